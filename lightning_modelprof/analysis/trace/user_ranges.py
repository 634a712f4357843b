"""UserDefined Summary: the ranges that a user put around code with ``record_function``."""

from __future__ import annotations

from typing import Final

import numpy as np

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.pooling import Key
from lightning_modelprof.analysis.timeline.calls import clipped_ends, find_calls, nearest_around, thread_label
from lightning_modelprof.analysis.timeline.intervals import length
from lightning_modelprof.analysis.timeline.names import is_shown_elsewhere, is_torch_range
from lightning_modelprof.analysis.timeline.tally import (
    Tally,
    by_name,
    distinct,
    rows_named,
    sum_by,
    tally_by,
)
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record

_NO_RANGES: Final = 'the trace has no user ranges (add one with torch.profiler.record_function("name"))'


class UserRange(Record, frozen=True, kw_only=True):
    """All calls of the range of one name.

    Attributes:
        is_torch: whether torch wrote it rather than the user, judging by its name.
        calls: number of calls, including those nested in another of them.
        host: host times of the outermost calls.
        device: summed times of the device events launched in each outermost call on its thread, at any depth;
            ``None`` without device events.
    """

    name: Key[str]
    is_torch: bool
    calls: int
    host: Tally
    device: Tally | None


class UserRangeThread(Record, frozen=True, kw_only=True):
    """The ranges of one host thread.

    Attributes:
        host_ns: time in which any of the ranges was open.
        device_ns: time of the device events launched in any of them; ``None`` if the trace has none.
        ranges: one per name, in no particular order.
    """

    name: str
    host_ns: int
    device_ns: int | None
    ranges: tuple[UserRange, ...]


class UserRanges(Record, frozen=True, kw_only=True):
    """The ranges of one trace.

    Attributes:
        threads: at least one.
        steps_ns: time of all steps on the host; ``None`` without steps.
        device_ns: summed time of all device events; ``None`` if the trace has none.
    """

    threads: tuple[UserRangeThread, ...]
    steps_ns: int | None
    device_ns: int | None


def summarize_user_ranges(timeline: Timeline) -> UserRanges:
    """Add up the ranges by thread and name, without those that other tables cover."""
    trace = timeline.trace
    wanted = timeline.is_annotation.copy()
    wanted[rows_named(trace, np.flatnonzero(wanted), is_shown_elsewhere)] = False
    if not wanted.any():
        raise NotMeasured(_NO_RANGES)
    launch = timeline.launch
    launching = np.where(launch.runtime >= 0, launch.runtime, launch.operator)
    around = nearest_around(timeline, launching, wanted)
    calls = find_calls(timeline, wanted, clipped_ends(timeline), around)
    tracks, track = distinct(calls.track, len(trace.tracks))
    names, name = by_name(trace, calls.row)
    keys, group = distinct(track * len(names) + name, len(tracks) * len(names))
    is_outer = calls.is_outermost(group)
    num_calls = np.bincount(group).tolist()
    host = tally_by(group[is_outer], calls.duration_ns[is_outer], len(keys))
    device = tally_by(group[is_outer], calls.device_total_ns[is_outer], len(keys))
    found: list[list[UserRange]] = [[] for _ in tracks]
    for place, key in enumerate(keys.tolist()):
        text = names[key % len(names)]
        found[key // len(names)].append(
            UserRange(
                name=text,
                is_torch=is_torch_range(text),
                calls=num_calls[place],
                host=host[place],
                device=device[place] if timeline.has_device else None,
            )
        )
    is_top = calls.parent < 0
    host_ns = sum_by(track[is_top], calls.duration_ns[is_top], len(tracks)).tolist()
    device_ns = sum_by(track, calls.device_self_ns, len(tracks)).tolist()
    return UserRanges(
        threads=tuple(
            UserRangeThread(
                name=thread_label(trace, one),
                host_ns=host_ns[place],
                device_ns=device_ns[place] if timeline.has_device else None,
                ranges=tuple(found[place]),
            )
            for place, one in enumerate(tracks.tolist())
        ),
        steps_ns=None if timeline.steps is None else length(timeline.steps.intervals),
        device_ns=int(trace.duration_ns[trace.device.event].sum()) if timeline.has_device else None,
    )
