"""The ranks of a job side by side: which one makes the others wait, and by what.

Durations alone are compared, each by its own rank's clock: we cannot tell how well clocks of different
machines agree. Ranks meet in every step, so all take the same time for it. What a rank does on its own
until they meet makes the others wait; what it does where they meet holds the wait for the others. So rank
1's slow loader is a long Dataloader on rank 1 and a long Backward on all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.statistics import t_quantile
from lightning_modelprof.analysis.steps.benchmark import standard_error
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES, AmongRanks
from lightning_modelprof.run.records import RankSteps
from lightning_modelprof.run.steps import NOT_MEASURED

LEAST_STEPS: Final = 20
"""Common clean steps, below which nothing is said of who is late."""


class RankPace(Record, frozen=True, kw_only=True):
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


class RankSkew(Record, frozen=True, kw_only=True):
    """All ranks that are known.

    Attributes:
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


def rank_skew(ranks: Sequence[RankSteps], world_size: int) -> RankSkew:
    """Compare the ranks of a job.

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
        raise NotMeasured("there's only one rank")
    if len(ranks) < 2:
        raise NotMeasured("steps of other ranks are unknown")
    with_steps = [one for one in ranks if len(one.totals)]
    if len(with_steps) < 2:
        raise NotMeasured("fewer than two ranks have clean steps")
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
        raise NotMeasured("fetches weren't recorded on every rank")
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
    sums_ns = one.totals.total("phases_ns")
    return RankPace(
        rank=one.rank,
        host=one.host,
        num_steps=one.num_steps,
        num_clean=num_clean,
        step_ns=int(one.totals.total("duration_ns")) / num_clean,
        phases_ns={
            phase.key: int(sums_ns[index]) / num_clean if is_measured[index] else None
            for index, phase in enumerate(PHASES)
        },
    )


SIGNIFICANCE: Final = 0.01
"""Probability that any rank is called late though none is, in each try of what ranks do on their own."""


_MOST_ALIKE: Final = 0.9
"""Neighbouring steps that are more alike than that are not told from a rank that became slower on the way."""


_BY_CHANCE: Final = NormalDist().inv_cdf(0.95)
"""Independent steps have a correlation of more than this over √n in one of twenty cases."""


_LEAST_INDEPENDENT: Final = 5.0
"""Steps count as so many at least, so that a great lateness is seen however alike they are."""


RankTimes = NDArray[np.float64]
"""Nanoseconds; shape (ranks, steps)."""


def lateness(own_ns: RankTimes) -> RankTimes:
    """By rank and step, how much longer a rank takes on its own than the others in the mean.

    Not than their median: where times are skewed, as they are, every rank is longer than that.
    """
    late: RankTimes = own_ns - (own_ns.sum(axis=0) - own_ns) / (len(own_ns) - 1)
    return late


def late_ranks(own_ns: RankTimes) -> dict[int, float]:
    """Mean lateness of the ranks that are late for sure, by their place; the latest first.

    Definition: the mean lateness is more than each of two standard errors, times Student's quantile for
    ``SIGNIFICANCE`` divided among the ranks (Bonferroni). One makes no assumption how steps depend on each
    other, but hardly sees what lasts longer than √n steps: overlapping batch means. The other counts only
    where neighbouring steps are alike by more than chance explains: the more so, the fewer are independent.
    """
    num_ranks, num_steps = own_ns.shape
    probability = 1 - SIGNIFICANCE / num_ranks
    late = lateness(own_ns)
    means_ns = late.mean(axis=1)
    residuals = late - means_ns[:, None]
    of_batches = t_quantile(probability, 1.5 * (num_steps / math.isqrt(num_steps) - 1))
    found = {}
    for place in np.argsort(-means_ns, kind="stable").tolist():
        mean_ns = float(means_ns[place])
        if mean_ns <= 0:
            break
        if mean_ns <= of_batches * (standard_error(residuals[place]) or 0.0):
            continue
        independent = _independent_steps(residuals[place])
        if independent is not None:
            error_ns = math.sqrt(float((residuals[place] ** 2).mean()) / (independent - 1))
            if mean_ns <= t_quantile(probability, independent - 1) * error_ns:
                continue
        found[place] = mean_ns
    return found


def _independent_steps(residuals: NDArray[np.float64]) -> float | None:
    """As many independent steps would tell the mean as well as these, of which each is like the one before.

    ``None`` where neighbours are not alike. Then it is not n: lateness that comes in every tenth step tells
    its mean better than chance would.

    Source: n (1 - φ) / (1 + φ) for an autoregression of first order: Bayley and Hammersley, The "Effective"
    Number of Independent Observations in an Autocorrelated Time Series, 1946. Its φ is estimated too low by
    (1 + 3 φ) / n: Kendall, Note on Bias in the Estimation of Autocorrelation, 1954.
    """
    n, squares = len(residuals), float(residuals @ residuals)
    if squares == 0:
        return None
    alike = float(residuals[1:] @ residuals[:-1]) / squares
    if alike <= _BY_CHANCE / math.sqrt(n):
        return None
    alike = min(alike + (1 + 3 * alike) / n, _MOST_ALIKE)
    return max(n * (1 - alike) / (1 + alike), _LEAST_INDEPENDENT)


_FORWARD: Final = ("forward",)


OPTIMIZER: Final = ("optimizer", "clip")
"""The optimizer step: what a rank does after the gradients are there."""


def _among_ranks(what: AmongRanks) -> tuple[str, ...]:
    return tuple(phase.key for phase in PHASES if phase.among_ranks == what)


_WORK_OR_WAIT: Final = _among_ranks("may_wait")


_SURE_WAITS: Final = _among_ranks("meets")
"""All ranks meet in Backward; Rank wait is nothing but the wait for others."""


_MAY_MEET: Final = ("callbacks", "module_hooks", "logging", "transfer", "checkpoint", *_FORWARD)


ALWAYS_OWN: Final = _among_ranks("own")
"""Phases that a rank does on its own, whatever the strategy."""


_TRIES: Final = ((), _FORWARD, OPTIMIZER, (*_FORWARD, *OPTIMIZER))
"""What may hold waits (for broadcast buffers, sharded parameters, norms) or work of a rank's own."""


