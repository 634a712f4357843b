"""Memory over a window by use: each block from allocation to release."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.intervals import locate, numbered
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record

LAYERS: Final = (
    "before",
    "optimizer_state",
    "gradients",
    "batch",
    "activations",
    "temporary",
    "other",
)
"""What memory is used for, lowest layer first. ``before`` was allocated before the window."""

_BEFORE, _STATE, _GRADIENTS, _BATCH, _ACTIVATIONS, _TEMPORARY, _OTHER = range(len(LAYERS))

_OF_PHASE: Final = {
    "dataloader": _BATCH,
    "transfer": _BATCH,
    "forward": _ACTIVATIONS,
    "backward": _GRADIENTS,
    "optimizer": _STATE,
}
"""Layer of a block that outlives its phase."""

MOST_POINTS: Final = 400

Joined = Literal["address", "size"]
"""How a release is matched to its allocation: exactly, or as the newest block of its size."""


class MemoryLayers(Record, frozen=True, kw_only=True):
    """Allocated memory of one device in a window, by layer, at no more than ``MOST_POINTS`` moments.

    The window is split into equal parts, each represented by the moment of its peak.

    Attributes:
        begin_ns, part_ns: start of the first part, and the length of each.
        layers_bytes: of each of ``LAYERS``, a value per part. They sum to the allocated memory.
        peak_bytes: largest sum at any moment.
        is_whole: whether the sum is the allocator's count; otherwise it's only the blocks that the window
            allocated or released.
        has_phases: whether the trace has phases; without them all that the window allocated is ``other``.
    """

    begin_ns: int
    part_ns: int
    layers_bytes: tuple[tuple[int, ...], ...]
    peak_bytes: int
    is_whole: bool
    joined: Joined
    has_phases: bool


def memory_curve(timeline: Timeline, rows: NDArray[np.intp], *, counts_all: bool) -> MemoryLayers | None:
    """Layers of one device; ``None`` if nothing was allocated or released in any time.

    Args:
        timeline: the trace, with k allocations and releases.
        rows: those of the device, in order of time.
        counts_all: whether torch's count of allocated bytes is complete there.
    """
    events = timeline.trace.allocations
    time_ns, size = events.time_ns[rows], events.size_bytes[rows]
    if not len(rows) or not size.any():
        return None
    address, allocated = events.address[rows], events.allocated_bytes[rows]
    is_exact = bool((address[size != 0] >= 0).all())
    partner = _partners(address if is_exact else _ranked_by_size(size), size)
    levels = _levels(_layers_of(timeline, time_ns, size, partner), size)
    is_whole = counts_all and bool((allocated >= 0).all())
    if is_whole:
        # As recorded: memory that the window didn't allocate was there before.
        levels[_BEFORE] = allocated - (levels.sum(axis=0) - levels[_BEFORE])
        before = allocated[0] - size[0]
    else:
        before = -levels[_BEFORE].min(initial=0)
        levels[_BEFORE] += before
    at_begin = np.where(np.arange(len(LAYERS)) == _BEFORE, before, 0)
    levels = np.column_stack((at_begin, levels))
    total = levels.sum(axis=0)
    place, begin_ns, part_ns = _highest_of_parts(np.append(time_ns[:1], time_ns), total)
    return MemoryLayers(
        begin_ns=begin_ns,
        part_ns=part_ns,
        layers_bytes=tuple(tuple(level[place].tolist()) for level in levels),
        peak_bytes=int(total.max()),
        is_whole=is_whole,
        joined="address" if is_exact else "size",
        has_phases=_has_phases(timeline),
    )


def _ranked_by_size(size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number that an allocation and its release have in common, shape (k,).

    A release ends the newest block of its size. So an allocation and a release belong together if the count
    of blocks of that size is the same before the one and after the other.
    """
    magnitude = np.abs(size)
    order = np.argsort(magnitude, kind="stable")
    sign = np.sign(size[order])
    depth = np.cumsum(sign) - (sign > 0)  # before an allocation, after a release
    width = int(depth.max() - depth.min()) + 1
    _, of_size = numbered(magnitude[order])
    result = np.empty(len(size), np.int64)
    result[order] = of_size * width + depth - depth.min()
    return result


def _partners(key: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each allocation's release (negative size) and each release's allocation, -1 for none, shape (k,)."""
    rows = np.flatnonzero(size)
    order = rows[np.argsort(key[rows], kind="stable")]
    first, second = order[:-1], order[1:]
    joined = (key[first] == key[second]) & (size[first] > 0) & (size[second] < 0)
    partner = np.full(len(size), -1, np.int64)
    partner[first[joined]], partner[second[joined]] = second[joined], first[joined]
    return partner


def _layers_of(
    timeline: Timeline, time_ns: NDArray[np.int64], size: NDArray[np.int64], partner: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The layer that each event adds to or takes from, shape (k,)."""
    layer = np.full(len(size), _OTHER, np.int64)
    phase, step = _phases_at(timeline, time_ns)
    allocates = size > 0
    for key, of_phase in _OF_PHASE.items():
        layer[allocates & (phase == key)] = of_phase
    # Blocks that their own phase releases in the same step are temporary.
    ends = np.flatnonzero(allocates & (partner >= 0))
    same = (phase[ends] == phase[partner[ends]]) & (step[ends] == step[partner[ends]]) & (step[ends] >= 0)
    brief = ends[same & (layer[ends] != _OTHER) & (layer[ends] != _BATCH)]
    layer[brief] = _TEMPORARY
    releases = np.flatnonzero(size < 0)
    known = partner[releases] >= 0
    layer[releases[known]] = layer[partner[releases[known]]]
    layer[releases[~known]] = _BEFORE
    return layer


def _phases_at(timeline: Timeline, time_ns: NDArray[np.int64]) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    """Host phase and step index at each moment, ``""`` and -1 without one."""
    phase, step = np.full(len(time_ns), "", "U32"), np.full(len(time_ns), -1, np.int64)
    host = timeline.host_time
    if host is None or timeline.steps is None or not _has_phases(timeline):
        return phase, step
    for intervals, column, values in (
        (host.pieces, phase, host.phase[host.call]),
        (timeline.steps.intervals, step, np.arange(len(timeline.steps.intervals))),
    ):
        if len(intervals):
            place = locate(time_ns, intervals)
            column[place >= 0] = values[place[place >= 0]]
    return phase, step


def _has_phases(timeline: Timeline) -> bool:
    return timeline.host_time is not None and timeline.host_time.source != "none"


def _levels(layer: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Content of each layer after each event, starting from 0, shape (layers, k)."""
    return np.stack([np.cumsum(np.where(layer == number, size, 0)) for number in range(len(LAYERS))])


def _highest_of_parts(
    time_ns: NDArray[np.int64], total: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int, int]:
    """The event after each part's peak, the start of the first part, and their length.

    A part without an event has the last event before it.
    """
    begin_ns = int(time_ns[0])
    part_ns = int(time_ns[-1] - begin_ns) // MOST_POINTS + 1
    part = (time_ns - begin_ns) // part_ns
    highest = np.lexsort((np.arange(len(total)), total, part))  # of equal ones, the last
    is_last = np.append(np.diff(part[highest]) > 0, True)
    place = np.full(int(part[-1]) + 1, -1, np.int64)
    place[part[highest[is_last]]] = highest[is_last]
    # A part without events keeps the level after the last event before it, not the highest before.
    ends = np.searchsorted(part, np.arange(len(place)), side="right") - 1
    return np.where(place >= 0, place, ends), begin_ns, part_ns
