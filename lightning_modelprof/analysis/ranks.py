"""The ranks of a job side by side: which one makes the others wait, and by what.

Durations alone are compared, each by its own rank's clock: we cannot tell how well clocks of different
machines agree. Ranks meet in every step, so all take the same time for it. What a rank does on its own
until they meet makes the others wait; what it does where they meet holds the wait for the others. So rank
1's slow loader is a long Dataloader on rank 1 and a long Backward on all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

import numpy as np

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.lateness import lateness
from lightning_modelprof.analysis.steps.benchmark import standard_error
from lightning_modelprof.analysis.straggler import Straggler, find_straggler
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankSteps
from lightning_modelprof.run.steps import NOT_MEASURED

LEAST_STEPS: Final = 20
"""Common clean steps, below which nothing is said of who is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """One rank.

    Attributes:
        num_steps: finished steps.
        num_clean: those that the benchmark uses; the means are over them.
        step_ns: mean time of a step.
        phases_ns: mean self time by phase key; ``None`` where it was not measured.
        own_ns: mean over the common steps of what it did on its own.
        late_ns: how much more that is than the mean of the other ranks; negative when it is less.
        late_error_ns: standard error of that.
        slowest_share: share of the common steps in which no rank took longer on its own.
    """

    rank: int
    host: str
    num_steps: int
    num_clean: int
    step_ns: float
    phases_ns: Mapping[str, float | None]
    own_ns: float | None = None
    late_ns: float | None = None
    late_error_ns: float | None = None
    slowest_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSkew:
    """All ranks that are known.

    Attributes:
        ranks: in order.
        world_size: ranks of the job; those that are missing wrote nothing that could be read.
        num_common: clean steps that are known of all these ranks.
        own_phases: keys of the phases that a rank does on its own.
        imbalance_ns: mean over the common steps of the longest own time less the mean of all ranks: what
            unequal ranks cost, whichever is the late one; ``None`` without common steps.
        straggler: ``None`` when no rank is late for sure.
        step_ns: mean step over all ranks.
    """

    ranks: tuple[RankPace, ...]
    world_size: int
    num_common: int
    own_phases: tuple[str, ...]
    imbalance_ns: float | None
    straggler: Straggler | None
    step_ns: float


def rank_skew(ranks: Sequence[RankSteps], world_size: int) -> RankSkew | Absent:
    """Compare the ranks of a job.

    Args:
        ranks: what is known of them.
        world_size: how many there are.

    Definition: a rank is late when, over the steps that are clean on all ranks, its own time (all phases but
    those in which ranks meet) is longer than the mean of the other ranks' in the same step by more than
    chance explains: see ``late_ranks``. Forward, and the optimizer step with clipping, are own time unless
    ranks meet there (sharded parameters, buffers that are broadcast): each is tried as either, and what costs
    a step more counts.

    Caveats: a rank that computes more slowly in Backward makes the others wait in their Backward: host times
    cannot tell who waits there. Traces can (Waiting for other ranks). Nor can they tell where the forward,
    the optimizer, a callback or a hook of the user's lets ranks meet: see ``Straggler.is_ambiguous``.
    """
    if world_size < 2:
        return Absent("there is one rank")
    if len(ranks) < 2:
        return Absent("the steps of other ranks are not known")
    with_steps = [one for one in ranks if len(one.totals)]
    if len(with_steps) < 2:
        return Absent("fewer than two ranks have clean steps")
    paces = [_pace(one) for one in with_steps]
    step_ns = sum(pace.step_ns for pace in paces) / len(paces)
    common = reduce(np.intersect1d, [one.steps.step for one in with_steps])
    if len(common) < LEAST_STEPS:
        return RankSkew(
            ranks=tuple(paces),
            world_size=world_size,
            num_common=len(common),
            own_phases=(),
            imbalance_ns=None,
            straggler=None,
            step_ns=step_ns,
        )
    phases_ns = np.stack([one.steps.phases_ns[np.isin(one.steps.step, common)] for one in with_steps])
    if (phases_ns[..., PHASE_INDEX["dataloader"]] == NOT_MEASURED).any():
        return Absent("the fetches of batches were not seen on every rank")
    times = np.where(phases_ns == NOT_MEASURED, 0, phases_ns).astype(np.float64)
    straggler, own = find_straggler(times, [one.rank for one in with_steps])
    own_ns = times[..., [PHASE_INDEX[key] for key in own]].sum(axis=2)
    late_ns, slowest_ns = lateness(own_ns), own_ns.max(axis=0)
    return RankSkew(
        ranks=tuple(
            replace(
                pace,
                own_ns=float(own_ns[place].mean()),
                late_ns=float(late_ns[place].mean()),
                late_error_ns=standard_error(late_ns[place] - late_ns[place].mean()),
                slowest_share=float((own_ns[place] >= slowest_ns).mean()),
            )
            for place, pace in enumerate(paces)
        ),
        world_size=world_size,
        num_common=len(common),
        own_phases=own,
        imbalance_ns=float((slowest_ns - own_ns.mean(axis=0)).mean()),
        straggler=straggler,
        step_ns=step_ns,
    )


def _pace(one: RankSteps) -> RankPace:
    num_clean, is_measured = len(one.totals), one.totals.measured_phases()
    sums_ns = one.totals.whole("phases_ns")
    return RankPace(
        rank=one.rank,
        host=one.host,
        num_steps=one.num_steps,
        num_clean=num_clean,
        step_ns=int(one.totals.whole("duration_ns")) / num_clean,
        phases_ns={
            phase.key: int(sums_ns[index]) / num_clean if is_measured[index] else None
            for index, phase in enumerate(PHASES)
        },
    )
