"""Sessions and the process: what a forked child must not do, and what the end of a program must not lose."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakSet


class Measures(Protocol):
    """Somebody who measures."""

    def forget_session(self) -> None:
        """To be called in a child, which measures nothing and leaves the parent's files alone."""

    def end_at_exit(self) -> None:
        """To be called when the program ends."""


_MEASURING: Final[WeakSet[Measures]] = WeakSet()
_LAST: Final[list[tuple[Callable[[], None], Callable[[], None]]]] = []


def end_with_process(measuring: Measures) -> None:
    """From now on, and as long as it lives, ``measuring`` is told of forks and of the program's end."""
    _MEASURING.add(measuring)


def at_the_very_end(end: Callable[[], None], forget: Callable[[], None]) -> None:
    """``end`` is called when the program ends, after all who measure were told, and ``forget`` in a child."""
    _LAST.append((end, forget))


def _forget_sessions() -> None:
    for measuring in tuple(_MEASURING):
        measuring.forget_session()
    for _, forget in _LAST:
        forget()


def _end_sessions() -> None:
    for measuring in tuple(_MEASURING):
        measuring.end_at_exit()
    for end, _ in _LAST:
        end()


atexit.register(_end_sessions)
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_sessions)
