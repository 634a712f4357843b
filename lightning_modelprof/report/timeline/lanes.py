"""The lanes of a timeline: which there are, in which order, and what to call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.intervals import length, union
from lightning_modelprof.analysis.timeline.names import AUTOGRAD_PREFIX
from lightning_modelprof.analysis.timeline.tally import distinct, stable_order
from lightning_modelprof.analysis.timeline.timeline import Timeline as TraceTimeline
from lightning_modelprof.report.profile import Lane
from lightning_modelprof.trace.columns import stream_number
from lightning_modelprof.trace.model import DEVICE_WORK, NOT_RECORDED, Category, Trace

HOST_GROUP: Final = "host"
OTHER_GROUP: Final = "other"
"""Of what is neither a host thread nor a stream, such as the profiler's own span."""

_HOST, _DEVICE, _OTHER = range(3)
_NUM_SIDES: Final = 3
_ON_HOST: Final = (
    Category.CPU_OP,
    Category.USER_ANNOTATION,
    Category.RUNTIME,
    Category.PYTHON_FUNCTION,
)
_ON_DEVICE: Final = (*DEVICE_WORK, Category.DEVICE_ANNOTATION, Category.DEVICE_SYNC)

_ROLES: Final = {
    "pt_main_thread": "main thread",
    "pt_autograd_": "autograd thread",
    "pt_data_pin": "DataLoader's pin-memory thread",
    "pt_data_worker": "DataLoader worker",
}
"""The beginning of the names that torch gives its threads, in words."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One lane before it has a label; ``device`` and ``stream`` are -1 where not known."""

    track: int
    side: int
    busy_ns: int
    device: int
    stream: int


def find_lanes(shared: TraceTimeline) -> tuple[tuple[Lane, ...], NDArray[np.int64]]:
    """The lanes in reading order, and the lane of each event.

    The thread of the steps is first, then the other threads of the host by the time in which anything is
    open on them, then streams by device and number, then what is neither.

    Returns:
        The lanes, and shape (n,): position of each event's lane.
    """
    trace = shared.trace
    keys, key_of = distinct(
        trace.track.astype(np.int64) * _NUM_SIDES + _sides(trace), len(trace.tracks) * _NUM_SIDES
    )
    places = _places(trace, keys, key_of)
    main = _main_track(shared, places)
    order = sorted(range(len(places)), key=lambda index: _reading_order(places[index], main))
    position = np.empty(len(places), np.int64)
    position[order] = np.arange(len(places))
    several = len({trace.tracks[place.track][0] for place in places if place.side == _HOST}) > 1
    autograd = _autograd_tracks(trace)
    lanes = tuple(_lane(trace, places[index], main, autograd, several=several) for index in order)
    return lanes, position[key_of]


def device_label(number: int) -> str:
    """Such as ``GPU 0``."""
    return f"GPU {number}" if number >= 0 else "GPU of unknown number"


def _sides(trace: Trace) -> NDArray[np.int64]:
    """Whether each event is the host's or a device's; what may be either is what else is on its track."""
    on_host, on_device = trace.is_category(*_ON_HOST), trace.is_category(*_ON_DEVICE)
    side_of_track = np.full(len(trace.tracks), _OTHER, np.int64)
    side_of_track[trace.track[on_device]] = _DEVICE
    side_of_track[trace.track[on_host]] = _HOST
    sides: NDArray[np.int64] = side_of_track[trace.track]
    sides[on_device] = _DEVICE  # a process may have the number of a device
    return sides


def _places(trace: Trace, keys: NDArray[np.int64], key_of: NDArray[np.int64]) -> list[_Place]:
    work = trace.device
    device_of = np.full(len(trace.tracks), NOT_RECORDED, np.int64)
    stream_of = device_of.copy()
    device_of[trace.track[work.event]] = work.device
    stream_of[trace.track[work.event]] = work.stream
    order = stable_order(key_of)
    ends = np.cumsum(np.bincount(key_of, minlength=len(keys))).tolist()
    places = []
    for key, first, last in zip(keys.tolist(), [0, *ends], ends, strict=False):
        own = order[first:last]
        track, side = divmod(key, _NUM_SIDES)
        process, thread = trace.tracks[track]
        device, stream = int(device_of[track]), int(stream_of[track])
        places.append(
            _Place(
                track=track,
                side=side,
                busy_ns=length(union(trace.begin_ns[own], trace.end_ns[own])),
                # On the device's side the process is the device and the thread the stream.
                device=device if device >= 0 else _number(process),
                stream=stream if stream >= 0 else _number(thread),
            )
        )
    return places


def _number(text: str) -> int:
    number = stream_number(text)
    return NOT_RECORDED if number is None else number


def _main_track(shared: TraceTimeline, places: list[_Place]) -> int:
    """The thread of the steps; without steps the one that has the number of its process; else -1."""
    steps, tracks = shared.steps, shared.trace.tracks
    if steps is not None and steps.has_ranges:
        return steps.track
    own = (place.track for place in places if place.side == _HOST and len(set(tracks[place.track])) == 1)
    return next(own, -1 if steps is None else steps.track)


def _autograd_tracks(trace: Trace) -> frozenset[int]:
    """Threads with nodes of autograd's graph; before torch 1.10 the nodes' own names tell."""
    nodes = trace.is_named(
        lambda name: name.startswith(AUTOGRAD_PREFIX) or "Backward" in name or "AccumulateGrad" in name
    )
    found = np.unique(trace.track[nodes & (trace.category == Category.CPU_OP)])
    return frozenset(found.tolist())


def _reading_order(place: _Place, main: int) -> tuple[int, ...]:
    if place.side == _HOST:
        return place.side, place.track != main, -place.busy_ns
    return place.side, place.device < 0, place.device, place.stream < 0, place.stream


def _lane(trace: Trace, place: _Place, main: int, autograd: frozenset[int], *, several: bool) -> Lane:
    """The lane with its label; ``several`` is whether the trace has several processes of the host."""
    process, thread = trace.tracks[place.track]
    if place.side == _DEVICE:
        group = device_label(place.device)
        stream = f"stream {place.stream}" if place.stream >= 0 else "without a stream"
        return Lane(label=f"{group} {stream}", group=group, is_device=True)
    # Kineto writes a name as "thread 1234 (python)".
    name = trace.thread_names.get(place.track, "").removeprefix(f"thread {thread}").strip(" ()")
    if place.side == _OTHER:
        label = name or (f"track {process} {thread}" if _number(thread) >= 0 else thread)
        return Lane(label=label, group=OTHER_GROUP, is_device=False)
    group = f"{HOST_GROUP} process {process}" if several else HOST_GROUP
    role = next((words for prefix, words in _ROLES.items() if name.startswith(prefix)), None)
    if place.track == main:
        role = "main thread"
    elif role is None and place.track in autograd:
        role = "autograd thread"
    label = f"{role} {thread}" if role else f"thread {thread} ({name})" if name else f"thread {thread}"
    return Lane(label=label, group=group, is_device=False)
