"""What rules about the device's side have in common: the facts of windows or of traces alone."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.trace.host_waits import MOSTLY, HostWaits, LateWork, pool_host_waits
from lightning_modelprof.analysis.trace.launches import KernelLaunches
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.device_shares import lost_work
from lightning_modelprof.report.model import Evidence, Finding, Severity, Slices
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.base import (
    FLOOR_NS,
    NO_SETUP,
    RuleHelp,
    ShareRule,
    count,
    duration,
    location_of,
    ratio,
    text,
)
from lightning_modelprof.run.phases import RANGE_PREFIX
from lightning_modelprof.run.setup import Compilation, CompileSetup, TrainingSetup
from lightning_modelprof.run.sites import LineCount, StepSites
from lightning_modelprof.units import milliseconds, percent

NO_WINDOW: Final = "no profiler window was recorded (set active to its number of steps)"


ON_THE_CPU: Final = "only checked on a GPU"


class Circumstances(Record, frozen=True, kw_only=True):
    """What is known beside the traces.

    Attributes:
        is_run: whether the traces are windows of a run of this package, not traces alone.
        step_ns: mean length of a step in which no profiler runs; ``None``: as long as the recorded ones.
        sites: source lines of one step.
    """

    is_run: bool = False
    step_ns: float | None = None
    sites: StepSites | None = None
    setup: TrainingSetup | None = None

    def per_step(self, time_ns: float, steps_ns: float, num_steps: int) -> float:
        """A time of recorded steps as a time per step of the run.

        A profiler makes steps longer, so the share that it has in the recorded steps is taken of a step
        without it.
        """
        if self.step_ns is None or not steps_ns:
            return time_ns / num_steps
        return time_ns / steps_ns * self.step_ns


class DeviceRule(ShareRule, frozen=True, kw_only=True):
    """A rule that judges traces, those of a run's windows or traces alone, by the arithmetic in ``judge``."""

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs = analysis.step_costs
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if analysis.info.device_type == "cpu":
            return self.not_evaluated(ON_THE_CPU)
        circumstances = Circumstances(
            is_run=True,
            step_ns=costs.step_ns,
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


_MOST_LINES: Final = 3


_ACTION: Final = (
    "Use torch.compile(mode='reduce-overhead'), larger batches, a fused optimizer or fewer small operators."
)


class LaunchBound(DeviceRule, frozen=True, kw_only=True):
    """Idle time of the device in which nothing was queued, less fetches and less what waits cost.

    With this package's phases in the trace only that in forward, backward and optimizer.

    Source: 10% and 30% are this project's own: a profiler makes each launch longer, so a few percent say
    nothing. torch_tb_profiler advises from 50% on.
    """

    kind: ClassVar[str] = "launch_bound"
    title: ClassVar[str] = "GPU waits for kernel launches"
    healthy: ClassVar[str] = "CPU keeps the GPU supplied"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "GPU idle time while the CPU hasn't launched work yet (Host Wait Summary) in forward, backward"
            " and optimizer. Other CPU work between launches counts too; an operator, Python code or a lock"
            " that fills half of the time is named instead. A profiler slows down launches, so the true"
            " share is smaller"
        ),
        where="the lines with the most operators",
    )
    bound: ClassVar[str | None] = "host_bound"
    slices: ClassVar[tuple[Slices, ...]] = (Slices(kind="idle: host"),)

    warning: float = 0.10
    critical: float = 0.30

    def judge(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:
        facts = pooled_waits(traces)
        if isinstance(facts, Absent):
            return self.not_evaluated(facts.reason)
        if not facts.steps_ns:
            return self.not_evaluated("the recorded steps have no duration")
        share = facts.launch_ns / facts.steps_ns
        late_ns = circumstances.per_step(facts.launch_ns, facts.steps_ns, facts.num_steps)
        num_kernels = facts.num_kernels / facts.num_steps
        launches = _launches(traces)
        evidence = [
            duration(HOST_LATE, late_ns),
            duration("longest gap", facts.longest_launch_ns),
            count("kernels per step", num_kernels),
            *_kernel_evidence(launches),
        ]
        if not self.is_found(share, late_ns):
            return self.clean(f"The GPU waits {milliseconds(late_ns)} per step for launches.", evidence)
        if facts.late_work and facts.late_work[0].time_ns >= MOSTLY * facts.launch_ns:
            work = facts.late_work[0]
            work_ns = circumstances.per_step(work.time_ns, facts.steps_ns, facts.num_steps)
            return (self._late_work(traces, work, work_ns, work.time_ns / facts.steps_ns, evidence),)
        return (
            self.found(
                f"The GPU is idle for {COST}, waiting for the CPU to launch work (longest gap"
                f" {milliseconds(facts.longest_launch_ns)}). {_kernels(num_kernels, launches)}",
                _ACTION,
                self.severity(share),
                saving_ns=late_ns,
                places=_busiest_lines(circumstances.sites),
                evidence=evidence,
            ),
        )

    def _late_work(
        self,
        traces: Sequence[TraceFacts],
        work: LateWork,
        work_ns: float,
        share: float,
        evidence: list[Evidence],
    ) -> Finding:
        """The host does something else for long, so fewer launches wouldn't help."""
        path = _path_share(traces, work)
        on_path = "" if path is None else f" This is {percent(path)} of the critical path."
        what = _what(work)
        return self.found(
            f"The GPU is idle for {COST} while the CPU runs {what}.{on_path}",
            _advice(work),
            self.severity(share),
            title="GPU waits for other CPU work",
            saving_ns=work_ns,
            evidence=[
                text(LATE_WORK, what),
                ratio(LATE_SHARE, share),
                *evidence[:1],
                ratio("share of the critical path", path),
                *evidence[1:],
            ],
        )


HOST_LATE: Final = "GPU idle per step while the CPU is late"
"""Label of the idle time in which the CPU is late, whatever it does."""


LATE_WORK: Final = "CPU work while the GPU is idle"
"""Label of what an idle device waits for, where it is no launches."""


LATE_SHARE: Final = "share of the step"
"""Label of what that covers of the idle time."""


PYTHON_CODE: Final = "Python code"


_DO: Final = {
    "operator": "Run {what} on the GPU, or before the step.",
    "runtime": "Avoid {what} in the step; reuse its results.",
    "function": "Make {what} faster, or move it out of the step.",
    "python": "Make {what} faster, or move it out of the step.",
    "lock": "Avoid the wait for {what}, or move it out of the step.",
}


_LOCK: Final = re.compile(r"\b(?:acquire|wait)\b.*(?:lock|Condition|Semaphore)|lock\S* object.*acquire", re.I)


def _is_lock(work: LateWork) -> bool:
    return work.kind == "function" and _LOCK.search(work.name) is not None


def _advice(work: LateWork) -> str:
    """What to do, with the user's own function first."""
    do = _DO["lock" if _is_lock(work) else work.kind].format(what=_name(work))
    return f"In {work.caller}, {do[:1].lower()}{do[1:]}" if work.caller else do


def _what(work: LateWork) -> str:
    return f"{_name(work)} in {work.caller}" if work.caller else _name(work)


def _name(work: LateWork) -> str:
    if work.kind != "python":
        return f"{work.name} (a lock)" if _is_lock(work) else work.name
    return f"{PYTHON_CODE} in {work.name}" if work.name else f"{PYTHON_CODE} outside operators"


def _path_share(traces: Sequence[TraceFacts], work: LateWork) -> float | None:
    """Share of the critical path that is this work on the host; ``None`` where it is not known."""
    paths = [facts.critical_path for facts in traces if not isinstance(facts.critical_path, Absent)]
    whole_ns = sum(path.recorded_ns for path in paths)
    parts = [part for path in paths for part in path.parts if part.cause == "host"]
    if work.kind == "python":
        own_ns = sum(part.time_ns for part in parts if part.operator in _places(work.name))
    elif work.kind == "operator":
        own_ns = sum(part.time_ns for part in parts if part.operator == work.name)
    else:  # the path knows operators and ranges only
        return None
    return own_ns / whole_ns if whole_ns and own_ns else None


def _places(name: str) -> tuple[str, ...]:
    return (name, RANGE_PREFIX + name)


def _launches(traces: Sequence[TraceFacts]) -> KernelLaunches | None:
    """Of the trace with most kernels: medians of several cannot be put together."""
    known = [facts.kernel_launches for facts in traces if not isinstance(facts.kernel_launches, Absent)]
    return max(known, key=lambda one: one.kernels.count, default=None)


def _kernel_evidence(launches: KernelLaunches | None) -> list[Evidence]:
    if launches is None:
        return []
    return [
        duration("median kernel time", launches.kernels.median_ns),
        ratio("kernels shorter than their launch", launches.shorter_ratio),
    ]


def _kernels(num_kernels: float, launches: KernelLaunches | None) -> str:
    if launches is None or launches.kernels.median_ns is None:
        return f"It runs {num_kernels:,.0f} kernels per step."
    median_us = launches.kernels.median_ns / 1e3
    said = f"It runs {num_kernels:,.0f} kernels per step (median {median_us:.3g} µs)"
    if launches.shorter_ratio is None:
        return f"{said}."
    return f"{said}; {percent(launches.shorter_ratio)} are shorter than their launch."


def _busiest_lines(sites: StepSites | None) -> list[Place]:
    """The lines of the forward that run most operators; where no line is known, the module."""
    lines = [] if sites is None else [line for line in sites.lines if line.phase == "forward"]
    lines.sort(key=lambda line: line.views - line.calls)
    return [_location(line) for line in lines[:_MOST_LINES] if line.file is not None or line.module]


def _location(line: LineCount) -> Place:
    return line.exact(module=line.module, is_exact=line.file is not None)


class CompileRecompiles(ShareRule, frozen=True, kw_only=True):
    """Functions that torch.compile compiled more than once, and where it broke a graph.

    The saving is that of the compilations after the first of each function, spread over all finished
    steps; graph breaks have no time of their own.

    Attributes:
        least: recompilations, or graph breaks, from which on it is found.
    """

    kind: ClassVar[str] = "compile_recompiles"
    title: ClassVar[str] = "torch.compile recompiles or breaks graphs"
    healthy: ClassVar[str] = "torch.compile compiles once"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "torch.compile recompiled a function or broke a graph, by the recompilation time; a hint if that"
            " is small or unknown"
        ),
        of="of the loop",
        where="the compiled functions",
    )
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE
    is_of_loop: ClassVar[bool] = True

    least: int = 1
    floor_ns: float = FLOOR_NS

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.compiled is None:
            return self.not_evaluated("torch.compile compiled nothing during the loop")
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        compiled = setup.compiled
        again = [one for one in compiled.compilations if one.attempt > 0]
        breaks = sum(compiled.graph_breaks.values())
        if len(again) < self.least and breaks < self.least:
            return self.clean(
                f"{len(compiled.compilations)} compilations, no recompilations or graph breaks."
            )
        known_s = [one.seconds for one in again if one.seconds is not None]
        cost_ns = 1e9 * sum(known_s) / analysis.num_steps if len(known_s) == len(again) else None
        share = None if cost_ns is None or not costs.loop.wall_ns else cost_ns / costs.loop.wall_ns
        is_slow = cost_ns is not None and self.is_found(share, cost_ns)
        places = dict.fromkeys(_place(one) for one in again)
        return (
            self.found(
                _summary(compiled, len(again), breaks)
                + (f" Recompiling takes {COST}." if again and cost_ns else ""),
                "Use torch.compile(..., dynamic=True), or batches of one shape (drop_last=True, padding)."
                if again
                else "Use fullgraph=True to see where graphs break.",
                self.severity(share) if is_slow and share is not None else Severity.INFO,
                saving_ns=cost_ns if again else None,
                places=places,
                evidence=[
                    count("recompilations", len(again)),
                    count("graph breaks", breaks),
                    duration("recompilation time per step", cost_ns),
                ],
            ),
        )


def _place(one: Compilation) -> Place:
    """The function; of what torch has put around a module the user's statement that ran it."""
    if not one.function.is_library or one.caller is None:
        return location_of(one.function)
    return replace(location_of(one.caller), is_exact=True)


def _summary(compiled: CompileSetup, again: int, breaks: int) -> str:
    sentences = []
    if again:
        failed = next((reasons[0] for reasons in compiled.failed_guards.values() if reasons), None)
        reason = f" (failed guard: {failed})" if failed else ""
        sentences.append(f"{again} of {len(compiled.compilations)} compilations are recompilations{reason}.")
    if breaks:
        reason = max(compiled.graph_breaks, key=lambda key: compiled.graph_breaks[key])
        sentences.append(f"Graphs broke {breaks} time{'s' * (breaks != 1)} (most often: {reason}).")
    return " ".join(sentences)
