"""Does the CPU keep the device supplied, and does torch.compile compile once?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.trace.host_waits import MOSTLY, HostWaits, LateWork
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.launches import KernelLaunches
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Severity, Slices
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.rule import (
    HOST_LATE,
    LATE_SHARE,
    LATE_WORK,
    PYTHON_CODE,
    Found,
    Limits,
    Passed,
    count,
    duration,
    location_of,
    ratio,
    rule,
    text,
)
from lightning_modelprof.run.phases import RANGE_PREFIX
from lightning_modelprof.run.setup import Compilation, CompileSetup
from lightning_modelprof.run.sites import StepSites
from lightning_modelprof.units import milliseconds, percent

_MOST_LINES: Final = 3
_ACTION: Final = (
    "Use torch.compile(mode='reduce-overhead'), larger batches, a fused optimizer or fewer small operators."
)


@rule(
    "launch_bound",
    title="GPU waits for kernel launches",
    healthy="CPU keeps the GPU supplied",
    where="the lines with the most operators",
    bound="host_bound",
    slices=(Slices(kind="idle: host"),),
    is_of_device=True,
    on_traces=True,
    # Our own: a profiler makes each launch longer, so a few percent mean nothing. torch_tb_profiler uses 50%.
    warning=0.10,
    critical=0.30,
)
def launch_bound(facts: JobFacts, limits: Limits) -> Iterator[Found | Passed]:
    """GPU idle time while the CPU hasn't launched work yet (CPU late in CPU waits for the GPU) in forward,
    backward and optimizer. Other CPU work between launches counts too; an operator, Python code or a lock
    that fills half of the time is named instead. A profiler slows down launches, so the true share is
    smaller.
    """
    waits = facts.waits
    if not waits.steps_ns:
        raise NotMeasured("the recorded steps have no duration")
    late_ns = facts.per_step(waits.launch_ns)
    num_kernels = waits.num_kernels / waits.num_steps
    launches = _launches(facts)
    evidence = [
        duration(HOST_LATE, late_ns),
        duration("longest gap", waits.longest_launch_ns),
        count("kernels per step", num_kernels),
        *_kernel_evidence(launches),
    ]
    work = next(iter(waits.late_work), None)
    is_found = limits.is_found(waits.launch_ns / waits.steps_ns, late_ns)
    if is_found and work is not None and work.time_ns >= MOSTLY * waits.launch_ns:
        yield _found_late_work(facts, waits, work, limits, evidence)
        return
    yield Found(
        what=f"The GPU is idle for {COST}, waiting for the CPU to launch work (longest gap"
        f" {milliseconds(waits.longest_launch_ns)}). {_kernels(num_kernels, launches)}",
        do=_ACTION,
        saves_ns=late_ns,
        at=_busiest_lines(facts.get(JobFacts.sites)),
        evidence=evidence,
        passed=f"The GPU waits {milliseconds(late_ns)} per step for launches.",
    )


def _found_late_work(
    facts: JobFacts, waits: HostWaits, work: LateWork, limits: Limits, evidence: Sequence[Evidence]
) -> Found:
    share, path = work.time_ns / waits.steps_ns, _critical_path_share(facts, work)
    on_path = "" if path is None else f" This is {percent(path)} of the critical path."
    what = f"{_name(work)} in {work.caller}" if work.caller else _name(work)
    return Found(
        title="GPU waits for other CPU work",
        what=f"The GPU is idle for {COST} while the CPU runs {what}.{on_path}",
        do=_advice(work),
        saves_ns=facts.per_step(work.time_ns),
        severity=limits.severity(share),
        evidence=[
            text(LATE_WORK, what),
            ratio(LATE_SHARE, share),
            *evidence[:1],
            ratio("share of the critical path", path),
            *evidence[1:],
        ],
    )


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
    do = _DO["lock" if _is_lock(work) else work.kind].format(what=_name(work))
    return f"In {work.caller}, {do[:1].lower()}{do[1:]}" if work.caller else do


def _name(work: LateWork) -> str:
    if work.kind != "python":
        return f"{work.name} (a lock)" if _is_lock(work) else work.name
    return f"{PYTHON_CODE} in {work.name}" if work.name else f"{PYTHON_CODE} outside operators"


def _critical_path_share(facts: JobFacts, work: LateWork) -> float | None:
    if work.kind not in ("python", "operator"):  # the path only knows operators and ranges
        return None
    names = (work.name, RANGE_PREFIX + work.name) if work.kind == "python" else (work.name,)
    paths = [path for trace in facts.traces if (path := trace.get(TraceFacts.critical_path)) is not None]
    parts = [part for path in paths for part in path.parts if part.cause == "host"]
    whole_ns = sum(path.recorded_ns for path in paths)
    own_ns = sum(part.time_ns for part in parts if part.operator in names)
    return own_ns / whole_ns if whole_ns and own_ns else None


def _launches(facts: JobFacts) -> KernelLaunches | None:
    """Return the launches of the trace with most kernels, since medians can't be merged."""
    known = [one for trace in facts.traces if (one := trace.get(TraceFacts.kernel_launches)) is not None]
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
    lines = [] if sites is None else [line for line in sites.lines if line.phase == "forward"]
    lines.sort(key=lambda line: line.views - line.calls)
    return [
        line.exact(module=line.module, is_exact=line.file is not None)
        for line in lines[:_MOST_LINES]
        if line.file is not None or line.module
    ]


