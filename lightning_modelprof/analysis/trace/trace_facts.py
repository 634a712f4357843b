"""Everything derived from one trace, from any recorder."""

from __future__ import annotations

import json
import re
from typing import Any

from lightning_modelprof.analysis.lazy import OUTSIDE, LazyFacts, NotMeasured, fact
from lightning_modelprof.analysis.timeline.timeline import Timeline, build_timeline
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
from lightning_modelprof.analysis.trace.step_account import StepAccount, account_for_steps
from lightning_modelprof.analysis.trace.step_breakdown import StepBreakdown, summarize_step_breakdown
from lightning_modelprof.analysis.trace.trace_checks import (
    KernelLaunchCount,
    check_trace,
    count_kernel_launches,
)
from lightning_modelprof.analysis.trace.user_ranges import UserRanges, summarize_user_ranges
from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from lightning_modelprof.trace.model import Trace


class TraceFacts(LazyFacts):
    """Derived facts of one trace; for this package's windows, only of completely recorded steps.

    Args:
        step_range: names of the ranges that are the steps; see :func:`build_timeline`.

    Attributes:
        rank: rank of the recording process; ``None`` if the trace doesn't have it.
        world_size: ranks of the job; ``None`` if the trace doesn't have it.
        begin_ns: start of its first event, since 1970 if the recorder's clock is.
        end_ns: end of its last event, on the same clock.
        step_origin: which ranges the steps are, if they aren't ``ProfilerStep``; else "".

    A pickle, e.g. for another process, has all facts but not the trace.
    """

    def __init__(self, trace: Trace, step_range: re.Pattern[str] | None = None) -> None:
        self._timeline: Timeline | None = build_timeline(trace, step_range)
        steps = self._timeline.steps
        self.source = trace.source
        self.rank = _noted(trace, "rank")
        self.world_size = _noted(trace, "world_size")
        self.begin_ns = trace.base_ns
        self.end_ns = trace.base_ns + int(trace.end_ns.max(initial=0))
        self.num_events = len(trace)
        self.step_numbers: tuple[int, ...] = () if steps is None else steps.numbers
        self.step_origin = "" if steps is None else steps.origin

    @property
    def timeline(self) -> Timeline:
        assert self._timeline is not None, "all facts were computed when this was pickled"
        return self._timeline

    def complete(self) -> TraceFacts:
        """Compute all facts and drop the trace, which takes far more memory; return ``self``."""
        for one in (*(getattr(type(self), name) for name in self.names()), *OUTSIDE):
            self.why_not(one)
        self._timeline = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.complete()
        return self.__dict__

    @fact
    def checks(self) -> tuple[str, ...]:
        """Caveats about the trace."""
        return check_trace(self.timeline)

    @fact
    def launch_count(self) -> KernelLaunchCount:
        return count_kernel_launches(self.timeline)

    @fact
    def device_usage(self) -> DeviceUsage:
        return summarize_device_usage(self.timeline)

    @fact
    def overview(self) -> Overview:
        return summarize_overview(self.timeline)

    @fact
    def model_summary(self) -> ModelSummary:
        return summarize_model(self.timeline)

    @fact
    def distributed(self) -> Distributed:
        return summarize_distributed(self.timeline)

    @fact
    def communication_calls(self) -> CommunicationCalls:
        return list_communication_calls(self.timeline)

    @fact
    def operators(self) -> Operators:
        return summarize_operators(self.timeline)

    @fact
    def operators_by_shape(self) -> Operators:
        if not self.operators.has_shapes:
            raise NotMeasured("no operator input shapes were recorded; set record_shapes=True")
        return self.operators

    @fact
    def kernels(self) -> Kernels:
        return summarize_kernels(self.timeline)

    @fact
    def copies(self) -> Copies:
        return summarize_copies(self.timeline)

    @fact
    def user_ranges(self) -> UserRanges:
        return summarize_user_ranges(self.timeline)

    @fact
    def memory(self) -> Memory:
        return summarize_memory(self.timeline)

    @fact
    def step_breakdown(self) -> StepBreakdown:
        return summarize_step_breakdown(self.timeline)

    @fact
    def idle(self) -> Idle:
        return summarize_idle(self.timeline)

    @fact
    def kernel_launches(self) -> KernelLaunches:
        return summarize_launches(self.timeline)

    @fact
    def runtime_calls(self) -> RuntimeCalls:
        return summarize_runtime_calls(self.timeline)

    @fact
    def dataloader(self) -> DataloaderTime:
        return summarize_dataloader(self.timeline)

    @fact
    def host_waits(self) -> HostWaits:
        return summarize_host_waits(self.timeline)

    @fact
    def critical_path(self) -> CriticalPath:
        return summarize_critical_path(self.timeline)

    @fact
    def step_account(self) -> StepAccount:
        """The critical path, what runs and why the GPU is idle, for the same steps."""
        return account_for_steps(
            self.timeline,
            self.step_breakdown,
            path=self.get(TraceFacts.critical_path),
            idle=self.get(TraceFacts.idle),
            waits=self.get(TraceFacts.host_waits),
            why_not_path=self.why_not(TraceFacts.critical_path),
            why_not_waits=self.why_not(TraceFacts.host_waits),
        )


def _noted(trace: Trace, what: str) -> int | None:
    for key in (TRACE_METADATA_KEY, "distributedInfo"):
        noted: Any = trace.metadata.get(key)
        if isinstance(noted, str):  # a trace rewritten by some tool
            try:
                noted = json.loads(noted)
            except (ValueError, RecursionError):
                continue
        number = noted.get(what) if isinstance(noted, dict) else None
        if type(number) is int and number >= 0:
            return number
    return None
