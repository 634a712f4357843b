"""Everything derived from one trace, whoever recorded it."""

from __future__ import annotations

import json
import re
from typing import Any

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.communication_calls import (
    CommunicationCalls,
    list_communication_calls,
)
from lightning_modelprof.analysis.trace.copies import Copies, summarize_copies
from lightning_modelprof.analysis.trace.critical_path import CriticalPath, summarize_critical_path
from lightning_modelprof.analysis.trace.dataloader import DataloaderTime, summarize_dataloader
from lightning_modelprof.analysis.trace.device_usage import DeviceUsage, summarize_device_usage
from lightning_modelprof.analysis.trace.distributed import Distributed, summarize_distributed
from lightning_modelprof.analysis.trace.host_waits import HostWaits, summarize_host_waits
from lightning_modelprof.analysis.trace.idle import Idle, summarize_idle
from lightning_modelprof.analysis.trace.kernels import Kernels, summarize_kernels
from lightning_modelprof.analysis.trace.launches import (
    KernelLaunches,
    RuntimeCalls,
    summarize_launches,
    summarize_runtime_calls,
)
from lightning_modelprof.analysis.trace.memory import Memory, summarize_memory
from lightning_modelprof.analysis.trace.model_summary import ModelSummary, summarize_model
from lightning_modelprof.analysis.trace.operators import Operators, summarize_operators
from lightning_modelprof.analysis.trace.overview import Overview, summarize_overview
from lightning_modelprof.analysis.trace.step_breakdown import StepBreakdown, summarize_step_breakdown
from lightning_modelprof.analysis.trace.trace_checks import (
    KernelLaunchCount,
    check_trace,
    count_kernel_launches,
)
from lightning_modelprof.analysis.trace.user_ranges import UserRanges, summarize_user_ranges
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from lightning_modelprof.trace.model import Trace


class TraceFacts(Record, frozen=True, kw_only=True):
    """Derived facts of one trace; a fact that the trace has no data for is :class:`Absent`.

    Attributes:
        rank: of the process that recorded it; ``None`` if the trace does not say.
        world_size: ranks of the job; ``None`` if the trace does not say.
        begin_ns: time of its first event, since 1970 if the recorder's clock says so.
        end_ns: time of the end of its last event, likewise.
        step_origin: which ranges they are, where they are no ``ProfilerStep``; else "".
        checks: sentences on what speaks against believing it.
    """

    source: str
    rank: int | None
    world_size: int | None
    begin_ns: int
    end_ns: int
    num_events: int
    step_numbers: tuple[int, ...]
    step_origin: str
    checks: tuple[str, ...]
    launch_count: KernelLaunchCount
    device_usage: DeviceUsage | Absent
    overview: Overview | Absent
    model_summary: ModelSummary | Absent
    distributed: Distributed | Absent
    communication_calls: CommunicationCalls | Absent
    operators: Operators | Absent
    kernels: Kernels | Absent
    copies: Copies | Absent
    user_ranges: UserRanges | Absent
    memory: Memory | Absent
    step_breakdown: StepBreakdown | Absent
    idle: Idle | Absent
    kernel_launches: KernelLaunches | Absent
    runtime_calls: RuntimeCalls | Absent
    dataloader: DataloaderTime | Absent
    host_waits: HostWaits | Absent
    critical_path: CriticalPath | Absent


def analyze_trace(trace: Trace, step_range: re.Pattern[str] | None = None) -> TraceFacts:
    """Derive the facts of one trace; of a window of ours only the steps that were recorded to their end.

    Args:
        step_range: names of the ranges that are the steps; see :func:`build_timeline`.
    """
    timeline = build_timeline(trace, step_range)
    return TraceFacts(
        source=trace.source,
        rank=_noted(trace, "rank"),
        world_size=_noted(trace, "world_size"),
        begin_ns=trace.base_ns,
        end_ns=trace.base_ns + int(trace.end_ns.max(initial=0)),
        num_events=len(trace),
        step_numbers=() if timeline.steps is None else timeline.steps.numbers,
        step_origin="" if timeline.steps is None else timeline.steps.origin,
        checks=check_trace(timeline),
        launch_count=count_kernel_launches(timeline),
        device_usage=summarize_device_usage(timeline),
        overview=summarize_overview(timeline),
        model_summary=summarize_model(timeline),
        distributed=summarize_distributed(timeline),
        communication_calls=list_communication_calls(timeline),
        operators=summarize_operators(timeline),
        kernels=summarize_kernels(timeline),
        copies=summarize_copies(timeline),
        user_ranges=summarize_user_ranges(timeline),
        memory=summarize_memory(timeline),
        step_breakdown=summarize_step_breakdown(timeline),
        idle=summarize_idle(timeline),
        kernel_launches=summarize_launches(timeline),
        runtime_calls=summarize_runtime_calls(timeline),
        dataloader=summarize_dataloader(timeline),
        host_waits=summarize_host_waits(timeline),
        critical_path=summarize_critical_path(timeline),
    )


def _noted(trace: Trace, what: str) -> int | None:
    """The rank or the world size, as the callback noted it in the trace, or torch did."""
    for key in (TRACE_METADATA_KEY, "distributedInfo"):
        noted: Any = trace.metadata.get(key)
        if isinstance(noted, str):  # a trace that some tool wrote anew
            try:
                noted = json.loads(noted)
            except (ValueError, RecursionError):
                continue
        number = noted.get(what) if isinstance(noted, dict) else None
        if type(number) is int and number >= 0:
            return number
    return None
