"""What rules about the device's side have in common: the facts of windows or of traces alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.trace.host_waits import HostWaits, pool_host_waits
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.device_shares import lost_work
from lightning_modelprof.report.model import Finding
from lightning_modelprof.report.rules.base import ShareRule
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.sites import StepSites

NO_WINDOW: Final = "no profiler window was recorded (active is how many steps it has)"
ON_THE_CPU: Final = "the run used no device beside the CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What is known beside the traces.

    Attributes:
        is_run: whether the traces are windows of a run of this package, not traces alone.
        step_ns: mean length of a step in which no profiler runs; ``None``: as long as the recorded ones.
        sites: source lines of one step.
        setup: how the training is set up.
    """

    is_run: bool = False
    step_ns: float | None = None
    sites: StepSites | None = None
    setup: TrainingSetup | None = None

    def per_step(self, time_ns: float, steps_ns: float, num_steps: int) -> float:
        """A time of recorded steps as a time per step of the run.

        A profiler makes steps longer, so the share that it has in the recorded steps is taken of a step
        without it.

        Args:
            time_ns: in all recorded steps together.
            steps_ns: their length.
            num_steps: how many.
        """
        if self.step_ns is None or not steps_ns:
            return time_ns / num_steps
        return time_ns / steps_ns * self.step_ns


@dataclass(frozen=True, kw_only=True)
class DeviceRule(ShareRule):
    """A rule that judges traces, those of a run's windows or traces alone, by the arithmetic in ``judge``."""

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """What the windows of a run say."""
        costs = analysis.step_costs
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if analysis.info.device_type == "cpu":
            return self.not_evaluated(ON_THE_CPU)
        circumstances = Circumstances(
            is_run=True,
            step_ns=costs.steady.wall_ns,
            sites=None if analysis.cost is None else analysis.cost.sites,
            setup=analysis.setup,
        )
        traces = tuple(window.facts for window in analysis.windows if window.facts is not None)
        return self.judge_known(traces, circumstances) if traces else self.without_window(circumstances)

    def judge_known(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:
        """What traces say, unless they lack most of the kernels that were launched in their steps."""
        lost = lost_work(facts.launch_count for facts in traces)
        return self.not_evaluated(lost) if lost else self.judge(traces, circumstances)

    @abstractmethod
    def judge(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:
        """What traces say: of a run's windows, or of the ranks of a job; at least one."""

    def without_window(self, circumstances: Circumstances) -> tuple[Finding, ...]:  # noqa: ARG002
        """What can be said of a run on a device without a window."""
        return self.not_evaluated(NO_WINDOW)


def pooled_waits(traces: Sequence[TraceFacts]) -> HostWaits | Absent:
    """Of all traces that have a device and steps; else why there is none."""
    facts = [trace.host_waits for trace in traces]
    known = [fact for fact in facts if not isinstance(fact, Absent)]
    if known:
        return pool_host_waits(known)
    return next(fact for fact in facts if isinstance(fact, Absent))
