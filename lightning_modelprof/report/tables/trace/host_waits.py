"""Host Wait Summary: what keeps the device idle in a step, and which waits of the host are behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.host_waits import HostWait, HostWaits, WaitPlace, pool_host_waits
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import split_ranks

_COLUMNS: Final = (
    Column("name", "Name"),
    Column("waits_for", "Waits for", help="the device, or a copy from or to it."),
    Column("where", "Where", help="the operator, and your line if stacks were recorded."),
    Column("calls", "Calls", Unit.COUNT, "Per step", help="of this place in a step."),
    Column("wait_ns", "Host waits", Unit.DURATION_NS, "Per step", help="time of the host in them."),
    Column(
        "idle_ns",
        "Device idle",
        Unit.DURATION_NS,
        "Per step",
        help="idle time of the device in a step that this row explains.",
    ),
    Column("ratio", "Ratio(%)", Unit.RATIO, "Per step", help="that, of the step."),
)
HOST_WAITS: Final = TableKind(
    id="host_waits",
    title="Host Wait Summary",
    help=(
        "Why the busiest device is idle in a step, as means over the recorded steps. Of several steps"
        " in a row the first does not count: what the host did before it was not recorded. Calls that"
        " wait are synchronizations, copies without `Async`, copies from pageable memory to the"
        " device, and asynchronous copies from or to memory that is not pinned which return only after"
        " the copy. All waits are thought away together: of two in a row, removing one may only make"
        " the other wait."
    ),
    columns=_COLUMNS,
    rows={
        "Idle": "all time without an event of that device.",
        "Idle without the first step": (
            "the same without the first of several steps in a row; its causes are below it."
        ),
        "Dataloader": "nothing was queued and the launching thread waited for its batch.",
        "Communication": (
            "nothing was queued and the launching thread communicated on the CPU, as in gloo:all_reduce."
        ),
        "After waits": (
            "what would be saved if no call waited for the device; below it each place that waits."
            " Without its waits the host would have launched everything after them earlier by the time it"
            " waited, so the device would be done earlier by the idle time that follows, as far as nothing"
            " was queued, but never by more than the host waited. A gap is put down to the latest waits"
            " before it, and a wait is forgotten at the end of the next step."
            " The time after the last event is a gap like those of the steps before it; of one step alone the"
            " host is late there."
        ),
        "Host late": "what is left of the time in which nothing was queued.",
        "Other": (
            "work was queued and yet waited, its launch is not known, or it is before the first event."
        ),
    },
    views=("kernels",),
    compared=Figure(keys=("idle_ns",), names=("name", "waits_for", "where")),
)

_WAITS_FOR: Final = {
    "sync": "the device",
    "device_to_host": "copy to host",
    "host_to_device": "copy to device",
}
WITHOUT_FIRST: Final = "Idle without the first step"

_NOTES: Final = (
    "Device idle is the mean time per step without any event of the busiest device, Ratio its share of the"
    " step. Of several steps in a row the first does not count; Idle has it, as Device Summary.",
    "After waits: what would be saved if no call waited for the device. The device would be done earlier by"
    " the idle time after a wait in which nothing was queued, but by no more than the host waited.",
    "Host late is what is left of the time in which nothing was queued. Other: work was queued and yet"
    " waited, its launch is not known, or it is before the device's first event.",
)


def host_waits_table(by_rank: Mapping[int, HostWaits | Absent], options: TableOptions) -> Table:  # noqa: ARG001
    """Idle time per step by its cause, and under After waits each place that waits, over all ranks."""
    ranks = split_ranks(by_rank)
    rows: list[tuple[Cell, ...]] = []
    depths: list[int] = []
    if ranks.found:
        fact = pool_host_waits(list(ranks.found.values()))
        known_ns = fact.fetch_ns + fact.communication_ns + fact.stake_ns + fact.late_ns
        communicates = fact.communication_ns > 0
        is_without = fact.covered_ns != fact.steps_ns
        if is_without:
            ratio = share(fact.covered_idle_ns, fact.covered_ns)
            rows.append(("Idle", None, None, None, None, None, ratio))
        rows.append(_cause(WITHOUT_FIRST if is_without else "Idle", fact.idle_ns, fact))
        rows.append(_cause("Dataloader", fact.fetch_ns, fact))
        if communicates:
            rows.append(_cause("Communication", fact.communication_ns, fact))
        rows.append(_cause("After waits", fact.stake_ns, fact))
        rows += [_wait(wait, fact) for wait in fact.waits]
        rows.append(_cause("Host late", fact.late_ns, fact))
        rows.append(_cause("Other", fact.idle_ns - known_ns, fact))
        depths = [*[0] * is_without, 0, 1, *[1] * communicates, 1, *[2] * len(fact.waits), 1, 1]
    return HOST_WAITS.table(
        rows=tuple(rows),
        depths=tuple(depths),
        notes=(*(_NOTES if ranks.found else ()), *ranks.notes),
        absent_reason=ranks.absent_reason,
    )


def _cause(name: str, idle_ns: int, fact: HostWaits) -> tuple[Cell, ...]:
    return (name, None, None, None, None, idle_ns / fact.num_steps, share(idle_ns, fact.steps_ns))


def _wait(wait: HostWait, fact: HostWaits) -> tuple[Cell, ...]:
    place = wait.place
    memory = f", {place.memory}" if place.memory else ""
    return (
        place.operators[-1] if place.operators else place.call,
        _WAITS_FOR[place.kind] + memory,
        _where(place),
        wait.calls / fact.num_steps,
        wait.wait_ns / fact.num_steps,
        wait.stake_ns / fact.num_steps,
        share(wait.stake_ns, fact.steps_ns),
    )


def _where(place: WaitPlace) -> str | None:
    """Phase, range and function, as far as they are known."""
    return ", ".join(part for part in (place.phase, place.annotation, place.function) if part) or None
