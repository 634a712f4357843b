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
    """All copies or sets of one kind, e.g. ``Memcpy HtoD (Pageable -> Device)``.

    Attributes:
        tally: calls and their time on the device; overlapping ones are added up.
        num_sized: calls with a recorded size.
        size_bytes: total bytes of those calls; ``None`` without any.
        sized_ns: total time of those calls.
        host: the launching runtime calls, each once, and their host time; a call that launches several kinds
            (a CUDA graph) counts for each. Empty if none is known.
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
        """Bytes over device time; ``None`` without bytes or time."""
        if self.size_bytes is None or not self.sized_ns:
            return None
        return self.size_bytes * 1e9 / self.sized_ns

    @property
    def memory(self) -> Memory | None:
        """Memory kind in the name: the host's if either end is there."""
        return memory_of(self.name)


class Copies(Record, frozen=True, kw_only=True):
    """All copies and sets of a trace, or of several ranks together, by kind.

    Attributes:
        kinds: in no particular order.
        device_total_ns: time of all device events, including kernels; overlapping ones are added up.
    """

    kinds: tuple[CopyKind, ...]
    device_total_ns: int


def memory_of(name: str) -> Memory | None:
    """Memory kind in the parentheses of an event's name, the slower of two.

    Returns:
        ``None`` if the name doesn't have it: ROCm writes ``Host`` for both pageable and pinned memory.
    """
    _, _, inside = name.lower().partition("(")
    ends = [end.strip(" )") for end in inside.split("->")]
    for memory in _SLOWEST_FIRST[:-1]:
        if any(end.startswith(memory) for end in ends):
            return memory
    return "device" if all(end.startswith(("device", "array")) for end in ends) else None


def summarize_copies(timeline: Timeline) -> Copies:
    """Add up the device's copies and sets of each kind, including those outside steps."""
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
    """Runtime calls that launched each group's device events, each once."""
    trace = timeline.trace
    runtime = timeline.launch.runtime[chosen]
    known = np.flatnonzero(runtime >= 0)
    pairs = different(group[known] * len(trace) + runtime[known])
    number, call = np.divmod(pairs, max(len(trace), 1))
    return tally_by(number, trace.duration_ns[call], size)