@rule(
    "compile_recompiles",
    title="torch.compile recompiles or breaks graphs",
    healthy="torch.compile compiles once",
    of="loop",
    where="the compiled functions",
    points_at=PointsAt.CHANGE,
    is_between_steps=True,
    least=1,
)
def compile_recompiles(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """torch.compile recompiled a function or broke a graph, by the recompilation time; a hint if that is
    small or unknown.
    """
    compiled = facts.setup.compiled
    if compiled is None:
        raise NotMeasured("torch.compile compiled nothing during the loop")
    loop_ns = facts.step_costs.loop.wall_ns
    again = [one for one in compiled.compilations if one.attempt > 0]
    breaks = sum(compiled.graph_breaks.values())
    if len(again) < limits.least and breaks < limits.least:
        yield Passed(what=f"{len(compiled.compilations)} compilations, no recompilations or graph breaks.")
        return
    known_s = [one.seconds for one in again if one.seconds is not None]
    # Graph breaks have no measured time.
    cost_ns = 1e9 * sum(known_s) / facts.num_steps if len(known_s) == len(again) else None
    share = None if cost_ns is None or not loop_ns else cost_ns / loop_ns
    is_slow = cost_ns is not None and limits.is_found(share, cost_ns)
    yield Found(
        what=_recompiles(compiled, len(again), breaks)
        + (f" Recompiling takes {COST}." if again and cost_ns else ""),
        do="Use torch.compile(..., dynamic=True), or batches of one shape (drop_last=True, padding)."
        if again
        else "Use fullgraph=True to see where graphs break.",
        saves_ns=cost_ns if again else None,
        severity=limits.severity(share) if is_slow and share is not None else Severity.INFO,
        at=dict.fromkeys(_compiled_at(one) for one in again),
        evidence=[
            count("recompilations", len(again)),
            count("graph breaks", breaks),
            duration("recompilation time per step", cost_ns),
        ],
    )


def _compiled_at(one: Compilation) -> Place:
    """Return the compiled function, or the user statement that ran it if torch wraps a module."""
    if not one.function.is_library or one.caller is None:
        return location_of(one.function)
    return replace(location_of(one.caller), is_exact=True)


def _recompiles(compiled: CompileSetup, again: int, breaks: int) -> str:
    sentences = []
    if again:
        failed = next((reasons[0] for reasons in compiled.failed_guards.values() if reasons), None)
        reason = f" (failed guard: {failed})" if failed else ""
        sentences.append(f"{again} of {len(compiled.compilations)} compilations are recompilations{reason}.")
    if breaks:
        reason = max(compiled.graph_breaks, key=lambda key: compiled.graph_breaks[key])
        sentences.append(f"Graphs broke {breaks} time{'s' * (breaks != 1)} (most often: {reason}).")
    return " ".join(sentences)