_EXPLAINS_MORE: Final = 1.1
"""A later try must explain so much more of the time than an earlier, simpler one."""


_AS_WELL: Final = 0.25


PhaseTimes = NDArray[np.float64]
"""Nanoseconds; shape (ranks, steps, phases)."""


class Straggler(Record, frozen=True, kw_only=True):
    """The rank that the others wait for.

    Attributes:
        rank: the latest one.
        others: further ranks that are late by at least a quarter as much, the latest first.
        phase: key of the phase that makes it late by the most.
        phase_ns: its mean there.
        usual_ns: mean of the ranks that are not late.
        late_ns: how much later it is than those, in the mean.
        waited_ns: how much longer those take where ranks meet; what they wait is seen there.
        waiting_phase: key of the phase in which they do.
        saving_ns: how much earlier the last rank would be ready to meet, were this one and ``others`` as
            early as those that are not late; negative when a rank that is not accused is later still.
    """

    rank: int
    others: tuple[int, ...]
    phase: str
    phase_ns: float
    usual_ns: float
    late_ns: float
    waited_ns: float
    waiting_phase: str
    saving_ns: float

    @property
    def is_ambiguous(self) -> bool:
        """Whether it may be the other way round: the others are late where ranks meet, and this one waits.

        In Rank wait nobody is late. Nor does a rank wait in Forward or a hook for what others do in Backward:
        ranks meet in Backward itself. But in the optimizer step it may, where the optimizer lets ranks meet.
        """
        if self.phase in OPTIMIZER:
            return self.waiting_phase != "rank_wait"
        return (
            self.phase in _MAY_MEET
            and self.waiting_phase in _WORK_OR_WAIT
            and self.waiting_phase not in _FORWARD
        )

    @property
    def awaited_ns(self) -> float:
        """How long the others wait for it: no more than it is late, nor than they wait at all."""
        return max(0.0, min(self.late_ns, self.waited_ns))

    @property
    def cost_ns(self) -> float:
        """What a step would be shorter by."""
        return max(0.0, min(self.saving_ns, self.awaited_ns))


