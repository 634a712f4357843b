"""Time Lightning's synchronization of ranks at each step's start, which is outside any action.

Since 2.5.2, the first rank tells the others before each fetch whether a signal has arrived, and all read the
answer. Early ranks wait there; without its own phase, that wait would look like logging.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from lightning_modelprof.measure.stand_in import StandIn
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.run.phases import PHASE_INDEX

RANK_WAIT: Final = PHASE_INDEX["rank_wait"]


BROADCAST: Final = "_broadcast_sigterm_tensor"
"""Private method of Lightning; if it's missing, the wait stays in the gap around it."""


class TimedBroadcast(StandIn):
    """Lightning's method, timed separately."""

    def __init__(self, broadcast: Callable[[], None], ledger: PhaseLedger) -> None:
        super().__init__(broadcast)
        self._ledger = ledger

    def __call__(self) -> None:
        ledger = self._ledger
        ledger.charge()
        outer, ledger.current = ledger.current, RANK_WAIT
        ranges = ledger.ranges
        if ranges is not None:
            ranges.push(RANK_WAIT)
        try:
            self.original()
        finally:
            if ranges is not None:
                ranges.pop()
            ledger.charge()
            ledger.current = outer


def time_broadcast(trainer: Any, ledger: PhaseLedger, cleanup: ExitStack) -> None:
    """Time the wait in a fit with several ranks separately, until ``cleanup``."""
    loop = trainer.fit_loop.epoch_loop
    broadcast = getattr(loop, BROADCAST, None)
    if trainer.world_size > 1 and broadcast is not None:
        stand_in(loop, BROADCAST, TimedBroadcast(broadcast, ledger), cleanup)


def stand_in(owner: Any, name: str, ours: StandIn, cleanup: ExitStack) -> None:
    """Replace a method by ``ours``, until ``cleanup``."""
    was_its_own = name in vars(owner)  # rather than its class's, as another object has replaced it already
    setattr(owner, name, ours)
    cleanup.callback(_restore, owner, name, ours, was_its_own=was_its_own)


def _restore(owner: Any, name: str, ours: StandIn, *, was_its_own: bool) -> None:
    if vars(owner).get(name) is not ours:
        return
    if was_its_own:
        setattr(owner, name, ours.original)
    else:
        delattr(owner, name)
