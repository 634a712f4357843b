"""Sums over figures of which some aren't known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def of_known(choose: Callable[[list[T]], T], values: Iterable[T | None]) -> T | None:
    """Such as the sum of what is not ``None``; ``None`` if nothing is."""
    found = [value for value in values if value is not None]
    return choose(found) if found else None


def sum_of_known(values: Iterable[int | None]) -> int | None:
    return of_known(sum, values)


def sum_of_all(values: Iterable[int | None]) -> int | None:
    """The sum, ``None`` if one of them is."""
    found = list(values)
    return None if None in found else sum_of_known([0, *found])