def find_straggler(times: PhaseTimes, numbers: Sequence[int]) -> tuple[Straggler | None, tuple[str, ...]]:
    """The latest of the ranks that are late for sure, and the phases that ranks do on their own.

    Args:
        times: what is not measured is 0.
    """
    best, best_own = None, ALWAYS_OWN
    for added in _TRIES:
        own = (*ALWAYS_OWN, *added)
        found = _find(times, numbers, own)
        if found is not None and (best is None or _is_better(found, best)):
            best, best_own = found, own
    return best, best_own


def _is_better(found: Straggler, best: Straggler) -> bool:
    if found.cost_ns > _EXPLAINS_MORE * best.cost_ns:
        return True
    is_mirrored = (found.phase, found.waiting_phase) == (best.waiting_phase, best.phase)
    return is_mirrored and len(found.others) < len(best.others)


def _find(times: PhaseTimes, numbers: Sequence[int], own: Sequence[str]) -> Straggler | None:
    """The latest rank when these phases hold no waits."""
    own_places = _places(own)
    late = late_ranks(times[..., own_places].sum(axis=2))
    if not late:
        return None
    latest, *rest = late
    others = [place for place in rest if late[place] >= _AS_WELL * late[latest]]
    usual = [place for place in range(len(numbers)) if place not in late] or [
        place for place in range(len(numbers)) if place != latest
    ]
    means_ns = times.mean(axis=1)
    usual_ns = means_ns[usual].mean(axis=0)
    excess_ns = means_ns[latest] - usual_ns
    cause = max(own_places, key=lambda index: excess_ns[index])
    meeting = [index for index in _places(_WORK_OR_WAIT + _SURE_WAITS) if index not in own_places]
    waiting = max(meeting, key=lambda index: -excess_ns[index])
    return Straggler(
        rank=numbers[latest],
        others=tuple(numbers[place] for place in others),
        phase=PHASES[cause].key,
        phase_ns=float(means_ns[latest, cause]),
        usual_ns=float(usual_ns[cause]),
        late_ns=float(excess_ns[own_places].sum()),
        waited_ns=float(-excess_ns[meeting].sum()),
        waiting_phase=PHASES[waiting].key,
        saving_ns=_saving_ns(times, own_places, [latest, *others], usual),
    )


def _saving_ns(times: PhaseTimes, own: list[int], late: list[int], usual: list[int]) -> float:
    """How much earlier the last rank would be ready to meet, in the mean over steps.

    The late ranks are taken to have the usual ones' times on their own instead: their longest in the step in
    which a late rank took longest, and so on. So nearly nothing is gained in steps in which another rank is
    nearly as late, and all where the rank is late in a few steps only.

    Args:
        own: places of the phases that hold no waits.
        late: places of the ranks that would be earlier, the latest first.
        usual: places of the ranks that are not late.
    """
    latest = late[0]
    unsure = [place for place in _places(_WORK_OR_WAIT) if place not in own]
    own_ns, unsure_ns = times[..., own].sum(axis=2), times[..., unsure].sum(axis=2)
    means_ns = times.mean(axis=1)
    # What another rank takes longer there may be a wait for the latest, so only its variation counts.
    longer_ns = np.maximum(means_ns[:, unsure] - means_ns[latest, unsure], 0).sum(axis=1)
    unsure_ns -= longer_ns[:, None]
    usual_ns = np.sort(own_ns[usual], axis=None).reshape(own_ns.shape[1], len(usual)).mean(axis=1)
    earlier_ns = own_ns.copy()
    for place in late:
        earlier_ns[place, np.argsort(own_ns[place], kind="stable")] = usual_ns
    gained_ns = (own_ns + unsure_ns).max(axis=0) - (earlier_ns + unsure_ns).max(axis=0)
    # A rank that is even later than the latest, all in all, does not wait for it: it hides it.
    ready_ns = means_ns[:, own + unsure].sum(axis=1)
    hidden_ns = float(np.delete(ready_ns, late).max(initial=0.0) - ready_ns[latest])
    return float(gained_ns.mean()) - max(0.0, hidden_ns)


def _places(keys: Sequence[str]) -> list[int]:
    return [PHASE_INDEX[key] for key in keys]
