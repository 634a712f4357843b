"""Sessions and the process: what a forked child must not do, and what the end of a program must not lose."""

from __future__ import annotations

import atexit
import os
from typing import Final, Protocol
from weakref import WeakSet


class Measures(Protocol):
    """Somebody who measures."""

    def forget_session(self) -> None:
        """To be called in a child, which measures nothing and leaves the parent's files alone."""

    def end_at_exit(self) -> None:
        """To be called when the program ends."""


_MEASURING: Final[WeakSet[Measures]] = WeakSet()


def end_with_process(measuring: Measures) -> None:
    """From now on, and as long as it lives, ``measuring`` is told of forks and of the program's end."""
    _MEASURING.add(measuring)


def _forget_sessions() -> None:
    for measuring in tuple(_MEASURING):
        measuring.forget_session()


def _end_sessions() -> None:
    for measuring in tuple(_MEASURING):
        measuring.end_at_exit()


atexit.register(_end_sessions)
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_sessions)
