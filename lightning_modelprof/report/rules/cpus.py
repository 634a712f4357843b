"""Does training have enough CPUs, and does it use them?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.batches import cpus_of_workers
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.loader import loader_advice
from lightning_modelprof.report.model import Severity
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.rule import (
    INFLATED,
    Found,
    Limits,
    Passed,
    count,
    duration,
    ratio,
    rule,
)
from lightning_modelprof.run.stacks import OtherThread, StackSamples
from lightning_modelprof.units import digits, milliseconds, percent

_MODEL: Final = ("forward", "backward")


@rule(
    "single_cpu_thread",
    title="PyTorch uses only one CPU",
    healthy="PyTorch uses the available CPUs",
    points_at=PointsAt.CHANGE,
    phases=_MODEL,
    has_thresholds=False,
    least_share=0.5,
    most_wait=0.1,
)
def single_cpu_thread(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """CPU training where torch uses one thread, more CPUs are free, and both forward plus backward and the
    training thread's CPU time take at least 50% of the step. CPUs that suggested workers would use aren't
    free. A warning where operators of 100 µs and more take half of forward and backward and no worker needs a
    CPU, otherwise a hint, since small operators don't gain from threads.
    """
    setup, (threads, usable) = facts.setup, _threads_and_cpus(facts)
    costs = facts.step_costs
    if costs.cpu_wait_share is not None and costs.cpu_wait_share >= limits.most_wait:
        waited = percent(costs.cpu_wait_share)
        raise NotMeasured(f"no CPU was free; training waited for a CPU {waited} of the time")
    present = sum(one.num_workers or 0 for one in setup.loaders)
    workers, cpu = max(present, _advised_computing_workers(facts)), facts.get(Facts.batch_cpu)
    free = usable - setup.local_world_size * (1 + workers)
    idle = None if cpu is None else cpu.idle_cpus(costs.usual_wall_ns(costs.typical))
    if idle is not None:
        free = min(free, idle - (workers - present))
    share = costs.typical.share(*_MODEL)
    evidence = [
        count("PyTorch threads", threads),
        count("usable CPUs", usable),
        ratio("share of step in forward and backward", share),
    ]
    if threads > 1 or free <= 0 or share is None or share < limits.least_share:
        used = "" if free > 0 or threads > 1 else "; none is free"
        yield Passed(
            what=f"PyTorch uses {threads} thread{'s' * (threads != 1)} on {usable} CPUs{used}.",
            evidence=evidence,
        )
        return
    computing = facts.batch_cpu.thread_share
    evidence.append(ratio("share of step on training thread's CPU", computing))
    if computing < limits.least_share:
        yield Passed(
            what=f"The training thread only computes {percent(computing)} of the step.", evidence=evidence
        )
        return
    large = _large_operator_share(facts)
    evidence.append(ratio("forward and backward in operators of 100 µs and more", large))
    # Forward and backward compute at most as much as the training thread; more threads divide that.
    is_worth_it = large >= limits.least_share and not workers
    saves_ns = large * free / (1 + free) * costs.in_step_ns(_MODEL) if is_worth_it else None
    gain = (
        "Small operators won't get faster."
        if saves_ns is None
        else f"This saves up to {milliseconds(saves_ns)} per step."
    )
    yield Found(
        what=f"PyTorch uses 1 thread on {usable} CPUs, and forward and backward take {percent(share)} of the"
        " step.",
        do=f"Try torch.set_num_threads({1 + free}), or OMP_NUM_THREADS={1 + free}. {gain}",
        saves_ns=saves_ns,
        saving_is="up to",
        severity=Severity.INFO if saves_ns is None else Severity.WARNING,
        evidence=evidence,
    )


def _threads_and_cpus(facts: Facts) -> tuple[int, int]:
    setup = facts.setup
    if not facts.is_on_cpu:
        raise NotMeasured("only checked for CPU training")
    if setup.num_threads is None or setup.usable_cpus is None:
        raise NotMeasured("the number of threads or CPUs is unknown")
    return setup.num_threads, setup.usable_cpus


_LARGE_NS: Final = 100_000
"""Minimum time of an operator that threads speed up: handing work to a thread takes about 10 µs."""


def _large_operator_share(facts: Facts) -> float:
    sites = facts.get(Facts.sites)
    lines = [one for one in (() if sites is None else sites.lines) if one.phase in _MODEL]
    large_ns = sum(one.took_ns for one in lines if one.took_ns >= _LARGE_NS * max(1, one.own_calls))
    return large_ns / max(1, sum(one.took_ns for one in lines))


def _advised_computing_workers(facts: Facts) -> int:
    costs, setup, cpu = facts.step_costs, facts.setup, facts.get(Facts.batch_cpu)
    wait_ns, wall_ns = costs.usual_wait_ns(), costs.usual_wall_ns(costs.typical)
    if cpu is None or cpu.is_computing is False or not wait_ns or not wall_ns:
        return 0
    return loader_advice(setup.loaders, setup.usable_cpus, wait_ns, wall_ns, cpu).num_workers or 0


@rule(
    "cpu_threads_oversubscribed",
    title="More threads than CPUs",
    healthy="Thread count fits the CPUs",
    levels="more than `most` = 1 thread per CPU",
    has_thresholds=False,
    most=1.0,
)
def cpu_threads_oversubscribed(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """CPU training where the PyTorch threads of all processes on this machine outnumber the usable CPUs."""
    # DataLoader workers don't count, since it's unknown whether they compute or wait.
    setup, (threads, usable) = facts.setup, _threads_and_cpus(facts)
    threads *= setup.local_world_size
    evidence = [count("PyTorch threads", threads), count("usable CPUs", usable)]
    if threads <= limits.most * usable:
        several, plural = "s" * (threads != 1), "s" * (usable != 1)
        yield Passed(what=f"{threads} PyTorch thread{several} on {usable} CPU{plural}.", evidence=evidence)
        return
    fitting = max(1, usable // setup.local_world_size)
    yield Found(
        what=f"{threads} PyTorch threads share {usable} CPUs.",
        do=f"Call torch.set_num_threads({fitting}), or set OMP_NUM_THREADS={fitting} (currently"
        f" {setup.num_threads}).",
        severity=Severity.WARNING,
        evidence=evidence,
    )


# With a convolutional network on two threads and two CPUs, the share was 0.0% on a quiet machine and 44% with
# one busy process in parallel, and steps took 3.7 times as long.
@rule(
    "busy_cpus",
    title="CPU contention",
    healthy="CPUs are free for training",
    levels="hint 10%, warning 25% of the loop",
    points_at=PointsAt.NO_TIME,
    has_thresholds=False,
    hint=0.1,
    warning=0.25,
)
def busy_cpus(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Share of the loop in which the training thread was ready to run but waited for a CPU
    (`/proc/thread-self/schedstat`). All timings are inflated by it.
    """
    slow = facts.slow.record
    share = slow.cpu_wait_share
    if share is None:
        raise NotMeasured(slow.why_no_cpu_wait or "no step was measured")
    waited = f"Training spent {percent(share)} of the time waiting for a CPU."
    evidence = [ratio("share of loop time spent waiting for a CPU", share)]
    if share < limits.hint:
        yield Passed(what=waited, evidence=evidence)
        return
    yield Found(
        what=f"{waited} {INFLATED}",
        do=_own_workers_advice(facts) or "Re-run on an idle machine, or reserve CPUs for this job.",
        severity=Severity.WARNING if share >= limits.warning else Severity.INFO,
        evidence=evidence,
    )


