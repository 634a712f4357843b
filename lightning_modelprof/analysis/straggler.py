"""The rank that the others wait for: by what it is late, where they wait, and what that costs a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lateness import late_ranks
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES

_FORWARD: Final = ("forward",)
OPTIMIZER: Final = ("optimizer", "clip")
"""The optimizer step: what a rank does after the gradients are there."""

_WORK_OR_WAIT: Final = (*_FORWARD, *OPTIMIZER, "validation", "other", "epoch_turn")
_SURE_WAITS: Final = ("backward", "rank_wait")
"""All ranks meet in the first; the second is nothing but the wait for others."""

_MAY_MEET: Final = ("callbacks", "module_hooks", "logging", "transfer", "checkpoint", *_FORWARD)

NOT_COUNTED: Final = ("profiler",)

ALWAYS_OWN: Final = tuple(
    phase.key for phase in PHASES if phase.key not in (*_WORK_OR_WAIT, *_SURE_WAITS, *NOT_COUNTED)
)
"""Phases that a rank does on its own, whatever the strategy."""

_TRIES: Final = ((), _FORWARD, OPTIMIZER, (*_FORWARD, *OPTIMIZER))
"""What may hold waits (for broadcast buffers, sharded parameters, norms) or work of a rank's own."""

_EXPLAINS_MORE: Final = 1.1
"""A later try must explain so much more of the time than an earlier, simpler one."""

_AS_WELL: Final = 0.25

PhaseTimes = NDArray[np.float64]
"""Nanoseconds; shape (ranks, steps, phases)."""


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
        may_wait = (*OPTIMIZER, "validation", "other", "epoch_turn")
        return self.phase in _MAY_MEET and self.waiting_phase in may_wait

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
        numbers: of the ranks.
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
        times: of all ranks.
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
