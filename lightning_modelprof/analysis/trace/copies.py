"""Memory Manipulation Summary: copies and sets of device memory, by kind."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NO_DEVICE, NotMeasured
from lightning_modelprof.analysis.pooling import Key
from lightning_modelprof.analysis.timeline.intervals import different
from lightning_modelprof.analysis.timeline.tally import (
    Groups,
    Tally,
    by_name,
    sum_by,
    tally_by,
)
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.kernels import LaunchingOperators, launching_operators
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category

Memory = Literal["pageable", "pinned", "managed", "device"]

_NO_COPIES: Final = "the trace has GPU events but no memory copies or sets"

_SLOWEST_FIRST: Final[tuple[Memory, ...]] = ("pageable", "pinned", "managed", "device")


class CopyKind(Record, frozen=True, kw_only=True):
    """All copies or sets of one kind, such as ``Memcpy HtoD (Pageable -> Device)``.

    Attributes:
        tally: calls and their time on the device; those that overlap are added up.
        num_sized: calls for which a number of bytes was recorded.
        size_bytes: bytes of those calls together; ``None`` when there are none.
        sized_ns: time of those calls together.
        host: calls of the runtime that launched them, each once, and the host's time in them; a call that
            launches several kinds (a CUDA graph) counts for each. No calls when none is known.
    """

    name: Key[str]
    tally: Tally
    num_sized: int
    size_bytes: int | None
    sized_ns: int
    host: Tally
    operators: LaunchingOperators

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes by time on the device; ``None`` without bytes or time."""
        if self.size_bytes is None or not self.sized_ns:
            return None
        return self.size_bytes * 1e9 / self.sized_ns

    @property
    def memory(self) -> Memory | None:
        """The memory that the kind's name tells of, on the host if either end is there."""
        return memory_of(self.name)


class Copies(Record, frozen=True, kw_only=True):
    """All copies and sets of a trace, or of several ranks together, by kind.

    Attributes:
        kinds: in no order.
        device_total_ns: time of all device events, kernels too; those that overlap are added up.
    """

    kinds: tuple[CopyKind, ...]
    device_total_ns: int


def memory_of(name: str) -> Memory | None:
    """The memory in the brackets of an event's name, the slower one of two.

    Returns:
        ``None`` when the name does not tell: ROCm writes ``Host`` for pageable and pinned memory alike.
    """
    _, _, inside = name.lower().partition("(")
    ends = [end.strip(" )") for end in inside.split("->")]
    for memory in _SLOWEST_FIRST[:-1]:
        if any(end.startswith(memory) for end in ends):
            return memory
    return "device" if all(end.startswith(("device", "array")) for end in ends) else None


def summarize_copies(timeline: Timeline) -> Copies:
    """Add up the device's copies and sets of each kind, also of those that ran outside the steps."""
    trace, device = timeline.trace, timeline.trace.device
    category = trace.category[device.event]
    chosen = np.flatnonzero((category == Category.MEMCPY) | (category == Category.MEMSET))
    if not len(chosen):
        raise NotMeasured(_NO_COPIES if timeline.has_device else NO_DEVICE)
    rows = device.event[chosen]
    names, group = by_name(trace, rows)
    size = len(names)
    duration_ns = trace.duration_ns[rows]
    sized = np.flatnonzero(device.size_bytes[chosen] >= 0)
    num_sized = np.bincount(group[sized], minlength=size)
    size_bytes = sum_by(group[sized], device.size_bytes[chosen[sized]], size)
    sized_ns = sum_by(group[sized], duration_ns[sized], size)
    tallies = tally_by(group, duration_ns, size)
    host = _launching_calls(timeline, chosen, group, size)
    operators = launching_operators(timeline, chosen, group, size)
    return Copies(
        kinds=tuple(
            CopyKind(
                name=name,
                tally=tallies[number],
                num_sized=int(num_sized[number]),
                size_bytes=int(size_bytes[number]) if num_sized[number] else None,
                sized_ns=int(sized_ns[number]),
                host=host[number],
                operators=operators[number],
            )
            for number, name in enumerate(names)
        ),
        device_total_ns=int(trace.duration_ns[device.event].sum()),
    )


def _launching_calls(timeline: Timeline, chosen: NDArray[np.intp], group: Groups, size: int) -> list[Tally]:
    """The runtime's calls that launched the device events of each group, each once."""
    trace = timeline.trace
    runtime = timeline.launch.runtime[chosen]
    known = np.flatnonzero(runtime >= 0)
    pairs = different(group[known] * len(trace) + runtime[known])
    number, call = np.divmod(pairs, max(len(trace), 1))
    return tally_by(number, trace.duration_ns[call], size)
