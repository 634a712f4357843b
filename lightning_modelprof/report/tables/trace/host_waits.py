"""CPU waits for the GPU: the waiting calls, and the GPU idle time due to each."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.trace.host_waits import HostWait, HostWaits, pool_host_waits
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
    ColumnSpec(
        "ratio",
        "Ratio(%)",
        Unit.RATIO,
        "Per step",
        help="the same as a share of the step.",
        share_of="idle_ns",
    ),
)
HOST_WAITS: Final = TableSpec(
    id="host_waits",
    title="CPU waits for the GPU",
    help=(
        "Places where the CPU waits for the busiest device, as means over the recorded steps, excluding the"
        " first of each consecutive series; findings about waits and launches use these figures. Waiting"
        " calls are synchronizations, copies without `Async`, copies from pageable memory to the device, and"
        " asynchronous copies of memory that isn't pinned that return only after the copy. Savings assume"
        " that all waits are removed together; removing one of two may only make the other wait."
    ),
    columns=_COLUMNS,
    rows={
        "After waits": (
            "time saved if no call waited for the device, with one row per place. Without a wait the CPU"
            " would launch later work earlier, which saves the following idle time in which nothing was"
            " queued, up to the length of the wait. Each gap counts for the latest waits before it, up to"
            " the end of the next step."
        ),
        "CPU late": "the remaining time in which nothing was queued, as in Critical path.",
        "In the model": (
            "the part of that in forward, backward, clipping, optimizer and zero_grad, where these are known."
        ),
    },
    views=("kernels",),
    compared=CompareKey(keys=("idle_ns",), names=("name", "waits_for", "where")),
)

_WAITS_FOR: Final = {
    "sync": "the device",
    "device_to_host": "copy to CPU",
    "host_to_device": "copy to device",
}


@trace_table(HOST_WAITS, "launch", TraceFacts.host_waits)
def host_waits_table(ranks: Ranks[HostWaits]) -> Table:
    """List each place that waits, over all ranks, and the GPU idle time from a CPU late without a wait."""
    fact = pool_host_waits(list(ranks.found.values()))
    count = fact.num_steps
    in_model = fact.launch_ns != fact.late_ns
    return HOST_WAITS.table(
        (
            {"name": "After waits", "idle_ns": fact.saves_ns / count},
            *(_cells(wait, count) for wait in fact.waits),
            {"name": "CPU late", "idle_ns": fact.late_ns / count},
            *([{"name": "In the model", "idle_ns": fact.launch_ns / count}] if in_model else ()),
        ),
        wholes={"ratio": fact.steps_ns / count},
        depths=(0, *[1] * len(fact.waits), 0, *[1] * in_model),
        is_detail=True,
    )


def _cells(wait: HostWait, num_steps: int) -> dict[str, Cell]:
    place = wait.place
    return {
        "name": place.operators[-1] if place.operators else place.call,
        "waits_for": _WAITS_FOR[place.kind] + (f", {place.memory}" if place.memory else ""),
        "where": ", ".join(filter(None, (place.phase, place.annotation, place.function))) or None,
        "calls": wait.calls / num_steps,
        "wait_ns": wait.wait_ns / num_steps,
        "idle_ns": wait.saves_ns / num_steps,
    }
