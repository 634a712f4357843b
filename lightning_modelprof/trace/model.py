"""Trace: one profiler window of one rank as read-only columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.record import Record, field


class Category(IntEnum):
    """What kind of event a row is; names of every torch version and backend are mapped to these."""

    OTHER = 0
    CPU_OP = 1
    USER_ANNOTATION = 2
    RUNTIME = 3
    """A call of CUDA's, ROCm's, XPU's or MTIA's runtime or driver on the host."""
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6
    DEVICE_ANNOTATION = 7
    """The device's twin of an annotation: the span of the kernels launched in it."""
    PYTHON_FUNCTION = 8
    DEVICE_SYNC = 9
    """A wait for a stream or an event, as CUPTI records it on the device's side."""
    OVERHEAD = 10
    """The profiler's own work."""


DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
"""Categories of events that occupy a device."""

_TORCH_ENTRY: Final = "schemaVersion"
"""Entry that torch.profiler puts into every file, also into one without a usable event."""

NOT_RECORDED = -1
"""Stands in the integer columns for what the file does not say; in the others it is NaN."""


class DeviceWork(Record, frozen=True, kw_only=True, eq=False):
    """The m device events (kernels, copies, sets) of a trace in its order; arrays are not writeable.

    Attributes:
        event: int64, shape (m,): row of each in the trace.
        device: int64, shape (m,): number of the device, -1 if the file does not say.
        stream: int64, shape (m,): number of the stream, -1 if the file does not say.
        size_bytes: int64, shape (m,): bytes copied or set, -1 for kernels.
        blocks_per_sm: float64, shape (m,): thread blocks of a kernel by streaming multiprocessor, or NaN.
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
    """The k allocations and releases (``profile_memory=True``) in order of time; arrays are not writeable.

    Attributes:
        time_ns: int64, shape (k,): on the clock of the trace's ``begin_ns``.
        track: int32, shape (k,): host thread.
        size_bytes: int64, shape (k,): positive for an allocation, negative for a release.
        device_type: int64, shape (k,): torch's number of the device type (0 CPU, 1 CUDA, ...), -1 unknown.
        device: int64, shape (k,): number of the device, -1 for the CPU.
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
    """What a communication event says of itself (torch 2.1 and later); ``None`` is not recorded.

    Attributes:
        name: such as ``allreduce`` or ``_allgather_base``.
        group: description of the process group, or its name.
        dtype: of the elements, in torch's words.
        in_elements, out_elements: number of elements that go in and come out.
    """

    name: str | None
    group: str | None
    group_size: int | None
    dtype: str | None
    in_elements: int | None
    out_elements: int | None


class Trace(Record, frozen=True, kw_only=True, eq=False):
    """Duration events of one rank, sorted by (begin_ns, -end_ns); arrays are not writeable.

    Attributes:
        base_ns: what was subtracted from every time stamp, so that the first event begins at 0.
        begin_ns, end_ns: int64, shape (n,): half-open interval of the event, exact nanoseconds.
        category: uint8, shape (n,): :class:`Category`.
        name: int32, shape (n,): index into ``names``.
        track: int32, shape (n,): index into ``tracks`` (host thread or device stream).
        correlation: int64, shape (n,): joins a host launch to its device events, -1 without one.
        external_id: int64, shape (n,): joins device events and launches to an operator, -1 without one.
        shape: int32, shape (n,): index into ``shapes``, -1 where not recorded.
        stack: int32, shape (n,): index into ``stacks``, -1 where not recorded (torch 1 only).
        collective: int32, shape (n,): index into ``collectives``, -1 where not recorded.
        names: the distinct event names.
        tracks: the distinct (pid, tid) pairs as written in the file, as text.
        thread_names: name of a track where the file has one.
        shapes: the distinct shapes of operators' inputs with their concrete values, as JSON texts.
        stacks: the distinct call stacks, innermost frame first, separated by ``;``.
        collectives: the distinct descriptions of communication.
        metadata: the file's top-level entries other than its events.
        num_dropped: events that could not be used (no duration, negative duration, not a number).
        damage: what of the file could not be read, or is not read (begin and end events apart), one sentence
            each; empty for a whole file.
        is_cut: whether the end of the list of events is missing.
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
        """Length of each event, shape (n,)."""
        return self.end_ns - self.begin_ns

    @property
    def is_of_another_tool(self) -> bool:
        """Whether nothing says that torch.profiler wrote it: no event's category, no entry of the file."""
        return len(self) > 0 and not self.category.any() and _TORCH_ENTRY not in self.metadata

    def is_category(self, *categories: Category) -> NDArray[np.bool_]:
        """Which events are of one of the categories, shape (n,)."""
        wanted = np.zeros(256, np.bool_)
        wanted[list(categories)] = True
        return wanted[self.category]

    def is_named(self, test: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which events have a name that passes the test, shape (n,)."""
        passes = np.fromiter((test(name) for name in self.names), np.bool_, len(self.names))
        return passes[self.name]

    def name_ids(self, prefix: str) -> NDArray[np.int32]:
        return np.array([index for index, name in enumerate(self.names) if name.startswith(prefix)], np.int32)

    def name_of(self, event: int) -> str:
        name: str = self.names[self.name[event]]
        return name


class InputShapes(Record, frozen=True):
    """What an operator got (``record_shapes=True``), as JSON texts; ``concrete`` is "" before torch 2.

    Attributes:
        dims: shape of each input, ``[[32, 3, 8, 8], [], ...]``.
        concrete: value of each input that is no tensor, ``["", "[1, 1]", ...]``.
    """

    dims: str
    concrete: str = ""
