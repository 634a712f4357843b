"""Algebra of half-open intervals in integer nanoseconds.

An interval set is an int64 array of shape (n, 2) with rows ``[begin, end)`` that are sorted, disjoint and
not empty; rows may touch where it matters which is which. :func:`union` makes one from any intervals; the
other functions expect and return such sets. Nothing is modified in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]

_IntegerT = TypeVar("_IntegerT", bound=np.integer[Any])

_FIRST: Final = np.iinfo(np.int64).min
_LAST: Final = np.iinfo(np.int64).max


def different(values: NDArray[_IntegerT]) -> NDArray[_IntegerT]:
    """Sorted distinct numbers; unlike ``np.unique``, doesn't import ``numpy.ma``."""
    ordered = np.sort(values, kind="stable")  # much faster for a few sorted columns in a row
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


def numbered(values: NDArray[_IntegerT]) -> tuple[NDArray[_IntegerT], NDArray[np.int64]]:
    """Sorted distinct numbers, and each number's position among them."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    place = np.empty(len(ordered), np.int64)
    place[order] = np.cumsum(is_first) - 1
    return ordered[is_first], place


def is_among(values: NDArray[np.int64], some: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which numbers are in ``some``; unlike ``np.isin``, never imports ``numpy.ma``."""
    ordered = np.sort(some)
    place = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[place] == values if len(ordered) else np.zeros(len(values), np.bool_)


def union(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> Intervals:
    """Merge any intervals, in any order, into an interval set without touching rows; empty ones vanish."""
    kept = begin_ns < end_ns
    order = np.argsort(begin_ns[kept], kind="stable")
    begin = begin_ns[kept][order]
    reached = np.maximum.accumulate(end_ns[kept][order])
    if not len(begin):
        return np.zeros((0, 2), np.int64)
    starts_new = np.concatenate(([True], begin[1:] > reached[:-1]))
    ends_old = np.concatenate((starts_new[1:], [True]))
    return np.column_stack((begin[starts_new], reached[ends_old]))


def intersect(left: Intervals, right: Intervals) -> Intervals:
    first = np.searchsorted(right[:, 1], left[:, 0], side="right")
    last = np.searchsorted(right[:, 0], left[:, 1], side="left")
    pairs = np.maximum(last - first, 0)  # number of `right` intervals that each `left` one meets
    in_left = np.repeat(np.arange(len(left)), pairs)
    in_right = np.arange(len(in_left)) + np.repeat(first - (np.cumsum(pairs) - pairs), pairs)
    begin = np.maximum(left[in_left, 0], right[in_right, 0])
    end = np.minimum(left[in_left, 1], right[in_right, 1])
    return np.column_stack((begin, end))


def subtract(left: Intervals, right: Intervals) -> Intervals:
    gaps = np.column_stack((np.append(_FIRST, right[:, 1]), np.append(right[:, 0], _LAST)))
    return intersect(left, gaps[gaps[:, 0] < gaps[:, 1]])


def length(intervals: Intervals) -> int:
    """Total nanoseconds."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def partition(whole: Intervals, layers: Sequence[Intervals]) -> list[Intervals]:
    """Split ``whole`` among layers: each takes what earlier layers left.

    Returns:
        One interval set per layer, in the same order, then the rest. They are disjoint and their lengths sum
        to the length of ``whole`` exactly.
    """
    parts = []
    rest = whole
    for layer in layers:
        parts.append(intersect(rest, layer))
        rest = subtract(rest, layer)
    return [*parts, rest]


def locate(points_ns: NDArray[np.int64], intervals: Intervals) -> NDArray[np.intp]:
    """Index of the interval that contains each point (in any order), -1 without one, shape (n,)."""
    index = np.searchsorted(intervals[:, 0], points_ns, side="right") - 1
    if not len(intervals):
        return index
    return np.where(points_ns < intervals[index, 1], index, -1)


def innermost(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> tuple[Intervals, NDArray[np.intp]]:
    """Split nested ranges of one thread into the times in which each is the innermost one.

    If ranges don't nest properly, the one that started last counts as the inner one.

    Args:
        begin_ns: start of each range, shape (n,), sorted; with equal starts, the outer one first.
        end_ns: end of each range, shape (n,).

    Returns:
        An interval set of m rows (neighbors may touch), and the index of each row's range.
    """
    begins, ends = begin_ns.tolist(), end_ns.tolist()
    pieces: list[tuple[int, int]] = []
    owners: list[int] = []
    stack: list[int] = []
    now = 0
    for index, begin in [*enumerate(begins), (-1, max(ends, default=0))]:  # the last round closes all
        while stack and now < begin:
            end = min(ends[stack[-1]], begin)
            if now < end:
                pieces.append((now, end))
                owners.append(stack[-1])
                now = end
            if ends[stack[-1]] <= begin:
                stack.pop()
        now = begin
        stack.append(index)
    return np.array(pieces, np.int64).reshape(-1, 2), np.array(owners, np.intp)


def outermost(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> tuple[Intervals, NDArray[np.intp]]:
    """Successive ranges of one thread, without empty ones and those inside an earlier one.

    A range that starts before the earlier one ends (by rounding in old traces) starts where that one ends.

    Args:
        begin_ns: start of each range, shape (n,), sorted.
        end_ns: end of each range, shape (n,).

    Returns:
        An interval set of m rows (neighbors may touch), and the index of each row's range.
    """
    reached = np.maximum.accumulate(np.append(_FIRST, end_ns))[:-1]
    begin = np.maximum(begin_ns, reached)
    kept = np.flatnonzero(begin < end_ns)
    return np.column_stack((begin[kept], end_ns[kept])), kept
