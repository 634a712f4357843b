"""Methods of other people's objects that one of ours stands in for, for as long as a loop runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


class StandIn:
    """Called in the place of a method; a copy, or a pickle, of the object that has it has the method itself.

    Args:
        original: the method.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)


def stand_in(owner: Any, name: str, ours: StandIn, cleanup: ExitStack) -> None:
    """Put ``ours`` in the place of a method, until ``cleanup``."""
    was_its_own = name in vars(owner)  # and not its class's: somebody else stood in already
    setattr(owner, name, ours)
    cleanup.callback(_give_back, owner, name, ours, was_its_own=was_its_own)


def _give_back(owner: Any, name: str, ours: StandIn, *, was_its_own: bool) -> None:
    """Take ours away, if nobody has put another in its place."""
    if vars(owner).get(name) is not ours:
        return
    if was_its_own:
        setattr(owner, name, ours.original)
    else:
        delattr(owner, name)


def _itself(original: Callable[..., Any]) -> Callable[..., Any]:
    return original
