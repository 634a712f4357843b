"""Waiting for other ranks: each rank's waits in communication, and which ranks caused them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.communication_calls import CommunicationCalls
from lightning_modelprof.analysis.trace.rank_waits import LateRank, Waits, WaitsOfRanks, compare_ranks
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.record import asdict
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table
from lightning_modelprof.units import milliseconds

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True, help="calls compared."),
    ColumnSpec(
        "total_ns",
        "Total",
        Unit.DURATION_NS,
        "Communication",
        adds_up=True,
        help="time of the compared calls on this rank; overlapping calls are added up.",
    ),
    ColumnSpec(
        "transfer_ns",
        "Transfer",
        Unit.DURATION_NS,
        "Communication",
        adds_up=True,
        help="the shortest duration of each call over the ranks, added up.",
    ),
    ColumnSpec(
        "waited_ns",
        "Total",
        Unit.DURATION_NS,
        "Waited",
        adds_up=True,
        help="Communication Total − Transfer, the time this rank waited for others.",
    ),
    ColumnSpec(
        "waited_step_ns", "Per step", Unit.DURATION_NS, "Waited", help="mean over the compared steps."
    ),
    ColumnSpec("waited_ratio", "Ratio(%)", Unit.RATIO, "Waited", help="share of Communication Total."),
    ColumnSpec(
        "last",
        "Calls",
        Unit.COUNT,
        "Came last",
        adds_up=True,
        help="calls in which this rank alone had the shortest time.",
    ),
    ColumnSpec("last_ratio", "Ratio(%)", Unit.RATIO, "Came last", help="share of the compared calls."),
    ColumnSpec(
        "caused_ns",
        "Total",
        Unit.DURATION_NS,
        "Others waited",
        help="mean time the other ranks waited in calls where this rank came last.",
    ),
    ColumnSpec(
        "caused_step_ns",
        "Per step",
        Unit.DURATION_NS,
        "Others waited",
        help="mean over the compared steps.",
    ),
)
RANK_WAITS: Final = TableSpec(
    id="rank_waits",
    title="Waiting for other ranks",
    help=(
        "Which rank waits for which, if traces of multiple ranks of one job are loaded. A collective that"
        " needs every rank ends at about the same time on all of them, so a shorter kernel means a later"
        " start. The shortest duration of each call is its transfer, and any additional time is waiting."
        " Only durations are compared, so the machines' clocks don't matter. Calls are compared in steps that"
        " all ranks recorded, in order within each step. Collectives are listed below each rank, longest wait"
        " first."
    ),
    columns=_COLUMNS,
    views=("distributed",),
    compared=CompareKey(keys=("waited_step_ns",)),
)


_ONLY_ONE: Final = "only one rank's trace is loaded"

_NO_STEPS_NOTE: Final = (
    "Not every rank has steps, so calls are compared in order from the start of the traces. This assumes"
    " that all ranks started recording before the same call."
)
_HOST_NOTE: Final = (
    "Calls are the backend's CPU ranges, such as gloo:all_reduce. They last until the rank has all data"
    " from the others, so they're compared like kernels."
)
_HABIT_NOTE: Final = (
    "A rank tends to be late for all calls of a step, so a few steps don't show a pattern. Record more"
    " steps before you look for the cause."
)


@trace_table(RANK_WAITS, "distributed", TraceFacts.communication_calls)
def rank_waits_table(
    ranks: Ranks[CommunicationCalls],
) -> Table:
    """Show how long each rank waited, how often it came last, and how long others waited for it."""
    if not ranks.are_several:
        raise NotMeasured(_ONLY_ONE)
    waits = compare_ranks(ranks.found)
    rows: list[Mapping[str, Cell]] = []
    depths: list[int] = []
    groups = {group for one in waits.ranks.values() for _, group in one.by_collective}
    for rank, one in waits.ranks.items():
        rows.append(_row(f"rank {rank}", one.whole))
        depths.append(0)
        for (name, group), part in one.by_collective.items():
            rows.append(_row(f"{name} in {group or 'an unknown group'}" if len(groups) > 1 else name, part))
            depths.append(1)
    return RANK_WAITS.table(
        rows,
        depths=tuple(depths),
        notes=(
            *(_sentence(one, has_groups=len(groups) > 1) for one in waits.stragglers),
            *((_HABIT_NOTE,) if waits.stragglers else ()),
            *((_NO_STEPS_NOTE,) if waits.num_steps is None else ()),
            *((_HOST_NOTE,) if waits.on_host else ()),
            *_left_out_notes(waits),
            *_missing_note(waits),
        ),
    )


def _row(name: str, waits: Waits) -> Mapping[str, Cell]:
    return {
        "name": name,
        **asdict(waits),
        "waited_ns": waits.waited_ns,
        "waited_step_ns": waits.waited_per_step_ns,
        "waited_ratio": share(waits.waited_ns, waits.total_ns),
        "last_ratio": share(waits.last, waits.calls),
        "caused_step_ns": waits.caused_per_step_ns,
    }


def _sentence(one: LateRank, *, has_groups: bool) -> str:
    where = f" of {one.group or 'an unknown group'}" if has_groups else ""
    others = "The other rank" if one.num_ranks == 2 else "The others"
    per_step = " per step" if one.is_per_step else ""
    return (
        f"Rank {one.rank} came last in {one.last} of {one.calls} calls{where}. {others} waited"
        f" {milliseconds(one.waited_ns)}{per_step} for it. By chance it would come last in 1 of"
        f" {one.num_ranks} calls."
    )


def _left_out_notes(waits: WaitsOfRanks) -> tuple[str, ...]:
    notes = []
    if waits.left_out:
        listed = "; ".join(f"{number} because {reason}" for reason, number in waits.left_out.items())
        notes.append(f"Calls not compared: {listed}.")
    if waits.other_source:
        several = len(waits.other_source) > 1
        notes.append(
            f"Rank{'s' if several else ''} {', '.join(map(str, waits.other_source))} not compared:"
            " communication was recorded on the CPU, but on the GPU for the others."
        )
    return tuple(notes)


def _missing_note(waits: WaitsOfRanks) -> tuple[str, ...]:
    here = len(waits.ranks)
    if waits.world_size is None or waits.world_size <= here:
        return ()
    return (
        f"{here} of {waits.world_size} ranks are compared. The last of them may itself have waited for a"
        " missing rank, so Transfer may be too high and Waited too low.",
    )
