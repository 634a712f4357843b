"""Overview Summary: how much of the steps each type of event covers, Paddle's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.overview import (
    DeviceType,
    EventType,
    HostType,
    Overview,
    pool_overviews,
)
from lightning_modelprof.report.kinds import Figure, TableKind
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import split_ranks

_TITLE: Final = "Overview Summary"
_COLUMNS: Final = (
    Column("name", "Event Type"),
    Column("calls", "Calls", Unit.COUNT, help="events that begin in the steps."),
    Column(
        "host_total_ns",
        "Time",
        Unit.DURATION_NS,
        "CPU",
        help=("the union of the type's intervals over all threads, clipped to the steps on the host."),
    ),
    Column(
        "host_ratio", "Ratio(%)", Unit.RATIO, "CPU", help="that over the steps' time (ProfileStep, 100 %)."
    ),
    Column(
        "device_total_ns",
        "Time",
        Unit.DURATION_NS,
        "GPU",
        help="the union over all streams and devices, clipped to the span.",
    ),
    Column(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        help="to the span, since the device lags behind the host.",
    ),
)
_AS_MODEL_SUMMARY: Final = (
    "the same figures as in the Model Summary, so only on the thread of the steps and without the"
    " forward and backward that Lightning runs in the optimizer's closure."
)
OVERVIEW: Final = TableKind(
    id="overview",
    title="Overview Summary",
    help=(
        "What each type of event covers of the steps. Overlap counts once, so no ratio exceeds 100 %;"
        " types overlap, so rows do not sum to ProfileStep. Each event is of one type, longest first,"
        " only those that occur. Several ranks: calls and times are added up, CPU ratios are to the"
        " sum of the ranks' steps, GPU ratios to the sum of the spans of those ranks that have device"
        " events; a note names the others. Absent when the trace has neither steps nor operators, or"
        " none of the recorded steps."
    ),
    columns=_COLUMNS,
    rows={
        "Operator": "operators, without nodes of autograd's graph (Backward).",
        "Backward": (
            "nodes of autograd's graph, `autograd::engine::evaluate_function`; before torch 1.10 by the"
            " nodes' names."
        ),
        "Runtime": "calls of CUDA, ROCm, XPU.",
        "Dataloader": "fetches by torch or in our range, none inside another.",
        "Optimization": _AS_MODEL_SUMMARY,
        "Zero grad": _AS_MODEL_SUMMARY,
        "Communication": (
            "operators of a backend, `nccl:`, `gloo:`; on the device its kernels (see Distributed Summary)."
        ),
        "UserDefined": "other annotations, as in that table, none around all steps.",
        "PythonFunction": "calls of Python functions.",
        "Profiler overhead": "the profiler's own work.",
        "Kernel": "computation.",
        "Memcpy": "copies on the device.",
        "Memset": "sets on the device.",
    },
    compared=Figure(keys=("host_total_ns",), sum_over="window"),
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

_NOTE: Final = (
    "Time in which at least one event of the type ran, on any thread, stream or device; overlap counts once,"
    " so no ratio exceeds 100 %. The types overlap each other (an operator calls the runtime), so the rows do"
    " not sum to ProfileStep. Calls are the events that begin in the steps."
)
_BACKWARD_NOTE: Final = (
    "Backward is the time in nodes of autograd's graph; the operators in them count in Operator, too."
)
_OPTIMIZATION_NOTE: Final = (
    "Optimization and Zero grad are those of the Model Summary, on the thread of the steps: an optimizer step"
    " around forward and backward (a closure) counts without these."
)
_GPU_NOTE: Final = (
    "The GPU columns cover the time from the first step to the end of the work that the last one launched."
    " Kernel is computation; Communication is kernels of NCCL and its like, and on the CPU the operators of"
    " such a backend."
)
_NO_DEVICE_NOTE: Final = "The trace has no device events in the steps."


def overview_table(by_rank: Mapping[int, Overview | Absent], options: TableOptions) -> Table:  # noqa: ARG001
    """Which types of events fill the steps, the ranks together.

    Args:
        by_rank: the overview of each rank.
        options: not used; the rows have one order.
    """
    ranks = split_ranks(by_rank)
    if not ranks.found:
        return OVERVIEW.table(absent_reason=ranks.absent_reason)
    pooled = pool_overviews(list(ranks.found.values()))
    whole = 1.0 if pooled.steps_ns else None
    return OVERVIEW.table(
        rows=(
            ("ProfileStep", pooled.num_steps, pooled.steps_ns, whole, None, None),
            *((*_named(one), one.total_ns, one.ratio, None, None) for one in pooled.host),
            *((*_named(one), None, None, one.total_ns, one.ratio) for one in pooled.device),
        ),
        depths=(0, *(1 for _ in pooled.host), *(0 for _ in pooled.device)),
        notes=(
            _NOTE,
            *([_BACKWARD_NOTE] if any(one.key == "backward" for one in pooled.host) else []),
            _GPU_NOTE if pooled.device else _NO_DEVICE_NOTE,
            *([_OPTIMIZATION_NOTE] if any(one.key == "optimization" for one in pooled.host) else []),
            *_several_note(ranks.found),
            *pooled.notes,
            *ranks.notes,
        ),
    )


def _named(one: EventType) -> tuple[Cell, Cell]:
    return _LABELS[one.key], one.calls


def _several_note(found: Mapping[int, Overview]) -> tuple[str, ...]:
    """What several ranks together mean."""
    if len(found) == 1:
        return ()
    lacking = [str(rank) for rank, one in found.items() if one.device_steps_ns is None]
    gpu = ""
    if lacking and len(lacking) < len(found):
        gpu = f" GPU figures are without rank{'s' if len(lacking) > 1 else ''} {', '.join(lacking)}, which"
        gpu += f" ha{'ve' if len(lacking) > 1 else 's'} no device events."
    return (
        f"Calls and times are the sums of {len(found)} ranks, CPU ratios are to the sum of their steps, GPU"
        f" ratios to the sum of their spans on the device.{gpu}",
    )
