"""Where Lightning lets the ranks wait for each other at the begin of each step, outside of any action.

Since 2.5.2 the first rank tells the others, before each fetch, whether a signal has come, and all read the
answer. Who is early waits there; without a phase of its own that wait would look like logging.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from lightning_modelprof.measure.ledger import PhaseLedger
from lightning_modelprof.run.phases import PHASE_INDEX

RANK_WAIT: Final = PHASE_INDEX["rank_wait"]

BROADCAST: Final = "_broadcast_sigterm_tensor"
"""Lightning's own method, which is private: where there is none, the wait stays in the gap that it is in."""


class TimedBroadcast:
    """Lightning's method, its time told apart; a copy, or a pickle, of the loop has Lightning's alone."""

    def __init__(self, broadcast: Callable[[], None], ledger: PhaseLedger) -> None:
        self._broadcast = broadcast
        self._ledger = ledger

    def __call__(self) -> None:
        """As Lightning's own."""
        ledger = self._ledger
        ledger.charge()
        outer, ledger.current = ledger.current, RANK_WAIT
        try:
            self._broadcast()
        finally:
            ledger.charge()
            ledger.current = outer

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._broadcast,)


def time_broadcast(trainer: Any, ledger: PhaseLedger, cleanup: ExitStack) -> None:
    """Tell the wait of a fit of several ranks apart, until ``cleanup``."""
    loop = trainer.fit_loop.epoch_loop
    broadcast = getattr(loop, BROADCAST, None)
    if trainer.world_size < 2 or broadcast is None:
        return
    timed = TimedBroadcast(broadcast, ledger)
    setattr(loop, BROADCAST, timed)
    cleanup.callback(_give_back, loop, timed)


def _give_back(loop: Any, timed: TimedBroadcast) -> None:
    """Take ours away, if nobody has put another in its place."""
    if vars(loop).get(BROADCAST) is timed:
        delattr(loop, BROADCAST)


def _itself(broadcast: Any) -> Any:
    return broadcast
