"""Tally: number and time of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.pooling import Largest, Smallest, pool
from lightning_modelprof.analysis.timeline.intervals import numbered
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Trace


class Tally(Record, frozen=True):
    """Number and time of calls; overlapping calls are added up.

    Attributes:
        max_ns, min_ns: longest and shortest call; ``None`` without a call.
    """

    calls: int
    total_ns: int
    max_ns: Largest[int]
    min_ns: Smallest[int]

    @property
    def avg_ns(self) -> float | None:
        return self.total_ns / self.calls if self.calls else None


NOTHING = Tally(0, 0, None, None)


def share(part: float | None, whole: float | None) -> float | None:
    """Part over whole; ``None`` if either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def add_up(tallies: Iterable[Tally]) -> Tally:
    return pool((NOTHING, *tallies))


def tally(durations_ns: NDArray[np.int64]) -> Tally:
    return tally_by(np.zeros(len(durations_ns), np.int64), durations_ns, 1)[0]


def tally_by(group: NDArray[np.signedinteger], durations_ns: NDArray[np.int64], size: int) -> list[Tally]:
    """One tally per group; group numbers are from 0 to size - 1."""
    calls = np.bincount(group, minlength=size)
    total_ns = sum_by(group, durations_ns, size)
    max_ns = np.full(size, np.iinfo(np.int64).min)
    min_ns = np.full(size, np.iinfo(np.int64).max)
    np.maximum.at(max_ns, group, durations_ns)
    np.minimum.at(min_ns, group, durations_ns)
    return [
        Tally(number, total, longest, shortest) if number else NOTHING
        for number, total, longest, shortest in zip(
            calls.tolist(), total_ns.tolist(), max_ns.tolist(), min_ns.tolist(), strict=True
        )
    ]


def sum_by(group: NDArray[np.signedinteger], values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Exact integer sum of each group's values, shape (size,)."""
    sums = np.zeros(size, np.int64)
    np.add.at(sums, group, values)
    return sums


Groups = NDArray[np.int64]
"""Number of each element's group, starting from 0."""


def distinct(numbers: NDArray[np.signedinteger], size: int) -> tuple[NDArray[np.int64], Groups]:
    """Sorted distinct numbers, from 0 to size - 1, and each number's position among them."""
    if size > 8 * len(numbers) + 2**16:
        return numbered(numbers.astype(np.int64))
    occurs = np.zeros(size, np.bool_)
    occurs[numbers] = True
    values = np.flatnonzero(occurs)
    place_of = np.zeros(size, np.int64)
    place_of[values] = np.arange(len(values))
    return values, place_of[numbers]


def by_name(trace: Trace, rows: NDArray[np.signedinteger]) -> tuple[list[str], Groups]:
    """The distinct names of some events, and each event's index into them."""
    ids, place = distinct(trace.name[rows], len(trace.names))
    return [trace.names[index] for index in ids.tolist()], place


def rows_named(trace: Trace, rows: NDArray[np.int64], test: Callable[[str], bool]) -> NDArray[np.int64]:
    """The events whose name passes the test, which runs once per distinct name."""
    names, place = by_name(trace, rows)
    passes = np.fromiter((test(name) for name in names), np.bool_, len(names))
    return rows[passes[place]]


def stable_order(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Stable sort order of small non-negative numbers, shape (n,)."""
    is_small = not len(numbers) or int(numbers.max()) < 2**16
    return np.argsort(numbers.astype(np.uint16) if is_small else numbers, kind="stable")  # 16 bits: radix
