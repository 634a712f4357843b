"""The critical path as a timeline lane: what determined each moment of the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.intervals import different
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.critical_path import CAUSES, Cause, StepReplay, why_no_path
from lightning_modelprof.report.dashboard_entry import DrawnTimeline, Lane
from lightning_modelprof.report.timeline.idle_slices import with_texts
from lightning_modelprof.report.timeline.layer import layer

LANE: Final = "critical path"
"""Label and group of the lane."""

PATH_PREFIX: Final = "critical path: "
"""Prefix of the kinds of its slices; the rest is the cause."""

_WHY: Final[Mapping[Cause, str]] = {
    "data loading": "the next work waited for data",
    "host": "the next work waited for the CPU",
    "launch": "the next work was being launched",
    "copy": "the next work waited for a copy",
    "kernel": "the next work waited for a kernel",
    "communication": "the next work waited for communication",
    "unexplained": "no dependency explains the delay of the next work",
}

_NO_OPERATOR: Final[Mapping[Cause, str]] = {
    "host": "Python",
    "launch": "launch",
    "unexplained": "unexplained",
}
"""Names of slices outside operators, ranges and kernels; for other causes, the cause."""


@layer(is_on_top=True)
def with_critical_path(
    drawn: DrawnTimeline, shared: Timeline, order: NDArray[np.int64]
) -> tuple[DrawnTimeline, NDArray[np.int64]]:
    """Add the lane on top, if the trace has a critical path.

    Consecutive pieces with the same cause and name are one slice, named after the outermost operator on the
    CPU. Its ``launch`` points to the event that it's part of, or that is launched.

    Args:
        drawn: k slices.
        order: each slice's row in the trace, other numbers for slices that aren't events, shape (k,).
    """
    if why_no_path(shared):
        return drawn, order
    trace = shared.trace
    replay = StepReplay(shared)
    path, pieces = replay.path(), replay.pieces
    # From a launch to its kernel, the path has the kernel's name and leads to it.
    piece = np.where(path.cause == CAUSES.index("launch"), path.after, path.piece)
    row = np.append(pieces.row, -1)[piece]
    outer = np.append(_outermost_operator(shared), -1)[row]
    row = np.where(outer >= 0, outer, row)
    name = np.append(np.where(pieces.kernel >= 0, pieces.kernel, pieces.operator), -1)[piece]
    name = np.where(outer >= 0, np.append(trace.name, -1)[outer], name)
    name = np.where(name >= 0, name, len(trace.names) + path.cause)
    is_first = np.ones(len(name), np.bool_)
    is_first[1:] = (np.diff(name) != 0) | (np.diff(path.cause) != 0) | (path.begin_ns[1:] != path.end_ns[:-1])
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(name)) - 1
    texts = tuple(_NO_OPERATOR.get(cause, cause) for cause in CAUSES)
    places = np.full(len(trace) + 1, -1)
    is_event = np.flatnonzero((order >= 0) & (order < len(trace)))
    places[order[is_event]] = is_event
    count = len(firsts)
    # The timeline's names start with the trace's.
    new_names, name_of = with_texts(drawn.names, name[firsts][:0], texts, np.arange(len(texts)))
    own_name = np.append(np.arange(len(trace.names)), name_of)[name[firsts]]
    used = different(path.cause)
    causes = [CAUSES[index] for index in used.tolist()]
    cause = np.searchsorted(used, path.cause[firsts])
    kinds = tuple(PATH_PREFIX + one for one in causes)
    categories, category = with_texts(drawn.categories, drawn.category[:0], kinds, cause)
    details = tuple(f"on the critical path: {_WHY[one]}" for one in causes)
    new_details, detail = with_texts(drawn.details, drawn.detail[:0], details, cause)
    target = places[row[firsts]]
    begin_ns = path.begin_ns[firsts]
    with_path = replace(
        drawn,
        lanes=(Lane(label=LANE, group=LANE, is_device=False), *drawn.lanes),
        names=new_names,
        categories=categories,
        details=new_details,
        lane=np.append(np.zeros(count, np.int64), drawn.lane + 1),
        depth=np.append(np.zeros(count, np.int64), drawn.depth),
        slice_begin_ns=np.append(begin_ns, drawn.slice_begin_ns),
        slice_duration_ns=np.append(path.end_ns[lasts] - begin_ns, drawn.slice_duration_ns),
        name=np.append(own_name, drawn.name),
        category=np.append(category, drawn.category),
        detail=np.append(detail, drawn.detail),
        launch=np.append(
            np.where(target >= 0, target + count, -1), np.where(drawn.launch >= 0, drawn.launch + count, -1)
        ),
    )
    return with_path, np.append(np.full(count, -1), order)


def _outermost_operator(shared: Timeline) -> NDArray[np.int64]:
    """Find the outermost operator around each CPU event; -1 without one and for device events."""
    around = shared.nearest(shared.is_operator)
    outer = np.where(shared.is_operator, np.arange(len(around)), around)
    found = np.flatnonzero(outer >= 0)
    while len(found):
        further = around[outer[found]]
        found = found[further >= 0]
        outer[found] = around[outer[found]]
    return outer
