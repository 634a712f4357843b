"""Overview Summary: Paddle's table of how much step time each event type covers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.overview import (
    DEVICE_TYPES,
    HOST_TYPES,
    DeviceType,
    EventType,
    HostType,
    Overview,
)
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Event Type"),
    ColumnSpec("calls", "Calls", Unit.COUNT, help="events that start in the steps."),
    ColumnSpec(
        "host_total_ns",
        "Time",
        Unit.DURATION_NS,
        "CPU",
        help="union of the type's intervals over all threads, within the steps on the CPU.",
    ),
    ColumnSpec(
        "host_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "CPU",
        help="the same, relative to the steps (ProfileStep, 100%).",
    ),
    ColumnSpec(
        "device_total_ns",
        "Time",
        Unit.DURATION_NS,
        "GPU",
        help="union over all streams and GPUs, within the steps' GPU time.",
    ),
    ColumnSpec(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        help="share of the steps' GPU time, since the GPU lags behind the CPU.",
    ),
)
_AS_MODEL_SUMMARY: Final = (
    "the same figures as in Model Summary: only on the steps' thread, and without the forward and backward"
    " that Lightning runs in the optimizer's closure."
)
OVERVIEW: Final = TableSpec(
    id="overview",
    title="Overview Summary",
    help=(
        "Share of step time covered by each type of event, longest first. Overlaps within a type count"
        " once, so no ratio exceeds 100%. Types overlap each other, so rows don't add up to ProfileStep."
        " Multiple ranks are added up, and their ratios are relative to the sum of their steps (GPU time"
        " only for ranks with GPU events)."
    ),
    columns=_COLUMNS,
    rows={
        "Operator": "operators, without autograd nodes (Backward).",
        "Backward": (
            "autograd nodes, `autograd::engine::evaluate_function`; before torch 1.10 by their names."
        ),
        "Runtime": "CUDA, ROCm and XPU calls.",
        "Dataloader": "outermost fetches, by torch or in our range.",
        "Optimization": _AS_MODEL_SUMMARY,
        "Zero grad": _AS_MODEL_SUMMARY,
        "Communication": (
            "backend operators (`nccl:`, `gloo:`); on the GPU, their kernels (see Distributed Summary)."
        ),
        "UserDefined": "other annotations as in that table, except those around all steps.",
        "PythonFunction": "Python function calls.",
        "Profiler overhead": "the profiler's own work.",
        "Kernel": "computation.",
        "Memcpy": "copies on the GPU.",
        "Memset": "sets on the GPU.",
    },
    compared=CompareKey(keys=("host_total_ns",), sum_over="window"),
)


_LABELS: Final[dict[HostType | DeviceType, str]] = {
    "operator": "Operator",
    "backward": "Backward",
    "runtime": "Runtime",
    "dataloader": "Dataloader",
    "optimization": "Optimization",
    "zero_grad": "Zero grad",
    "communication": "Communication",
    "user_defined": "UserDefined",
    "python_function": "PythonFunction",
    "overhead": "Profiler overhead",
    "kernel": "Kernel",
    "memcpy": "Memcpy",
    "memset": "Memset",
}
_NO_DEVICE_NOTE: Final = "The trace has no GPU events in the steps."


@trace_table(OVERVIEW, "overview", TraceFacts.overview)
def overview_table(ranks: Ranks[Overview]) -> Table:
    """List event types by the step time they cover, over all ranks."""
    pooled = pool(ranks.found.values())
    host = sorted(pooled.host, key=lambda one: (-one.total_ns, HOST_TYPES.index(one.key)))
    device = sorted(pooled.device, key=lambda one: DEVICE_TYPES.index(one.key))
    steps = {"name": "ProfileStep", "calls": pooled.num_steps}
    return OVERVIEW.table(
        (
            {**steps, **_covered("host", pooled.steps_ns, pooled.steps_ns)},
            *({**_named(one), **_covered("host", one.total_ns, pooled.steps_ns)} for one in host),
            *({**_named(one), **_covered("device", one.total_ns, pooled.device_steps_ns)} for one in device),
        ),
        depths=(0, *(1 for _ in host), *(0 for _ in device)),
        notes=(
            *(() if device else (_NO_DEVICE_NOTE,)),
            *_several_note(ranks.found),
            *pooled.notes,
        ),
    )


def _named(one: EventType) -> dict[str, Cell]:
    return {"name": _LABELS[one.key], "calls": one.calls}


def _covered(side: str, time_ns: int, whole_ns: int | None) -> dict[str, Cell]:
    return {f"{side}_total_ns": time_ns, f"{side}_ratio": share(time_ns, whole_ns)}


def _several_note(found: Mapping[int, Overview]) -> tuple[str, ...]:
    if len(found) == 1:
        return ()
    lacking = [str(rank) for rank, one in found.items() if one.device_steps_ns is None]
    gpu = ""
    if lacking and len(lacking) < len(found):
        gpu = f" GPU figures exclude rank{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}, which"
        gpu += f" ha{'ve' if len(lacking) > 1 else 's'} no GPU events."
    return (f"Calls and times are summed over {len(found)} ranks.{gpu}",)
