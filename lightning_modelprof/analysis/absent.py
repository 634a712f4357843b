"""Absent: a fact that couldn't be derived, and why; and sums over partly unknown figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning_modelprof.record import Record

T = TypeVar("T")


class Absent(Record, frozen=True):
    """Stands in the place of a fact; ``reason`` continues a sentence that begins with the table's title."""

    reason: str


NO_DEVICE = Absent("the trace has no GPU events")


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
