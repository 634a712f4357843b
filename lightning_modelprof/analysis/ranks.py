"""Compare the ranks of a job: which one makes the others wait, and in which phase.

Only durations are compared, each by its own rank's clock, since clocks of different machines may disagree.
Ranks meet in every step, so their steps take equally long. Time that a rank spends on its own before they
meet makes the others wait; time where they meet includes the wait for the others. So a slow loader on rank 1
is a long Dataloader on rank 1 and a long Backward on all others.
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
"""Common clean steps needed to find a straggler."""


class RankPace(Record, frozen=True, kw_only=True):
    """One rank.

    Attributes:
        num_steps: finished steps.
        num_clean: steps that the benchmark uses; the means are over them.
        step_ns: mean step time.
        phases_ns: mean self time by phase key; ``None`` if not measured.
        own_ns: mean time on its own over the common steps.
        late_ns: ``own_ns`` minus the mean of the other ranks; negative if it's less.
        late_error_ns: standard error of ``late_ns``.
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
    """All known ranks.

    Attributes:
        world_size: ranks of the job; missing ones saved nothing readable.
        num_common: clean steps known for all of these ranks.
        own_phases: keys of the phases that a rank runs on its own.
        imbalance_ns: mean over the common steps of the longest own time minus the ranks' mean: cost of
            unequal ranks, whichever is late; ``None`` without common steps.
        straggler: ``None`` when no rank is significantly late.
        step_ns: mean step time over all ranks.
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

    Definition: a rank is late when, over the steps that are clean on all ranks, its own time (all phases
    except those in which ranks meet) exceeds the mean of the other ranks in the same step by more than chance
    explains: see ``late_ranks``. Forward, and the optimizer step with clipping, are own time unless ranks
    meet there (sharded parameters, broadcast buffers): each is tried both ways, and the one that costs more
    per step is used.

    Caveats: a rank with slower compute in Backward makes the others wait in their Backward, where host times
    can't show which rank waits. Traces can (Waiting for other ranks). Nor do host times show where the
    forward, the optimizer, a callback or a user's hook makes ranks meet: see ``Straggler.is_ambiguous``.
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
"""Probability of a false straggler when no rank is late, for each try of which phases are own time."""


_MOST_ALIKE: Final = 0.9
"""Lag-1 correlation is capped here: above it, noise looks like a rank that slowed down along the way."""


_BY_CHANCE: Final = NormalDist().inv_cdf(0.95)
"""Independent steps have a correlation of more than this over √n in one case out of twenty."""


_LEAST_INDEPENDENT: Final = 5.0
"""Fewest independent steps assumed, so that a large delay is found however correlated steps are."""


RankTimes = NDArray[np.float64]
"""Nanoseconds, shape (ranks, steps)."""


def lateness(own_ns: RankTimes) -> RankTimes:
    """Excess of each rank's own time over the mean of the others, by rank and step.

    The median of the others would be wrong: step times are skewed, so every rank's mean exceeds it.
    """
    late: RankTimes = own_ns - (own_ns.sum(axis=0) - own_ns) / (len(own_ns) - 1)
    return late


def late_ranks(own_ns: RankTimes) -> dict[int, float]:
    """Mean lateness of the significantly late ranks, by position, latest first.

    Definition: the mean lateness exceeds each of two standard errors, times Student's quantile for
    ``SIGNIFICANCE`` divided by the number of ranks (Bonferroni). The first, overlapping batch means, assumes
    nothing about how steps depend on each other, but hardly sees effects that last longer than √n steps. The
    second applies only if neighboring steps are more alike than chance explains: the more alike, the fewer
    independent steps.
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
    """Number of independent steps that would give the mean as precisely as these autocorrelated ones.

    ``None``, rather than n, if neighbors aren't alike: lateness in every tenth step gives its mean more
    precisely than independent steps would.

    Source: n (1 - φ) / (1 + φ) for a first-order autoregression: Bayley and Hammersley, The "Effective"
    Number of Independent Observations in an Autocorrelated Time Series, 1946. The estimate of φ is too low by
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
"""The optimizer step: a rank's work after the gradients are ready."""


def _among_ranks(what: AmongRanks) -> tuple[str, ...]:
    return tuple(phase.key for phase in PHASES if phase.among_ranks == what)


