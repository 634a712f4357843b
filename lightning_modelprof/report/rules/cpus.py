"""Does the model run on one of several CPUs?"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.batch_cpu import BatchCpu
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.loader import loader_advice
from lightning_modelprof.report.model import Finding, Severity
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    Rule,
    RuleHelp,
    ShareRule,
    count,
    duration,
    ratio,
)
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.stacks import OtherThread, StackSamples
from lightning_modelprof.units import digits, milliseconds, percent


class SingleCpuThread(Rule, frozen=True, kw_only=True):
    """Torch has one thread, more CPUs are free, and forward and backward compute for most of a step.

    Small operators gain nothing from threads: it is a hint, unless operators of 100 us and more take most of
    the inspected step's Forward and Backward and there are no workers. With so many threads their share of
    these phases is divided by as many at best, which is the saving. What the training thread
    computes is measured for the whole step without its batch, so forward and backward compute that at most.
    A CPU that a worker is advised for is not free.

    Attributes:
        least_share: of forward and backward in the step.
        most_wait: share of the loop for which the training thread waited for a CPU, from which on none is
            free.
    """

    kind: ClassVar[str] = "single_cpu_thread"
    title: ClassVar[str] = "PyTorch uses only one CPU"
    healthy: ClassVar[str] = "PyTorch uses the available CPUs"
    help: ClassVar[RuleHelp] = RuleHelp(
        "CPU training where torch uses one thread, more CPUs are free, and both forward plus backward and the"
        " training thread's CPU time take at least 50% of the step. CPUs that suggested workers would use"
        " aren't free. A warning where operators of 100 µs and more take half of forward and backward and no"
        " worker needs a CPU, otherwise a hint, since small operators don't gain from threads"
    )
    phases: ClassVar[tuple[str, ...]] = ("forward", "backward")
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    least_share: float = 0.5
    most_wait: float = 0.1

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, setup = analysis.step_costs, analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated("only checked for CPU training")
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup.num_threads is None or setup.usable_cpus is None:
            return self.not_evaluated("the number of threads or CPUs is unknown")
        if costs.cpu_wait_share is not None and costs.cpu_wait_share >= self.most_wait:
            waited = percent(costs.cpu_wait_share)
            return self.not_evaluated(f"no CPU was free; training waited for a CPU {waited} of the time")
        present = sum(one.num_workers or 0 for one in setup.loaders)
        cpu = analysis.batch_cpu
        workers = max(present, _advised_workers(costs, setup, cpu))
        free = setup.usable_cpus - setup.local_world_size * (1 + workers)
        idle = None if isinstance(cpu, Absent) else cpu.idle_cpus(costs.usual_wall_ns(costs.typical))
        if idle is not None:
            free = min(free, idle - (workers - present))
        share = costs.typical.share("forward", "backward")
        evidence = [
            count("PyTorch threads", setup.num_threads),
            count("usable CPUs", setup.usable_cpus),
            ratio("share of step in forward and backward", share),
        ]
        if setup.num_threads > 1 or free <= 0 or share is None or share < self.least_share:
            used = "" if free > 0 or setup.num_threads > 1 else "; none is free"
            return self.clean(
                f"PyTorch uses {setup.num_threads} thread{'s' * (setup.num_threads != 1)} on"
                f" {setup.usable_cpus} CPUs{used}.",
                evidence,
            )
        if isinstance(cpu, Absent):
            return self.not_evaluated(cpu.reason)
        evidence.append(ratio("share of step on training thread's CPU", cpu.thread_share))
        if cpu.thread_share < self.least_share:
            return self.clean(
                f"The training thread only computes {percent(cpu.thread_share)} of the step.",
                evidence,
            )
        large = _large_operators(analysis)
        is_worth_it = large >= self.least_share and not workers
        saving_ns = large * free / (1 + free) * costs.in_step_ns(self.phases) if is_worth_it else None
        evidence.append(ratio("forward and backward in operators of 100 µs and more", large))
        return (
            self.found(
                f"PyTorch uses 1 thread on {setup.usable_cpus} CPUs, and forward and backward take"
                f" {percent(share)} of the step.",
                f"Try torch.set_num_threads({1 + free}), or OMP_NUM_THREADS={1 + free}."
                + (
                    " Small operators won't get faster."
                    if saving_ns is None
                    else f" This saves up to {milliseconds(saving_ns)} per step."
                ),
                Severity.INFO if saving_ns is None else Severity.WARNING,
                saving_ns=saving_ns,
                saving_is="up to",
                evidence=evidence,
            ),
        )


_LARGE_NS: Final = 100_000
"""What an operator takes at least that threads make faster: to hand work to a thread takes some 10 us."""


def _large_operators(analysis: Analysis) -> float:
    """Share of large operators in the time of all in Forward and Backward of the inspected step."""
    sites = None if analysis.cost is None else analysis.cost.sites
    lines = [one for one in (() if sites is None else sites.lines) if one.phase in SingleCpuThread.phases]
    large_ns = sum(one.took_ns for one in lines if one.took_ns >= _LARGE_NS * max(1, one.own_calls))
    return large_ns / max(1, sum(one.took_ns for one in lines))


def _advised_workers(costs: StepCosts, setup: TrainingSetup, cpu: BatchCpu | Absent) -> int:
    """Workers that another rule may advise and that compute."""
    wait_ns, wall_ns = costs.usual_wait_ns(), costs.usual_wall_ns(costs.typical)
    if isinstance(cpu, Absent) or cpu.is_computing is False or not wait_ns or not wall_ns:
        return 0
    return loader_advice(setup.loaders, setup.usable_cpus, wait_ns, wall_ns, cpu).num_workers or 0


class CpuThreadsOversubscribed(Rule, frozen=True, kw_only=True):
    """Threads of torch in all training processes of the machine, over the CPUs that this process may use.

    On the CPU alone: there the operators run on these threads. Workers of a loader do not count, as nobody
    knows whether they compute or wait. What it costs is not measured.

    Attributes:
        most: threads per CPU above which it is found.
    """

    kind: ClassVar[str] = "cpu_threads_oversubscribed"
    title: ClassVar[str] = "More threads than CPUs"
    healthy: ClassVar[str] = "Thread count fits the CPUs"
    help: ClassVar[RuleHelp] = RuleHelp(
        "CPU training where the PyTorch threads of all processes on this machine outnumber the usable CPUs",
        levels="more than `most` = 1 thread per CPU",
    )

    most: float = 1.0

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        setup = analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated("only checked for CPU training")
        if setup.num_threads is None or setup.usable_cpus is None:
            return self.not_evaluated("the number of threads or CPUs is unknown")
        threads = setup.num_threads * setup.local_world_size
        evidence = [count("PyTorch threads", threads), count("usable CPUs", setup.usable_cpus)]
        if threads <= self.most * setup.usable_cpus:
            several, plural = "s" * (threads != 1), "s" * (setup.usable_cpus != 1)
            return self.clean(
                f"{threads} PyTorch thread{several} on {setup.usable_cpus} CPU{plural}.", evidence
            )
        fitting = max(1, setup.usable_cpus // setup.local_world_size)
        return (
            self.found(
                f"{threads} PyTorch threads share {setup.usable_cpus} CPUs.",
                f"Call torch.set_num_threads({fitting}), or set OMP_NUM_THREADS={fitting} (currently"
                f" {setup.num_threads}).",
                Severity.WARNING,
                evidence=evidence,
            ),
        )


INFLATED: Final = "All timings in this report are inflated, including the model's."


class BusyCpus(Rule, frozen=True, kw_only=True):
    """Time of the loop in which the training thread was ready to run and had no CPU.

    Every phase is longer for it, and so is a comparison with a run that had the CPUs to itself. What it costs
    is more than this wait, as other threads of the process waited as well.

    Attributes:
        hint: share of the loop from which on it is a hint.
        warning: share from which on it is a warning.

    Source: on two CPUs with a convolution network on two threads, the share was 0.0% on a quiet machine and
    44% beside one busy process, with steps 3.7 times as long.
    """

    kind: ClassVar[str] = "busy_cpus"
    title: ClassVar[str] = "CPU contention"
    healthy: ClassVar[str] = "CPUs are free for training"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "share of the loop in which the training thread was ready to run but waited for a CPU"
            " (`/proc/thread-self/schedstat`). All timings are inflated by it"
        ),
        levels="hint 10%, warning 25% of the loop",
    )
    points_at: ClassVar[PointsAt] = PointsAt.NO_TIME

    hint: float = 0.1
    warning: float = 0.25

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        facts = analysis.slow
        if isinstance(facts, Absent):
            return self.not_evaluated(facts.reason)
        share = facts.record.cpu_wait_share
        if share is None:
            return self.not_evaluated(facts.record.why_no_cpu_wait or "no step was measured")
        evidence = [ratio("share of loop time spent waiting for a CPU", share)]
        if share < self.hint:
            return self.clean(f"Training spent {percent(share)} of the time waiting for a CPU.", evidence)
        return (
            self.found(
                f"Training spent {percent(share)} of the time waiting for a CPU. {INFLATED}",
                _own_workers(analysis) or "Re-run on an idle machine, or reserve CPUs for this job.",
                Severity.WARNING if share >= self.warning else Severity.INFO,
                evidence=evidence,
            ),
        )


def _own_workers(analysis: Analysis) -> str:
    """What to do where the workers of this training take half of the CPUs; ``""`` where they do not."""
    costs, cpus = analysis.step_costs, None if analysis.setup is None else analysis.setup.usable_cpus
    if isinstance(costs, Absent) or isinstance(analysis.workers, Absent) or not cpus:
        return ""
    times = [one.times for loader in analysis.workers for one in loader.workers]
    loop_ns = max(1.0, costs.loop.wall_ns * costs.loop.num_steps)
    used = sum(one.cpu_ns + (one.other_cpu_ns or 0) for one in times) / loop_ns
    if used < cpus / 2:
        return ""
    return (
        f"Make DataLoader samples cheaper, or reserve more CPUs. The workers use {digits(used)} of {cpus}"
        " CPUs."
    )


class CompetingThread(ShareRule, frozen=True, kw_only=True):
    """CPU time of the other Python threads of the process, over the whole loop.

    Python runs one thread at a time: while another one runs Python, the training waits. The saving is the
    time that the other thread had a CPU, and no more than the training thread did not have one.

    Caveats:
        Time in native code that lets the interpreter go, as NumPy does for large arrays, counts as well and
        costs the training less.

    Source: CPU times of threads by the system; places by samples.
    """

    kind: ClassVar[str] = "competing_thread"
    title: ClassVar[str] = "Another Python thread competes with training"
    healthy: ClassVar[str] = "No competing Python threads"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "CPU time of another Python thread in this process, at most the time in which the training thread"
            " wasn't on a CPU. An upper bound, because native code that releases the GIL counts too"
        ),
        of="of the loop",
        where="the line with most of the thread's samples",
    )
    bound: ClassVar[str | None] = "host_bound"
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE

    warning: float = 0.10
    critical: float = 0.30

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each thread."""
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
                    f"Thread {thread.name} was on a CPU {percent(thread.cpu_ns / samples.loop_ns)} of the"
                    f" time. Only one thread runs Python at a time, so this costs up to {COST}.",
                    "Run this work less often, or in a separate process.",
                    self.severity(share),
                    title=f"Thread {thread.name} competes with training",
                    saving_ns=cost_ns,
                    saving_is="up to",
                    places=[place],
                    evidence=[
                        duration("maximum cost per step", cost_ns),
                        ratio("thread's CPU share of loop", thread.cpu_ns / samples.loop_ns),
                        count("stack samples", sum(one.samples for one in thread.stacks)),
                    ],
                )
            )
        return tuple(found) or self.clean("Other Python threads use little CPU time.")


def _place(samples: StackSamples, thread: OtherThread) -> Place | None:
    """The user's line that its samples are at most often; of a library the function; ``None`` of torch's."""
    lines: Counter[int] = Counter()
    others: Counter[str] = Counter()
    for stack in thread.stacks:
        frames = [samples.frames[number] for number in stack.frames]
        users = [number for number in stack.frames if samples.frames[number].is_users]
        if users:
            lines[users[-1]] += stack.samples
        elif frames and not any(one.python_module.startswith("torch.") for one in frames):
            named = next((one for one in reversed(frames) if one.package), frames[0])
            others[f"{named.python_module}.{named.function}"] += stack.samples
    if lines:
        frame = samples.frames[lines.most_common(1)[0][0]]
        return frame.exact()
    return Place(function=others.most_common(1)[0][0]) if others else None
