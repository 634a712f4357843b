"""Two profiler windows or imported traces become one report: what changed most, and each table row by row."""

from __future__ import annotations

from typing import Any

from lightning_modelprof.report.compare.row_changes import changed_rows
from lightning_modelprof.report.compare.tables import findings_table
from lightning_modelprof.report.duration_unit import duration_unit
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.window_steps import (
    STEP,
    WindowSteps,
    differences_ns,
    steps_table,
    window_steps,
)


def compare_windows(before: Report, after: Report, names: tuple[str, str]) -> Report:
    """The report of two windows or traces side by side.

    Args:
        before: the report of a profiler window or of traces of one job.
        after: the same.
        names: what the reader calls them.

    Caveats:
        It has no interval and says of no difference that it is more than chance: a window has few steps.
    """
    sides = (window_steps(before), window_steps(after))
    known = _both(sides)
    # The step time breakdown is the first table, with the spread of the steps.
    rest = [table for table in changed_rows(before, after) if table.id != "step_breakdown_changes"]
    return Report(
        title=_first_line(sides),
        facts=tuple(
            (label, _described(name, side))
            for label, name, side in zip(("Before", "After"), names, sides, strict=True)
        ),
        tables=(
            *(() if known is None else (steps_table(*known),)),
            findings_table(before, after),
            *rest,
        ),
        notes=_notes(before, after, known),
        sections={"comparison": _section(names, known)},
    )


def _both(sides: tuple[WindowSteps | str, WindowSteps | str]) -> tuple[WindowSteps, WindowSteps] | None:
    before, after = sides
    return None if isinstance(before, str) or isinstance(after, str) else (before, after)


def _first_line(sides: tuple[WindowSteps | str, WindowSteps | str]) -> str:
    """How long a step takes, and which of its parts changed most."""
    known = _both(sides)
    if known is None:
        reasons = [
            f"{label}: {side}"
            for label, side in zip(("before", "after"), sides, strict=True)
            if isinstance(side, str)
        ]
        return f"No steps to compare ({'; '.join(reasons)})"
    old, new = (side.mean_ns[STEP] for side in known)
    if not old or new is None:
        return "No steps to compare (a step took no measurable time)"
    scale, unit = duration_unit(max(old, new))
    line = f"step {old / scale:,.4g} → {new / scale:,.4g} {unit} ({100 * (new - old) / old:+.1f} %)"
    parts = {part: value for part, value in differences_ns(*known).items() if part != STEP and value}
    if not parts:
        return line
    part = max(parts, key=lambda part: abs(parts[part]))
    scale, unit = duration_unit(abs(parts[part]))
    return f"{line}; what changed most: {part} {parts[part] / scale:+,.3g} {unit}"


def _described(name: str, side: WindowSteps | str) -> str:
    if isinstance(side, str):
        return f"{name} ({side})"
    number = len(side.durations_ns)
    if number == 0:
        return f"{name} (means of ranks)"
    return f"{name} (1 step)" if number == 1 else f"{name} ({number:,} steps of {_spread(side)})"


def _spread(side: WindowSteps) -> str:
    """Such as ``166 to 187.9 ms``."""
    low, high = side.low_ns[STEP], side.high_ns[STEP]
    scale, unit = duration_unit(high)
    return f"{low / scale:,.4g} to {high / scale:,.4g} {unit}"


def _notes(before: Report, after: Report, known: tuple[WindowSteps, WindowSteps] | None) -> tuple[str, ...]:
    notes = []
    if known is not None:
        no_interval = "No confidence interval: too few steps in a window, so a difference may be chance."
        if all(len(side.durations_ns) > 1 for side in known):
            spreads = f" The steps took {_spread(known[0])} before and {_spread(known[1])} after."
        else:
            spreads = " How much the steps vary is not known of both sides."
        notes.append(f"{no_interval}{spreads} Compare runs for a decision with an interval.")
    models = [_device_models(report) for report in (before, after)]
    if all(models) and models[0] != models[1]:
        notes.append(f"Different devices: {', '.join(models[0])} before, {', '.join(models[1])} after.")
    ranks = [len(report.sections.get("traces", ())) for report in (before, after)]
    if all(ranks) and ranks[0] != ranks[1]:
        notes.append(f"Different numbers of traces: {ranks[0]} before, {ranks[1]} after.")
    return tuple(notes)


def _device_models(report: Report) -> tuple[str, ...]:
    """The distinct models of the devices, as far as the trace says them."""
    table = next((one for one in report.tables if one.id == "device_usage"), None)
    keys = [] if table is None else [column.key for column in table.columns]
    if table is None or "model" not in keys:
        return ()
    models = (row[keys.index("model")] for row in table.rows)
    return tuple(dict.fromkeys(str(model) for model in models if model))


def _section(names: tuple[str, str], known: tuple[WindowSteps, WindowSteps] | None) -> dict[str, Any]:
    """Plain values: what each side is, and the parts of the mean step."""
    section: dict[str, Any] = {"kind": "window", "before": names[0], "after": names[1], "parts": None}
    if known is not None:
        section["parts"] = {
            part: {"before_ns": old, "after_ns": known[1].mean_ns.get(part)}
            for part, old in known[0].mean_ns.items()
        }
    return section