_WORK_OR_WAIT: Final = _among_ranks("may_wait")


_SURE_WAITS: Final = _among_ranks("meets")
"""All ranks meet in Backward; Rank wait is nothing but waiting for others."""


_MAY_MEET: Final = ("callbacks", "module_hooks", "logging", "transfer", "checkpoint", *_FORWARD)


ALWAYS_OWN: Final = _among_ranks("own")
"""Phases that a rank runs on its own under every strategy."""


_TRIES: Final = ((), _FORWARD, OPTIMIZER, (*_FORWARD, *OPTIMIZER))
"""Phases that may be waits (for broadcast buffers, sharded parameters, norms) or a rank's own work."""


_EXPLAINS_MORE: Final = 1.1
"""Factor by which a later try must explain more time than an earlier, simpler one."""


_AS_WELL: Final = 0.25


PhaseTimes = NDArray[np.float64]
"""Nanoseconds, shape (ranks, steps, phases)."""


class Straggler(Record, frozen=True, kw_only=True):
    """The rank that the others wait for.

    Attributes:
        rank: the latest one.
        others: further ranks at least a quarter as late, latest first.
        phase: key of the phase that contributes most to the delay.
        phase_ns: the rank's mean in that phase.
        usual_ns: mean of the ranks that aren't late.
        late_ns: mean delay relative to those ranks.
        waited_ns: how much longer those ranks spend where ranks meet, which shows their wait.
        waiting_phase: key of the phase with most of that wait.
        saving_ns: how much earlier the last rank would reach the meeting point if this rank and ``others``
            weren't late; negative if another rank is even later.
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
        """Whether the reverse is possible: the others are late where ranks meet, and this one waits.

        Rank wait holds no work that could be late. And a rank can't wait in Forward or a hook for the others'
        Backward, since ranks meet in Backward itself. But it can in the optimizer step, if ranks meet there.
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
        """Time the others wait for it: at most its delay and at most their total wait."""
        return max(0.0, min(self.late_ns, self.waited_ns))

    @property
    def cost_ns(self) -> float:
        """Possible saving per step."""
        return max(0.0, min(self.saving_ns, self.awaited_ns))


def find_straggler(times: PhaseTimes, numbers: Sequence[int]) -> tuple[Straggler | None, tuple[str, ...]]:
    """Find the latest of the significantly late ranks, and the phases that ranks run on their own.

    Args:
        times: 0 where not measured.
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
    """Find the latest rank, assuming that the ``own`` phases contain no waits."""
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
    """How much earlier the last rank would be ready to meet, averaged over steps.

    Each late rank gets the usual ranks' own times instead, matched by rank order: their longest in the step
    where the late rank took longest, and so on. So steps in which another rank is nearly as late gain almost
    nothing, and the gain is full where the rank is late in a few steps only.

    Args:
        own: positions of the phases without waits.
        late: positions of the late ranks, latest first.
        usual: positions of the ranks that aren't late.
    """
    latest = late[0]
    unsure = [place for place in _places(_WORK_OR_WAIT) if place not in own]
    own_ns, unsure_ns = times[..., own].sum(axis=2), times[..., unsure].sum(axis=2)
    means_ns = times.mean(axis=1)
    # Extra time of another rank here may be a wait for the latest, so only its variation counts.
    longer_ns = np.maximum(means_ns[:, unsure] - means_ns[latest, unsure], 0).sum(axis=1)
    unsure_ns -= longer_ns[:, None]
    usual_ns = np.sort(own_ns[usual], axis=None).reshape(own_ns.shape[1], len(usual)).mean(axis=1)
    earlier_ns = own_ns.copy()
    for place in late:
        earlier_ns[place, np.argsort(own_ns[place], kind="stable")] = usual_ns
    gained_ns = (own_ns + unsure_ns).max(axis=0) - (earlier_ns + unsure_ns).max(axis=0)
    # A rank that's later than the latest overall doesn't wait for it but hides it.
    ready_ns = means_ns[:, own + unsure].sum(axis=1)
    hidden_ns = float(np.delete(ready_ns, late).max(initial=0.0) - ready_ns[latest])
    return float(gained_ns.mean()) - max(0.0, hidden_ns)


def _places(keys: Sequence[str]) -> list[int]:
    return [PHASE_INDEX[key] for key in keys]
