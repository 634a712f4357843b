"""Upgrade older versions' files before they're read."""

from __future__ import annotations

from typing import Any, Final

_DEFINITION: Final = frozenset(("name", "file", "line"))
_DEFINITION_IN_FULL: Final = _DEFINITION | {"is_library", "package"}
_FRAME: Final = frozenset(("function_line", "is_users", "module"))
_FLOP_PHASES: Final = ("forward", "backward", "recompute", "optimizer")
_REPORT: Final = frozenset(("title", "tables", "sections"))
_LOCATION: Final = frozenset(("file", "line", "function", "is_exact"))


def upgrade(content: Any) -> Any:
    """Convert JSON values of a saved run, or of a report in an event file, to this version's.

    Up to version 2 of saved runs and 1 of event files, a place's function was ``name`` in definitions, a
    stack frame's Python module was ``module``, and unknown parts of a finding's place were ``null``. Up to
    version 2 of event files, a report had ``sections`` instead of its summary. The user's own configuration
    is unchanged.
    """
    if isinstance(content, list):
        return [upgrade(one) for one in content]
    if not isinstance(content, dict):
        return content
    keys, renamed = content.keys(), {}
    if _DEFINITION <= keys <= _DEFINITION_IN_FULL:
        renamed = {"name": "function"}
    elif keys >= _FRAME:
        renamed = {"module": "python_module"}
    elif keys >= _LOCATION:
        content = {key: value for key, value in content.items() if value is not None}
    elif keys >= _REPORT and isinstance(content["sections"], dict):
        content = content | {"summary": _summary(content["sections"])}
    return {
        renamed.get(key, key): value if key == "config" else upgrade(value) for key, value in content.items()
    }


def _summary(sections: dict[str, Any]) -> dict[str, Any]:
    """Convert a report's sections to a summary, whose only difference is renamed fields."""
    summary = {key: value for key, value in sections.items() if value is not None}
    if isinstance(benchmark := summary.get("benchmark"), dict):
        summary["benchmark"] = {
            **benchmark,
            "num_steps": benchmark.get("steps"),
            "reader_ratio": benchmark.get("reader_ratio_per_step"),
            "steps_per_s": benchmark.get("ips"),
        }
    if isinstance(phases := summary.get("phases"), list):
        summary["phases"] = [
            {"key": phase.get("phase"), **phase} for phase in phases if isinstance(phase, dict)
        ]
    if isinstance(flops := summary.get("flops"), dict):
        counts = {phase: flops[phase] for phase in _FLOP_PHASES if isinstance(flops.get(phase), dict)}
        summary["flops"] = flops | {"phases": {phase: count.get("flops") for phase, count in counts.items()}}
    return summary
