"""Does one rank make the others wait?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.ranks import LEAST_STEPS, OPTIMIZER, RankSkew, Straggler
from lightning_modelprof.analysis.trace.distributed import Distributed
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.rank_waits import awaited_rank
from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.advice.lines import PointsAt, exact_places
from lightning_modelprof.report.advice.loader import places_of_batches
from lightning_modelprof.report.advice.owners import loader_call
from lightning_modelprof.report.model import Evidence, Severity, Slices
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.rule import (
    LATE_PHASE,
    LATE_RANK,
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
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.ranks import rank_file
from lightning_modelprof.units import milliseconds

_ADVICE: Final = {
    "dataloader": "Check the data, storage and CPUs of {rank}. Give all ranks equal shares.",
    "dataloader_init": "{persistent}.",
    "callbacks": "Do less in the callback, or run it on all ranks.",
    "logging": "Log less often; all ranks wait for the one that writes.",
    "checkpoint": "Save less often, or asynchronously; all ranks wait for the one that writes.",
    "forward": "Check for extra work of {rank} in training_step. Give all ranks equally large batches.",
    "optimizer": "Check {rank} for extra parameters, CPU state or a slower CPU.",
}
_USUAL_ADVICE: Final = "Check for extra work of {rank} in this phase."
_MAY_COST_NOTHING: Final = (
    " It may cost nothing if the CPU only waits for its own GPU in {phase} and Rank wait."
)


@rule(
    "straggler_rank",
    title="Straggler: other ranks wait for one rank",
    healthy="Ranks keep pace",
    of_words="of the mean step of all ranks",
    where="data set, if the phase is Dataloader",
    bound="straggler_bound",
    points_at=PointsAt.CHANGE,  # only the straggler knows its own lines
    on_traces=True,
)
def straggler_rank(facts: JobFacts, limits: Limits) -> Iterator[Found | Passed]:
    """How much shorter a step gets if the late ranks keep pace with the others (Ranks), at most the extra
    time that those spend waiting. Based on CPU times, so a late CPU may cost nothing if its GPU lags behind.
    """
    yield from _in_run(facts, limits) if isinstance(facts, Facts) else _in_traces(facts)


def _in_run(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    skew = facts.rank_skew
    if skew.imbalance_ns is None:
        raise NotMeasured(f"fewer than {LEAST_STEPS} steps are clean on all ranks")
    late = skew.straggler
    evidence = [
        duration("slowest rank's time above the mean per step", skew.imbalance_ns),
        count("ranks", len(skew.ranks)),
        count("steps compared", skew.num_common),
    ]
    if late is None:
        yield Passed(what=f"None of {len(skew.ranks)} ranks is late.", evidence=evidence)
        return
    if not limits.is_found(late.cost_ns / skew.step_ns, late.cost_ns):
        what = (
            f"Rank {late.rank} is {milliseconds(late.late_ns)} per step later than the others, which costs"
            f" {milliseconds(late.cost_ns)}."
        )
        yield Passed(what=what, evidence=evidence)
        return
    evidence = [
        duration("could save per step", late.cost_ns),
        duration(f"rank {late.rank} delay per step", late.late_ns),
        duration("other ranks' wait per step", late.waited_ns),
        *evidence,
    ]
    if late.is_ambiguous:
        yield _ambiguous_straggler(skew, late, evidence)
    else:
        yield _late(facts, skew, late, limits.severity(late.cost_ns / skew.step_ns), evidence)


def _late(
    facts: Facts, skew: RankSkew, late: Straggler, severity: Severity, evidence: Sequence[Evidence]
) -> Found:
    phase, rank, setup = _label(late.phase), f"rank {late.rank}", facts.get(Facts.setup)
    persistent = "Set persistent_workers=True"
    if setup is not None and setup.loaders:
        persistent = loader_call(setup, setup.loaders[0], persistent_workers=True)
    too = f" Also late: {_listed(late.others)}." if late.others else ""
    may_cost_nothing = late.phase in OPTIMIZER and not facts.is_on_cpu
    cost = f"{milliseconds(late.cost_ns)} per step" if may_cost_nothing else COST
    return Found(
        title=f"Straggler: other ranks wait for {rank} in {phase}",
        what=f"{_takes(skew, late)}. The others wait {milliseconds(late.awaited_ns)} for it, mostly in"
        f" {_label(late.waiting_phase)}.{too} This costs {cost}."
        + (_MAY_COST_NOTHING.format(phase=phase) if may_cost_nothing else ""),
        do=f"{_ADVICE.get(late.phase, _USUAL_ADVICE).format(rank=rank, persistent=persistent)} To see its"
        f" lines, run lightning-modelprof report RUN/{rank_file(late.rank)}",
        saves_ns=None if may_cost_nothing else late.cost_ns,
        severity=Severity.INFO if may_cost_nothing else severity,
        at=_late_places(facts, late),
        evidence=evidence,
    )


def _late_places(facts: Facts, late: Straggler) -> Sequence[Place]:
    setup, hot = facts.get(Facts.setup), facts.get(Facts.hot_lines)
    if late.phase != "dataloader" or setup is None:
        return ()
    places = [location_of(place) for place in places_of_batches(setup.loaders)]
    return places if hot is None or late.rank != facts.rank else exact_places(places, hot)


def _ambiguous_straggler(skew: RankSkew, late: Straggler, evidence: Sequence[Evidence]) -> Found:
    phase, waiting, rank = _label(late.phase), _label(late.waiting_phase), f"rank {late.rank}"
    alike = f" The same holds for {_listed(late.others)}." if late.others else ""
    return Found(
        title=f"Ranks differ in {phase} and {waiting}",
        what=f"{_takes(skew, late)}, which take {milliseconds(late.awaited_ns)} more in {waiting}.{alike}"
        f" Either they wait for {rank} there, or {rank} waits for them in {phase}. This costs"
        f" {milliseconds(late.cost_ns)} per step.",
        do=f"Record traces of all ranks to find the straggler. Then check {phase} on {rank} and {waiting} on"
        " the others.",
        severity=Severity.INFO,
        evidence=evidence,
    )


def _takes(skew: RankSkew, late: Straggler) -> str:
    hosts = {pace.rank: pace.host for pace in skew.ranks}
    host = hosts[late.rank] if len(set(hosts.values())) > 1 else ""  # if it distinguishes the rank
    return (
        f"Rank {late.rank}{f' (on {host})' if host else ''} takes {milliseconds(late.phase_ns)} per step in"
        f" {_label(late.phase)}, {milliseconds(late.usual_ns)} on the others"
    )


def _label(key: str) -> str:
    return PHASES[PHASE_INDEX[key]].label


def _listed(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _in_traces(facts: JobFacts) -> Iterator[Found | Passed]:
    if facts.lost_work:
        raise NotMeasured(facts.lost_work)
    late = _late_in_traces(facts)
    if late is None:
        yield Passed(what="No single rank makes the others wait.")
        return
    where = f" in {late.phase}" if late.phase else ""
    longer = f" It takes {milliseconds(late.excess_ns)} more per step in {late.phase}." if late.phase else ""
    yield Found(
        title=f"Straggler: other ranks wait for rank {late.rank}{where}",
        what=f"Other ranks wait {COST} for rank {late.rank}, which comes last in {late.last} of"
        f" {late.calls} calls.{longer}",
        do=f"Check why rank {late.rank} is slower{where}.",
        saves_ns=late.cost_ns,
        evidence=[
            count(LATE_RANK, late.rank),
            duration("other ranks' wait per step", late.cost_ns),
            text(LATE_PHASE, late.phase),
            duration("extra time per step in the slower phase", late.excess_ns),
            count("calls it joined last", late.last),
            count("calls", late.calls),
        ],
        passed=f"Other ranks wait {milliseconds(late.cost_ns)} per step for rank {late.rank}.",
    )


class _LateRank(Record, frozen=True, kw_only=True):
    """The rank that the others wait for in their collectives.

    Attributes:
        phase: phase in which it takes longer than the others; ``""`` if none stands out.
        excess_ns: how much longer per step.
        cost_ns: the others' wait per step that no kernel hides.
        last, calls: calls it joined last, and all calls.
    """

    rank: int
    phase: str
    excess_ns: float
    cost_ns: float
    last: int
    calls: int


def _late_in_traces(facts: JobFacts) -> _LateRank | None:
    waits = facts.rank_waits
    rank = awaited_rank(waits)
    if rank is None:
        return None
    others = [trace for trace in facts.traces if trace.rank in waits.ranks and trace.rank != rank]
    exposed = _in_steps(trace.get(TraceFacts.distributed) for trace in others)
    if not exposed:
        return None
    num_steps = sum(one.num_steps for one in exposed)
    per_step = facts.step_ns / sum(one.steps_ns for one in exposed)
    whole = waits.ranks[rank].whole
    waited_ns = min(num_steps * (whole.caused_per_step_ns or 0.0), sum(one.exposed_ns for one in exposed))
    phase, excess_ns = _longer_phase(next(one for one in facts.traces if one.rank == rank), others)
    return _LateRank(
        rank=rank,
        phase=phase,
        excess_ns=num_steps * excess_ns * per_step,
        cost_ns=waited_ns * per_step,
        last=whole.last,
        calls=whole.calls,
    )


_GPU_WORK: Final = "kernels"


def _longer_phase(late: TraceFacts, others: Sequence[TraceFacts]) -> tuple[str, float]:
    """Return the phase in which a rank exceeds the others' mean most, and by how much per step."""
    own, usual = _times_per_step(late), [_times_per_step(facts) for facts in others]
    excess = {
        name: time_ns - sum(one.get(name, 0.0) for one in usual) / len(usual) for name, time_ns in own.items()
    }
    phase = max(excess, key=lambda name: excess[name], default="")
    return (phase, excess[phase]) if phase and excess[phase] > 0 else ("", 0.0)


