"""A process that is forked while a loop is measured: what the child must not do."""

from __future__ import annotations

import os
from typing import Final, Protocol
from weakref import WeakSet


class Forgets(Protocol):
    """Somebody who measures."""

    def forget_session(self) -> None:
        """To be called in a child, which measures nothing and leaves the parent's files alone."""


_MEASURING: Final[WeakSet[Forgets]] = WeakSet()


def forget_in_children(measuring: Forgets) -> None:
    """From now on, and as long as it lives, ``measuring`` forgets its session in every forked child."""
    _MEASURING.add(measuring)


def _forget_sessions() -> None:
    for measuring in tuple(_MEASURING):
        measuring.forget_session()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_sessions)
