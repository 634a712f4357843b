"""Operator Summary: cost of each operator on the host and on the device, and the operators that it calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.timeline.calls import (
    NestedCalls,
    clipped_ends,
    find_calls,
    self_times,
    thread_label,
)
from lightning_modelprof.analysis.timeline.nesting import nearest_ancestor
from lightning_modelprof.analysis.timeline.tally import (
    Groups,
    Tally,
    by_name,
    distinct,
    sum_by,
    tally,
    tally_by,
)
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.operator_costs import (
    Child,
    Operator,
    OperatorMemory,
    callers_of,
    flops_of_calls,
    modules_of,
)
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import NOT_RECORDED, Category, Trace

_NO_OPERATORS: Final = "the trace has no operators (record them with ProfilerActivity.CPU)"


_Labels = tuple[Sequence[str], NDArray[np.int64]]
"""Texts, and each call's index into them, -1 without one."""


class OperatorThread(Record, frozen=True, kw_only=True):
    """The operators of one host thread.

    Attributes:
        host_ns: time in which any operator was running.
        operators: one per name, in no particular order.
        by_shape: one per name and input shape, in no particular order; empty if no shapes were recorded.
    """

    name: str
    host_ns: int
    operators: tuple[Operator, ...]
    by_shape: tuple[Operator, ...]


class Operators(Record, frozen=True, kw_only=True):
    """Operators of one trace.

    Attributes:
        threads: at least one.
        host_self_ns: sum of the operators' self times: the threads' time in an operator and not in a runtime
            call inside it.
        device_ns: summed time of all device events; ``None`` without any.
        not_launched: device events that no operator launched.
    """

    threads: tuple[OperatorThread, ...]
    host_self_ns: int
    device_ns: int | None
    not_launched: Tally
    has_shapes: bool
    has_modules: bool
    has_callers: bool
    has_memory: bool = False


def summarize_operators(timeline: Timeline) -> Operators:
    """Add up the operators by thread and name, and by thread, name and input shape.

    Source: self and total times are those of the Operator view of torch_tb_profiler (pytorch/kineto,
    ``tb_plugin``, removed in 2026), except for calls inside one of the same name, which it mostly counted
    twice.
    """
    if not timeline.is_operator.any():
        raise NotMeasured(_NO_OPERATORS)
    trace = timeline.trace
    sums = _Sums(timeline)
    calls = sums.calls
    tracks, track = distinct(calls.track, len(trace.tracks))
    texts, name = by_name(trace, calls.row)
    operators = _by_thread(sums, (track, len(tracks)), (name, texts), None)
    dims, shape = _shapes(trace, calls)
    by_shape = _by_thread(sums, (track, len(tracks)), (name, texts), (shape, dims)) if dims else None
    is_outer = calls.parent < 0
    host_ns = sum_by(track[is_outer], calls.duration_ns[is_outer], len(tracks)).tolist()
    durations_ns = trace.duration_ns[trace.device.event]
    return Operators(
        threads=tuple(
            OperatorThread(
                name=thread_label(trace, one),
                host_ns=host_ns[place],
                operators=tuple(operators[place]),
                by_shape=tuple(by_shape[place]) if by_shape else (),
            )
            for place, one in enumerate(tracks.tolist())
        ),
        host_self_ns=int(sums.self_ns.sum()),
        device_ns=int(durations_ns.sum()) if timeline.has_device else None,
        not_launched=tally(durations_ns[calls.launched_by < 0]),
        has_shapes=bool(dims),
        has_modules=sums.modules is not None,
        has_callers=sums.callers is not None,
        has_memory=sums.memory.is_known,
    )


