"""Everything derived from one trace file, whoever recorded it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_modelprof.analysis.model_summary import ModelSummary, summarize_model
from lightning_modelprof.analysis.step_breakdown import StepBreakdown, break_down_steps
from lightning_modelprof.run.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """Derived facts of one trace.

    Attributes:
        source: the file's name.
        num_events: events that were read.
        num_dropped: events that could not be used.
        model_summary: ``None`` when the trace has no step.
        step_breakdown: ``None`` when the trace has neither steps nor operators.
    """

    source: str
    num_events: int
    num_dropped: int
    model_summary: ModelSummary | None
    step_breakdown: StepBreakdown | None


def analyze_trace(trace: Trace) -> TraceFacts:
    """Derive the facts of one trace; of a window of ours only the steps that were recorded to their end."""
    return TraceFacts(
        source=trace.source,
        num_events=len(trace),
        num_dropped=trace.num_dropped,
        model_summary=summarize_model(trace),
        step_breakdown=break_down_steps(trace),
    )
