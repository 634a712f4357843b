"""What each step of a trace waited for, step after step or rank beside rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES, StepBreakdown
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts.bins import bin_note, bin_sizes, bin_starts, even_axis
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.report.words import STEP_LABELS


def trace_steps(by_rank: Mapping[int, TraceFacts]) -> Chart | None:
    """Which steps of a trace, or which ranks, waited for what; ``None`` when no trace has a step.

    Definition: the columns of the table Step time breakdown; of several ranks the mean of each. A category
    without any time has no layer.
    """
    found = {
        rank: facts.step_breakdown
        for rank, facts in by_rank.items()
        if not isinstance(facts.step_breakdown, Absent)
    }
    if not found:
        return None
    return _of_ranks(found) if len(by_rank) > 1 else _of_steps(*found.values())


def _of_steps(fact: StepBreakdown) -> Chart:
    """A point for each step, or for as many as are put together."""
    starts = bin_starts(len(fact.steps))
    sizes = bin_sizes(starts, len(fact.steps))
    parts_ns = np.array([step.parts_ns for step in fact.steps], np.float64)
    first, x_label = even_axis([step.number for step in fact.steps], "step", "steps of the trace")
    return _chart(
        title="What each step of the trace waited for",
        x_label=x_label,
        x=tuple((first + starts).astype(float).tolist()),
        points_ns=(np.add.reduceat(parts_ns, starts, axis=0) / sizes[:, np.newaxis]).tolist(),
        note=bin_note(starts, len(fact.steps), "step", "steps"),
    )


def _of_ranks(found: Mapping[int, StepBreakdown]) -> Chart:
    """A point for each rank that has steps."""
    ranks = sorted(found)
    first, x_label = even_axis(ranks, "rank", "ranks with steps")
    return _chart(
        title="What the steps of each rank waited for",
        x_label=x_label,
        x=tuple(float(first + place) for place in range(len(ranks))),
        points_ns=[found[rank].mean_parts_ns for rank in ranks],
        note="One point is the mean of a rank's steps.",
    )


def _chart(
    *,
    title: str,
    x_label: str,
    x: tuple[float, ...],
    points_ns: Sequence[Sequence[float]],
    note: str,
) -> Chart:
    return Chart(
        id="step_breakdown",
        title=title,
        kind="stacked",
        x_label=x_label,
        x=x,
        unit=Unit.DURATION_NS,
        series=tuple(
            Series(
                key="rest" if key == "other" else key,
                label=STEP_LABELS[key],
                values=tuple(float(parts[place]) for parts in points_ns),
            )
            for place, key in enumerate(STEP_CATEGORIES)
            if any(parts[place] for parts in points_ns)
        ),
        notes=(f"{note} Each moment counts for the first of the categories in Step time breakdown.",),
    )
