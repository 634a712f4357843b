"""Communication of one rank call by call, for comparing ranks."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.timeline.calls import nearest_around
from lightning_modelprof.analysis.timeline.intervals import locate
from lightning_modelprof.analysis.timeline.names import launches_communication
from lightning_modelprof.analysis.timeline.tally import distinct
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.distributed import Source, find_collectives, find_communication_rows
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category, Trace

_ONLY_ASKED: Final = "the trace only has NCCL's CPU ranges, which launch communication; record the GPU"


class CallKind(Record, frozen=True):
    """Kind of a rank's collectives.

    Attributes:
        name: torch's plain name, e.g. ``all_reduce``; see :class:`CollectiveTime`.
        group: description or name of the process group; ``None`` if not recorded.
        group_size: ranks in the group; ``None`` if not recorded.
        members: ranks of the group; ``None`` if not recorded (older torch), or if several groups share the
            name and size.
    """

    name: str
    group: str | None
    group_size: int | None
    members: tuple[int, ...] | None


class Call(Record, frozen=True):
    """One call.

    Attributes:
        step: number of the kept step that launched it; ``None`` outside steps or without any.
        duration_ns: of its kernel, or of its range on the host.
        in_elements: elements that this rank contributed; ``None`` if not recorded.
    """

    kind: CallKind
    step: int | None
    duration_ns: int
    in_elements: int | None


class CommunicationCalls(Record, frozen=True, kw_only=True):
    """All communication of one rank.

    Attributes:
        world_size: ranks of the job; ``None`` if torch didn't record it.
        steps: numbers of the kept steps; ``None`` without ``ProfilerStep`` ranges.
        calls: in order of their starts.
    """

    source: Source
    world_size: int | None
    steps: tuple[int, ...] | None
    calls: tuple[Call, ...]


def list_communication_calls(timeline: Timeline) -> CommunicationCalls:
    """List every kernel that communicates, or without any, every backend range on the host.

    Raises:
        NotMeasured: without communication (see :func:`find_communication_rows`), and if only the host's
            requests to NCCL were recorded.
    """
    found = find_communication_rows(timeline)
    if found.is_asynchronous:
        raise NotMeasured(_ONLY_ASKED)
    trace, steps = timeline.trace, _step_numbers(timeline)
    described = _descriptions(timeline, found.rows, found.source)
    columns = (
        _kinds(timeline, found.rows, found.source, described),
        _steps_of(timeline, found.rows, found.source).tolist(),
        trace.duration_ns[found.rows].tolist(),
        described.tolist(),
    )
    return CommunicationCalls(
        source=found.source,
        world_size=_world_size(trace),
        steps=steps,
        calls=tuple(
            Call(
                kind,
                None if steps is None or place < 0 else steps[place],
                duration_ns,
                None if description < 0 else trace.collectives[description].in_elements,
            )
            for kind, place, duration_ns, description in zip(*columns, strict=True)
        ),
    )


def _step_numbers(timeline: Timeline) -> tuple[int, ...] | None:
    """Numbers of the kept steps; ``None`` without ``ProfilerStep`` ranges: only these match across ranks."""
    steps, bounds = timeline.steps, timeline.bounds
    if steps is None or bounds is None or not (steps.has_ranges and steps.are_numbered):
        return None
    return bounds.numbers


def _host_rows(timeline: Timeline, rows: NDArray[np.int64], source: Source) -> NDArray[np.int64]:
    """Row of each call's host event or launch, -1 if unknown, shape (k,)."""
    if source == "host":
        return rows
    launch = timeline.launch
    place = np.searchsorted(timeline.trace.device.event, rows)
    return np.where(launch.runtime[place] >= 0, launch.runtime[place], launch.operator[place])


def _steps_of(timeline: Timeline, rows: NDArray[np.int64], source: Source) -> NDArray[np.intp]:
    """Index of the kept step that launched each call, -1 outside steps, shape (k,).

    The launch decides, since launches have the same order on all ranks; a kernel can run after its step.
    """
    steps, bounds = timeline.steps, timeline.bounds
    if steps is None or bounds is None:
        return np.full(len(rows), -1, np.intp)
    begin_ns = timeline.trace.begin_ns
    host = _host_rows(timeline, rows, source)
    by_launch = locate(begin_ns[host], steps.intervals[: len(bounds.numbers)])
    filled = np.flatnonzero(bounds.intervals[:, 0] < bounds.intervals[:, 1])
    by_begin = locate(begin_ns[rows], bounds.intervals[filled])
    by_begin[by_begin >= 0] = filled[by_begin[by_begin >= 0]]
    return np.where(host >= 0, by_launch, by_begin)


def _descriptions(timeline: Timeline, rows: NDArray[np.int64], source: Source) -> NDArray[np.int64]:
    """Index of each call's own description, or else its launch's, -1 without one, shape (k,)."""
    trace = timeline.trace
    host = _host_rows(timeline, rows, source)
    around = nearest_around(timeline, host, trace.collective >= 0, or_itself=True)
    launched = np.where(around >= 0, trace.collective[around], -1)
    own = trace.collective[rows]
    return np.where(own >= 0, own, launched).astype(np.int64)


def _kinds(
    timeline: Timeline, rows: NDArray[np.int64], source: Source, described: NDArray[np.int64]
) -> list[CallKind]:
    """Kind of each of the k calls, as in the Collectives table."""
    trace = timeline.trace
    is_range = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION) & (
        timeline.is_communication | trace.is_named(launches_communication)
    )
    named = nearest_around(timeline, _host_rows(timeline, rows, source), is_range, or_itself=True)
    # Calls that agree in everything that determines the kind share one, derived once.
    labels: dict[tuple[str | None, str | None, int | None], int] = {}
    label_of = [
        labels.setdefault((one.name, one.group, one.group_size), len(labels)) for one in trace.collectives
    ]
    origins = (
        trace.name[rows],
        np.where(named >= 0, trace.name[named], -1),
        np.array([*label_of, -1], np.int64)[described],
    )
    alike = np.zeros(len(rows), np.int64)
    for numbers in origins:
        width = int(numbers.max()) + 2
        _, alike = distinct(alike * width + numbers + 1, (int(alike.max()) + 1) * width)
    firsts = np.zeros(int(alike.max()) + 1, np.int64)
    firsts[alike[::-1]] = np.arange(len(alike))[::-1]
    kinds = []
    for first in rows[firsts].tolist():
        (one,) = find_collectives(timeline, np.array([first]), source)
        members = _members(trace, one.group, one.group_size)
        kinds.append(CallKind(one.name, one.group, one.group_size, members))
    return [kinds[number] for number in alike.tolist()]


def _members(trace: Trace, group: str | None, group_size: int | None) -> tuple[int, ...] | None:
    """Ranks of the process group with this description or name and size, as recorded by torch."""
    groups: Any = _noted(trace).get("pg_config")
    if group is None or not isinstance(groups, list):
        return None
    found = {
        tuple(sorted(ranks))
        for one in groups
        if isinstance(one, dict) and group in (one.get("pg_desc"), one.get("pg_name"))
        for ranks in [one.get("ranks")]
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
    }
    fitting = {ranks for ranks in found if group_size in (None, len(ranks))}
    return fitting.pop() if len(fitting) == 1 else None


def _world_size(trace: Trace) -> int | None:
    size = _noted(trace).get("world_size")
    return size if type(size) is int and size > 0 else None


def _noted(trace: Trace) -> dict[str, Any]:
    noted = trace.metadata.get("distributedInfo")
    return noted if isinstance(noted, dict) else {}
