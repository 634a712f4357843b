"""How long do the ranks communicate while no kernel computes?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.distributed import Distributed
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Evidence, Finding
from lightning_modelprof.report.rules.base import count, duration, milliseconds, percent, ratio, text
from lightning_modelprof.report.rules.device import Circumstances, DeviceRule

_ACTION: Final = (
    "Communicate less often: accumulate_grad_batches (DDP then skips all but the last batch). Let more of it"
    " run beside the backward pass: DDPStrategy(gradient_as_bucket_view=True, static_graph=True,"
    " bucket_cap_mb=...). Send less: ddp_comm_hook=bf16_compress_hook. If ranks wait for each other, give"
    " them equal work."
)


@dataclass(frozen=True, kw_only=True)
class CommunicationExposed(DeviceRule):
    """Communication in the steps that overlaps with no other kernel, over all ranks.

    Source: 10 % is where torch_tb_profiler (pytorch/kineto, ``tb_plugin``) warns of communication. 30 % is
    this project's own.

    Caveats:
        A collective begins on the first rank that comes to it and ends on the last one: its time holds the
        wait for slower ranks.
    """

    kind: ClassVar[str] = "communication_exposed"
    title: ClassVar[str] = "No computation hides the communication"
    bound: ClassVar[str | None] = "communication_bound"

    warning: float = 0.10
    critical: float = 0.30

    def judge(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without communication in steps."""
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
        cost_ns = circumstances.per_step(exposed, steps_ns, sum(rank.num_steps for rank in known))
        evidence: list[Evidence] = [
            duration("exposed per step", cost_ns),
            ratio("share of the step", share),
            ratio(
                "share of communication that is exposed", exposed / max(sum(one.all_ns for one in known), 1)
            ),
            *[ratio("least share of any rank", min(one.share for one in known)) for _ in known[1:2]],
            *_collectives(traces),
        ]
        if not self.is_found(share, cost_ns):
            return self.clean(f"Nothing hides {milliseconds(cost_ns)} of communication a step.", evidence)
        return (
            self.found(
                f"In {milliseconds(cost_ns)} of a step ({percent(share)}) the ranks communicate and no kernel"
                " computes. The time in which a rank waits for slower ones is in it.",
                _ACTION,
                self.severity(share),
                saving_ns=cost_ns,
                evidence=evidence,
            ),
        )


@dataclass(frozen=True, slots=True)
class _InSteps:
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
            return [count("collectives", len(kinds)), text("longest", kinds[0].name)]
    return []
