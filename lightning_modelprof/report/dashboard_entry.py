"""A profile: all that a dashboard shows of one run or one profiler window.

Other outputs show a :class:`Report`; a dashboard also zooms, so it gets the columns that charts are drawn of.
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
        step: int64, shape (n,): number of the step, from 0.
        duration_ns: int64, shape (n,): its wall time.
        samples: int64, shape (n,): what was counted in its batch, -1 if it was not counted.
        tags: int64, shape (n,): the bits of ``run.records.StepTag``.
        exclusion: int64, shape (n,): position in ``exclusions`` of why the benchmark leaves it out.
        exclusions: the reasons; the first is ``""``, of clean steps.
        phases: (key, label) of each phase that some step has a time for, or that could not be measured, in
            the order of a step.
        phases_ns: int64, shape (n, len(phases)); -1 where it could not be measured, the others sum to
            ``duration_ns``.
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
    """One thread of the host or one stream of a device.

    Attributes:
        label: such as ``thread 1234 (main)`` or ``GPU 0 stream 7``.
        group: what it is part of, such as ``host`` or ``GPU 0``; lanes of a group follow each other.
        is_device: whether it is a stream.
    """

    label: str
    group: str
    is_device: bool


class Counter(Record, frozen=True, kw_only=True, eq=False):
    """A figure that changes while a trace goes on: it has ``value[i]`` from ``time_ns[i]`` on.

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
    """What ran when on each thread and stream of one rank: the slices of a trace.

    Slices are sorted by lane, depth and begin; those of one lane and depth do not overlap. Times are
    nanoseconds since the first event of the trace.

    Attributes:
        source: name of the trace.
        rank: of the process; ``None`` if the trace does not say.
        lanes: in reading order.
        names: the distinct names of slices.
        categories: the distinct kinds of slices, such as ``operator`` or ``kernel``.
        details: what else is known of slices, such as the shapes of inputs; distinct.
        steps: (number, begin_ns, end_ns) of each step, device work included.
        lane: int64, shape (n,): position in ``lanes``.
        depth: int64, shape (n,): 0 on top, 1 inside a slice of depth 0, ...
        slice_begin_ns, slice_duration_ns: int64, shape (n,).
        name: int64, shape (n,): position in ``names``.
        category: int64, shape (n,): position in ``categories``.
        detail: int64, shape (n,): position in ``details``, -1 without one.
        launch: int64, shape (n,): position of the slice of the host that launched this one, -1 without one;
            of a fetch that of the batch, made by a worker, that its step used.
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
    """One entry that a reader of a dashboard can choose.

    Attributes:
        kind: ``run`` for the whole of a loop, ``window`` for one profiler window or imported trace.
        loop: the Trainer's method: ``fit``, ``validate``, ``test`` or ``predict``.
        window: index of the window; ``None`` for a run.
        label: what the reader chooses, such as ``steps 12 to 21``.
        report: of all ranks together.
        rank_reports: rank → the report of that rank alone; empty when there is only one.
        steps: every step of the run; ``None`` for a window.
        timelines: rank → its timeline; empty for a run.
        step_numbers: of the steps that a window holds, in ascending order; empty for a run.
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
