"""Which module made a node of the autograd graph: read from the numbers that autograd gives the nodes."""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

_Owner = TypeVar("_Owner")


class SequenceMarks(Generic[_Owner]):
    """Who was running from which autograd sequence number on; numbers only grow in a thread.

    Args:
        outside: who owns the nodes that were made before the first mark.
    """

    def __init__(self, outside: _Owner) -> None:
        self._numbers = [0]
        self._owners = [outside]

    def add(self, number: int, owner: _Owner) -> None:
        """From the node with ``number`` on, nodes belong to ``owner``."""
        if number == self._numbers[-1]:
            self._owners[-1] = owner
        else:
            self._numbers.append(number)
            self._owners.append(owner)

    def owner_of(self, number: int) -> _Owner:
        """Who was running when the node with ``number`` was made."""
        return self._owners[bisect_right(self._numbers, number) - 1]
