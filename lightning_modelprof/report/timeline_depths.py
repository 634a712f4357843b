"""How deep each slice of a lane is drawn, so that slices of one lane and depth never overlap."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.tally import stable_order

_Open = tuple[int, int, int, int]
"""An open slice: its end, its row, and of it and all below it in the stack the first end and the last row."""


def find_depths(
    begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64], lane: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The row of each slice in its lane: the first free one below all slices that contain it.

    Slices that nest like calls are as deep as calls are. Where one begins in another and ends after it, it
    goes one row deeper, with its true times. A slice without length is in what is open around it, and
    nothing is in it.

    Args:
        begin_ns: shape (n,), sorted; of two slices with the same begin the longer one first.
        end_ns: shape (n,).
        lane: small non-negative numbers, shape (n,).
    """
    depth = np.zeros(len(begin_ns), np.int64)
    order = stable_order(lane)
    for own in np.split(order, np.flatnonzero(np.diff(lane[order])) + 1):
        depth[own] = _depths_of_lane(begin_ns[own], end_ns[own])
    return depth


def _depths_of_lane(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """As many as are open when each slice begins; where slices cross, what the careful way finds."""
    has_length = begin_ns < end_ns
    long_begin_ns, long_end_ns = begin_ns[has_length], end_ns[has_length]
    ends_ns = np.sort(long_end_ns)
    # Of those that begin together the ones without length come last, so all that has begun comes before.
    num_begun: NDArray[np.int64] = np.cumsum(has_length) - has_length
    depth: NDArray[np.int64] = num_begun - np.searchsorted(ends_ns, begin_ns, side="right")
    crosses = _crosses(long_begin_ns, long_end_ns, ends_ns, depth[has_length])
    if crosses.any():
        # A slice of depth 0 begins when nothing is open: what crosses before it does not matter to it.
        stretch = np.cumsum(depth == 0)
        is_crossed = np.zeros(len(depth) + 1, np.bool_)
        is_crossed[stretch[has_length][crosses]] = True
        rows = np.flatnonzero(is_crossed[stretch])
        depth[rows] = _first_free_rows(zip(begin_ns[rows].tolist(), end_ns[rows].tolist(), strict=True))
    return depth


def _crosses(
    begin_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
    ends_ns: NDArray[np.int64],
    depth: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which slices do not end when they would if each end were that of the slice that began last.

    Args:
        begin_ns: of k slices with a length, sorted, shape (k,).
        end_ns: of the same, shape (k,).
        ends_ns: ``end_ns``, sorted.
        depth: how many are open when each begins, shape (k,).

    Returns:
        Shape (k,). None is true where all slices nest; where two cross, the first that ends is.
    """
    depth_of_end = np.searchsorted(begin_ns, ends_ns, side="left") - np.arange(len(ends_ns)) - 1
    expected_ns = np.empty_like(end_ns)
    # In one depth begins and ends take turns.
    expected_ns[stable_order(depth)] = ends_ns[stable_order(depth_of_end)]
    crosses: NDArray[np.bool_] = expected_ns != end_ns
    return crosses


def _first_free_rows(slices: Iterable[tuple[int, int]]) -> list[int]:
    """The row of each slice, one after the other, for any slices."""
    rows: list[int] = []
    stack: list[_Open] = []
    for begin, end in slices:
        while stack and stack[-1][0] <= begin:
            stack.pop()
        if stack and stack[-1][2] <= begin:  # some that began before the last one have ended, too
            stack = _restacked([(until, row) for until, row, _, _ in stack if until > begin])
        first_end, last_row = (stack[-1][2], stack[-1][3]) if stack else (end, -1)
        if end <= first_end:
            row = last_row + 1
        else:
            taken = {row for _, row, _, _ in stack}
            row = 1 + max((row for until, row, _, _ in stack if until >= end), default=-1)
            while row in taken:
                row += 1
        rows.append(row)
        stack.append((end, row, min(end, first_end), max(row, last_row)))
    return rows


def _restacked(still_open: list[tuple[int, int]]) -> list[_Open]:
    stack: list[_Open] = []
    for end, row in still_open:
        first_end, last_row = (stack[-1][2], stack[-1][3]) if stack else (end, row)
        stack.append((end, row, min(end, first_end), max(row, last_row)))
    return stack