def _times_per_step(facts: TraceFacts) -> dict[str, float]:
    """Return GPU compute time, and each phase's CPU time."""
    breakdown, summary = facts.get(TraceFacts.step_breakdown), facts.get(TraceFacts.model_summary)
    times: dict[str, float] = {}
    if breakdown is not None:
        times[_GPU_WORK] = dict(zip(STEP_CATEGORIES, breakdown.mean_parts_ns, strict=True))["kernel"]
    if summary is not None and summary.num_steps:
        has_parts = any(row.depth == 2 for row in summary.rows)  # Others has parts
        for row in summary.rows[1:]:
            if not (has_parts and row.key == "others"):
                times[row.label] = row.host_total_ns / summary.num_steps
    return times


_ACTION: Final = (
    "Use accumulate_grad_batches, DDPStrategy(gradient_as_bucket_view=True, static_graph=True,"
    " bucket_cap_mb=...), or ddp_comm_hook=bf16_compress_hook. The first and last may change results."
)
_EQUAL_WORK: Final = "Give all ranks equal work."


@rule(
    "communication_exposed",
    title="Communication isn't overlapped with compute",
    healthy="Communication overlaps with compute",
    bound="communication_bound",
    slices=(Slices(kind="communication"),),
    is_of_device=True,
    on_traces=True,
    warning=0.10,  # from torch_tb_profiler (pytorch/kineto, tb_plugin)
    critical=0.30,  # our own
)
def communication_exposed(facts: JobFacts) -> Iterator[Found | Passed]:
    """Communication that overlaps with no kernel, over all ranks. A collective lasts from its first rank to
    its last, so it includes waiting for slower ranks.
    """
    distributed = facts.of_traces(TraceFacts.distributed)
    known = _in_steps(distributed)
    if not known:
        raise NotMeasured("the traces have no steps with kernels and communication")
    per_step = facts.step_ns / sum(one.steps_ns for one in known)
    num_steps, exposed_ns = sum(one.num_steps for one in known), sum(one.exposed_ns for one in known)
    cost_ns = exposed_ns * per_step
    wait_ns, late = 0.0, None
    if waits := facts.get(JobFacts.rank_waits):
        waited_ns = [one.whole.waited_per_step_ns or 0.0 for one in waits.ranks.values()]
        wait_ns = min(num_steps * sum(waited_ns) / max(len(waited_ns), 1) * per_step, cost_ns)
        late = _late_in_traces(facts)
    transfer = duration("exposed transfer per step", cost_ns - wait_ns)
    if late is not None:  # a separate finding covers the wait
        saves_ns, first = cost_ns - wait_ns, [transfer]
        also = f" This excludes waiting for rank {late.rank}."
        rest = f" The rest is waiting for rank {late.rank}."
    else:
        saves_ns, first = cost_ns, [duration("exposed communication per step", cost_ns)]
        also, rest = " This includes waiting for slower ranks.", ""
        if wait_ns:
            first += [transfer, duration("waiting for other ranks per step", wait_ns)]
            also = f" In {milliseconds(wait_ns)} of it, ranks wait for each other."
    evidence = [
        *first,
        ratio("exposed share of communication", exposed_ns / max(sum(one.all_ns for one in known), 1)),
        *_collective_evidence(distributed),
    ]
    if len(known) > 1:
        share = min(one.exposed_ns / one.steps_ns for one in known)
        evidence.append(ratio("exposed share of the step on the best rank", share))
    yield Found(
        what=f"Communication without overlap takes {COST}.{also}",
        do=_EQUAL_WORK if late is None and wait_ns > cost_ns / 2 else _ACTION,
        saves_ns=saves_ns,
        evidence=evidence,
        passed=f"{milliseconds(saves_ns)} of communication per step isn't overlapped.{rest}",
    )


class _InSteps(Record, frozen=True):
    exposed_ns: int
    all_ns: int
    steps_ns: int
    num_steps: int


def _in_steps(ranks: Iterable[Distributed | None]) -> list[_InSteps]:
    return [
        _InSteps(
            exposed_ns=one.in_steps.exposed_ns,
            all_ns=one.in_steps.communication_ns,
            steps_ns=one.base_ns,
            num_steps=one.num_steps,
        )
        for one in ranks
        if one is not None and one.in_steps is not None and not one.is_asynchronous
        if one.in_steps.exposed_ns is not None and one.base == "steps" and one.base_ns
    ]


def _collective_evidence(ranks: Sequence[Distributed]) -> list[Evidence]:
    kinds = next((one.collectives for one in ranks if one.collectives), ())
    if not kinds:
        return []
    longest = min(kinds, key=lambda one: (-one.time.total_ns, one.name))
    return [text("longest collective", longest.name), count("kinds of collectives", len(kinds))]
