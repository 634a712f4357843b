"""Times between two marks on a device's stream, and waiting for a device.

A device works behind the host's back. A host clock around a model's call therefore sees how long the launches
took; a host clock with a wait on either side sees the device's time but stops the host; device events see the
device's time and stop nobody.
"""

from __future__ import annotations

from array import array
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_modelprof.errors import ConfigError
from lightning_modelprof.measure.clock import DeviceClock, device_clock


def wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done all its work; there is none to wait for on the CPU."""
    if device.type == "cpu":
        return
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
    if synchronize is None:
        raise ConfigError(
            f"{device}: expected a device that torch.{device.type} can wait for, got one it cannot."
        )
    if device.type == "mps":
        synchronize()
    else:
        synchronize(device)


class DeviceSpans:
    """Times between two marks on a device's stream, read when the device has passed them.

    Args:
        device: one that has events.

    Raises:
        ConfigError: when it is not there or has none.
    """

    def __init__(self, device: torch.device) -> None:
        clock = device_clock(device)
        if clock is None:
            raise ConfigError(
                f"{device}: expected a CUDA, XPU or MPS device, got one without device events."
                " Use EventTimer('cpu') or method='wall' for the host clock, or method='synchronize'."
            )
        if device.type != "cpu" and not getattr(torch, device.type).is_available():
            raise ConfigError(f"{device}: expected a device of this machine, got none of that kind.")
        self._device = device
        self._clock: DeviceClock = clock
        self._pending: deque[tuple[Any, Any, array[int]]] = deque()

    def mark(self) -> Any:
        """A mark on the device's current stream, whichever device is current."""
        with self._current_device():
            return self._clock.mark()

    def close(self, begin: Any, into: array[int]) -> None:
        """Ends at a mark of now; the time goes ``into`` the list once it is known."""
        self._pending.append((begin, self.mark(), into))
        self.collect()

    def collect(self) -> None:
        """Reads the spans that the device has passed; does not wait."""
        pending, clock = self._pending, self._clock
        while pending:
            begin, end, into = pending[0]
            if not clock.is_reached(end):
                return
            elapsed_ns = clock.elapsed_ns(begin, end)
            if elapsed_ns is None:  # the mark of another stream, which is behind
                return
            pending.popleft()
            clock.release(begin)
            clock.release(end)
            if elapsed_ns >= 0:  # marks of streams that overtook each other tell nothing
                into.append(elapsed_ns)

    def finish(self) -> None:
        """Reads all spans; waits for the device once if it is not there yet."""
        self.collect()
        if self._pending:
            wait_for(self._device)
        while self._pending:
            self.collect()
            if self._pending:  # marks that cannot be compared: not measured
                self._pending.popleft()

    def _current_device(self) -> AbstractContextManager[Any]:
        if self._device.index is None or self._device.type not in {"cuda", "xpu"}:
            return nullcontext()
        guard: AbstractContextManager[Any] = getattr(torch, self._device.type).device(self._device)
        return guard
