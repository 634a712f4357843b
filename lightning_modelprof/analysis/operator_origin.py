"""Where operators come from: the module around each, and the line of Python that called it."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.enclosing import nearest_around
from lightning_modelprof.analysis.grouping import rows_named
from lightning_modelprof.analysis.timeline.names import is_module
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.trace.model import NOT_RECORDED, Category

_FRAME: Final = re.compile(r"(?P<file>[^<].*?)\(\d+\): ")
"""``train.py(12): training_step``, but neither ``<built-in method ...>`` nor ``nn.Module: Linear_0``."""
_NOT_THE_USERS: Final = re.compile(
    r"(?:^|(?:.*/)?(?:site|dist)-packages/)"
    r"(?:torch|lightning/pytorch|lightning/fabric|pytorch_lightning|lightning_fabric)/"
    r"|(?:.*/)?lightning_modelprof/"
)
"""Code that is on the way to every operator, with the folders that Kineto cuts off and without."""


def is_user_frame(frame: str) -> bool:
    """Whether a frame of a call stack is a line of Python outside torch, Lightning and this package."""
    match = _FRAME.match(frame)
    return match is not None and not _NOT_THE_USERS.match(match["file"].replace("\\", "/"))


def modules_of(
    timeline: Timeline, rows: NDArray[np.int64]
) -> tuple[tuple[str, ...], NDArray[np.int64]] | None:
    """The innermost module in whose call each event is.

    Args:
        timeline: n events.
        rows: events of the host, shape (k,).

    Returns:
        Names, and the index into them of each event, -1 in no module, shape (k,); ``None`` when the trace has
        no calls of modules.
    """
    trace = timeline.trace
    is_range = timeline.is_annotation | (trace.category == Category.PYTHON_FUNCTION)
    calls = rows_named(trace, np.flatnonzero(is_range), is_module)
    if not len(calls):
        return None
    return trace.names, _name_of_nearest(timeline, calls, rows)


def callers_of(
    timeline: Timeline, rows: NDArray[np.int64]
) -> tuple[tuple[str, ...], NDArray[np.int64]] | None:
    """The innermost frame outside torch and Lightning from which each event was called.

    Args:
        timeline: n events.
        rows: events of the host, shape (k,).

    Returns:
        Frames, and the index into them of each event, -1 without one, shape (k,); ``None`` when the trace has
        no call stacks.
    """
    trace = timeline.trace
    calls = np.flatnonzero(trace.category == Category.PYTHON_FUNCTION)
    stack = trace.stack[rows]
    if not len(calls) and (stack == NOT_RECORDED).all():
        return None
    is_users = cache(is_user_frame)
    frames = list(trace.names)
    caller = _name_of_nearest(timeline, rows_named(trace, calls, is_users), rows)
    # Torch 1 wrote the whole stack into each operator; many stacks share their frames.
    of_stack = np.full(len(trace.stacks) + 1, -1, np.int64)  # the last one stands for no stack
    for index, text in enumerate(trace.stacks):
        frame = next(filter(is_users, text.split(";")), None)
        if frame is not None:
            of_stack[index] = len(frames)
            frames.append(frame)
    return tuple(frames), np.where(of_stack[stack] >= 0, of_stack[stack], caller)


def _name_of_nearest(
    timeline: Timeline, wanted: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Name of the innermost of the wanted events around each row, -1 without one, shape (k,)."""
    if not len(wanted):
        return np.full(len(rows), -1, np.int64)
    is_wanted = np.zeros(len(timeline.trace), np.bool_)
    is_wanted[wanted] = True
    nearest = nearest_around(timeline, rows, is_wanted)
    return np.where(nearest >= 0, timeline.trace.name[nearest], -1).astype(np.int64)