def _shapes(trace: Trace, calls: NestedCalls) -> tuple[list[str], NDArray[np.int64]]:
    """Texts of the shapes, empty if no operator has one, and each call's index, -1 without one."""
    if (trace.shape[calls.row] == NOT_RECORDED).all():
        return [], np.zeros(0, np.int64)
    place: dict[str, int] = {}
    of_shape = [place.setdefault(shapes.dims, len(place)) for shapes in trace.shapes]
    return list(place), np.array([*of_shape, -1], np.int64)[trace.shape[calls.row]]


def _by_thread(
    sums: _Sums,
    threads: tuple[Groups, int],
    names: tuple[Groups, list[str]],
    shapes: tuple[Groups, list[str]] | None,
) -> list[list[Operator]]:
    """Operators of each thread, by name or by name and shape.

    Args:
        threads: each call's thread number, and the number of threads.
        names: each call's name number, and the names.
        shapes: each call's shape number, -1 without one, and the shapes; ``None`` to group by name alone.
    """
    track, num_threads = threads
    name, texts = names
    shape, dims = shapes if shapes is not None else (np.full(len(name), -1, np.int64), [])
    width = len(dims) + 1
    keys, group = distinct((track * len(texts) + name) * width + shape + 1, num_threads * len(texts) * width)
    labels = [
        (texts[key // width % len(texts)], dims[key % width - 1] if key % width else None)
        for key in keys.tolist()
    ]
    has_details = shapes is None
    operators = sums.operators(
        group,
        labels,
        sums.children(group, len(labels), name, texts) if has_details else [{} for _ in labels],
        sums.kernels(group, len(labels)) if has_details else [{} for _ in labels],
    )
    found: list[list[Operator]] = [[] for _ in range(num_threads)]
    for key, operator in zip(keys.tolist(), operators, strict=True):
        found[key // width // len(texts)].append(operator)
    return found


class _Sums:
    """A trace's operator calls, for summing by any grouping."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        end_ns = clipped_ends(timeline)
        self.calls = find_calls(timeline, timeline.is_operator, end_ns, timeline.launch.operator)
        self.self_ns = _self_ns(timeline, end_ns)
        self.flops, self.pair = flops_of_calls(timeline.trace, self.calls)
        is_known = self.pair >= 0
        is_inside = nearest_ancestor(self.calls.parent, is_known) >= 0
        self.is_counted = is_known & ~is_inside  # the outermost calls with known operations
        self.is_uncounted = ~is_known & ~is_inside
        self.memory = OperatorMemory(timeline, self.calls, end_ns)
        self.modules = modules_of(timeline, self.calls.row)
        self.callers = callers_of(timeline, self.calls.row)

    def operators(
        self,
        group: Groups,
        labels: list[tuple[str, str | None]],
        children: list[dict[str, Child]],
        kernels: list[dict[str, Tally]],
    ) -> list[Operator]:
        """One operator per group; ``group`` is the number of each call's group, shape (k,)."""
        size = len(labels)
        is_outer = self.calls.is_outermost(group)
        calls = np.bincount(group, minlength=size).tolist()
        host = tally_by(group[is_outer], self.calls.duration_ns[is_outer], size)
        host_self_ns = sum_by(group, self.self_ns, size).tolist()
        device = self._device(group, is_outer, size)
        device_self_ns = sum_by(group, self.calls.device_self_ns, size).tolist()
        has_device = self.timeline.has_device
        counted = np.flatnonzero(self.is_counted)
        pairs = _sum_labels(group[counted], self.pair[counted], None, size, range(len(self.flops)))
        num_uncounted = np.bincount(group[self.is_uncounted], minlength=size).tolist()
        modules = self._label_sums(self.modules, group, self.calls.duration_ns, size)
        callers = self._label_sums(self.callers, group, None, size)
        memory = self.memory.changes(group, is_outer, size)
        return [
            Operator(
                name=name,
                shape=shape,
                calls=calls[one],
                host=host[one],
                host_self_ns=host_self_ns[one],
                device=device[one],
                device_self_ns=device_self_ns[one] if has_device else None,
                counted_flops=sum(number * self.flops[pair] for pair, number in pairs[one].items()),
                num_counted=sum(pairs[one].values()),
                num_uncounted=num_uncounted[one],
                memory=memory[one],
                modules=modules[one],
                callers=callers[one],
                children=children[one],
                kernels=kernels[one],
            )
            for one, (name, shape) in enumerate(labels)
        ]

    def children(self, group: Groups, size: int, name: Groups, texts: list[str]) -> list[dict[str, Child]]:
        inner = np.flatnonzero(self.calls.parent >= 0)
        outer_group = group[self.calls.parent[inner]]
        keys, pair_of_inner = distinct(outer_group * len(texts) + name[inner], size * len(texts))
        pair = np.full(len(self.calls), len(keys), np.int64)  # all outermost calls form a last pair
        pair[inner] = pair_of_inner
        is_outer = self.calls.is_outermost(pair)
        calls = np.bincount(pair, minlength=len(keys)).tolist()
        host = tally_by(pair[is_outer], self.calls.duration_ns[is_outer], len(keys) + 1)
        device = self._device(pair, is_outer, len(keys) + 1)
        kernels = self.kernels(pair, len(keys) + 1)
        found: list[dict[str, Child]] = [{} for _ in range(size)]
        for one, key in enumerate(keys.tolist()):
            child = texts[key % len(texts)]
            found[key // len(texts)][child] = Child(
                name=child, calls=calls[one], host=host[one], device=device[one], kernels=kernels[one]
            )
        return found

    def kernels(self, group: Groups, size: int) -> list[dict[str, Tally]]:
        trace = self.timeline.trace
        launched = np.flatnonzero(self.calls.launched_by >= 0)
        event = trace.device.event[launched]
        names, name = by_name(trace, event)
        keys, place = distinct(group[self.calls.launched_by[launched]] * len(names) + name, size * len(names))
        found: list[dict[str, Tally]] = [{} for _ in range(size)]
        tallies = tally_by(place, trace.duration_ns[event], len(keys))
        for key, one in zip(keys.tolist(), tallies, strict=True):
            found[key // len(names)][names[key % len(names)]] = one
        return found

    def _device(self, group: Groups, is_outer: NDArray[np.bool_], size: int) -> Sequence[Tally | None]:
        if not self.timeline.has_device:
            return [None] * size
        return tally_by(group[is_outer], self.calls.device_total_ns[is_outer], size)

    def _label_sums(
        self, labels: _Labels | None, group: Groups, values: NDArray[np.int64] | None, size: int
    ) -> list[dict[str, int]]:
        """Sum of the values by group and text; without values, the number of calls."""
        if labels is None:
            return [{} for _ in range(size)]
        texts, label = labels
        known = np.flatnonzero(label >= 0)
        sums = _sum_labels(
            group[known], label[known], None if values is None else values[known], size, range(len(texts))
        )
        return [{texts[one]: number for one, number in found.items()} for found in sums]


def _sum_labels(
    group: Groups, label: Groups, values: NDArray[np.int64] | None, size: int, labels: range
) -> list[dict[int, int]]:
    """Sum of the values by group and label; without values, the number of elements."""
    found: list[dict[int, int]] = [{} for _ in range(size)]
    if not len(labels):
        return found
    keys, place = distinct(group * len(labels) + label, size * len(labels))
    sums = sum_by(place, np.ones(len(place), np.int64) if values is None else values, len(keys))
    for key, number in zip(keys.tolist(), sums.tolist(), strict=True):
        found[key // len(labels)][key % len(labels)] = number
    return found


def _self_ns(timeline: Timeline, end_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Duration of each call without operators and runtime calls directly inside it, shape (k,)."""
    is_taken = timeline.is_operator | (timeline.trace.category == Category.RUNTIME)
    rows, self_ns = self_times(timeline, is_taken, end_ns)
    return self_ns[timeline.is_operator[rows]]  # the calls are in the same order
