"""Does another Python thread of the process hold the interpreter that the training needs?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.model import Finding, Location
from lightning_modelprof.report.rules.base import (
    THE_LOOP,
    ShareRule,
    Whole,
    count,
    duration,
    milliseconds,
    percent,
    ratio,
)
from lightning_modelprof.run.stacks import OtherThread, StackSamples


@dataclass(frozen=True, kw_only=True)
class CompetingThread(ShareRule):
    """CPU time of the other Python threads of the process, over the whole loop.

    Python runs one thread at a time: while another one runs Python, the training waits. At stake is the time
    that the other thread had a CPU, and no more than the training thread did not have one.

    Caveats:
        Time in native code that lets the interpreter go, as NumPy does for large arrays, counts as well and
        costs the training less.

    Source: CPU times of threads by the system; places by samples.
    """

    kind: ClassVar[str] = "competing_thread"
    title: ClassVar[str] = "Another Python thread holds the training up"
    bound: ClassVar[str | None] = "host_bound"
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.10
    critical: float = 0.30

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of the whole loop."""
        return Whole(costs.loop.wall_ns, THE_LOOP)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each thread, clean, or not evaluated without samples."""
        costs, hot = analysis.step_costs, analysis.hot_lines
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(hot, Absent):
            return self.not_evaluated(hot.reason)
        samples = hot.samples
        found = []
        for thread in samples.others:
            place = _place(samples, thread)
            if thread.cpu_ns is None or not samples.loop_ns or place is None:
                continue
            share = thread.cpu_ns / samples.loop_ns
            if not isinstance(analysis.batch_cpu, Absent):
                share = min(share, max(0.0, 1 - analysis.batch_cpu.thread_share))
            cost_ns = share * costs.loop.wall_ns
            if not self.is_found(share, cost_ns):
                continue
            found.append(
                self.found(
                    f"The thread {thread.name} of this process had a CPU in"
                    f" {percent(thread.cpu_ns / samples.loop_ns)} of the time. One thread runs Python"
                    f" at a time, so that costs the training up to {milliseconds(cost_ns)} a step"
                    f" ({percent(share)} of {THE_LOOP}).",
                    "Run this less often, or in a process of its own: the training waits while this thread"
                    " runs Python.",
                    self.severity(share),
                    title=f"The thread {thread.name} holds the training up",
                    saving_ns=cost_ns,
                    places=[place],
                    evidence=[
                        duration("per step, at most", cost_ns),
                        ratio("share of the time on a CPU", thread.cpu_ns / samples.loop_ns),
                        count("samples", sum(one.samples for one in thread.stacks)),
                    ],
                )
            )
        return tuple(found) or self.clean("No other Python thread takes much.")


def _place(samples: StackSamples, thread: OtherThread) -> Location | None:
    """The user's line that its samples are at most often; of a library the function; ``None`` of torch's."""
    lines: Counter[int] = Counter()
    others: Counter[str] = Counter()
    for stack in thread.stacks:
        frames = [samples.frames[number] for number in stack.frames]
        users = [number for number in stack.frames if samples.frames[number].is_users]
        if users:
            lines[users[-1]] += stack.samples
        elif frames and not any(one.module.startswith("torch.") for one in frames):
            named = next((one for one in reversed(frames) if one.package), frames[0])
            others[f"{named.module}.{named.function}"] += stack.samples
    if lines:
        frame = samples.frames[lines.most_common(1)[0][0]]
        return Location(file=frame.file, line=frame.line, function=frame.function, is_exact=True)
    return Location(function=others.most_common(1)[0][0]) if others else None
