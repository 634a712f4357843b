"""Finds steps in which the CPU only queued work that the device did later: their wall time is too short.

The CPU may queue about a thousand launches before it has to wait for the device. Until that queue is full, or
the CPU waits for a result, a step ends long before its work is done. Over such steps the mean wall time says
nothing about how fast training is. Device time does: the device's steps follow each other without a gap.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.run.steps import NOT_CLEAN, NOT_MEASURED, StepTag, StepTimings

MAX_SHARE_QUEUED: Final = 0.01
"""Share of the device's time that may be queued at the end of a run of clean steps."""


MAX_STEPS_QUEUED: Final = 0.25
"""The same in steps: the device may end its last step a little after the host."""


def tag_steps_run_ahead(steps: StepTimings) -> None:
    """Set and clear ``StepTag.RUN_AHEAD``, in place.

    In each run of clean steps with device times, the shortest beginning is tagged after which the rest takes
    the host as long as the device. Where there is no such rest none is tagged: the analysis then says how
    long a step takes the device.

    Args:
        steps: consecutive steps, with the device times that are known.
    """
    steps.tags &= ~np.int64(StepTag.RUN_AHEAD)
    has_device = (steps.device_phases_ns != NOT_MEASURED).all(axis=1)
    if not has_device.any():
        return
    device_ns = steps.device_phases_ns.sum(axis=1)
    is_clean = (steps.tags & int(NOT_CLEAN)) == 0
    for begin, end in _runs(is_clean & has_device):
        behind = begin + _num_run_ahead(steps.duration_ns[begin:end], device_ns[begin:end])
        steps.tags[begin:behind] |= int(StepTag.RUN_AHEAD)


def _num_run_ahead(host_ns: NDArray[np.int64], device_ns: NDArray[np.int64]) -> int:
    """How many first steps to leave out; none if no rest takes the host as long as the device."""
    # Position k: over the steps from k to the last.
    queued_ns = np.cumsum((device_ns - host_ns)[::-1])[::-1]
    allowed_ns = np.maximum(
        MAX_SHARE_QUEUED * np.cumsum(device_ns[::-1])[::-1], MAX_STEPS_QUEUED * np.median(device_ns)
    )
    is_balanced = queued_ns <= allowed_ns
    return int(np.argmax(is_balanced))


def _runs(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Each run of true values as (first, behind the last), shape (n, 2)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return edges.reshape(-1, 2)
