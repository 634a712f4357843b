"""By how much the memory in use changed while each call of an operator ran."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.enclosing import innermost_at
from lightning_modelprof.analysis.grouping import Groups
from lightning_modelprof.analysis.nested_calls import NestedCalls
from lightning_modelprof.analysis.operator_tally import MemoryChange
from lightning_modelprof.analysis.timeline.tally import sum_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.memory import CPU


class OperatorMemory:
    """Charges each allocation and release to the innermost call around it on its thread.

    Source: ``cpu_memory_usage`` and ``self_cpu_memory_usage`` of torch.autograd.profiler_util, and those of
    devices; but a call inside one of the same name counts once in the total, as its time does.

    Args:
        timeline: of the trace.
        calls: its operators.
        end_ns: the ends of all events by ``enclosing.clipped_ends``.
    """

    def __init__(self, timeline: Timeline, calls: NestedCalls, end_ns: NDArray[np.int64]) -> None:
        events = timeline.trace.allocations
        index = np.full(len(timeline.trace) + 1, -1, np.int64)  # the last one stands for no event
        index[calls.row] = np.arange(len(calls))
        payer = index[innermost_at(timeline, events.track, events.time_ns, timeline.is_operator, end_ns)]
        self.is_known = bool(len(events))
        self._self_bytes: list[NDArray[np.int64]] = []
        self._bytes: list[NDArray[np.int64]] = []
        is_host = events.device_type == CPU
        for is_there in (is_host, ~is_host):
            own = (payer >= 0) & is_there
            self_bytes = sum_by(payer[own], events.size_bytes[own], len(calls))
            before = np.concatenate((np.zeros(1, np.int64), np.cumsum(self_bytes)))
            self._self_bytes.append(self_bytes)
            self._bytes.append(before[calls.stop] - before[:-1])

    def changes(self, group: Groups, is_outer: NDArray[np.bool_], size: int) -> list[MemoryChange | None]:
        """What the calls of each group changed.

        Args:
            group: number of each call's group.
            is_outer: which calls are in no other one of their group.
            size: number of groups.
        """
        if not self.is_known:
            return [None] * size
        columns = []
        for whole, own in zip(self._bytes, self._self_bytes, strict=True):
            columns += [sum_by(group[is_outer], whole[is_outer], size), sum_by(group, own, size)]
        return [MemoryChange(*row) for row in np.stack(columns, axis=1).tolist()]
