"""Hand-made traces: Chrome-trace events through the real reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.model_summary import ModelSummary, summarize_model
from lightning_modelprof.analysis.trace.step_breakdown import StepBreakdown, summarize_step_breakdown
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace.reader import parse_trace, read_trace

FOLDER = Path(__file__).resolve().parents[1] / "data" / "traces"
"""Real traces."""


def real_file(name: str) -> Path:
    return FOLDER / f"{name}.pt.trace.json.gz"


def make_trace(events: list[dict[str, Any]], **metadata: Any) -> Trace:
    """A trace of these events, written to JSON and read back.

    Args:
        events: as in a Chrome trace: ph, cat, name, pid, tid, ts and dur in microseconds, args.
        metadata: the file's other entries.
    """
    return parse_trace(json.dumps({**metadata, "traceEvents": events}).encode(), "hand-made")


def event(
    cat: str, name: str, begin: float, end: float, tid: int = 1, pid: int = 1, **args: Any
) -> dict[str, Any]:
    """One complete event; start and end in microseconds, to the nanosecond."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": begin,
        "dur": round(end - begin, 3),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def load(name: str) -> Trace:
    """Read a real trace."""
    return read_trace(real_file(name))


def reference(name: str, kind: str) -> Any:
    """Independently derived numbers of a real trace; times in microseconds."""
    return json.loads((FOLDER / "reference" / f"{name}.{kind}.json").read_text())


def summarize(trace: Trace) -> ModelSummary:
    """The Model Summary of a trace."""
    return summarize_model(build_timeline(trace))


def break_down(trace: Trace) -> StepBreakdown:
    """The step time breakdown of a trace."""
    return summarize_step_breakdown(build_timeline(trace))
