"""Device Summary: utilization of the host's processors and of each device.

Source of the device figures: the Overview of torch_tb_profiler (pytorch/kineto, ``tb_plugin``, removed in
2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.timeline.calls import Covers, busy_ns, covered_time
from lightning_modelprof.analysis.timeline.intervals import Intervals, different, length, union
from lightning_modelprof.analysis.timeline.names import uses_tensor_cores
from lightning_modelprof.analysis.timeline.tally import by_name, share
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.analysis.trace.kernels import (
    DeviceProperties,
    amount,
    device_properties,
    tell_tensor_cores,
    whole,
)
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from lightning_modelprof.trace.model import Category, Trace

_NO_DEVICES: Final = "the trace has neither GPU events nor CPU times (ModelProfCallback records CPU times)"

_FULL: Final = 1 << 40
"""All multiprocessors of a device, in parts: integers, so that the sweep doesn't drift."""


class HostUsage(Record, frozen=True, kw_only=True):
    """Processor utilization over the window, as fractions.

    Attributes:
        process: CPU time of the training process over elapsed time, so 1 is one core; ``None`` if unreadable.
        workers: the same for its children, e.g. DataLoader workers; ``None`` if unreadable.
        system: busy share of all cores of the machine, by any process; ``None`` if unreadable.
        num_cpus: cores of the machine; ``None`` if unknown.
    """

    process: float | None
    workers: float | None
    system: float | None
    num_cpus: int | None


class OneDevice(Record, frozen=True, kw_only=True):
    """Utilization of one device over the window's span, as fractions; ``None`` means not measured.

    Attributes:
        utilization: share of the span in which a kernel runs; ``None`` in an empty span.
        busy: share of the span in :func:`busy_time`; ``None`` in an empty span.
        sm_efficiency: mean over the span of the share of multiprocessors with a thread block: at each instant
            the smaller of 1 and the sum of the running kernels' blocks per multiprocessor. ``None`` if there
            are kernels and none has that number.
        sm_unknown: share of the kernels' time without that number, which counts as 0.
        occupancy: mean of the profiler's estimate of the achieved occupancy, weighted by the kernels' time in
            the span; idle time doesn't count. ``None`` if no kernel has one.
        occupancy_zero: share of that time with an estimate of 0; ``None`` if no kernel has one.
        tensor_cores: share of kernels on tensor cores in the time of all kernels that could be classified;
            ``None`` if there are none, and for devices without tensor cores.
        tensor_unknown: share of the kernels' time in the span that couldn't be classified; ``None`` without
            kernels, and for devices without tensor cores.
        number, name, memory_bytes, compute_capability: of the device; ``None`` if not in the file.
    """

    number: int | None
    utilization: float | None
    busy: float | None
    sm_efficiency: float | None
    sm_unknown: float | None
    occupancy: float | None
    occupancy_zero: float | None
    tensor_cores: float | None
    tensor_unknown: float | None
    name: str | None
    memory_bytes: int | None
    compute_capability: str | None


class DeviceUsage(Record, frozen=True, kw_only=True):
    """Utilization of one rank's processors and devices.

    Attributes:
        host: ``None`` if the trace has no processor times.
        devices: those with device events, by number.
        span: start and end of the time that the devices' figures cover; ``None`` without devices. Gaps
            between kept steps that aren't consecutive don't count.
        covers: what that time spans; ``None`` without devices.
        covered_ns: its length; 0 without devices.
    """

    host: HostUsage | None
    devices: tuple[OneDevice, ...]
    span: tuple[int, int] | None
    covers: Covers | None
    covered_ns: int = 0
    notes: tuple[str, ...] = ()


def summarize_device_usage(timeline: Timeline) -> DeviceUsage:
    """Measure the processors over the window, and each device from the first kept step to the last."""
    trace = timeline.trace
    host = _host_usage(trace.metadata)
    covered = covered_time(timeline)
    if covered is None or not timeline.has_device:
        if host is None:
            raise NotMeasured(_NO_DEVICES)
        return DeviceUsage(host=host, devices=(), span=None, covers=None)
    on_tensor_cores = _on_tensor_cores(trace) if tell_tensor_cores(trace) else None
    properties = device_properties(trace)
    devices = tuple(
        _one_device(
            timeline,
            number,
            covered.intervals,
            on_tensor_cores,
            properties.get(number, DeviceProperties()),
        )
        for number in different(trace.device.device).tolist()
    )
    notes = () if timeline.bounds is None else timeline.bounds.notes
    return DeviceUsage(
        host=host,
        devices=devices,
        span=timeline.span or timeline.device_span,
        covers=covered.kind,
        covered_ns=covered.total_ns,
        notes=notes,
    )


