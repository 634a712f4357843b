"""Ranks: what a step of each rank consists of, which one is late, and how far the phases lie apart."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.ranks import RankPace, RankSkew
from lightning_modelprof.report.kinds import TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES

_CORE: Final = tuple(phase for phase in PHASES if phase.is_core)


_IN_ORDER: Final = 16
"""With more ranks than these the latest come first."""


def rank_tables(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """Which rank makes the others wait, and by what; no table when there is one rank."""
    skew = analysis.rank_skew
    if isinstance(skew, Absent):
        if analysis.info.world_size < 2:
            return ()
        absent = _absent(analysis)
        note = f"{skew.reason[0].upper()}{skew.reason[1:]}."
        ranks = _ranks(absent, None, (note,)) if absent else _ranks((), skew.reason)
        return (ranks, _spread((), skew.reason))
    return (_rank_table(skew, _absent(analysis)), _spread_table(skew))


def _absent(analysis: Analysis) -> tuple[tuple[Cell, ...], ...]:
    """A row for each rank of which nothing is known; the reason stands in the place of its name."""
    cells = len(_CORE) + 6
    return tuple((f"rank {one.rank}: {one.reason}", *[None] * cells) for one in analysis.absent_ranks)


def _rank_table(skew: RankSkew, absent: tuple[tuple[Cell, ...], ...]) -> Table:
    ranks = list(skew.ranks)
    if len(ranks) > _IN_ORDER:
        ranks.sort(key=lambda pace: -(pace.late_ns or 0.0))
    return _ranks((*map(_row, ranks), *absent), None, _notes(skew, len(absent)))


def _row(pace: RankPace) -> tuple[Cell, ...]:
    return (
        f"rank {pace.rank}",
        pace.host or None,
        pace.num_clean,
        pace.step_ns,
        *(pace.phases_ns[phase.key] for phase in _CORE),
        pace.own_ns,
        pace.late_ns,
        pace.slowest_share,
    )


_MEAN: Final = "mean over the clean steps of the rank."
RANKS: Final = TableKind(
    id="rank_phases",
    title="Ranks",
    help=(
        "Shown for more than one rank, when their steps could be brought together: at the end of a"
        " loop that ended well, or by `lightning-modelprof report` from the files that each rank"
        " wrote. Durations alone are compared, each by its own rank's clock.\n\n"
        "Ranks meet in every step and take the same time for it: what one does for longer on its own"
        " shows on the others where they wait, mostly in Backward. A slow loader on rank 1 is a long"
        " Dataloader on rank 1 and a long Backward everywhere else."
    ),
    columns=(
        Column("rank", "Rank"),
        Column("host", "Host", help="where it ran."),
        Column("num_steps", "Clean steps", Unit.COUNT, help="of the rank."),
        Column("step_ns", "Step", Unit.DURATION_NS, help=_MEAN),
        *(Column(f"{phase.key}_ns", phase.label, Unit.DURATION_NS, help=_MEAN) for phase in _CORE),
        Column(
            "own_ns",
            "Own",
            Unit.DURATION_NS,
            help=(
                "the phases that a rank does until ranks meet, all but Forward, Backward, Optimization,"
                " Gradient clipping, Validation, Rank wait, Loop, Epoch turn and Profiler. It is tried with"
                " Forward, with Optimization and Gradient clipping, and with all three, too: what explains at"
                " least a tenth more of the time counts, and the note says which. The mean over steps that"
                " are clean on all ranks."
            ),
        ),
        Column(
            "late_ns",
            "Later by",
            Unit.DURATION_NS,
            help=(
                "Own less the mean Own of the other ranks in the same step. The mean over steps that are"
                " clean on all ranks."
            ),
        ),
        Column(
            "slowest",
            "Slowest(%)",
            Unit.RATIO,
            help=("share of the steps in which no rank had more Own, of those that are clean on all ranks."),
        ),
    ),
    views=("distributed",),
)


def _ranks(rows: tuple[tuple[Cell, ...], ...], reason: str | None, notes: tuple[str, ...] = ()) -> Table:
    return RANKS.table(
        rows=rows,
        notes=notes,
        absent_reason=reason,
    )


def _notes(skew: RankSkew, num_explained: int) -> tuple[str, ...]:
    missing = skew.world_size - len(skew.ranks) - num_explained
    notes = []
    if missing:
        notes.append(
            f"{missing} of {skew.world_size} ranks are missing: they wrote nothing, or had no clean step."
        )
    if skew.imbalance_ns is None:
        return (*notes, f"Only {skew.num_common} steps are clean on all ranks: who is late cannot be said.")
    own = ", ".join(PHASES[PHASE_INDEX[key]].label for key in skew.own_phases)
    notes.append(
        f"Own: what a rank does until ranks meet ({own}); Later by: than the mean of the others in the same"
        f" step. Both over {skew.num_common:,} steps that are clean on all ranks."
    )
    return tuple(notes)


def _spread_table(skew: RankSkew) -> Table:
    rows = []
    for phase in PHASES:
        known = [(ns, pace.rank) for pace in skew.ranks if (ns := pace.phases_ns[phase.key]) is not None]
        if not known or not any(ns for ns, _ in known):
            continue
        (least_ns, least), (most_ns, most) = min(known), max(known)
        mean_ns = sum(ns for ns, _ in known) / len(known)
        rows.append((phase.label, mean_ns, least_ns, least, most_ns, most, most_ns - least_ns))
    return _spread(tuple(rows), None)


RANK_SPREAD: Final = TableKind(
    id="rank_spread",
    title="Phases over the ranks",
    help="How far the means of the ranks lie apart, phase by phase.",
    columns=(
        Column("label", "Phase"),
        Column("mean_ns", "Mean", Unit.DURATION_NS, help="of the ranks' means."),
        Column("least_ns", "Least", Unit.DURATION_NS, help="the least and the most of the ranks' means."),
        Column("least_rank", "of rank", Unit.COUNT, help="the rank that has it."),
        Column("most_ns", "Most", Unit.DURATION_NS, help="the least and the most of the ranks' means."),
        Column("most_rank", "of rank", Unit.COUNT, help="the rank that has it."),
        Column("spread_ns", "Apart", Unit.DURATION_NS, help="how far the least and the most lie apart."),
    ),
    has_phases=True,
    views=("distributed",),
)


def _spread(rows: tuple[tuple[Cell, ...], ...], reason: str | None) -> Table:
    return RANK_SPREAD.table(
        rows=rows,
        absent_reason=reason,
    )


ALL_RANKS: Final = TableKind(
    id="all_ranks",
    title="All ranks",
    help=(
        "Shown for more than one rank: the same averages over the clean steps of every rank, in the"
        " report of the first one. Samples/s of all ranks is the total samples over the mean time of a"
        " rank. Where ranks are missing, the title and that line say of how many it is."
    ),
    columns=(
        Column("figure", "Figure"),
        Column("value", "Value", Unit.BY_ROW, help="of all ranks together."),
    ),
    views=("distributed",),
)


def all_ranks(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """How fast all ranks were together; no table when there is one rank."""
    ranks = analysis.all_ranks
    if ranks is None:
        return ()
    rate = 1e9 * ranks.world_size / ranks.batch_total_ns if ranks.batch_total_ns else None
    unit = analysis.info.sample_unit
    reader = ranks.reader_total_ns
    named: tuple[tuple[str, Cell, Unit], ...] = (
        ("clean steps", ranks.num_steps, Unit.COUNT),
        ("batch_cost avg", ranks.batch_total_ns / ranks.num_steps, Unit.DURATION_NS),
        ("batch_cost max", ranks.batch_max_ns, Unit.DURATION_NS),
        ("batch_cost min", ranks.batch_min_ns, Unit.DURATION_NS),
        ("reader_cost avg", None if reader is None else reader / ranks.num_steps, Unit.DURATION_NS),
        ("Reader Ratio", ranks.reader_ratio, Unit.RATIO),
        (
            f"{unit}/s of {'all' if ranks.world_size == analysis.info.world_size else 'these'} ranks",
            None if rate is None or ranks.samples is None else rate * ranks.samples,
            Unit.RATE,
        ),
    )
    return (
        ALL_RANKS.table(
            title=f"All {ranks.world_size} ranks"
            if ranks.world_size == analysis.info.world_size
            else f"{ranks.world_size} of {analysis.info.world_size} ranks",
            rows=tuple((label, value) for label, value, _ in named),
            row_units=tuple(row_unit for _, _, row_unit in named),
            notes=("Over the clean steps of every one of these ranks.",),
        ),
    )
