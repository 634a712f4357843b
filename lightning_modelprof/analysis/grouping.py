"""Grouping: events by small numbers, such as ids of names and threads, without sorting many of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.trace.model import Trace

Groups = NDArray[np.int64]
"""Number of each element's group, from 0 on."""


def distinct(numbers: NDArray[np.signedinteger], size: int) -> tuple[NDArray[np.int64], Groups]:
    """The different numbers in order, and for each number its place among them.

    Args:
        numbers: values from 0 to size - 1, shape (n,).
        size: one more than the largest value there can be.
    """
    if size > 8 * len(numbers) + 2**16:
        values, place = np.unique(numbers, return_inverse=True)
        return values.astype(np.int64), place.reshape(-1).astype(np.int64)
    occurs = np.zeros(size, np.bool_)
    occurs[numbers] = True
    values = np.flatnonzero(occurs)
    place_of = np.zeros(size, np.int64)
    place_of[values] = np.arange(len(values))
    return values, place_of[numbers]


def by_name(trace: Trace, rows: NDArray[np.signedinteger]) -> tuple[list[str], Groups]:
    """The different names of some events, and for each event the place of its own among them.

    Args:
        trace: n events.
        rows: k of them.
    """
    ids, place = distinct(trace.name[rows], len(trace.names))
    return [trace.names[index] for index in ids.tolist()], place


def rows_named(trace: Trace, rows: NDArray[np.int64], test: Callable[[str], bool]) -> NDArray[np.int64]:
    """Those of some events whose name passes the test; only names that occur among them are tested."""
    names, place = by_name(trace, rows)
    passes = np.fromiter((test(name) for name in names), np.bool_, len(names))
    return rows[passes[place]]


def stable_order(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Order that sorts small non-negative numbers and keeps equal ones in place, shape (n,)."""
    is_small = not len(numbers) or int(numbers.max()) < 2**16
    return np.argsort(numbers.astype(np.uint16) if is_small else numbers, kind="stable")  # 16 bits: radix
