"""A timeline as packed columns, for browsers.

The packed form is that of ``show/tensorboard/packing.py``. Its ``meta`` is::

    source      name of the trace
    rank        of the process, or null
    begin_ns, end_ns    of the trace
    lanes       [{"label", "group", "is_device"}, ...] in reading order
    names       the distinct names of slices
    categories  the distinct kinds of slices
    details     the distinct detail texts of slices
    steps       [[number, begin_ns, end_ns], ...]
    notes       what was left out and why
    counters    [{"label", "group", "unit", "count"}, ...]; unit is a value of report.model.Unit
    rows        [[lane, depth, count], ...]: slices are in this order, count of them per row

and its columns, with one value per slice, in the order of ``rows`` and within a row by start, are::

    begin       delta: ns since the first event of the trace
    duration    int: ns
    name        int: index into names
    category    int: index into categories
    detail      int: index into details, -1 without one
    launch      int: index of the slice that launched this one, -1 without one; for a fetch, its batch

and for the counter at index i, with ``count`` points::

    counter_<i>_time    delta: ns since the first event of the trace, ascending
    counter_<i>_value   float: level from then on

Rows without slices aren't listed. The differences of ``begin`` continue from row to row, so the first of a
row is mostly negative.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.report.dashboard_entry import Counter, DrawnTimeline, Lane
from lightning_modelprof.report.model import Unit
from lightning_modelprof.show.tensorboard.packing import check_columns, pack_columns, unpack_columns
from lightning_modelprof.units import format_amount, format_duration

MAX_BYTES: Final = 48_000_000
"""Maximum bytes of a packed timeline: the largest blob tested with both of TensorBoard's data loaders."""

MOST_CHECKED: Final = 2_000_000
"""Maximum slices whose numbers are checked before a page gets them, which takes half a second."""

PYTHON_FUNCTION: Final = "python function"
"""The kind that is left out first, because it has the most slices and they are short."""

_COLUMNS: Final = ("slice_begin_ns", "slice_duration_ns", "name", "category", "detail", "launch")
_NEVER: Final = np.iinfo(np.int64).max
_MARGIN: Final = 0.9
"""Share of the slices that would fit if all were the same size; texts of the remaining ones take more."""


def pack_timeline(timeline: DrawnTimeline, max_bytes: int = MAX_BYTES) -> bytes:
    """Pack a timeline.

    A timeline larger than ``max_bytes`` loses its Python functions and, if that isn't enough, its shortest
    slices, with notes on how many and how short. Steps and counters are never left out.

    Raises:
        ValueError: if the trace is longer than 53 bits of nanoseconds, which are 104 days.
    """
    packed = _pack(timeline)
    if len(packed) <= max_bytes:
        return packed
    reason = f"The timeline would exceed {format_amount(max_bytes, Unit.BYTES)} otherwise."
    if PYTHON_FUNCTION in timeline.categories:
        kept = timeline.category != timeline.categories.index(PYTHON_FUNCTION)
        note = f"All {int((~kept).sum()):,} slices of Python functions are left out. {reason}"
        timeline = _with_note(_only(timeline, kept), note)
        packed = _pack(timeline)
    fewer = timeline
    while len(packed) > max_bytes and len(fewer):
        shortest_ns = _limit_ns(fewer, _MARGIN * max_bytes / len(packed))
        fewer = _only(fewer, fewer.slice_duration_ns >= shortest_ns)
        note = (
            f"{len(timeline) - len(fewer):,} of {len(timeline):,} slices, all shorter than"
            f" {format_duration(shortest_ns)}, are left out. {reason}"
        )
        packed = _pack(_with_note(fewer, note))
    return packed


