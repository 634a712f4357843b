"""Where calls that wait for the device come from: operators, phase, the user's range and function."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.enclosing import nearest_around
from lightning_modelprof.analysis.grouping import rows_named
from lightning_modelprof.analysis.operator_origin import callers_of
from lightning_modelprof.analysis.timeline.intervals import locate
from lightning_modelprof.analysis.timeline.names import (
    AUTOGRAD_PREFIX,
    LIGHTNING_PREFIX,
    is_shown_elsewhere,
    is_torch_range,
)
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.wait_rows import DIRECTIONS, Direction, WaitRows


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WaitPlace:
    """What waits, and where; texts are "" where something is not known or not there.

    Attributes:
        kind: what it waits for.
        memory: host memory of the copy that it waits for: ``pageable`` or ``pinned``.
        operators: the operators around the call, innermost first, without those of autograd's graph: of
            ``loss.item()`` they are ``aten::_local_scalar_dense`` and ``aten::item``.
        call: name of the runtime's function.
        phase: key of the phase of the steps' thread.
        annotation: the innermost range of the user's around it on its thread, without one that of Lightning.
        function: the innermost function outside of torch and Lightning, as a trace with stacks names it:
            ``train.py(12): training_step``, where 12 is the first line of the function.
    """

    kind: Direction
    memory: str = ""
    operators: tuple[str, ...] = ()
    call: str = ""
    phase: str = ""
    annotation: str = ""
    function: str = ""


def places_of(timeline: Timeline, waits: WaitRows) -> list[WaitPlace]:
    """The place of each wait."""
    trace, rows = timeline.trace, waits.row
    phases, annotations, functions = (
        _phases(timeline, rows),
        _annotations(timeline, rows),
        _functions(timeline, waits),
    )
    return [
        WaitPlace(
            kind=DIRECTIONS[waits.direction[index]],
            memory=waits.memory[index],
            operators=_operators(timeline, int(waits.operator[index])),
            call=trace.name_of(int(row)),
            phase=phases[index],
            annotation=annotations[index],
            function=functions[index],
        )
        for index, row in enumerate(rows.tolist())
    ]


def _operators(timeline: Timeline, row: int) -> tuple[str, ...]:
    names = []
    while row >= 0:
        name = timeline.trace.name_of(row)
        if (
            timeline.is_operator[row]
            and "::" in name
            and not name.startswith((AUTOGRAD_PREFIX, "torch::autograd"))
        ):
            names.append(name)
        row = int(timeline.parent[row])
    return tuple(names)


def _phases(timeline: Timeline, rows: NDArray[np.int64]) -> list[str]:
    host_time = timeline.host_time
    if host_time is None or not len(host_time.pieces):
        return [""] * len(rows)
    piece = locate(timeline.trace.begin_ns[rows], host_time.pieces)
    return ["" if index < 0 else str(host_time.phase[host_time.call[index]]) for index in piece.tolist()]


def _annotations(timeline: Timeline, rows: NDArray[np.int64]) -> list[str]:
    trace = timeline.trace
    ranges = np.flatnonzero(timeline.is_annotation & ~timeline.is_step_range)
    users = rows_named(trace, ranges, _is_users)
    lightnings = rows_named(trace, ranges, lambda name: name.startswith(LIGHTNING_PREFIX))
    found = np.full(len(rows), -1, np.int64)
    for chosen in (users, lightnings):
        wanted = np.zeros(len(trace), np.bool_)
        wanted[chosen] = True
        found = np.where(found >= 0, found, nearest_around(timeline, rows, wanted))
    return ["" if row < 0 else trace.name_of(row) for row in found.tolist()]


def _is_users(name: str) -> bool:
    return not is_shown_elsewhere(name) and not is_torch_range(name)


def _functions(timeline: Timeline, waits: WaitRows) -> list[str]:
    # Torch 1 wrote stacks into operators, not into the runtime's calls.
    callers = callers_of(timeline, np.where(waits.operator >= 0, waits.operator, waits.row))
    if callers is None:
        return [""] * len(waits.row)
    names, index = callers
    return ["" if one < 0 else names[one] for one in index.tolist()]
