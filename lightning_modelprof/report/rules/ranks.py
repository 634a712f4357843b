"""Does one rank make the others wait?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.ranks import LEAST_STEPS, OPTIMIZER, RankSkew, Straggler
from lightning_modelprof.analysis.trace.distributed import Distributed
from lightning_modelprof.analysis.trace.rank_waits import WaitsOfRanks, awaited_rank, compare_ranks
from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.record import Record
from lightning_modelprof.report.advice.lines import PointsAt, at_exact_lines
from lightning_modelprof.report.advice.loader import places_of_batches
from lightning_modelprof.report.advice.owners import loader_call
from lightning_modelprof.report.model import Evidence, Finding, Severity, Slices
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.base import RuleHelp, ShareRule, count, duration, ratio, text
from lightning_modelprof.report.rules.device import Circumstances, DeviceRule
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


_MAY_COST_NOTHING: Final = (
    " It may cost nothing if the CPU only waits for its own GPU in {phase} and Rank wait."
)


_USUAL_ADVICE: Final = "Check for extra work of {rank} in this phase."


class StragglerRank(ShareRule, frozen=True, kw_only=True):
    """One rank takes longer than the others for what it does on its own, and they wait for it.

    The saving is how much earlier the last rank would be ready to meet, were the late ones as early as
    the others: no more than they are late, nor than the others take longer where ranks meet.

    Caveats:
        The host's clock is used. On a device that lags behind the host, a late host may cost nothing; then
        no rank is seen to wait, or only before the next step.
    """

    kind: ClassVar[str] = "straggler_rank"
    title: ClassVar[str] = "Straggler: other ranks wait for one rank"
    healthy: ClassVar[str] = "Ranks keep pace"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "how much shorter a step gets if the late ranks keep pace with the others (Ranks), at most the"
            " extra time that those spend waiting. Based on CPU times, so a late CPU may cost nothing if its"
            " GPU lags behind"
        ),
        of="of the mean step of all ranks",
        where="data set, if the phase is Dataloader",
    )
    bound: ClassVar[str | None] = "straggler_bound"
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE  # only the late rank has seen its own lines

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        skew = analysis.rank_skew
        if isinstance(skew, Absent):
            return self.not_evaluated(skew.reason)
        if skew.imbalance_ns is None:
            return self.not_evaluated(f"fewer than {LEAST_STEPS} steps are clean on all ranks")
        late = skew.straggler
        evidence = [
            duration("slowest rank's time above the mean per step", skew.imbalance_ns),
            count("ranks", len(skew.ranks)),
            count("steps compared", skew.num_common),
        ]
        share = None if late is None else late.cost_ns / skew.step_ns
        if late is None or not self.is_found(share, late.cost_ns):
            return self.clean(_clean_summary(skew), evidence)
        evidence = [
            duration("could save per step", late.cost_ns),
            duration(f"rank {late.rank} delay per step", late.late_ns),
            duration("other ranks' wait per step", late.waited_ns),
            *evidence,
        ]
        if late.is_ambiguous:
            return (self._either(skew, late, evidence),)
        phase, rank = _label(late.phase), f"rank {late.rank}"
        loaders = () if analysis.setup is None else analysis.setup.loaders
        advice = _ADVICE.get(late.phase, _USUAL_ADVICE)
        persistent = "Set persistent_workers=True"
        if analysis.setup is not None and loaders:
            persistent = loader_call(analysis.setup, loaders[0], persistent_workers=True)
        too = f" Also late: {_listed(late.others)}." if late.others else ""
        may_cost_nothing = late.phase in OPTIMIZER and analysis.info.device_type != "cpu"
        found = (
            self.found(
                f"{_takes(skew, late)}. The others wait {milliseconds(late.awaited_ns)} for it, mostly in"
                f" {_label(late.waiting_phase)}.{too} This costs"
                f" {f'{milliseconds(late.cost_ns)} per step' if may_cost_nothing else COST}."
                + (_MAY_COST_NOTHING.format(phase=phase) if may_cost_nothing else ""),
                f"{advice.format(rank=rank, persistent=persistent)} To see its lines, run"
                f" lightning-modelprof report RUN/{rank_file(late.rank)}",
                Severity.INFO if may_cost_nothing else self.severity(late.cost_ns / skew.step_ns),
                title=f"Straggler: other ranks wait for {rank} in {phase}",
                saving_ns=None if may_cost_nothing else late.cost_ns,
                places=places_of_batches(loaders) if late.phase == "dataloader" else (),
                evidence=evidence,
            ),
        )
        if late.rank != analysis.rank:
            return found
        return tuple(at_exact_lines(one, analysis.hot_lines) for one in found)

    def _either(self, skew: RankSkew, late: Straggler, evidence: list[Evidence]) -> Finding:
        """A hint without a culprit, as it may be either way round."""
        phase, waiting, rank = _label(late.phase), _label(late.waiting_phase), f"rank {late.rank}"
        alike = f" The same holds for {_listed(late.others)}." if late.others else ""
        return self.found(
            f"{_takes(skew, late)}, which take {milliseconds(late.awaited_ns)} more in {waiting}.{alike}"
            f" Either they wait for {rank} there, or {rank} waits for them in {phase}. This costs"
            f" {milliseconds(late.cost_ns)} per step.",
            f"Record traces of all ranks to find the straggler. Then check {phase} on {rank} and {waiting} on"
            " the others.",
            Severity.INFO,
            title=f"Ranks differ in {phase} and {waiting}",
            evidence=evidence,
        )


def _takes(skew: RankSkew, late: Straggler) -> str:
    return (
        f"Rank {late.rank}{_host(skew, late)} takes {milliseconds(late.phase_ns)} per step in"
        f" {_label(late.phase)}, {milliseconds(late.usual_ns)} on the others"
    )


def _clean_summary(skew: RankSkew) -> str:
    if skew.straggler is None:
        return f"None of {len(skew.ranks)} ranks is late."
    late = skew.straggler
    return (
        f"Rank {late.rank} is {milliseconds(late.late_ns)} per step later than the others, which costs"
        f" {milliseconds(late.cost_ns)}."
    )


def _host(skew: RankSkew, late: Straggler) -> str:
    """Where it runs, if that tells it from others."""
    hosts = {pace.rank: pace.host for pace in skew.ranks}
    return f" (on {hosts[late.rank]})" if hosts[late.rank] and len(set(hosts.values())) > 1 else ""


def _label(key: str) -> str:
    return PHASES[PHASE_INDEX[key]].label


def _listed(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


_ACTION: Final = (
    "Use accumulate_grad_batches, DDPStrategy(gradient_as_bucket_view=True, static_graph=True,"
    " bucket_cap_mb=...), or ddp_comm_hook=bf16_compress_hook. The first and last may change results."
)


class CommunicationExposed(DeviceRule, frozen=True, kw_only=True):
    """Communication in the steps that overlaps with no other kernel, over all ranks.

    Source: 10% is where torch_tb_profiler (pytorch/kineto, ``tb_plugin``) warns of communication. 30% is
    this project's own.

    Caveats:
        A collective begins on the first rank that comes to it and ends on the last one: its time holds the
        wait for slower ranks.
    """

    kind: ClassVar[str] = "communication_exposed"
    title: ClassVar[str] = "Communication isn't overlapped with compute"
    healthy: ClassVar[str] = "Communication overlaps with compute"
    help: ClassVar[RuleHelp] = RuleHelp(
        "communication that overlaps with no kernel, over all ranks. A collective lasts from its first rank"
        " to its last, so it includes waiting for slower ranks"
    )
    bound: ClassVar[str | None] = "communication_bound"
    slices: ClassVar[tuple[Slices, ...]] = (Slices(kind="communication"),)

    warning: float = 0.10
    critical: float = 0.30

    def judge(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:
        absent = [facts.distributed for facts in traces if isinstance(facts.distributed, Absent)]
        if len(absent) == len(traces):
            return self.not_evaluated(absent[0].reason)
        ranks = [_in_steps(facts.distributed) for facts in traces]
        known = [rank for rank in ranks if rank is not None]
        if not known:
            return self.not_evaluated("the traces have no steps with kernels and communication")
        steps_ns = sum(rank.steps_ns for rank in known)
        exposed = sum(rank.exposed_ns for rank in known)
        share = exposed / steps_ns
        num_steps = sum(rank.num_steps for rank in known)
        cost_ns = circumstances.per_step(exposed, steps_ns, num_steps)
        evidence: list[Evidence] = [
            duration("exposed communication per step", cost_ns),
            ratio("exposed share of communication", exposed / max(sum(one.all_ns for one in known), 1)),
            *_collectives(traces),
            *[
                ratio("exposed share of the step on the best rank", min(one.share for one in known))
                for _ in known[1:2]
            ],
        ]
        waited = num_steps * (_waited_per_step(traces, circumstances) or 0.0)
        wait_ns = min(circumstances.per_step(waited, steps_ns, num_steps), cost_ns)
        late = straggler_of(traces, circumstances)
        if wait_ns and late is None:
            evidence[1:1] = [
                duration("exposed transfer per step", cost_ns - wait_ns),
                duration("waiting for other ranks per step", wait_ns),
            ]
        if late is not None:  # the wait is a finding of its own
            share, cost_ns = share * (1 - wait_ns / cost_ns) if cost_ns else 0.0, cost_ns - wait_ns
            evidence = [
                duration("exposed transfer per step", cost_ns),
                *evidence[1:],
            ]
        if not self.is_found(share, cost_ns):
            waits = f" The rest is waiting for rank {late.rank}." if late is not None else ""
            return self.clean(
                f"{milliseconds(cost_ns)} of communication per step isn't overlapped.{waits}", evidence
            )
        waits = " This includes waiting for slower ranks."
        if wait_ns:
            waits = f" In {milliseconds(wait_ns)} of it, ranks wait for each other."
        if late is not None:
            waits = f" This excludes waiting for rank {late.rank}."
        return (
            self.found(
                f"Communication without overlap takes {COST}.{waits}",
                _EQUAL_WORK if late is None and wait_ns > cost_ns / 2 else _ACTION,
                self.severity(share),
                saving_ns=cost_ns,
                evidence=evidence,
            ),
        )


class LateRankInTraces(Record, frozen=True, kw_only=True):
    """The rank that the others wait for in their collectives.

    Attributes:
        phase: in which it takes longer than the others; "" where none stands out.
        excess_ns: by how much per step.
        cost_ns: how long the others wait for it per step, as far as no kernel hides it.
        share: of the step.
        last, calls: calls to which it came last, of so many.
    """

    rank: int
    phase: str
    excess_ns: float
    cost_ns: float
    share: float
    last: int
    calls: int


def _rank_waits(traces: Sequence[TraceFacts], circumstances: Circumstances) -> WaitsOfRanks | None:
    """What ranks of one job wait for each other; ``None`` where that is not known per step."""
    if circumstances.is_run:  # its windows are of one rank
        return None
    by_rank = {facts.rank: facts.communication_calls for facts in traces if facts.rank is not None}
    known = {rank: one for rank, one in by_rank.items() if not isinstance(one, Absent)}
    if len(by_rank) < len(traces) or len(known) < 2:
        return None
    waits = compare_ranks(known)
    return None if isinstance(waits, Absent) or waits.num_steps is None else waits


def _waited_per_step(traces: Sequence[TraceFacts], circumstances: Circumstances) -> float | None:
    """Mean over the ranks, per recorded step."""
    waits = _rank_waits(traces, circumstances)
    if waits is None or not waits.ranks:
        return None
    return sum(one.whole.waited_per_step_ns or 0.0 for one in waits.ranks.values()) / len(waits.ranks)


def straggler_of(traces: Sequence[TraceFacts], circumstances: Circumstances) -> LateRankInTraces | None:
    waits = _rank_waits(traces, circumstances)
    rank = None if waits is None else awaited_rank(waits)
    if waits is None or rank is None:
        return None
    others = [facts for facts in traces if facts.rank in waits.ranks and facts.rank != rank]
    exposed = [one for facts in others if (one := _in_steps(facts.distributed)) is not None]
    if not exposed:
        return None
    num_steps = sum(one.num_steps for one in exposed)
    steps_ns = sum(one.steps_ns for one in exposed)
    exposed_ns = sum(one.exposed_ns for one in exposed)
    whole = waits.ranks[rank].whole
    waited_ns = min(num_steps * (whole.caused_per_step_ns or 0.0), exposed_ns)
    phase, excess_ns = _longer_phase(next(facts for facts in traces if facts.rank == rank), others)
    return LateRankInTraces(
        rank=rank,
        phase=phase,
        excess_ns=circumstances.per_step(num_steps * excess_ns, steps_ns, num_steps),
        cost_ns=circumstances.per_step(waited_ns, steps_ns, num_steps),
        share=waited_ns / steps_ns,
        last=whole.last,
        calls=whole.calls,
    )


_GPU_WORK: Final = "kernels"


def _longer_phase(late: TraceFacts, others: Sequence[TraceFacts]) -> tuple[str, float]:
    """In what a rank takes longer than the mean of the others, and by how much per step."""
    own, usual = _times_per_step(late), [_times_per_step(facts) for facts in others]
    excess = {
        name: time_ns - sum(one.get(name, 0.0) for one in usual) / len(usual) for name, time_ns in own.items()
    }
    phase = max(excess, key=lambda name: excess[name], default="")
    return (phase, excess[phase]) if phase and excess[phase] > 0 else ("", 0.0)


def _times_per_step(facts: TraceFacts) -> dict[str, float]:
    """Time of the GPU's computation, and of each phase on the CPU."""
    times: dict[str, float] = {}
    if not isinstance(facts.step_breakdown, Absent):
        parts = dict(zip(STEP_CATEGORIES, facts.step_breakdown.mean_parts_ns, strict=True))
        times[_GPU_WORK] = parts["kernel"]
    if not isinstance(facts.model_summary, Absent) and facts.model_summary.num_steps:
        rows = facts.model_summary.rows
        has_parts = any(row.depth == 2 for row in rows)  # of Others
        for row in rows[1:]:
            if not (has_parts and row.key == "others"):
                times[row.label] = row.host_total_ns / facts.model_summary.num_steps
    return times


