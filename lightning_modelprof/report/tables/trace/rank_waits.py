"""Waiting for other ranks: how long each rank waited in communication, and for whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.communication_calls import CommunicationCalls
from lightning_modelprof.analysis.trace.rank_waits import LateRank, Waits, WaitsOfRanks, compare_ranks
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import Ranks, split_ranks
from lightning_modelprof.units import milliseconds

_COLUMNS: Final = (
    Column("name", "Name"),
    Column("calls", "Calls", Unit.COUNT, adds_up=True, help="calls that were compared."),
    Column(
        "total_ns",
        "Total",
        Unit.DURATION_NS,
        "Communication",
        adds_up=True,
        help="time of the compared calls on this rank; calls that overlap are added up.",
    ),
    Column(
        "transfer_ns",
        "Transfer",
        Unit.DURATION_NS,
        "Communication",
        adds_up=True,
        help="of each call the shortest duration over the ranks, added up.",
    ),
    Column(
        "waited_ns",
        "Total",
        Unit.DURATION_NS,
        "Waited",
        adds_up=True,
        help="Communication Total − Transfer: this rank waited for others.",
    ),
    Column(
        "waited_step_ns", "Per step", Unit.DURATION_NS, "Waited", help="the mean over the compared steps."
    ),
    Column("waited_ratio", "Ratio(%)", Unit.RATIO, "Waited", help="its share of Communication Total."),
    Column(
        "last",
        "Calls",
        Unit.COUNT,
        "Came last",
        adds_up=True,
        help="calls in which this rank alone had the shortest time.",
    ),
    Column("last_ratio", "Ratio(%)", Unit.RATIO, "Came last", help="their share of the compared calls."),
    Column(
        "caused_ns",
        "Total",
        Unit.DURATION_NS,
        "Others waited",
        help=("how long the other ranks, on average, waited in the calls to which this one came last."),
    ),
    Column(
        "caused_step_ns",
        "Per step",
        Unit.DURATION_NS,
        "Others waited",
        help="the mean over the compared steps.",
    ),
)
RANK_WAITS: Final = TableKind(
    id="rank_waits",
    title="Waiting for other ranks",
    help=(
        "Who waited for whom, where traces of several ranks of one job are here. A collective in"
        " which every rank needs something of every other one ends at about the same time on all of"
        " them, so a shorter kernel means a later start. Of each compared call the transfer is the"
        " shortest duration over the ranks; what a rank's own call took longer is its wait. Only"
        " durations are compared: clocks of different hosts need not agree. Below each rank are its"
        " collectives, longest wait first."
    ),
    columns=_COLUMNS,
    views=("distributed",),
    compared=Figure(keys=("waited_step_ns",)),
)


_ONLY_ONE: Final = "only one rank's trace is here"

_NOTES: Final = (
    "A collective ends at about the same time on all ranks, so the rank whose call is the shortest came last"
    " and did not wait. Transfer is that shortest time, Waited what a rank's own calls took longer, and its"
    " Ratio the share of Communication. Only durations are compared, no clocks.",
    "Came last counts the calls in which this rank alone had the shortest time. Others waited is how long the"
    " other ranks waited in these calls, the mean of them.",
)
_STEPS_NOTE: Final = (
    "Compared are the calls of steps that all ranks have: the first call of a step on one rank with the first"
    " one on the others, and so on."
)
_NO_STEPS_NOTE: Final = (
    "Not every rank has steps, so the first call of a trace is compared with the first one of the others, and"
    " so on: that is right if all began to record before the same call."
)
_HOST_NOTE: Final = (
    "The calls are ranges of the backend on the host, such as gloo:all_reduce: they last until the rank has"
    " what it needs of the others, so they are compared like kernels."
)
_HABIT_NOTE: Final = (
    "Calls of one step are late together, so a few steps do not show a habit: record more before you look for"
    " the reason in the rank."
)


def rank_waits_table(
    by_rank: Mapping[int, CommunicationCalls | Absent],
    options: TableOptions,  # noqa: ARG001
) -> Table:
    """How long each rank waited for others, how often it came last, and what that cost the others."""
    ranks = split_ranks(by_rank)
    waits = _compare(ranks)
    if isinstance(waits, Absent):
        return RANK_WAITS.table(
            notes=ranks.notes,
            absent_reason=waits.reason,
        )
    rows: list[tuple[Cell, ...]] = []
    depths: list[int] = []
    groups = {group for one in waits.ranks.values() for _, group in one.by_collective}
    for rank, one in waits.ranks.items():
        rows.append(_row(f"rank {rank}", one.whole))
        depths.append(0)
        for (name, group), part in one.by_collective.items():
            rows.append(_row(f"{name} in {group or 'no known group'}" if len(groups) > 1 else name, part))
            depths.append(1)
    return RANK_WAITS.table(
        rows=tuple(rows),
        depths=tuple(depths),
        notes=(
            *(_sentence(one, has_groups=len(groups) > 1) for one in waits.stragglers),
            *((_HABIT_NOTE,) if waits.stragglers else ()),
            *_NOTES,
            _NO_STEPS_NOTE if waits.num_steps is None else _STEPS_NOTE,
            *((_HOST_NOTE,) if waits.on_host else ()),
            *_left_out_notes(waits),
            *_missing_note(waits),
            *ranks.notes,
        ),
    )


def _compare(ranks: Ranks[CommunicationCalls]) -> WaitsOfRanks | Absent:
    if ranks.absent_reason is not None:
        return Absent(ranks.absent_reason)
    return compare_ranks(ranks.found) if ranks.are_several else Absent(_ONLY_ONE)


def _row(name: str, waits: Waits) -> tuple[Cell, ...]:
    return (
        name,
        waits.calls,
        waits.total_ns,
        waits.transfer_ns,
        waits.waited_ns,
        waits.waited_per_step_ns,
        share(waits.waited_ns, waits.total_ns),
        waits.last,
        share(waits.last, waits.calls),
        waits.caused_ns,
        waits.caused_per_step_ns,
    )


def _sentence(one: LateRank, *, has_groups: bool) -> str:
    """Who came last more often than chance explains."""
    where = f" of {one.group or 'no known group'}" if has_groups else ""
    others = "the other rank" if one.num_ranks == 2 else "the others"
    per_step = " per step" if one.is_per_step else ""
    return (
        f"Rank {one.rank} came last in {one.last} of {one.calls} calls{where}; {others} waited"
        f" {milliseconds(one.waited_ns)}{per_step} for it. By chance it would come last in 1 of"
        f" {one.num_ranks} calls."
    )


def _left_out_notes(waits: WaitsOfRanks) -> tuple[str, ...]:
    """How many calls are not compared, and why."""
    notes = []
    if waits.left_out:
        listed = "; ".join(f"{number} because {reason}" for reason, number in waits.left_out.items())
        notes.append(f"Calls that are not compared: {listed}.")
    if waits.other_source:
        several = len(waits.other_source) > 1
        notes.append(
            f"Without rank{'s' if several else ''} {', '.join(map(str, waits.other_source))}:"
            f" {'their' if several else 'its'} communication was recorded on the host, that of the others on"
            " the device."
        )
    return tuple(notes)


def _missing_note(waits: WaitsOfRanks) -> tuple[str, ...]:
    """What it means that traces of ranks are missing."""
    here = len(waits.ranks)
    if waits.world_size is None or waits.world_size <= here:
        return ()
    return (
        f"{here} of the {waits.world_size} ranks of the job are compared: which of these came last is known,"
        " but it may have waited for one that is not here, so Transfer can be too long and Waited too short.",
    )
