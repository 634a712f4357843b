"""Measure time between two marks on a device's stream, and wait for a device.

A device works asynchronously. A CPU clock around a model's call therefore measures only the launches; with a
wait on either side it measures the device's time but blocks the CPU; device events measure the device's time
and block nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Any, Final, Literal, get_args

import numpy as np
import torch

from lightning_modelprof.errors import ConfigError, quoted
from lightning_modelprof.measure.clock import DeviceClock, device_clock
from lightning_modelprof.record import Record


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done all its work; return immediately on the CPU."""
    if device.type == "cpu":
        return
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
    if synchronize is None:
        raise ConfigError(f"{device}: torch.{device.type} can't wait for this device.")
    if device.type == "mps":
        synchronize()
    else:
        synchronize(device)


class DeviceSpans:
    """Time between two marks on a device's stream, read once the device has passed them.

    Args:
        device: one with events.

    Raises:
        ConfigError: when it doesn't exist or has no events.
    """

    def __init__(self, device: torch.device) -> None:
        clock = device_clock(device)
        if clock is None:
            raise ConfigError(
                f"{device}: expected a CUDA, XPU or MPS device, got one without device events."
                " Use EventTimer('cpu') or method='wall' for the CPU clock, or method='synchronize'."
            )
        if device.type != "cpu" and not getattr(torch, device.type).is_available():
            raise ConfigError(f"{device}: this machine has no such device.")
        self._device = device
        self._clock: DeviceClock = clock
        self._pending: deque[tuple[Any, Any, array[int]]] = deque()

    def mark(self) -> Any:
        """Record a mark on this device's current stream, even if another device is current."""
        with self._current_device():
            return self._clock.mark()

    def close(self, begin: Any, into: array[int]) -> None:
        """End a span now; its time is appended to ``into`` once known."""
        self._pending.append((begin, self.mark(), into))
        self.collect()

    def collect(self) -> None:
        """Read the spans that the device has passed, without waiting."""
        pending, clock = self._pending, self._clock
        while pending:
            begin, end, into = pending[0]
            if not clock.is_reached(end):
                return
            elapsed_ns = clock.elapsed_ns(begin, end)
            if elapsed_ns is None:  # the mark of another stream that is behind
                return
            pending.popleft()
            clock.release(begin)
            clock.release(end)
            if elapsed_ns >= 0:  # meaningless if the streams overtook each other
                into.append(elapsed_ns)

    def finish(self) -> None:
        """Read all spans; wait for the device once if necessary."""
        self.collect()
        if self._pending:
            wait_for(self._device)
        while self._pending:
            self.collect()
            if self._pending:  # marks that can't be compared aren't measured
                self._pending.popleft()

    def _current_device(self) -> AbstractContextManager[Any]:
        if self._device.index is None or self._device.type not in {"cuda", "xpu"}:
            return nullcontext()
        guard: AbstractContextManager[Any] = getattr(torch, self._device.type).device(self._device)
        return guard


Method = Literal["event", "synchronize", "wall"]


METHODS: Final = get_args(Method)


class Spread(Record, frozen=True, kw_only=True):
    """The distribution of repeated timings, in ns.

    Attributes:
        avg_ns: Mean.
        p50_ns: Median. Percentiles are interpolated linearly between the two nearest values.
        p90_ns: 90th percentile.
        p99_ns: 99th percentile.
        min_ns: Shortest.
        max_ns: Longest.
    """

    avg_ns: float
    p50_ns: float
    p90_ns: float
    p99_ns: float
    min_ns: int
    max_ns: int


class InferenceTimes(Spread, frozen=True, kw_only=True):
    """The result of ``benchmark_inference``; the distribution is over single runs.

    Attributes:
        method: ``event``, ``synchronize`` or ``wall``.
        device: Where the model ran.
        runs: Number of timed runs.
        samples_per_s: Samples per run divided by ``avg_ns``. ``None`` if the sample count is unknown, or with
            ``wall`` on a GPU, where ``avg_ns`` only covers the launches.
        tokens_per_s: Tokens per run divided by ``avg_ns``; ``None`` in the same cases.
        real_ns: CPU clock over all timed runs, including the wait for the device at the end.
        user_ns: CPU time of all threads in user code during the timed runs.
        system_ns: CPU time of all threads in the kernel during the timed runs.
    """

    method: Method
    device: str
    runs: int
    samples_per_s: float | None
    tokens_per_s: float | None
    real_ns: int
    user_ns: int
    system_ns: int

    @property
    def fps(self) -> float | None:
        """Frames per second, the same as ``samples_per_s`` if a sample is an image."""
        return self.samples_per_s


class StageTimes(Record, frozen=True, kw_only=True):
    """One stage's times from ``EventTimer``, including nested stages.

    Attributes:
        name: The stage's name.
        calls: Number of calls.
        real: CPU clock from the stage's start to its end. On a GPU this covers launches and CPU work, not the
            model's device time.
        device: Elapsed time on the device's stream, including the device's waits for the CPU. ``None`` on the
            CPU, or if no call could be measured.
        device_calls: Number of calls that ``device`` covers.
        user_ns: CPU time of all threads in user code, over all calls.
        system_ns: CPU time of all threads in the kernel, over all calls.
    """

    name: str
    calls: int
    real: Spread
    device: Spread | None
    device_calls: int
    user_ns: int
    system_ns: int


def spread_of(times_ns: array[int]) -> dict[str, Any]:
    """The fields of ``Spread``."""
    values = np.array(times_ns, dtype=np.int64)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return {
        "avg_ns": float(values.mean()),
        "p50_ns": p50,
        "p90_ns": p90,
        "p99_ns": p99,
        "min_ns": int(values.min()),
        "max_ns": int(values.max()),
    }


def whole_number(function: str, name: str, value: Any, at_least: int) -> int:
    """Check a function's whole-number argument.

    Raises:
        ConfigError: when it isn't a whole number or is too small.
    """
    try:
        number = index(value)
    except TypeError:
        number = at_least - 1
    if isinstance(value, bool | torch.Tensor) or number < at_least:
        raise ConfigError(
            f"{function}({name}): expected a whole number of at least {at_least}, got {quoted(value)}."
        )
    return number


def per_second(count: int | None, avg_ns: float) -> float | None:
    """Rate of ``count`` per ``avg_ns``; ``None`` if it's unknown or no time passed."""
    return None if count is None or avg_ns <= 0 else count * 1e9 / avg_ns
