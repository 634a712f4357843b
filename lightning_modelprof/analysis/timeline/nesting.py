"""Which host event encloses which: the call tree of every thread."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.names import is_range
from lightning_modelprof.trace.model import Category, Trace

_NESTING: Final = (
    Category.CPU_OP,
    Category.USER_ANNOTATION,
    Category.RUNTIME,
    Category.PYTHON_FUNCTION,
)
"""Events of a host thread, which nest like calls."""

_NEVER: Final = 2**63

_MAX_OPENING_FUNCTIONS: Final = 64
"""Functions from the one that goes on in a range down to the one that opens it; about ten are usual."""

_ROUNDING_NS: Final = 2_000
"""An operator of C++ ends no later after the function that called it: old traces have whole microseconds."""

_OPENING_OPERATORS: Final = "RecordFunctionFast"
"""In the names of the functions by which Python opens and closes what the profiler writes as an operator."""

_Stack = list[tuple[int, int]]


def find_parents(trace: Trace) -> NDArray[np.int64]:
    """The innermost event of the same thread that is open when each host event begins.

    Two kinds of events do not nest, and are made to. An event that ends after the one around it (by the
    rounding of old traces) counts as ending with it. But a range that is opened inside of a Python function
    and ends after it (``record_function.__enter__`` opens one and returns) is around whatever comes after
    that function: its parent is the first event that ends no earlier. So is an operator that Python opened
    (``RecordFunctionFast.__enter__``, as torch.compile does): the function around its begin says so, or that
    it ends later than rounding explains, since an operator of C++ ends before the function that called it.

    Returns:
        Shape (n,): row of the event around it, -1 for outermost ones and for those of the device.
    """
    rows = np.flatnonzero(trace.is_category(*_NESTING))
    parent = np.full(len(trace), -1, np.int64)
    parents: list[int] = []
    is_function = trace.is_category(Category.PYTHON_FUNCTION)
    # Old torch wrote its ranges as operators.
    named_as_range = trace.is_category(Category.CPU_OP) & trace.is_named(is_range)
    is_late = trace.is_category(Category.USER_ANNOTATION) | named_as_range
    is_operator = trace.is_category(Category.CPU_OP)
    is_opening = is_function & trace.is_named(lambda name: _OPENING_OPERATORS in name)
    # Per thread what is open, as (end, row), innermost last; at the bottom what never ends.
    stacks: list[_Stack] = [[(_NEVER, -1)] for _ in trace.tracks]
    for row, begin, end, track in zip(
        rows.tolist(),
        trace.begin_ns[rows].tolist(),
        trace.end_ns[rows].tolist(),
        trace.track[rows].tolist(),
        strict=True,
    ):
        stack = stacks[track]
        while stack[-1][0] <= begin:
            stack.pop()
        outer_end, outer = stack[-1]
        if end <= outer_end:
            parents.append(outer)
            stack.append((end, row))
        elif is_late[row] or (
            is_operator[row] and is_function[outer] and (is_opening[outer] or end > outer_end + _ROUNDING_NS)
        ):
            parents.append(_open_beneath(stack, end, row, is_function))
        else:
            parents.append(outer)
            stack.append((outer_end, row))
    parent[rows] = parents
    return parent


def _open_beneath(stack: _Stack, end: int, row: int, is_function: NDArray[np.bool_]) -> int:
    """Open a range beneath the Python functions that it outlives; returns what is around it."""
    outlived: _Stack = []
    while len(outlived) < _MAX_OPENING_FUNCTIONS and stack[-1][0] < end and is_function[stack[-1][1]]:
        outlived.append(stack.pop())
    outer_end, outer = stack[-1]
    stack.append((min(end, outer_end), row))
    stack.extend(reversed(outlived))  # they are still open, and end first
    return outer


def nearest_ancestor(parent: NDArray[np.int64], wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The innermost of the wanted events around each event, not itself.

    Args:
        parent: row of the event around each, -1 without one, shape (n,).
        wanted: which events count, shape (n,).

    Returns:
        Shape (n,): -1 where no wanted event is around.
    """
    found: NDArray[np.int64] = parent.copy()
    searching = np.flatnonzero(found >= 0)
    while True:
        searching = searching[~wanted[found[searching]]]
        if not len(searching):
            return found
        # What is known of the one around it is known of the event, too: rounds double what is skipped.
        found[searching] = found[found[searching]]
        searching = searching[found[searching] >= 0]