def _own_workers_advice(facts: Facts) -> str:
    setup, used = facts.get(Facts.setup), cpus_of_workers(facts)
    cpus = None if setup is None else setup.usable_cpus
    if not cpus or used < cpus / 2:
        return ""
    return (
        f"Make DataLoader samples cheaper, or reserve more CPUs. The workers use {digits(used)} of {cpus}"
        " CPUs."
    )


@rule(
    "competing_thread",
    title="Another Python thread competes with training",
    healthy="No competing Python threads",
    of="loop",
    where="the line with most of the thread's samples",
    bound="host_bound",
    points_at=PointsAt.CHANGE,
    warning=0.10,
    critical=0.30,
)
def competing_thread(facts: Facts) -> Iterator[Found | Passed]:
    """CPU time of another Python thread in this process, at most the time in which the training thread wasn't
    on a CPU. An upper bound, because native code that releases the GIL counts too.
    """
    costs, samples, cpu = facts.step_costs, facts.hot_lines.samples, facts.get(Facts.batch_cpu)
    yield Passed(what="Other Python threads use little CPU time.")
    for thread in samples.others:
        place = _place(samples, thread)
        if thread.cpu_ns is None or not samples.loop_ns or place is None:
            continue
        share = thread.cpu_ns / samples.loop_ns
        most = share if cpu is None else min(share, max(0.0, 1 - cpu.thread_share))
        cost_ns = most * costs.loop.wall_ns
        yield Found(
            title=f"Thread {thread.name} competes with training",
            what=f"Thread {thread.name} was on a CPU {percent(share)} of the time. Only one thread runs"
            f" Python at a time, so this costs up to {COST}.",
            do="Run this work less often, or in a separate process.",
            saves_ns=cost_ns,
            saving_is="up to",
            at=[place],
            evidence=[
                duration("maximum cost per step", cost_ns),
                ratio("thread's CPU share of loop", share),
                count("stack samples", sum(one.samples for one in thread.stacks)),
            ],
        )


def _place(samples: StackSamples, thread: OtherThread) -> Place | None:
    """Return the user line with most samples, else the library function; ``None`` for torch's own threads."""
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
