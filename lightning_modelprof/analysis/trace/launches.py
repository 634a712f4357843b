"""Launches: host cost of starting kernels, and queueing delays."""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NO_DEVICE, NotMeasured
from lightning_modelprof.analysis.pooling import Key
from lightning_modelprof.analysis.timeline.tally import Tally, add_up, by_name, distinct, share, tally_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category

SHORT_NS: Final = (5_000, 10_000)
"""Kernels of at most this length count as short: a launch takes the host about as long."""

_WAITS: Final = re.compile(
    r"(cuda|cu|hip|ze)\w*Synchronize\w*|(cuda|cu|hip)Memcpy(?!\w*Async)\w*|ur(QueueFinish|EventWait)\w*"
)
"""Runtime calls that return when the device is done: synchronization, and copies without ``Async``."""

NO_KERNELS: Final = "the trace has no kernels"
NO_RUNTIME_CALLS: Final = "the trace has no runtime calls"


class TimeSpread(Record, frozen=True, kw_only=True):
    """Distribution of some times; all but ``count`` are ``None`` without any.

    Attributes:
        median_ns: the middle one, or the mean of the two in the middle.
        p90_ns: the smallest time that at least nine tenths of the others don't exceed.
    """

    count: int
    total_ns: int | None
    avg_ns: float | None
    median_ns: float | None
    p90_ns: int | None
    max_ns: int | None
    min_ns: int | None


class KernelLaunches(Record, frozen=True, kw_only=True):
    """Launches of one rank's kernels, over the whole trace.

    Attributes:
        short: time of the kernels of at most 5 and of at most 10 microseconds.
        linked: time of the kernels with a known launching runtime call.
        shorter: time of the linked kernels whose launching call took longer than everything it launched: one
            kernel, or those of a graph together.
        calls: host time of the calls that launched kernels; a call that launched several kernels (a graph)
            counts once.
        num_graph_calls: calls that launched several.
        delay: start of each linked kernel minus end of its launching call. Negative if the kernel started
            before the call returned.
        negative_delay: the negative ones of these.
    """

    kernels: TimeSpread
    short: tuple[TimeSpread, ...]
    linked: TimeSpread
    unlinked: TimeSpread
    shorter: TimeSpread
    calls: TimeSpread
    num_graph_calls: int
    delay: TimeSpread
    negative_delay: TimeSpread

    @property
    def shorter_ratio(self) -> float | None:
        return share(self.shorter.count, self.linked.count)


class RuntimeCall(Record, frozen=True, kw_only=True):
    """All calls of one function of a device's runtime or driver.

    Attributes:
        host: host time, summed over threads.
        waits: whether it returns only when the device is done, judging by its name.
    """

    name: Key[str]
    host: Tally
    waits: bool

    @property
    def wait_ns(self) -> int | None:
        return self.host.total_ns if self.waits else None


class RuntimeCalls(Record, frozen=True, kw_only=True):
    """Calls of the devices' runtimes in the whole trace, in no particular order."""

    calls: tuple[RuntimeCall, ...]

    @property
    def host(self) -> Tally:
        return add_up(call.host for call in self.calls)

    @property
    def wait_ns(self) -> int:
        return sum(call.wait_ns or 0 for call in self.calls)


def summarize_launches(timeline: Timeline) -> KernelLaunches:
    trace = timeline.trace
    if not timeline.has_device:
        raise NotMeasured(NO_DEVICE)
    is_kernel = trace.category[trace.device.event] == Category.KERNEL
    if not is_kernel.any():
        raise NotMeasured(NO_KERNELS)
    rows = trace.device.event[is_kernel]
    call_of = timeline.launch.runtime[is_kernel]
    kernel_ns = trace.duration_ns[rows]
    is_linked = call_of >= 0
    linked_ns, linked_call = kernel_ns[is_linked], call_of[is_linked]
    delay_ns = trace.begin_ns[rows[is_linked]] - trace.end_ns[linked_call]
    calls, call = distinct(linked_call, len(trace))
    launched_ns = np.zeros(len(calls), np.int64)
    np.add.at(launched_ns, call, linked_ns)
    is_shorter = launched_ns[call] < trace.duration_ns[linked_call]
    return KernelLaunches(
        kernels=_spread(kernel_ns),
        short=tuple(_spread(kernel_ns[kernel_ns <= limit_ns]) for limit_ns in SHORT_NS),
        linked=_spread(linked_ns),
        unlinked=_spread(kernel_ns[~is_linked]),
        shorter=_spread(linked_ns[is_shorter]),
        calls=_spread(trace.duration_ns[calls]),
        num_graph_calls=int(np.count_nonzero(np.bincount(call) > 1)),
        delay=_spread(delay_ns),
        negative_delay=_spread(delay_ns[delay_ns < 0]),
    )


def summarize_runtime_calls(timeline: Timeline) -> RuntimeCalls:
    trace = timeline.trace
    rows = np.flatnonzero(trace.category == Category.RUNTIME)
    if not len(rows):
        raise NotMeasured(NO_RUNTIME_CALLS)
    names, name_of = by_name(trace, rows)
    tallies = tally_by(name_of, trace.duration_ns[rows], len(names))
    return RuntimeCalls(
        calls=tuple(
            RuntimeCall(name=name, host=host, waits=waits_for_device(name))
            for name, host in zip(names, tallies, strict=True)
        )
    )


def waits_for_device(name: str) -> bool:
    """Whether this runtime call returns only when the device is done.

    Caveats: judged by name. Other calls may wait as well: ``cudaMalloc``, ``cudaFree``, an asynchronous copy
    from or to unpinned memory, or any launch when the queue is full.
    """
    return _WAITS.fullmatch(name) is not None


def _spread(times_ns: NDArray[np.int64]) -> TimeSpread:
    if not len(times_ns):
        return TimeSpread(
            count=0, total_ns=None, avg_ns=None, median_ns=None, p90_ns=None, max_ns=None, min_ns=None
        )
    count, total_ns, in_order = len(times_ns), int(times_ns.sum()), np.sort(times_ns)
    return TimeSpread(
        count=count,
        total_ns=total_ns,
        avg_ns=total_ns / count,
        median_ns=float(in_order[(count - 1) // 2] + in_order[count // 2]) / 2,
        p90_ns=int(in_order[-((count - 1) // 10) - 1]),
        max_ns=int(in_order[-1]),
        min_ns=int(in_order[0]),
    )
