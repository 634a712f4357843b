"""Ranks: each rank's step by phase, the straggler, and each phase's spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.ranks import RankPace, RankSkew
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES

_CORE: Final = tuple(phase for phase in PHASES if phase.is_core)


_IN_ORDER: Final = 16
"""With more ranks, the latest come first."""


def _time_in(phase: str) -> Callable[[RankPace], float | None]:
    return lambda pace: pace.phases_ns[phase]


_MEAN: Final = "mean over the rank's clean steps."
RANKS: Final = TableSpec(
    id="rank_phases",
    title="Ranks",
    help=(
        "Shown for more than one rank, once their steps could be matched: when a loop ends normally, or"
        " with `lightning-modelprof report` from the files each rank wrote. Each rank's durations are"
        " measured on its own clock.\n\nRanks synchronize every step, so they all take the same time, and"
        " one rank's delay shows up as waiting on the others, mostly in Backward. A slow loader on rank 1"
        " is a long Dataloader on rank 1 and a long Backward everywhere else."
    ),
    columns=(
        ColumnSpec("rank", "Rank", of=lambda pace: f"rank {pace.rank}"),
        ColumnSpec("host", "Host", help="name of its machine.", of=lambda pace: pace.host or None),
        ColumnSpec(
            "num_steps",
            "Clean steps",
            Unit.COUNT,
            help="clean steps of the rank.",
            of=lambda pace: pace.num_clean,
        ),
        ColumnSpec("step_ns", "Step", Unit.DURATION_NS, help=_MEAN),
        *(
            ColumnSpec(
                f"{phase.key}_ns",
                phase.label,
                Unit.DURATION_NS,
                help=_MEAN,
                of=_time_in(phase.key),
            )
            for phase in _CORE
        ),
        ColumnSpec(
            "own_ns",
            "Own time",
            Unit.DURATION_NS,
            help=(
                "time in phases before ranks synchronize (all but Forward, Backward, Optimization, Gradient"
                " clipping, Validation, Rank wait, Loop, Epoch boundary and Profiler), as a mean over steps"
                " that are clean on all ranks. Forward, and Optimization with Gradient clipping, are added"
                " if they explain at least a tenth more of the time; a note lists the phases."
            ),
        ),
        ColumnSpec(
            "late_ns",
            "Behind by",
            Unit.DURATION_NS,
            help=(
                "own time minus the other ranks' mean in the same step, as a mean over steps that are clean"
                " on all ranks."
            ),
        ),
        ColumnSpec(
            "slowest",
            "Slowest(%)",
            Unit.RATIO,
            help=(
                "share of steps in which this rank had the most own time, over steps that are clean on all"
                " ranks."
            ),
            of=lambda pace: pace.slowest_share,
        ),
    ),
    place=30,
    views=("distributed",),
)


@run_table(RANKS)
def rank_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """Show which rank makes others wait, and in which phases; no table for a single rank."""
    if facts.info.world_size < 2:
        return
    absent = [{"rank": f"rank {one.rank}: {one.reason}"} for one in facts.absent_ranks]
    reason = facts.why_not(Facts.rank_skew)
    if absent and reason:
        yield RANKS.table(absent, notes=(f"{reason[0].upper()}{reason[1:]}.",))
        return
    ranks = list(facts.rank_skew.ranks)
    if len(ranks) > _IN_ORDER:
        ranks.sort(key=lambda pace: -(pace.late_ns or 0.0))
    yield RANKS.table([*ranks, *absent], notes=_notes(facts.rank_skew, len(absent)))


def _notes(skew: RankSkew, num_explained: int) -> tuple[str, ...]:
    missing = skew.world_size - len(skew.ranks) - num_explained
    notes = []
    if missing:
        notes.append(
            f"{missing} of {skew.world_size} ranks are missing because they wrote nothing or had no clean"
            " steps."
        )
    if skew.imbalance_ns is None:
        return (
            *notes,
            f"Only {skew.num_common} steps are clean on all ranks, too few to find the straggler.",
        )
    own = ", ".join(PHASES[PHASE_INDEX[key]].label for key in skew.own_phases)
    notes.append(
        f"Own time is spent before ranks synchronize ({own}). Own time and Behind by are over"
        f" {skew.num_common:,} steps that are clean on all ranks."
    )
    return tuple(notes)


RANK_SPREAD: Final = TableSpec(
    id="rank_spread",
    title="Phase spread across ranks",
    help="How far the ranks' means are apart in each phase.",
    columns=(
        ColumnSpec("label", "Phase"),
        ColumnSpec("mean_ns", "Avg", Unit.DURATION_NS, help="mean over the ranks."),
        ColumnSpec("least_ns", "Min", Unit.DURATION_NS, help="smallest and largest mean of a rank."),
        ColumnSpec("least_rank", "of rank", Unit.COUNT, help="rank with that mean."),
        ColumnSpec("most_ns", "Max", Unit.DURATION_NS, help="smallest and largest mean of a rank."),
        ColumnSpec("most_rank", "of rank", Unit.COUNT, help="rank with that mean."),
        ColumnSpec("spread_ns", "Spread", Unit.DURATION_NS, help="max minus min."),
    ),
    has_phases=True,
    place=40,
    views=("distributed",),
)


@run_table(RANK_SPREAD)
def rank_spread_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    if facts.info.world_size < 2:
        return
    rows = []
    for phase in PHASES:
        known = [
            (ns, pace.rank) for pace in facts.rank_skew.ranks if (ns := pace.phases_ns[phase.key]) is not None
        ]
        if not known or not any(ns for ns, _ in known):
            continue
        (least_ns, least), (most_ns, most) = min(known), max(known)
        rows.append(
            {
                "label": phase.label,
                "mean_ns": sum(ns for ns, _ in known) / len(known),
                "least_ns": least_ns,
                "least_rank": least,
                "most_ns": most_ns,
                "most_rank": most,
                "spread_ns": most_ns - least_ns,
            }
        )
    yield RANK_SPREAD.table(rows)


ALL_RANKS: Final = TableSpec(
    id="all_ranks",
    title="All ranks",
    help=(
        "Averages over the clean steps of all ranks, shown in the first rank's report. Samples/s of all"
        " ranks is the total number of samples divided by a rank's mean time. If ranks are missing, the"
        " title and that row say how many are included."
    ),
    columns=(
        ColumnSpec("figure", "Metric"),
        ColumnSpec("value", "Value", Unit.BY_ROW, help="over all ranks together."),
    ),
    unit_of=itemgetter("unit"),
    place=20,
    views=("distributed",),
    compared=CompareKey(keys=("value",), better={"Reader Ratio": "less"}),
)


@run_table(ALL_RANKS, needs=Facts.all_ranks)
def all_ranks(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """Show the combined speed of all ranks."""
    ranks = facts.all_ranks
    rate = 1e9 * ranks.world_size / ranks.batch_total_ns if ranks.batch_total_ns else None
    unit = facts.info.sample_unit
    reader = ranks.reader_total_ns
    named: tuple[tuple[str, Cell, Unit], ...] = (
        ("clean steps", ranks.num_steps, Unit.COUNT),
        ("batch_cost avg", ranks.batch_total_ns / ranks.num_steps, Unit.DURATION_NS),
        ("batch_cost max", ranks.batch_max_ns, Unit.DURATION_NS),
        ("batch_cost min", ranks.batch_min_ns, Unit.DURATION_NS),
        ("reader_cost avg", None if reader is None else reader / ranks.num_steps, Unit.DURATION_NS),
        ("Reader Ratio", ranks.reader_ratio, Unit.RATIO),
        (
            f"{unit}/s of {'all' if ranks.world_size == facts.info.world_size else 'these'} ranks",
            None if rate is None or ranks.samples is None else rate * ranks.samples,
            Unit.RATE,
        ),
    )
    yield ALL_RANKS.table(
        ({"figure": label, "value": value, "unit": of_row} for label, value, of_row in named),
        title=f"All {ranks.world_size} ranks"
        if ranks.world_size == facts.info.world_size
        else f"{ranks.world_size} of {facts.info.world_size} ranks",
    )