def joined_time(time_ns: NDArray[np.int64], stretches: Intervals) -> NDArray[np.int64]:
    """Nanoseconds of the stretches, an interval set, that have passed at each moment, shape (n,)."""
    if not len(stretches):
        return np.zeros_like(time_ns)
    lasts_ns = stretches[:, 1] - stretches[:, 0]
    index = np.maximum(np.searchsorted(stretches[:, 0], time_ns, side="right") - 1, 0)
    passed_ns = np.clip(time_ns - stretches[index, 0], 0, lasts_ns[index])
    joined: NDArray[np.int64] = (np.cumsum(lasts_ns) - lasts_ns)[index] + passed_ns
    return joined


def integrate_capped(
    begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64], shares: NDArray[np.float64]
) -> float:
    """Integral, in nanoseconds, of the smaller of 1 and the sum of the shares at each instant.

    Args:
        begin_ns: start of each interval, shape (n,), in any order.
        end_ns: end of each interval, shape (n,), not before its start.
        shares: shape (n,), not negative.
    """
    parts = np.rint(np.minimum(shares, 1.0) * _FULL).astype(np.int64)
    time_ns = np.concatenate((begin_ns, end_ns))
    order = np.argsort(time_ns, kind="stable")
    level = np.minimum(np.cumsum(np.concatenate((parts, -parts))[order]), _FULL)
    return float((level[:-1] / _FULL * np.diff(time_ns[order])).sum())


def _on_tensor_cores(trace: Trace) -> NDArray[np.float64]:
    """1 for device events on tensor cores, 0 for others, NaN if unknown, shape (m,)."""
    names, place = by_name(trace, trace.device.event)
    told = [uses_tensor_cores(name) for name in names]
    return np.array([np.nan if one is None else float(one) for one in told], np.float64)[place]


def _one_device(
    timeline: Timeline,
    number: int,
    stretches: Intervals,
    on_tensor_cores: NDArray[np.float64] | None,
    properties: DeviceProperties,
) -> OneDevice:
    """Utilization of one device; ``on_tensor_cores`` is ``None`` for devices without tensor cores."""
    trace, device = timeline.trace, timeline.trace.device
    all_begin_ns = joined_time(trace.begin_ns[device.event], stretches)
    all_end_ns = joined_time(trace.end_ns[device.event], stretches)
    work = np.flatnonzero((device.device == number) & (all_begin_ns < all_end_ns))
    kernel = work[trace.category[device.event[work]] == Category.KERNEL]
    begin_ns, end_ns = all_begin_ns[kernel], all_end_ns[kernel]
    time_ns = end_ns - begin_ns
    kernel_ns, span_ns = int(time_ns.sum()), length(stretches)
    blocks, occupancy = device.blocks_per_sm[kernel], device.occupancy[kernel]
    counted, rated = np.isfinite(blocks) & (blocks >= 0), np.isfinite(occupancy)
    rated_ns = int(time_ns[rated].sum())
    on_cores = np.full(len(kernel), np.nan) if on_tensor_cores is None else on_tensor_cores[kernel]
    told_ns = int(time_ns[~np.isnan(on_cores)].sum())
    working_ns = integrate_capped(begin_ns[counted], end_ns[counted], blocks[counted])
    return OneDevice(
        number=number if number >= 0 else None,
        utilization=share(length(union(begin_ns, end_ns)), span_ns),
        busy=share(busy_ns(timeline, number, stretches), span_ns),
        sm_efficiency=share(working_ns, span_ns) if counted.any() or not kernel_ns else None,
        sm_unknown=share(int(time_ns[~counted].sum()), kernel_ns),
        occupancy=share(float((occupancy[rated] * time_ns[rated]).sum()), rated_ns),
        occupancy_zero=share(int(time_ns[occupancy == 0].sum()), rated_ns),
        tensor_cores=share(int(time_ns[on_cores == 1].sum()), told_ns),
        tensor_unknown=None if on_tensor_cores is None else share(kernel_ns - told_ns, kernel_ns),
        name=properties.name,
        memory_bytes=properties.memory_bytes,
        compute_capability=properties.compute_capability,
    )


def _host_usage(metadata: Mapping[str, Any]) -> HostUsage | None:
    ours = metadata.get(TRACE_METADATA_KEY)
    cpu = ours.get("cpu") if isinstance(ours, dict) else None
    if not isinstance(cpu, dict):
        return None
    elapsed_ns = amount(cpu.get("elapsed_ns"))
    return HostUsage(
        process=share(amount(cpu.get("process_ns")), elapsed_ns),
        workers=share(amount(cpu.get("workers_ns")), elapsed_ns),
        system=share(amount(cpu.get("system_busy_ns")), amount(cpu.get("system_total_ns"))),
        num_cpus=whole(cpu.get("num_cpus")) or None,
    )
