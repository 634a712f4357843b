"""Host Wait Summary: what keeps the device idle in a step, and which waits of the host are behind it."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.host_waits import HostWait, HostWaits, WaitPlace, pool_host_waits
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("waits_for", "Waits for", help="the device, or a copy from or to it."),
    ColumnSpec("where", "Where", help="operator, and your line if stacks were recorded."),
    ColumnSpec("calls", "Calls", Unit.COUNT, "Per step", help="calls at this place per step."),
    ColumnSpec("wait_ns", "CPU waits", Unit.DURATION_NS, "Per step", help="CPU time in them."),
    ColumnSpec(
        "idle_ns",
        "Device idle",
        Unit.DURATION_NS,
        "Per step",
        help="device idle time explained by this row.",
    ),
    ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, "Per step", help="the same as a share of the step."),
)
HOST_WAITS: Final = TableSpec(
    id="host_waits",
    title="CPU waits for the GPU",
    help=(
        "Why the busiest device is idle, as means over the recorded steps, excluding the first of each"
        " consecutive series. Waiting calls are synchronizations, copies without `Async`, copies from"
        " pageable memory to"
        " the device, and asynchronous copies of memory that isn't pinned that return only after the copy."
        " Savings assume that all waits are removed together; removing one of two may only make the other"
        " wait."
    ),
    columns=_COLUMNS,
    rows={
        "Idle": "all time without an event on that device.",
        "Idle without the first step": (
            "the same, excluding the first step of each consecutive series. Its causes are below."
        ),
        "Dataloader": "nothing was queued while the launching thread waited for data.",
        "Communication": (
            "nothing was queued while the launching thread communicated on the CPU, as in gloo:all_reduce."
        ),
        "After waits": (
            "time saved if no call waited for the device, with one row per place. Without a wait the CPU"
            " would launch later work earlier, which saves the following idle time in which nothing was"
            " queued, up to the length of the wait. Each gap counts for the latest waits before it, up to"
            " the end of the next step."
        ),
        "CPU late": "the remaining time in which nothing was queued.",
        "Other": "queued work that was delayed, unknown launches and time before the first event.",
    },
    views=("kernels",),
    compared=CompareKey(keys=("idle_ns",), names=("name", "waits_for", "where")),
)

_WAITS_FOR: Final = {
    "sync": "the device",
    "device_to_host": "copy to CPU",
    "host_to_device": "copy to device",
}
WITHOUT_FIRST: Final = "Idle without the first step"

_NOTES: Final = (
    "Device idle is the mean time per step without any event on the busiest device, and Ratio is its share"
    " of the step. In each series of consecutive steps, the first is excluded, except in Idle, which matches"
    " Device"
    " Summary.",
    '"After waits" is the time that would be saved if no call waited for the device. It\'s the idle time'
    " after"
    " a wait with nothing queued, up to the length of the wait.",
    '"CPU late" is the remaining time with nothing queued. Other is queued work that was delayed,'
    " unknown launches and time before the device's first event.",
)


@trace_table(HOST_WAITS, "launch", TraceFacts.host_waits)
def host_waits_table(ranks: Ranks[HostWaits]) -> Table:
    """Idle time per step by its cause, and under After waits each place that waits, over all ranks."""
    fact = pool_host_waits(list(ranks.found.values()))
    known_ns = fact.fetch_ns + fact.communication_ns + fact.saves_ns + fact.late_ns
    communicates = fact.communication_ns > 0
    is_without = fact.covered_ns != fact.steps_ns
    rows: list[tuple[Cell, ...]] = []
    if is_without:
        rows.append(("Idle", None, None, None, None, None, share(fact.covered_idle_ns, fact.covered_ns)))
    rows.append(_cause(WITHOUT_FIRST if is_without else "Idle", fact.idle_ns, fact))
    rows.append(_cause("Dataloader", fact.fetch_ns, fact))
    if communicates:
        rows.append(_cause("Communication", fact.communication_ns, fact))
    rows.append(_cause("After waits", fact.saves_ns, fact))
    rows += [_wait(wait, fact) for wait in fact.waits]
    rows.append(_cause("CPU late", fact.late_ns, fact))
    rows.append(_cause("Other", fact.idle_ns - known_ns, fact))
    return HOST_WAITS.table(
        rows=tuple(rows),
        depths=(*[0] * is_without, 0, 1, *[1] * communicates, 1, *[2] * len(fact.waits), 1, 1),
        notes=_NOTES,
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
        wait.saves_ns / fact.num_steps,
        share(wait.saves_ns, fact.steps_ns),
    )


def _where(place: WaitPlace) -> str | None:
    """Phase, range and function, as far as they are known."""
    return ", ".join(part for part in (place.phase, place.annotation, place.function) if part) or None
