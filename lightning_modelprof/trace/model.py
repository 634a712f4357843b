"""Trace: one profiler window of one rank as read-only columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.record import Record, field


class Category(IntEnum):
    """Kind of event; names of all torch versions and backends map to these."""

    OTHER = 0
    CPU_OP = 1
    USER_ANNOTATION = 2
    RUNTIME = 3
    """A CPU call of the CUDA, ROCm, XPU or MTIA runtime or driver."""
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6
    DEVICE_ANNOTATION = 7
    """The device-side counterpart of an annotation: the span of the kernels launched in it."""
    PYTHON_FUNCTION = 8
    DEVICE_SYNC = 9
    """A wait for a stream or an event, as CUPTI records it on the device side."""
    OVERHEAD = 10
    """The recording profiler's own work."""


DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
"""Categories of events that occupy a device."""

_TORCH_ENTRY: Final = "schemaVersion"
"""Top-level key that torch.profiler writes into every file, even without a usable event."""

NOT_RECORDED = -1
"""Missing value in integer columns; in float columns it's NaN."""


class DeviceWork(Record, frozen=True, kw_only=True, eq=False):
    """The m device events (kernels, copies, memsets) of a trace in its order, as read-only arrays.

    Attributes:
        event: int64, shape (m,): row in the trace.
        device: int64, shape (m,): device number, -1 if not recorded.
        stream: int64, shape (m,): stream number, -1 if not recorded.
        size_bytes: int64, shape (m,): bytes copied or set, -1 for kernels.
        blocks_per_sm: float64, shape (m,): a kernel's thread blocks per streaming multiprocessor, or NaN.
        occupancy: float64, shape (m,): Kineto's estimate of a kernel's achieved occupancy, a fraction of 1,
            or NaN.
    """

    event: NDArray[np.int64]
    device: NDArray[np.int64]
    stream: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    blocks_per_sm: NDArray[np.float64]
    occupancy: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.event)


class Allocations(Record, frozen=True, kw_only=True, eq=False):
    """The k allocations and releases (``profile_memory=True``) in order of time, as read-only arrays.

    Attributes:
        time_ns: int64, shape (k,): on the clock of the trace's ``begin_ns``.
        track: int32, shape (k,): CPU thread.
        size_bytes: int64, shape (k,): positive for an allocation, negative for a release.
        device_type: int64, shape (k,): torch's number of the device type (0 CPU, 1 CUDA, ...), -1 unknown.
        device: int64, shape (k,): device number, -1 for the CPU.
        allocated_bytes: int64, shape (k,): allocated on that device after the event, -1 if not recorded.
        reserved_bytes: int64, shape (k,): reserved by the allocator, -1 if not recorded.
        address: int64, shape (k,): of the block, -1 if not recorded (torch before 2.0).
    """

    time_ns: NDArray[np.int64]
    track: NDArray[np.int32]
    size_bytes: NDArray[np.int64]
    device_type: NDArray[np.int64]
    device: NDArray[np.int64]
    allocated_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]
    address: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.time_ns)


class Collective(Record, frozen=True, kw_only=True):
    """Details of a communication event (torch 2.1 and later); ``None`` means not recorded.

    Attributes:
        name: such as ``allreduce`` or ``_allgather_base``.
        group: description of the process group, or its name.
        dtype: of the elements, as torch names it.
        in_elements, out_elements: number of input and output elements.
    """

    name: str | None
    group: str | None
    group_size: int | None
    dtype: str | None
    in_elements: int | None
    out_elements: int | None


class Trace(Record, frozen=True, kw_only=True, eq=False):
    """Duration events of one rank, sorted by (begin_ns, -end_ns), as read-only arrays.

    Attributes:
        base_ns: subtracted from every time stamp, so that the first event starts at 0.
        begin_ns, end_ns: int64, shape (n,): half-open interval of the event, exact nanoseconds.
        category: uint8, shape (n,): :class:`Category`.
        name: int32, shape (n,): index into ``names``.
        track: int32, shape (n,): index into ``tracks`` (CPU thread or device stream).
        correlation: int64, shape (n,): joins a launch to its device events, -1 without one.
        external_id: int64, shape (n,): joins device events and launches to an operator, -1 without one.
        shape: int32, shape (n,): index into ``shapes``, -1 if not recorded.
        stack: int32, shape (n,): index into ``stacks``, -1 if not recorded (torch 1 only).
        collective: int32, shape (n,): index into ``collectives``, -1 if not recorded.
        names: distinct event names.
        tracks: distinct (pid, tid) pairs as written in the file, as text.
        thread_names: names of tracks that have one in the file.
        shapes: distinct shapes of operators' inputs with their concrete values, as JSON texts.
        stacks: distinct call stacks, innermost frame first, separated by ``;``.
        collectives: distinct communication details.
        metadata: the file's top-level entries other than its events.
        num_dropped: unusable events (no duration, negative duration, not a number).
        damage: unreadable parts of the file, and ignored ones (separate begin and end events), one sentence
            each; empty for a whole file.
        is_cut: whether the end of the event list is missing.
    """

    source: str
    base_ns: int
    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    category: NDArray[np.uint8]
    name: NDArray[np.int32]
    track: NDArray[np.int32]
    correlation: NDArray[np.int64]
    external_id: NDArray[np.int64]
    shape: NDArray[np.int32]
    stack: NDArray[np.int32]
    collective: NDArray[np.int32]
    names: tuple[str, ...]
    tracks: tuple[tuple[str, str], ...]
    thread_names: Mapping[int, str]
    shapes: tuple[InputShapes, ...]
    stacks: tuple[str, ...]
    collectives: tuple[Collective, ...]
    device: DeviceWork
    allocations: Allocations
    metadata: Mapping[str, Any] = field(default_factory=dict)
    num_dropped: int = 0
    damage: tuple[str, ...] = ()
    is_cut: bool = False

    def __len__(self) -> int:
        return len(self.begin_ns)

    @property
    def duration_ns(self) -> NDArray[np.int64]:
        """Duration of each event, shape (n,)."""
        return self.end_ns - self.begin_ns

    @property
    def is_of_another_tool(self) -> bool:
        """Whether nothing shows that torch.profiler wrote it: no category, no top-level entry."""
        return len(self) > 0 and not self.category.any() and _TORCH_ENTRY not in self.metadata

    def is_category(self, *categories: Category) -> NDArray[np.bool_]:
        """Whether each event is of one of the categories, shape (n,)."""
        wanted = np.zeros(256, np.bool_)
        wanted[list(categories)] = True
        return wanted[self.category]

    def is_named(self, test: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Whether each event's name passes the test, shape (n,)."""
        passes = np.fromiter((test(name) for name in self.names), np.bool_, len(self.names))
        return passes[self.name]

    def name_ids(self, prefix: str) -> NDArray[np.int32]:
        return np.array([index for index, name in enumerate(self.names) if name.startswith(prefix)], np.int32)

    def name_of(self, event: int) -> str:
        name: str = self.names[self.name[event]]
        return name


class InputShapes(Record, frozen=True):
    """Inputs of an operator (``record_shapes=True``), as JSON texts; ``concrete`` is "" before torch 2.

    Attributes:
        dims: shape of each input, ``[[32, 3, 8, 8], [], ...]``.
        concrete: value of each non-tensor input, ``["", "[1, 1]", ...]``.
    """

    dims: str
    concrete: str = ""
