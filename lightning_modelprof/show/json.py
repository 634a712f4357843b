"""The report for machines: raw numbers, integer nanoseconds, nothing rounded and nothing cut."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from lightning_modelprof.report.model import Report, Table

REPORT_SCHEMA_VERSION = 1
"""Version of report.json; raised when a reader of the old one would go wrong. run.json has its own."""


def render_json(report: Report) -> bytes:
    """Write the report as indented UTF-8 JSON, the same bytes for the same report.

    A number that is not finite is written as ``null``: JSON has no NaN, and one bad division must not
    cost the whole report of a run that took a day.

    Args:
        report: what to write; its figures stand beside ``tables`` and ``notes``.

    Returns:
        One JSON object and a newline.

    Raises:
        ValueError: when two tables or two columns have the same key: one of them would silently be lost.
        TypeError: when the configuration holds something that is not a plain JSON value.
    """
    _check_unique("table ids", [table.id for table in report.tables])
    document = {
        "schema_version": REPORT_SCHEMA_VERSION,
        **_sections(report),
        "tables": {table.id: _table(table) for table in report.tables},
        "notes": report.notes,
    }
    plain = _finite(document)
    try:
        raw = json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        # Half a surrogate pair, as in some file names, has no UTF-8; its backslash form is valid JSON.
        text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode("utf-8", "backslashreplace")
    return msgspec.json.format(raw, indent=2) + b"\n"  # json itself indents in Python, far more slowly


def _sections(report: Report) -> dict[str, Any]:
    summary: dict[str, Any] = msgspec.to_builtins(report.summary)
    sections = _of_a_run(summary) if report.summary.run else {}
    if report.summary.traces:
        sections = {"traces": summary["traces"], "others": summary["others"]}
    if (comparison := summary["comparison"]) is not None:
        runs = {"before": comparison.pop("runs_before"), "after": comparison.pop("runs_after")}
        sections = {"comparison": comparison, "runs": runs}
    if (comparison := summary["window_comparison"]) is not None:
        sections = {"comparison": {"kind": "window", **comparison}}
    for table in report.tables:
        if table.id == "stages":
            sections = {"stages": _table(table)["rows"]}
    if report.verdict is not None:
        sections["verdict"] = asdict(report.verdict)
        sections["findings"] = [one.as_plain() for one in report.findings]
    return sections


def _of_a_run(summary: dict[str, Any]) -> dict[str, Any]:
    names = ("run", "settings", "validation", "callbacks", "windows", "ranks", "own_cost")
    return {name: summary[name] for name in names} | {
        "benchmark": _benchmark(summary),
        "phases": [{"phase": one.pop("key"), **one} for one in summary["phases"]],
        "flops": _flops(summary["flops"]),
        "memory": _memory(summary["memory"]),
    }


def _benchmark(summary: dict[str, Any]) -> dict[str, Any] | None:
    figures, info = summary["benchmark"], summary["run"]
    if figures is None:
        return None
    ratio, steps, samples = (figures[name] for name in ("reader_ratio", "steps_per_s", "samples_per_s"))
    return {
        "steps": figures["num_steps"],
        "reader_ratio": ratio and ratio["avg"],
        "reader_ratio_per_step": ratio,
        "batch_cost_ns": figures["batch_cost_ns"],
        "reader_cost_ns": figures["reader_cost_ns"],
        "ips": steps and {"unit": "steps/s" if info["loop"] == "fit" else "batches/s", **steps},
        "samples_per_s": samples and {"unit": f"{info['sample_unit']}/s", **samples},
        "samples_per_step": figures["samples_per_step"],
    }


def _flops(figures: dict[str, Any] | None) -> dict[str, Any] | None:
    if figures is None:
        return None
    mean = figures["mean_step"]
    if mean is not None and mean["note"]:
        figures["mean_step"] = {name: mean[name] for name in ("model_flops", "hardware_flops", "note")}
    phases = figures.pop("phases")
    return figures | {phase: {"flops": number, "macs": number // 2} for phase, number in phases.items()}


def _memory(figures: dict[str, Any] | None) -> dict[str, Any] | None:
    if figures is None:
        return None
    for growing in figures["growing"]:
        growing["lines"] = [
            {
                "name": one.get("function", ""),
                "file": one.get("file"),
                "line": one.get("line"),
                "is_library": one.get("is_library", False),
                "package": one.get("package", ""),
            }
            for one in growing["lines"]
        ]
    if (event := figures["out_of_memory"]) is not None:
        for name in ("module", "package", "is_library", "is_exact", "inner", "call"):
            event.pop(name, None)
        figures["out_of_memory"] = {"file": None, "line": None, "function": "", **event}
    return figures


def _table(table: Table) -> dict[str, Any]:
    keys = [column.key for column in table.columns]
    _check_unique(f"column keys of table {table.id!r}", keys)
    document: dict[str, Any] = {
        "title": table.title,
        "columns": [
            {"key": column.key, "label": column.label, "unit": column.unit.value, "group": column.group}
            for column in table.columns
        ],
        "rows": [dict(zip(keys, row, strict=True)) for row in table.rows],
        "notes": table.notes,
        "absent_reason": table.absent_reason,
    }
    if table.depths:
        document["depths"] = table.depths
    if table.row_units:
        document["row_units"] = [unit.value for unit in table.row_units]
    return document


def _check_unique(what: str, keys: list[str]) -> None:
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"expected unique {what}, got {', '.join(map(repr, repeated))} more than once")


def _finite(value: Any) -> Any:
    """The same value with ``null`` in place of NaN and infinities, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
