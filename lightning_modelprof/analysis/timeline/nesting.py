"""The call tree of every thread: which host event encloses which."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.names import (
    is_communication_kernel,
    is_communication_operator,
    is_range,
    is_torch_kernel,
    launches_communication,
)
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category, Trace

_NESTING: Final = (
    Category.CPU_OP,
    Category.USER_ANNOTATION,
    Category.RUNTIME,
    Category.PYTHON_FUNCTION,
)
"""Host thread events, which nest like calls."""


_NEVER: Final = 2**63


_MAX_OPENING_FUNCTIONS: Final = 64
"""Functions from the one that continues in a range down to the one that opens it; about ten are usual."""


_ROUNDING_NS: Final = 2_000
"""Most that a C++ operator ends after its calling function: old traces have whole microseconds."""


_OPENING_OPERATORS: Final = "RecordFunctionFast"
"""In the names of functions through which Python opens and closes what the profiler writes as operators."""


_Stack = list[tuple[int, int]]


def find_parents(trace: Trace) -> NDArray[np.int64]:
    """The innermost event open on the same thread when each host event starts.

    Two kinds of events don't nest, and are made to. An event that ends after the one around it (by the
    rounding of old traces) counts as ending with it. But a range that is opened inside a Python function and
    ends after it (``record_function.__enter__`` opens one and returns) encloses whatever comes after that
    function: its parent is the first event that ends no earlier. So does an operator opened from Python
    (``RecordFunctionFast.__enter__``, as in torch.compile). Such an operator is recognized by the function
    around its start, or because it ends later than rounding explains: a C++ operator ends before its caller.

    Returns:
        Shape (n,): row of the event around it, -1 for outermost and device events.
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
    # Open events per thread as (end, row), innermost last, with one that never ends at the bottom.
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
    """Open a range beneath the Python functions that it outlives; return the event around it."""
    outlived: _Stack = []
    while len(outlived) < _MAX_OPENING_FUNCTIONS and stack[-1][0] < end and is_function[stack[-1][1]]:
        outlived.append(stack.pop())
    outer_end, outer = stack[-1]
    stack.append((min(end, outer_end), row))
    stack.extend(reversed(outlived))  # they are still open, and end first
    return outer


def nearest_ancestor(parent: NDArray[np.int64], wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The innermost wanted event around each event, excluding itself, -1 without one, shape (n,)."""
    found: NDArray[np.int64] = parent.copy()
    searching = np.flatnonzero(found >= 0)
    while True:
        searching = searching[~wanted[found[searching]]]
        if not len(searching):
            return found
        # The parent's ancestor is also the event's: each round doubles the levels skipped.
        found[searching] = found[found[searching]]
        searching = searching[found[searching] >= 0]


class LaunchLinks(Record, frozen=True, kw_only=True, eq=False):
    """Launch of each of the m device events, in the order of ``Trace.device``.

    Attributes:
        runtime: int64, shape (m,): row of the runtime call with the same correlation id, -1 without one.
        operator: int64, shape (m,): row of the innermost operator around that call on its thread; without a
            call, the operator with the same external id; -1 without one.
        begin_ns: int64, shape (m,): start of the call, or else of the operator; -1 without either.
    """

    runtime: NDArray[np.int64]
    operator: NDArray[np.int64]
    begin_ns: NDArray[np.int64]


def link_launches(trace: Trace, parent: NDArray[np.int64], is_operator: NDArray[np.bool_]) -> LaunchLinks:
    """Join device events with the host.

    Args:
        trace: the trace, n events.
        parent: row of the event around each host event, shape (n,).
        is_operator: shape (n,).
    """
    work = trace.device.event
    runtime = _match(trace.correlation, np.flatnonzero(trace.category == Category.RUNTIME), work)
    operator = np.where(runtime >= 0, nearest_ancestor(parent, is_operator)[runtime], -1)
    lost = np.flatnonzero(runtime < 0)
    # Torch 1.12 to 2.0 wrote the correlation as the external id; that number is another operator's.
    with_id = work[trace.external_id[work] >= 0]
    if len(lost) and (trace.external_id[with_id] != trace.correlation[with_id]).any():
        operator[lost] = _match(trace.external_id, np.flatnonzero(is_operator), work[lost])
    known = np.where(runtime >= 0, runtime, operator)
    return LaunchLinks(
        runtime=runtime,
        operator=operator,
        begin_ns=np.where(known >= 0, trace.begin_ns[known] if len(trace) else -1, -1),
    )


def _match(ids: NDArray[np.int64], hosts: NDArray[np.int64], work: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row of the first of ``hosts`` with the same id as each of ``work``, -1 without one, shape (m,)."""
    hosts = hosts[ids[hosts] >= 0]
    hosts = hosts[np.argsort(ids[hosts], kind="stable")]
    place = np.searchsorted(ids[hosts], ids[work])
    known = np.flatnonzero(place < len(hosts))
    known = known[ids[hosts[place[known]]] == ids[work[known]]]
    found = np.full(len(work), -1, np.int64)
    found[known] = hosts[place[known]]
    return found


def find_communication(trace: Trace, parent: NDArray[np.int64], launch: LaunchLinks) -> NDArray[np.bool_]:
    """Find kernels that move data between ranks, and a backend's operators on the host, shape (n,).

    NCCL's kernels are recognized by name. Others may not be: a kernel launched in a range of the backend
    (``xccl:all_reduce``) or in an operator of symmetric memory also communicates, unless its name is one of
    torch's own kernels, which copy and concatenate around a collective.
    """
    kernel = trace.category == Category.KERNEL
    host = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION)
    communicates: NDArray[np.bool_] = (kernel & trace.is_named(is_communication_kernel)) | (
        host & trace.is_named(is_communication_operator)
    )
    launching = host & trace.is_named(launches_communication)
    if not launching.any():
        return communicates
    work = trace.device.event
    other = kernel & ~communicates & ~trace.is_named(is_torch_kernel)
    candidates = np.flatnonzero(other[work])
    runtime, operator = launch.runtime[candidates], launch.operator[candidates]
    around = np.where(runtime >= 0, runtime, operator)
    searching = np.flatnonzero(around >= 0)
    while len(searching):
        is_found = launching[around[searching]]
        communicates[work[candidates[searching[is_found]]]] = True
        searching = searching[~is_found]
        around[searching] = parent[around[searching]]
        searching = searching[around[searching] >= 0]
    return communicates
