"""Charts with ranks side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.trace.distributed import StepShares
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts.chart import chart, even_axis, split_layers, trace_chart
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.report.tables.rows import split_ranks

_MOST: Final = 256
"""Maximum bars that can be told apart across a page."""


@chart(
    "rank_phases",
    title="Phase times per rank",
    help="Mean clean step of each rank by phase, for at most 256 ranks.",
    place=90,
    views=("distributed",),
)
def rank_phases(facts: Facts) -> Chart | None:
    """Show each rank's mean step by phase; ``None`` with more than 256 ranks."""
    skew = facts.rank_skew
    if len(skew.ranks) > _MOST:
        return None
    layers, _ = split_layers(facts.phases)
    shown = [phase for phase in layers if all(pace.phases_ns[phase.key] is not None for pace in skew.ranks)]
    keys = {phase.key for phase in shown}
    rest = tuple(
        sum(ns or 0.0 for key, ns in pace.phases_ns.items() if key not in keys) for pace in skew.ranks
    )
    numbers = [pace.rank for pace in skew.ranks]
    first, x_label = even_axis(numbers, "rank", "ranks")
    series = [
        Series(
            key=phase.key,
            label=phase.label,
            values=tuple(pace.phases_ns[phase.key] for pace in skew.ranks),
        )
        for phase in shown
    ]
    if any(rest):
        series.append(Series(key="rest", label="Other phases", values=rest))
    return Chart(
        id="rank_phases",
        title="Phase times per rank",
        kind="stacked",
        x_label=x_label,
        x=tuple(float(first + place) for place in range(len(numbers))),
        unit=Unit.DURATION_NS,
        series=tuple(series),
        notes=(
            (
                "Means over each rank's clean steps. Ranks synchronize every step, so one rank's delay"
                " shows up as waiting on the others, mostly in Backward."
            ),
        ),
    )


_LAYERS: Final = (
    ("kernel", "Computation", "computation_ns"),
    ("overlap", "Overlap", "overlap_ns"),
    ("communication", "Exposed communication", "exposed_ns"),
    ("memcpy", "Copies", "copies_ns"),
    ("rest", "Other", "other_ns"),
)
"""Key, label and attribute; keys that other charts share have the same color there."""


_LAYERS_ON_HOST: Final = (
    ("communication", "Communication", "exposed_ns"),
    ("rest", "Rest of the step", "other_ns"),
)


_NOTE: Final = (
    "Means over each rank's steps. The layers don't overlap and add up to the step. Overlap is computation"
    " and communication at the same time. Exposed communication includes waiting for other ranks."
)


_HOST_NOTE: Final = (
    "Means over each rank's steps. Communication is CPU time in the backend's ranges. Without kernels, its"
    " overlap with computation is unknown."
)


@trace_chart(
    "rank_shares",
    title="Computation and communication by rank",
    help="Mean step of each rank, if at least two have steps and communication. Computation is time in"
    " compute kernels only, Overlap is compute and communication together, Exposed communication"
    " includes waiting for other ranks, and Copies is time in copies and memsets only. The layers are"
    " disjoint and add up to the step. Without kernels (gloo on the CPU), overlap is unknown. Ranks"
    " without kernels are listed in a note if other ranks have some.",
    place=140,
    views=("distributed",),
)
def rank_shares(by_rank: Mapping[int, TraceFacts]) -> Chart | None:
    """Show each rank's computation and communication; ``None`` with fewer than two ranks to show."""
    found = {
        rank: (one.shares, one.num_steps)
        for rank, one in split_ranks(by_rank, TraceFacts.distributed).found.items()
        if one.shares is not None
    }
    has_kernels = any(shares.computation_ns is not None for shares, _ in found.values())
    shown = {
        rank: (shares, num_steps)
        for rank, (shares, num_steps) in found.items()
        if not has_kernels or shares.computation_ns is not None
    }
    if len(shown) < 2:
        return None
    ranks = list(shown)
    first, x_label = even_axis(ranks, "rank", f"ranks {_some(ranks)}")
    return Chart(
        id="rank_shares",
        title="Computation and communication by rank",
        kind="stacked",
        x_label=x_label,
        x=tuple(float(first + place) for place in range(len(ranks))),
        unit=Unit.DURATION_NS,
        series=tuple(
            Series(key=key, label=label, values=values)
            for key, label, attribute in (_LAYERS if has_kernels else _LAYERS_ON_HOST)
            if any(values := tuple(_mean(*shown[rank], attribute) for rank in ranks))
        ),
        notes=(_NOTE if has_kernels else _HOST_NOTE, *_without_note(by_rank, ranks)),
    )


def _mean(shares: StepShares, num_steps: int, attribute: str) -> float:
    part: int = getattr(shares, attribute)
    return part / num_steps


def _some(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def _without_note(by_rank: Mapping[int, TraceFacts], shown: Sequence[int]) -> tuple[str, ...]:
    lacking = [str(rank) for rank in sorted(by_rank) if rank not in shown]
    if not lacking:
        return ()
    return (
        (
            f"Rank{'s' if len(lacking) > 1 else ''} {', '.join(lacking)} not shown: no steps, communication"
            " or kernels recorded."
        ),
    )
