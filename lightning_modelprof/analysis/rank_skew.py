"""The ranks of a job side by side: which one makes the others wait, and by what.

Durations alone are compared, each by its own rank's clock: clocks of different machines agree to nobody knows
what. Ranks meet in every step, so all take the same time for it. What a rank does on its own until they meet
makes the others wait; what it does where they meet holds the wait for the others. So rank 1's slow loader is
a long Dataloader on rank 1 and a long Backward on all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.benchmark import standard_error
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import RankSteps
from lightning_modelprof.run.steps import NOT_MEASURED

MEETING: Final = ("forward", "backward", "optimizer", "clip", "validation", "other", "rank_wait")
"""Phases in which ranks wait for each other: gradients, sharded parameters, broadcast buffers, norms."""

_MAY_MEET: Final = ("callbacks", "module_hooks", "logging", "transfer", "checkpoint")

NOT_COUNTED: Final = ("profiler",)

SIGNIFICANCE: Final = 0.01
"""Probability that any rank is called late though none is, in each try with and without Forward."""

LEAST_STEPS: Final = 20
"""Common clean steps, below which nothing is said of who is late."""

_AS_WELL: Final = 0.25

_Times = NDArray[np.float64]


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
class Straggler:
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
    """

    rank: int
    others: tuple[int, ...]
    phase: str
    phase_ns: float
    usual_ns: float
    late_ns: float
    waited_ns: float
    waiting_phase: str

    @property
    def is_ambiguous(self) -> bool:
        """Whether it may be the other way round: the others are late where ranks meet, and this one waits.

        So it is where ranks meet in a hook or a callback of the user's.
        """
        return self.phase in _MAY_MEET and self.waiting_phase in ("optimizer", "clip", "validation", "other")

    @property
    def cost_ns(self) -> float:
        """What a step would be shorter by: no more than the rank is late, nor than anybody waits."""
        return max(0.0, min(self.late_ns, self.waited_ns))


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
    chance explains: the mean difference over its standard error exceeds Student's quantile for
    ``SIGNIFICANCE``, divided among the ranks (Bonferroni). Forward is own time unless parameters are sharded
    or buffers are broadcast: both are tried, and what explains more of the others' waiting counts.

    Caveats: a rank that computes more slowly in Backward makes the others wait in their Backward: host times
    cannot tell who waits there. Traces can (Waiting for other ranks). Nor can they tell where a callback or
    hook of the user's lets ranks meet: see ``Straggler.is_ambiguous``.
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
    numbers = [one.rank for one in with_steps]
    strict = tuple(phase.key for phase in PHASES if phase.key not in (*MEETING, *NOT_COUNTED))
    found = [(_find_straggler(times, numbers, own), own) for own in (strict, (*strict, "forward"))]
    # Forward may hold waits or work of a rank's own: whichever explains more of what the others wait.
    straggler, own = max(found, key=lambda one: -1.0 if one[0] is None else one[0].cost_ns)
    own_ns = times[..., [PHASE_INDEX[key] for key in own]].sum(axis=2)
    return RankSkew(
        ranks=tuple(_with_lateness(pace, own_ns, place) for place, pace in enumerate(paces)),
        world_size=world_size,
        num_common=len(common),
        own_phases=own,
        imbalance_ns=float((own_ns.max(axis=0) - own_ns.mean(axis=0)).mean()),
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


def _with_lateness(pace: RankPace, own_ns: _Times, place: int) -> RankPace:
    late = _late(own_ns, place)
    return RankPace(
        rank=pace.rank,
        host=pace.host,
        num_steps=pace.num_steps,
        num_clean=pace.num_clean,
        step_ns=pace.step_ns,
        phases_ns=pace.phases_ns,
        own_ns=float(own_ns[place].mean()),
        late_ns=float(late.mean()),
        late_error_ns=standard_error(late - late.mean()),
        slowest_share=float((own_ns[place] >= own_ns.max(axis=0)).mean()),
    )


def _late(own_ns: _Times, place: int) -> _Times:
    """By step, how much longer a rank takes on its own than the others in the mean; shape (steps,).

    Not than their median: where times are skewed, as they are, every rank is longer than that.
    """
    late: _Times = own_ns[place] - (own_ns.sum(axis=0) - own_ns[place]) / (len(own_ns) - 1)
    return late


def _t_quantile(probability: float, num_steps: int) -> float:
    """Student's t for a mean over so many steps, by its standard error from overlapping batch means.

    Source: degrees of freedom of overlapping batch means: Meketon and Schmeiser 1984, as of the standard
    error; the expansion of the quantile: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    degrees = 1.5 * (num_steps / math.isqrt(num_steps) - 1)
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def _find_straggler(times: _Times, numbers: list[int], own: Sequence[str]) -> Straggler | None:
    """The latest of the ranks that are late for sure.

    Args:
        times: shape (ranks, steps, len(PHASES)), nanoseconds.
        numbers: of the ranks.
        own: keys of the phases that a rank does on its own.
    """
    own_places = [PHASE_INDEX[key] for key in own]
    own_ns = times[..., own_places].sum(axis=2)
    enough = _t_quantile(1 - SIGNIFICANCE / len(numbers), own_ns.shape[1])
    late = {}
    for place in range(len(numbers)):
        difference = _late(own_ns, place)
        error_ns = standard_error(difference - difference.mean()) or 0.0
        if difference.mean() > enough * error_ns and difference.mean() > 0:
            late[place] = float(difference.mean())
    if not late:
        return None
    order = sorted(late, key=lambda place: -late[place])
    latest = order[0]
    others = [place for place in order[1:] if late[place] >= _AS_WELL * late[latest]]
    usual = [place for place in range(len(numbers)) if place not in late] or [
        place for place in range(len(numbers)) if place != latest
    ]
    means_ns = times.mean(axis=1)
    usual_ns = means_ns[usual].mean(axis=0)
    excess_ns = means_ns[latest] - usual_ns
    cause = max(own_places, key=lambda index: excess_ns[index])
    meeting = [
        index
        for index, phase in enumerate(PHASES)
        if index not in own_places and phase.key not in NOT_COUNTED
    ]
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
    )
