"""Facts of one job's traces together: of its ranks, or of a run's windows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from lightning_modelprof.analysis.lazy import LazyFacts, NotMeasured, fact
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.analysis.trace.device_shares import (
    DeviceShares,
    WaitShares,
    device_shares,
    host_shares,
    lost_work,
    recorded_step_ns,
    wait_shares,
)
from lightning_modelprof.analysis.trace.device_usage import OneDevice
from lightning_modelprof.analysis.trace.host_waits import HostWaits, pool_host_waits
from lightning_modelprof.analysis.trace.kernels import TensorCoreUse, tensor_core_use
from lightning_modelprof.analysis.trace.rank_waits import WaitsOfRanks, compare_ranks
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.sites import StepSites

T = TypeVar("T")

NO_WINDOW: Final = "no profiler window was recorded (set active=10)"
_ONLY_IN_RUNS: Final = "traces alone don't say"
NOT_COMPARED: Final = "the traces have no communication calls that can be compared between ranks"
_NO_TENSOR_CORES: Final = (
    "only checked on NVIDIA GPUs with tensor cores (Volta and newer, except the GTX 16 series)"
)


class JobFacts(LazyFacts):
    """Facts of one job's traces; :class:`Facts` adds the measurements of a run.

    Args:
        traces: of its ranks, or of a run's windows; none in a run without windows.
    """

    is_on_cpu = False

    def __init__(self, traces: Iterable[TraceFacts]) -> None:
        self.traces = tuple(traces)

    @fact
    def setup(self) -> TrainingSetup:
        raise NotMeasured(_ONLY_IN_RUNS)

    @fact
    def sites(self) -> StepSites:
        """Work of each source line in one step."""
        raise NotMeasured(_ONLY_IN_RUNS)

    @fact
    def step_costs(self) -> StepCosts:
        """Step time without profiler overhead."""
        raise NotMeasured(_ONLY_IN_RUNS)

    @fact
    def step_ns(self) -> float:
        """Step time: in a run without the profiler, in traces alone the mean recorded step."""
        return recorded_step_ns(self.traces, self.get(JobFacts.waits))

    @fact
    def waits(self) -> HostWaits:
        """Waits of the host for the device, in all traces with a device and steps."""
        return pool_host_waits(self.of_traces(TraceFacts.host_waits))

    @fact
    def wait_shares(self) -> WaitShares:
        return wait_shares(self.waits, self.get(JobFacts.device_shares))

    @fact
    def device_shares(self) -> DeviceShares:
        """Composition of the steps in traces with device events."""
        return device_shares(self.traces)

    @fact
    def host_shares(self) -> DeviceShares:
        """Composition of the steps if no trace has device events."""
        return host_shares(self.traces)

    @fact
    def lost_work(self) -> str:
        """Why the traces don't show the GPU's work; ``""`` if they do."""
        return lost_work(trace.launch_count for trace in self.traces)

    @fact
    def tensor_core_use(self) -> TensorCoreUse:
        """Tensor core use of all traces' kernels."""
        kernels = self.of_traces(TraceFacts.kernels)
        # Kernels of a device without tensor cores are never classified.
        if all(one.tensor_unknown is None for one in self.devices):
            raise NotMeasured(_NO_TENSOR_CORES)
        return tensor_core_use(kernels)

    @fact
    def rank_waits(self) -> WaitsOfRanks:
        """Waits of one job's ranks for each other in their steps."""
        by_rank = {trace.rank: trace for trace in self.traces if trace.rank is not None}
        is_of_ranks = len(by_rank) == len(self.traces)
        calls = {rank: trace.get(TraceFacts.communication_calls) for rank, trace in by_rank.items()}
        try:
            waits = compare_ranks({rank: one for rank, one in calls.items() if one and is_of_ranks})
        except NotMeasured:
            raise NotMeasured(NOT_COMPARED) from None
        if waits.num_steps is None:
            raise NotMeasured(NOT_COMPARED)
        return waits

    @property
    def devices(self) -> list[OneDevice]:
        known = [trace.get(TraceFacts.device_usage) for trace in self.traces]
        return [device for usage in known if usage is not None for device in usage.devices]

    def of_traces(self, which: fact[T]) -> list[T]:
        """A fact of each trace that has it, at least one."""
        if not self.traces:
            raise NotMeasured(NO_WINDOW)
        known = [one for trace in self.traces if (one := trace.get(which)) is not None]
        if not known:
            raise NotMeasured(self.traces[0].why_not(which))
        return known

    def per_step(self, time_ns: float) -> float:
        """Convert a time over all recorded steps to a time per step.

        A profiler makes steps longer, so the share of the recorded steps is applied to a step without it.
        """
        waits, step_ns = self.waits, self.get(JobFacts.step_ns)
        if step_ns is None or not waits.steps_ns:
            return time_ns / waits.num_steps
        return time_ns / waits.steps_ns * step_ns
