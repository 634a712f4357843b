"""Dashboard entries: everything a dashboard shows of one run or one profiler window.

Other outputs show a :class:`Report`; a dashboard can also zoom, so it gets the columns behind the charts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.record import Record, field
from lightning_modelprof.report.model import Report, Unit

ProfileKind = Literal["run", "window"]


class StepColumns(Record, frozen=True, kw_only=True, eq=False):
    """Every finished step of one rank, in order.

    Attributes:
        step: int64, shape (n,): step number, from 0.
        duration_ns: int64, shape (n,): wall time.
        samples: int64, shape (n,): samples in the batch, -1 if not counted.
        tags: int64, shape (n,): bits of ``run.records.StepTag``.
        exclusion: int64, shape (n,): position in ``exclusions`` of the reason why the benchmark excludes it.
        exclusions: the reasons; the first is ``""``, for clean steps.
        phases: (key, label) of each phase that took time in some step or couldn't be measured, in step order.
        phases_ns: int64, shape (n, len(phases)); -1 where not measured, the others sum to ``duration_ns``.
    """

    step: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    samples: NDArray[np.int64]
    tags: NDArray[np.int64]
    exclusion: NDArray[np.int64]
    exclusions: tuple[str, ...]
    phases: tuple[tuple[str, str], ...]
    phases_ns: NDArray[np.int64]


class Lane(Record, frozen=True, kw_only=True):
    """One CPU thread or one GPU stream.

    Attributes:
        label: such as ``thread 1234 (main)`` or ``GPU 0 stream 7``.
        group: what it is part of, such as ``host`` or ``GPU 0``; lanes of a group are adjacent.
        is_device: whether it is a stream.
    """

    label: str
    group: str
    is_device: bool


class Counter(Record, frozen=True, kw_only=True, eq=False):
    """A figure that changes over a trace: ``value[i]`` from ``time_ns[i]`` on.

    Attributes:
        time_ns: int64, shape (n,), ascending.
        value: float64, shape (n,).
    """

    label: str
    group: str
    unit: Unit
    time_ns: NDArray[np.int64]
    value: NDArray[np.float64]


class DrawnTimeline(Record, frozen=True, kw_only=True, eq=False):
    """What ran when on each thread and stream of one rank: a trace's slices.

    Slices are sorted by lane, depth and start; slices of one lane and depth don't overlap. Times are
    nanoseconds since the trace's first event.

    Attributes:
        source: trace name.
        rank: rank of the process; ``None`` if the trace lacks it.
        lanes: in reading order.
        names: distinct slice names.
        categories: distinct slice kinds, such as ``operator`` or ``kernel``.
        details: distinct further details, such as input shapes.
        steps: (number, begin_ns, end_ns) of each step, device work included.
        lane: int64, shape (n,): position in ``lanes``.
        depth: int64, shape (n,): 0 on top, 1 inside a slice of depth 0, ...
        slice_begin_ns, slice_duration_ns: int64, shape (n,).
        name: int64, shape (n,): position in ``names``.
        category: int64, shape (n,): position in ``categories``.
        detail: int64, shape (n,): position in ``details``, -1 without one.
        launch: int64, shape (n,): position of the CPU slice that launched this one, -1 without one; for a
            fetch, of the worker slice that made the batch.
        counters: memory, for example.
        notes: what was left out and why.
    """

    source: str
    rank: int | None
    begin_ns: int
    end_ns: int
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    categories: tuple[str, ...]
    details: tuple[str, ...]
    steps: tuple[tuple[int, int, int], ...]
    lane: NDArray[np.int64]
    depth: NDArray[np.int64]
    slice_begin_ns: NDArray[np.int64]
    slice_duration_ns: NDArray[np.int64]
    name: NDArray[np.int64]
    category: NDArray[np.int64]
    detail: NDArray[np.int64]
    launch: NDArray[np.int64]
    counters: tuple[Counter, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.slice_begin_ns)


class DashboardEntry(Record, frozen=True, kw_only=True, eq=False):
    """One entry that a reader can choose in a dashboard.

    Attributes:
        kind: ``run`` for a whole loop, ``window`` for one profiler window or imported trace.
        loop: Trainer method: ``fit``, ``validate``, ``test`` or ``predict``.
        window: window index; ``None`` for a run.
        label: the reader's choice, such as ``steps 12 to 21``.
        report: report of all ranks together.
        rank_reports: rank → report of that rank alone; empty with only one.
        steps: every step of the run; ``None`` for a window.
        timelines: rank → timeline; empty for a run.
        step_numbers: the window's steps, ascending; empty for a run.
    """

    kind: ProfileKind
    loop: str
    window: int | None
    label: str
    report: Report
    rank_reports: Mapping[int, Report] = field(default_factory=dict)
    steps: StepColumns | None = None
    timelines: Mapping[int, DrawnTimeline] = field(default_factory=dict)
    step_numbers: tuple[int, ...] = ()
