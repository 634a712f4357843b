"""Charts of traces: step time breakdown, kernel types and operator shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.trace.kernels import KernelUse
from lightning_modelprof.analysis.trace.operator_costs import Operator
from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES, StepBreakdown
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts.chart import (
    MAX_LAYERS,
    bin_note,
    bin_sizes,
    bin_starts,
    even_axis,
    trace_chart,
)
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.report.tables.rows import order_of, order_words, split_ranks
from lightning_modelprof.report.words import STEP_LABELS
from lightning_modelprof.units import milliseconds

_ONCE: Final = "Each moment counts once, in the first busy category of Step time breakdown."

_SLOW_PERCENT: Final = 5
"""How much longer than the median a slow step is."""

_MOST_SLOW: Final = 3

_LEAST_STEPS: Final = 3
"""With fewer steps, the median means little."""


@trace_chart(
    "step_breakdown",
    title="Step time breakdown by step",
    help="The Step time breakdown table as bars. With multiple ranks, it shows each rank's mean step."
    " More than 400 steps are averaged into fewer points. Step numbers with gaps are renumbered"
    " from 1. A note names up to three steps that take at least 5% longer than the median, and the"
    " category that exceeds its own median the most.",
    place=130,
    views=("overview", "steps"),
)
def trace_steps(by_rank: Mapping[int, TraceFacts]) -> Chart:
    """Show what each step of a trace, or each rank, waited for."""
    ranks = split_ranks(by_rank, TraceFacts.step_breakdown)
    return _of_ranks(ranks.found) if ranks.are_several else _of_steps(*ranks.found.values())


def _of_steps(fact: StepBreakdown) -> Chart:
    starts = bin_starts(len(fact.steps))
    sizes = bin_sizes(starts, len(fact.steps))
    parts_ns = np.array([step.parts_ns for step in fact.steps], np.float64)
    first, x_label = even_axis([step.number for step in fact.steps], "step", "recorded steps")
    return _chart(
        title="Step time breakdown by step",
        x_label=x_label,
        x=tuple((first + starts).astype(float).tolist()),
        points_ns=(np.add.reduceat(parts_ns, starts, axis=0) / sizes[:, np.newaxis]).tolist(),
        notes=(
            f"{bin_note(starts, len(fact.steps), 'step', 'steps')} {_ONCE}",
            *_slowest(range(first, first + len(fact.steps)), parts_ns),
        ),
    )


def _slowest(numbers: Sequence[int], parts_ns: NDArray[np.float64]) -> tuple[str, ...]:
    total_ns = parts_ns.sum(axis=1)
    usual_ns = float(np.median(total_ns))
    if len(numbers) < _LEAST_STEPS or not usual_ns:
        return ()
    excess_ns = parts_ns - np.median(parts_ns, axis=0)
    slowest = np.argsort(-total_ns, kind="stable")[:_MOST_SLOW].tolist()
    slow = [place for place in slowest if total_ns[place] >= (1 + _SLOW_PERCENT / 100) * usual_ns]
    if not slow:
        return (f"No step takes {_SLOW_PERCENT}% longer than the median of {milliseconds(usual_ns)}.",)
    named = []
    for place in slow:
        part = int(excess_ns[place].argmax())
        more_ns = float(excess_ns[place, part])
        more = f" ({STEP_LABELS[STEP_CATEGORIES[part]]} +{milliseconds(more_ns)})" if more_ns > 0 else ""
        named.append(f"step {numbers[place]} with {milliseconds(float(total_ns[place]))}{more}")
    return (
        f"Slowest: {', '.join(named)}. The median is {milliseconds(usual_ns)}; in parentheses is the"
        " category that exceeds its own median the most.",
    )


def _of_ranks(found: Mapping[int, StepBreakdown]) -> Chart:
    ranks = sorted(found)
    first, x_label = even_axis(ranks, "rank", "ranks with steps")
    return _chart(
        title="Step time breakdown by rank",
        x_label=x_label,
        x=tuple(float(first + place) for place in range(len(ranks))),
        points_ns=[found[rank].mean_parts_ns for rank in ranks],
        notes=(f"Each point is a rank's mean step. {_ONCE}",),
    )


def _chart(
    *,
    title: str,
    x_label: str,
    x: tuple[float, ...],
    points_ns: Sequence[Sequence[float]],
    notes: tuple[str, ...],
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
        notes=notes,
    )


_LABELS = {
    "tensor_cores": "Tensor Cores",
    "kernel": "Other kernels",
    "communication": "Communication",
}


@trace_chart(
    "kernel_types",
    title="Kernel time by type",
    help="Total time in Kernel Summary, grouped by kernel name into communication, tensor cores and"
    " other. Kernels we can't classify count as other. The chart is hidden if there's only one"
    " group.",
    place=160,
    views=("kernels",),
)
def kernel_types(by_rank: Mapping[int, TraceFacts]) -> Chart | None:
    """Split kernel time by tensor cores and communication; ``None`` with fewer than two kinds."""
    time_ns = dict.fromkeys(_LABELS, 0)
    for kernel in pool(split_ranks(by_rank, TraceFacts.kernels).found.values()).by_name:
        time_ns[_kind(kernel)] += kernel.tally.total_ns
    kinds = [kind for kind, ns in time_ns.items() if ns]
    if len(kinds) < 2:
        return None
    return Chart(
        id="kernel_types",
        title="Kernel time by type",
        kind="stacked",
        x_label="trace",
        x=(0.0,),
        unit=Unit.DURATION_NS,
        series=tuple(Series(key=kind, label=_LABELS[kind], values=(float(time_ns[kind]),)) for kind in kinds),
        notes=(
            (
                "Grouped by kernel name, including kernels outside steps; overlaps counted in full. Kernels"
                ' we can\'t classify are counted as "other".'
            ),
        ),
    )


def _kind(kernel: KernelUse) -> str:
    if kernel.is_communication:
        return "communication"
    return "tensor_cores" if kernel.uses_tensor_cores else "kernel"


@trace_chart(
    "operator_shares",
    title="Operators by self time",
    help="The Self column of Operator Summary, GPU time if the trace has GPU events and CPU time"
    " otherwise. Shows the seven largest operators and the rest.",
    place=150,
    views=("operators",),
)
def operator_shares(by_rank: Mapping[int, TraceFacts]) -> Chart | None:
    """Show the operators with the most self time, and the rest; ``None`` with fewer than two."""
    ranks = split_ranks(by_rank, TraceFacts.operators).found.values()
    has_device = any(rank.device_ns is not None for rank in ranks)
    threads = [thread for rank in ranks for thread in rank.threads]
    time_ns: Counter[str] = Counter()
    for operator in (operator for thread in threads for operator in thread.operators):
        time_ns[operator.name] += _own_ns(operator, has_device=has_device)
    names = sorted((name for name, ns in time_ns.items() if ns), key=lambda name: (-time_ns[name], name))
    if len(names) < 2:
        return None
    layers = {name: time_ns[name] for name in names[:MAX_LAYERS]}
    rest_ns = sum(time_ns[name] for name in names[MAX_LAYERS:])
    series = [Series(key=f"operator {name}", label=name, values=(float(ns),)) for name, ns in layers.items()]
    if rest_ns:
        series.append(Series(key="rest", label="Other operators", values=(float(rest_ns),)))
    return Chart(
        id="operator_shares",
        title="Operators by self time",
        kind="stacked",
        x_label="trace",
        x=(0.0,),
        unit=Unit.DURATION_NS,
        series=tuple(series),
        notes=(order_words(order_of(None, has_device=has_device)),),
    )


def _own_ns(operator: Operator, *, has_device: bool) -> int:
    return (operator.device_self_ns or 0) if has_device else operator.host_self_ns
