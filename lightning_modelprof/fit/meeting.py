"""The ranks agree, where a loop begins, whether all of them measure it.

In a collective they would wait without end for a rank that does not have the callback, or whose loop is
skipped because it has no batch, though the training itself would have gone on. So they meet at the store by
which their process group found each other, and wait for ``PATIENCE`` at most.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed

PATIENCE: Final = timedelta(seconds=60)
"""Ranks come here one after the other; where one is later than this, they are measured apart."""

_ALL: Final = "all"
_APART: Final = "apart"
_NUMBERS: Final = itertools.count()
"""Every rank goes through the same loops of several ranks, so their numbers agree."""


class Meeting:
    """Of all ranks, for one loop; to be made on each of them in ``setup``.

    Args:
        trainer: that runs the loop.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._has_joined = trainer.world_size == 1
        number = 0 if self._has_joined else next(_NUMBERS)
        self._here, self._message, self._decision = (
            f"lightning-modelprof/{number}/{what}" for what in ("here", "message", "decision")
        )

    def join(self, message: str) -> str | None:
        """This rank is there; returns what the first rank says, ``None`` if not all have come.

        Args:
            message: of this rank; only that of the first one counts.
        """
        trainer = self._trainer
        self._has_joined = True
        if trainer.world_size == 1:
            return message
        store = _store()
        if store is None:
            return str(trainer.strategy.broadcast(message))
        if trainer.is_global_zero:
            store.set(self._message, message)
        if store.add(self._here, 1) == trainer.world_size:
            store.compare_set(self._decision, "", _ALL)
        try:
            store.wait([self._decision], PATIENCE)
        except RuntimeError:  # too late; who decides first decides for all
            store.compare_set(self._decision, "", _APART)
        if store.get(self._decision).decode() != _ALL:
            return None
        return str(store.get(self._message).decode())

    def cancel(self) -> None:
        """This rank will not come, unless it has been there; the others need not wait for it."""
        if self._has_joined:
            return
        self._has_joined = True
        store = _store()
        if store is not None:
            with suppress(RuntimeError):  # the first rank, which keeps the store, may be gone
                store.compare_set(self._decision, "", _APART)


def _store() -> Any:
    """What the process group was set up by; ``None`` with a strategy that has no such thing."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    get_store = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return None if get_store is None else get_store()
