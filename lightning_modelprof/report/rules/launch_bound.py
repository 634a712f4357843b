"""Is the device idle because the host is late with its next work?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.launches import KernelLaunches
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Evidence, Finding, Location
from lightning_modelprof.report.rules.base import count, duration, milliseconds, percent, ratio
from lightning_modelprof.report.rules.device import Circumstances, DeviceRule, pooled_waits
from lightning_modelprof.run.sites import LineCount, StepSites

_MOST_LINES: Final = 3

_ACTION: Final = (
    "Give each kernel more to do, or launch fewer: a larger batch, torch.compile (mode='reduce-overhead' uses"
    " CUDA graphs), a fused optimizer, operations on whole tensors instead of loops. What else the host does"
    " between launches counts too. A profiler makes launches slower, so the true share is smaller."
)


@dataclass(frozen=True, kw_only=True)
class LaunchBound(DeviceRule):
    """Idle time of the device in which nothing was queued, less fetches and less what waits cost.

    With this package's phases in the trace only that in forward, backward and optimizer.

    Source: 10 % and 30 % are this project's own: a profiler makes each launch longer, so a few percent say
    nothing. torch_tb_profiler advises from 50 % on.
    """

    kind: ClassVar[str] = "launch_bound"
    title: ClassVar[str] = "The device waits for the host to launch its work"
    bound: ClassVar[str | None] = "host_bound"

    warning: float = 0.10
    critical: float = 0.30

    def judge(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without steps on a device."""
        facts = pooled_waits(traces)
        if isinstance(facts, Absent):
            return self.not_evaluated(facts.reason)
        if not facts.steps_ns:
            return self.not_evaluated("the recorded steps took no time")
        share = facts.launch_ns / facts.steps_ns
        late_ns = circumstances.per_step(facts.launch_ns, facts.steps_ns, facts.num_steps)
        num_kernels = facts.num_kernels / facts.num_steps
        launches = _launches(traces)
        evidence = [
            duration("idle per step, host late", late_ns),
            ratio("share of the step", share),
            duration("longest stretch", facts.longest_launch_ns),
            count("kernels per step", num_kernels),
            *_kernel_evidence(launches),
        ]
        if not self.is_found(share, late_ns):
            return self.clean(f"The device waits {milliseconds(late_ns)} a step for launches.", evidence)
        return (
            self.found(
                f"In {milliseconds(late_ns)} of a step ({percent(share)}) the device has nothing to do,"
                f" because the host has not launched the next work yet, at most"
                f" {milliseconds(facts.longest_launch_ns)} at a stretch. {_kernels(num_kernels, launches)}",
                _ACTION,
                self.severity(share),
                saving_ns=late_ns,
                places=_busiest_lines(circumstances.sites),
                evidence=evidence,
            ),
        )


def _launches(traces: Sequence[TraceFacts]) -> KernelLaunches | None:
    """Of the trace with most kernels: medians of several cannot be put together."""
    known = [facts.kernel_launches for facts in traces if not isinstance(facts.kernel_launches, Absent)]
    return max(known, key=lambda one: one.kernels.count, default=None)


def _kernel_evidence(launches: KernelLaunches | None) -> list[Evidence]:
    if launches is None:
        return []
    return [
        duration("median kernel", launches.kernels.median_ns),
        ratio("kernels shorter than their launch", launches.shorter_ratio),
    ]


def _kernels(num_kernels: float, launches: KernelLaunches | None) -> str:
    if launches is None or launches.kernels.median_ns is None:
        return f"It runs {num_kernels:,.0f} kernels a step."
    median_us = launches.kernels.median_ns / 1e3
    text = f"It runs {num_kernels:,.0f} kernels a step, of {median_us:.3g} us at the median"
    if launches.shorter_ratio is None:
        return f"{text}."
    return f"{text}; {percent(launches.shorter_ratio)} take less time than their launch."


def _busiest_lines(sites: StepSites | None) -> list[Location]:
    """The lines of the forward that run most operators; where no line is known, the module."""
    lines = [] if sites is None else [line for line in sites.lines if line.phase == "forward"]
    lines.sort(key=lambda line: line.views - line.calls)
    return [_location(line) for line in lines[:_MOST_LINES] if line.file is not None or line.module]


def _location(line: LineCount) -> Location:
    return Location(
        file=line.file,
        line=line.line,
        function=line.function or None,
        module=line.module or None,
        is_exact=line.file is not None,
    )
