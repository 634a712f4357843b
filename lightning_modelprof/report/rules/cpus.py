"""Does the model run on one of several CPUs?"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.batch_cpu import BatchCpu
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.advice.loader import loader_advice
from lightning_modelprof.report.model import Finding, Location, Severity
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
from lightning_modelprof.units import digits, percent


class SingleCpuThread(Rule, frozen=True, kw_only=True):
    """Torch has one thread, more CPUs are free, and forward and backward compute for most of a step.

    A hint: small operators gain nothing from threads. What it costs is not measured. What the training thread
    computes is measured for the whole step without its batch, so forward and backward compute that at most.
    A CPU that a worker is advised for is not free.

    Attributes:
        least_share: of forward and backward in the step.
        most_wait: share of the loop for which the training thread waited for a CPU, from which on none is
            free.
    """

    kind: ClassVar[str] = "single_cpu_thread"
    title: ClassVar[str] = "The model runs on one of several CPUs"
    help: ClassVar[RuleHelp] = RuleHelp(
        "on the CPU: torch uses one thread although more CPUs are free, forward and backward are"
        " at least 50% of the step, and so is the training thread's CPU time; a CPU that a"
        " computing worker is advised for is not free; a hint"
    )

    least_share: float = 0.5
    most_wait: float = 0.1

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated on another device."""
        costs, setup = analysis.step_costs, analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated("the model does not run on the CPU")
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup.num_threads is None or setup.usable_cpus is None:
            return self.not_evaluated("the number of threads or of CPUs is not known")
        if costs.cpu_wait_share is not None and costs.cpu_wait_share >= self.most_wait:
            waited = percent(costs.cpu_wait_share)
            return self.not_evaluated(f"no CPU was free: the training thread waited for one in {waited}")
        present = sum(one.num_workers or 0 for one in setup.loaders)
        cpu = analysis.batch_cpu
        workers = max(present, _advised_workers(costs, setup, cpu))
        free = setup.usable_cpus - setup.local_world_size * (1 + workers)
        idle = None if isinstance(cpu, Absent) else cpu.idle_cpus(costs.usual_wall_ns(costs.typical))
        if idle is not None:
            free = min(free, idle - (workers - present))
        share = costs.typical.share("forward", "backward")
        evidence = [
            count("threads of torch", setup.num_threads),
            count("usable CPUs", setup.usable_cpus),
            ratio("forward and backward", share),
        ]
        if setup.num_threads > 1 or free <= 0 or share is None or share < self.least_share:
            used = "" if free > 0 or setup.num_threads > 1 else ", of which none is free"
            return self.clean(
                f"torch has {setup.num_threads} threads on {setup.usable_cpus} CPUs{used}.", evidence
            )
        if isinstance(cpu, Absent):
            return self.not_evaluated(cpu.reason)
        evidence.append(ratio("the training thread's CPU time, without batches", cpu.thread_share))
        if cpu.thread_share < self.least_share:
            return self.clean(
                f"The training thread computes in {percent(cpu.thread_share)} of the step, without batches.",
                evidence,
            )
        return (
            self.found(
                f"torch has 1 thread, this process may use {setup.usable_cpus} CPUs, and forward and backward"
                f" are {percent(share)} of the step.",
                f"Try torch.set_num_threads({1 + free}), or OMP_NUM_THREADS={1 + free}."
                " Small operators gain nothing.",
                Severity.INFO,
                evidence=evidence,
            ),
        )


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
    help: ClassVar[RuleHelp] = RuleHelp(
        "on the CPU: threads of torch in all processes here over usable CPUs",
        levels="more than `most` = 1 each",
    )

    most: float = 1.0

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated on another device."""
        setup = analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if analysis.info.device_type != "cpu":
            return self.not_evaluated("the model does not run on the CPU")
        if setup.num_threads is None or setup.usable_cpus is None:
            return self.not_evaluated("the number of threads or of CPUs is not known")
        threads = setup.num_threads * setup.local_world_size
        evidence = [count("threads of torch", threads), count("usable CPUs", setup.usable_cpus)]
        if threads <= self.most * setup.usable_cpus:
            return self.clean(f"{threads} threads of torch on {setup.usable_cpus} CPUs.", evidence)
        fitting = max(1, setup.usable_cpus // setup.local_world_size)
        return (
            self.found(
                f"{threads} threads of torch share {setup.usable_cpus} CPUs.",
                f"torch.set_num_threads({fitting}), or OMP_NUM_THREADS={fitting}: {setup.num_threads} now.",
                Severity.WARNING,
                evidence=evidence,
            ),
        )


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
    title: ClassVar[str] = "The training thread waits for a CPU"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "share of the loop in which the training thread was ready to run and had no CPU"
            " (`/proc/thread-self/schedstat`); all times are longer for it"
        ),
        levels="hint 10%, warning 25% of the loop",
    )
    rests_on_time: ClassVar[bool] = False

    hint: float = 0.1
    warning: float = 0.25

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where nobody counts."""
        facts = analysis.slow
        if isinstance(facts, Absent):
            return self.not_evaluated(facts.reason)
        share = facts.record.cpu_wait_share
        if share is None:
            return self.not_evaluated(facts.record.why_no_cpu_wait or "no step was looked at")
        evidence = [ratio("share of the loop", share)]
        if share < self.hint:
            return self.clean(f"It waited for a CPU in {percent(share)} of the time.", evidence)
        return (
            self.found(
                f"In {percent(share)} of the time the training thread was ready to run and had no CPU. All"
                " times of this report are longer for it, those of the model as well.",
                _own_workers(analysis)
                or "Measure again while nothing else runs here, or give this job CPUs of its own.",
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
        "Make the samples of the DataLoader's workers cheaper, or give this job more CPUs: these workers use"
        f" {digits(used)} of {cpus} CPUs themselves. If others run here, measure again without them."
    )


class CompetingThread(ShareRule, frozen=True, kw_only=True):
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
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "CPU time of another Python thread of the process, at most the time that the training"
            " thread had none; of its samples the line that most are at"
        ),
        of="of the loop",
        where="that line",
    )
    bound: ClassVar[str | None] = "host_bound"
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.10
    critical: float = 0.30

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
                    f" at a time, so that costs the training up to {COST}.",
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