def unpack_timeline(packed: bytes) -> DrawnTimeline:
    """Unpack a timeline.

    Raises:
        ValueError: if :func:`pack_timeline` didn't make these bytes.
    """
    meta, columns = unpack_columns(packed)
    try:
        lane, depth, count = np.array(meta["rows"], np.int64).reshape(-1, 3).T
        slices = (columns["begin"], columns["duration"], *(columns[name] for name in _COLUMNS[2:]))
        timeline = DrawnTimeline(
            source=meta["source"],
            rank=meta["rank"],
            begin_ns=int(meta["begin_ns"]),
            end_ns=int(meta["end_ns"]),
            lanes=tuple(Lane(**one) for one in meta["lanes"]),
            names=tuple(meta["names"]),
            categories=tuple(meta["categories"]),
            details=tuple(meta["details"]),
            steps=tuple((int(number), int(begin), int(end)) for number, begin, end in meta["steps"]),
            lane=np.repeat(lane, count),
            depth=np.repeat(depth, count),
            **dict(zip(_COLUMNS, slices, strict=True)),
            counters=tuple(
                _unpack_counter(one, columns[f"counter_{index}_time"], columns[f"counter_{index}_value"])
                for index, one in enumerate(meta["counters"])
            ),
            notes=tuple(meta["notes"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"these columns are no timeline: {error!r}") from error
    lengths = {len(getattr(timeline, name)) for name in ("lane", "depth", *_COLUMNS)}
    if len(lengths) > 1:
        raise ValueError(f"these columns are no timeline: their lengths are {sorted(lengths)}")
    return timeline


def check_timeline(packed: bytes) -> None:
    """Check that a page can draw a packed timeline.

    With more than ``MOST_CHECKED`` slices, only checks the description and the columns' lengths.

    Raises:
        ValueError: with what's wrong.
    """
    if check_columns(packed).get("begin", 0) <= MOST_CHECKED:
        _check_ranges(unpack_timeline(packed))


def _check_ranges(timeline: DrawnTimeline) -> None:
    """Refuse numbers that no trace has, and indices out of range."""
    ends = {
        "lane": len(timeline.lanes),
        "depth": len(timeline),  # at most one row per slice
        "name": len(timeline.names),
        "category": len(timeline.categories),
        "detail": len(timeline.details),
        "launch": len(timeline),
        "slice_begin_ns": _NEVER,
        "slice_duration_ns": _NEVER,
    }
    for name, end in ends.items():
        column, least = getattr(timeline, name), -1 if name in {"detail", "launch"} else 0
        if len(column) and (column.min() < least or column.max() >= end):
            raise ValueError(f"{name} is below {least} or not below {end}")
    is_new_row = _begins_row(timeline.lane, timeline.depth)
    if (np.diff(timeline.slice_begin_ns)[~is_new_row[1:]] < 0).any():
        raise ValueError("the slices of a row are out of order")
    if any((np.diff(one.time_ns) < 0).any() for one in timeline.counters):
        raise ValueError("the points of a counter are out of order")
    spans = [(timeline.begin_ns, timeline.end_ns), *(step[1:] for step in timeline.steps)]
    if any(not begin_ns <= end_ns for begin_ns, end_ns in spans):
        raise ValueError("the trace or a step ends before it starts")


def _pack(timeline: DrawnTimeline) -> bytes:
    meta = {
        "source": timeline.source,
        "rank": timeline.rank,
        "begin_ns": timeline.begin_ns,
        "end_ns": timeline.end_ns,
        "lanes": [
            {"label": lane.label, "group": lane.group, "is_device": lane.is_device} for lane in timeline.lanes
        ],
        "names": timeline.names,
        "categories": timeline.categories,
        "details": timeline.details,
        "steps": timeline.steps,
        "notes": timeline.notes,
        "counters": [
            {
                "label": counter.label,
                "group": counter.group,
                "unit": counter.unit.value,
                "count": len(counter.value),
            }
            for counter in timeline.counters
        ],
        "rows": _rows(timeline),
    }
    columns: dict[str, NDArray[Any]] = {
        "begin": timeline.slice_begin_ns,
        "duration": timeline.slice_duration_ns,
        "name": timeline.name,
        "category": timeline.category,
        "detail": timeline.detail,
        "launch": timeline.launch,
    }
    deltas = {"begin"}
    for index, counter in enumerate(timeline.counters):
        columns[f"counter_{index}_time"] = counter.time_ns
        columns[f"counter_{index}_value"] = counter.value
        deltas.add(f"counter_{index}_time")
    return pack_columns(meta, columns, frozenset(deltas))


def _rows(timeline: DrawnTimeline) -> list[list[int]]:
    starts = np.flatnonzero(_begins_row(timeline.lane, timeline.depth))
    counts = np.diff(starts, append=len(timeline))
    rows: list[list[int]] = np.column_stack((timeline.lane[starts], timeline.depth[starts], counts)).tolist()
    return rows


def _begins_row(lane: NDArray[np.int64], depth: NDArray[np.int64]) -> NDArray[np.bool_]:
    begins: NDArray[np.bool_] = (np.diff(lane, prepend=-1) != 0) | (np.diff(depth, prepend=-1) != 0)
    return begins


def _unpack_counter(one: dict[str, Any], time_ns: NDArray[np.int64], value: NDArray[np.float64]) -> Counter:
    if len(time_ns) != one["count"] or len(value) != one["count"]:
        raise ValueError(f"{len(time_ns)} times and {len(value)} values instead of {one['count']}")
    return Counter(
        label=one["label"], group=one["group"], unit=Unit(one["unit"]), time_ns=time_ns, value=value
    )


def _with_note(timeline: DrawnTimeline, note: str) -> DrawnTimeline:
    return replace(timeline, notes=(*timeline.notes, note))


def _limit_ns(timeline: DrawnTimeline, share: float) -> int:
    """Return the minimum duration that keeps at most ``share`` of the slices, and not all of them."""
    durations_ns = np.sort(timeline.slice_duration_ns)
    num_dropped = max(len(durations_ns) - int(share * len(durations_ns)), 1)
    return int(durations_ns[num_dropped - 1]) + 1


def _only(timeline: DrawnTimeline, kept: NDArray[np.bool_]) -> DrawnTimeline:
    """Keep some slices, and only the rows, names and texts that they use."""
    rows = np.flatnonzero(kept)
    depth = _moved_up(timeline, rows)
    order = np.lexsort((timeline.slice_begin_ns[rows], depth, timeline.lane[rows]))
    rows, depth = rows[order], depth[order]
    position = np.full(len(timeline) + 1, -1, np.int64)  # the last entry is for -1, which means none
    position[rows] = np.arange(len(rows))
    names, name = _used(timeline.names, timeline.name[rows])
    categories, category = _used(timeline.categories, timeline.category[rows])
    details, detail = _used(timeline.details, timeline.detail[rows])
    return replace(
        timeline,
        names=names,
        categories=categories,
        details=details,
        lane=timeline.lane[rows],
        depth=depth,
        slice_begin_ns=timeline.slice_begin_ns[rows],
        slice_duration_ns=timeline.slice_duration_ns[rows],
        name=name,
        category=category,
        detail=detail,
        launch=position[timeline.launch[rows]],
    )


def _moved_up(timeline: DrawnTimeline, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return the depths of some slices without the others: each right below what it overlaps.

    Works row by row from the top, on whole rows, because slices of a row don't overlap each other.
    """
    lane, depth = timeline.lane[rows], timeline.depth[rows]
    begin_ns = timeline.slice_begin_ns[rows]
    end_ns = begin_ns + np.maximum(timeline.slice_duration_ns[rows], 1)  # zero-length slices are inside, too
    moved = np.zeros(len(rows), np.int64)
    starts = np.flatnonzero(_begins_row(lane, depth))
    placed: list[NDArray[np.intp]] = []  # by new depth in the lane: the slices there, by start
    for own in np.split(np.arange(len(rows)), starts[1:]):
        if not len(own) or not own[0] or lane[own[0]] != lane[own[0] - 1]:
            placed = []
        for new_depth, above in enumerate(placed):
            following = np.searchsorted(end_ns[above], begin_ns[own], side="right")
            overlaps = np.append(begin_ns[above], _NEVER)[following] < end_ns[own]
            moved[own[overlaps]] = new_depth + 1
        for new_depth in np.unique(moved[own]).tolist():
            more = own[moved[own] == new_depth]
            both = np.concatenate((placed[new_depth], more)) if new_depth < len(placed) else more
            placed[new_depth : new_depth + 1] = [both[np.argsort(begin_ns[both], kind="stable")]]
    return moved


def _used(texts: tuple[str, ...], place: NDArray[np.int64]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the texts that occur, and each slice's index into them, -1 without one."""
    new_place = np.full(len(texts) + 1, -1, np.int64)  # the last entry is for -1, which means none
    used = np.unique(place[place >= 0])
    new_place[used] = np.arange(len(used))
    return tuple(texts[index] for index in used.tolist()), new_place[place]