class StragglerInTraces(DeviceRule, frozen=True, kw_only=True):
    """One rank comes last to the collectives of recorded steps, and the others wait for it there.

    Caveats:
        Calls of one step are late together, so a few steps do not show a habit.
    """

    kind: ClassVar[str] = StragglerRank.kind
    title: ClassVar[str] = StragglerRank.title
    healthy: ClassVar[str] = StragglerRank.healthy
    help: ClassVar[RuleHelp] = StragglerRank.help
    bound: ClassVar[str | None] = StragglerRank.bound

    def judge(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:
        if _rank_waits(traces, circumstances) is None:
            return self.not_evaluated(
                "the traces have no communication calls that can be compared between ranks"
            )
        late = straggler_of(traces, circumstances)
        if late is None:
            return self.clean("No single rank makes the others wait.")
        evidence = [
            count(LATE_RANK, late.rank),
            duration("other ranks' wait per step", late.cost_ns),
            text(LATE_PHASE, late.phase),
            duration("extra time per step in the slower phase", late.excess_ns),
            count("calls it joined last", late.last),
            count("calls", late.calls),
        ]
        if not self.is_found(late.share, late.cost_ns):
            return self.clean(
                f"Other ranks wait {milliseconds(late.cost_ns)} per step for rank {late.rank}.", evidence
            )
        where = f" in {late.phase}" if late.phase else ""
        longer = ""
        if late.phase:
            longer = f" It takes {milliseconds(late.excess_ns)} more per step in {late.phase}."
        return (
            self.found(
                f"Other ranks wait {COST} for rank {late.rank}, which comes last in {late.last} of"
                f" {late.calls} calls.{longer}",
                f"Check why rank {late.rank} is slower{where}.",
                self.severity(late.share),
                title=f"Straggler: other ranks wait for rank {late.rank}{where}",
                saving_ns=late.cost_ns,
                evidence=evidence,
            ),
        )


LATE_RANK: Final = "late rank"


LATE_PHASE: Final = "slower phase"


_EQUAL_WORK: Final = "Give all ranks equal work."


class _InSteps(Record, frozen=True):
    exposed_ns: int
    all_ns: int
    steps_ns: int
    num_steps: int

    @property
    def share(self) -> float:
        return self.exposed_ns / self.steps_ns


def _in_steps(distributed: Distributed | Absent) -> _InSteps | None:
    """Of one rank; ``None`` without steps, or where communication itself was not recorded."""
    if isinstance(distributed, Absent) or distributed.in_steps is None or distributed.is_asynchronous:
        return None
    exposed_ns = distributed.in_steps.exposed_ns
    if exposed_ns is None or distributed.base != "steps" or not distributed.base_ns:
        return None
    return _InSteps(
        exposed_ns=exposed_ns,
        all_ns=distributed.in_steps.communication_ns,
        steps_ns=distributed.base_ns,
        num_steps=distributed.num_steps,
    )


def _collectives(traces: Sequence[TraceFacts]) -> list[Evidence]:
    """How many kinds of collectives there are, and the longest one's name."""
    for facts in traces:
        if not isinstance(facts.distributed, Absent) and facts.distributed.collectives:
            kinds = facts.distributed.collectives
            return [text("longest collective", kinds[0].name), count("kinds of collectives", len(kinds))]
    return []
