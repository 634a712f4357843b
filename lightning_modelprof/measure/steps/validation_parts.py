"""Times each part of the validation loops inside a fit.

The ledger knows one phase, validation, whose time is split as it grows: whenever a part starts, the time that
the phase has gained belongs to the previous part. So the parts add up to the phase by construction, and
anything else (callbacks, checkpoints, the user's own profiler) is in no part, wherever it happens.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from lightning_modelprof.measure.clock import DeviceClock
from lightning_modelprof.run.phases import PART_INDEX, PARTS, PartTime, ValidationTimes

DATALOADER_INIT: Final = PART_INDEX["dataloader_init"]
OTHER: Final = PART_INDEX["other"]

_WITHOUT_CALLS: Final = {PART_INDEX[key] for key in ("epoch_end", "logging", "other")}
"""Parts without a start of their own: what remains between others."""

MAX_MARKS: Final = 2_048
"""Most marks that may wait for the device; beyond that, device times are dropped to bound memory."""


class ValidationParts:
    """Time by part over all validation loops of a fit.

    Args:
        device: puts marks on the device's stream where parts start; ``None`` without a device.

    Attributes:
        num_runs: loops started.
        total_ns: nanoseconds per part, in ``PARTS`` order.
        fetch_ns: time of the newest batch fetch.
        has_given_up: whether device times are missing, so that none is reported.
    """

    __slots__ = (
        "_dataloader_idx",
        "_device",
        "_device_ns",
        "_first_fetch_ns",
        "_marks",
        "_num_first_fetches",
        "_seen_ns",
        "calls",
        "fetch_ns",
        "has_given_up",
        "num_runs",
        "part",
        "total_ns",
    )

    def __init__(self, device: DeviceClock | None = None) -> None:
        self._device = device
        self._marks: deque[tuple[Any, int | None]] = deque()
        self._device_ns = [0] * len(PARTS)
        self.has_given_up = False
        self.part = OTHER
        self.num_runs = 0
        self.calls = [0] * len(PARTS)
        self.total_ns = [0] * len(PARTS)
        self.fetch_ns = 0
        self._seen_ns = 0
        self._first_fetch_ns = self._num_first_fetches = 0
        self._dataloader_idx: int | None = None

    def begin_run(self, part: int, phase_ns: int) -> None:
        """Start a validation loop with a part; ``phase_ns`` is the phase's time so far in the step."""
        self.num_runs += 1
        self.calls[DATALOADER_INIT] += 1
        self.part, self._seen_ns, self._dataloader_idx = part, phase_ns, None
        self._mark(part)

    def begin(self, part: int, phase_ns: int) -> None:
        """Start a part; the phase's time up to ``phase_ns`` was the previous part's."""
        self.total_ns[self.part] += phase_ns - self._seen_ns
        self._seen_ns = phase_ns
        if part != self.part:
            self._mark(part)
        self.part = part

    def end_run(self, phase_ns: int) -> None:
        self.total_ns[self.part] += phase_ns - self._seen_ns
        self._seen_ns = phase_ns
        self.part = OTHER
        self._mark(None)

    def begin_batch(self, dataloader_idx: int) -> None:
        """Note a batch's arrival; the first of each dataloader may have waited for its workers."""
        if dataloader_idx != self._dataloader_idx:
            self._dataloader_idx = dataloader_idx
            self._num_first_fetches += 1
            self._first_fetch_ns += self.fetch_ns

    def times(self) -> ValidationTimes | None:
        """Return the times so far; ``None`` without a validation."""
        if not self.num_runs:
            return None
        self._collect()
        has_device = any(self._device_ns) and not self.has_given_up  # it may not have got this far
        return ValidationTimes(
            num_runs=self.num_runs,
            parts=tuple(
                PartTime(
                    key=part.key,
                    calls=None if index in _WITHOUT_CALLS else self.calls[index],
                    total_ns=self.total_ns[index],
                    device_ns=self._device_ns[index] if has_device else None,
                )
                for index, part in enumerate(PARTS)
            ),
            num_first_fetches=self._num_first_fetches,
            first_fetch_ns=self._first_fetch_ns,
        )

    def _mark(self, part: int | None) -> None:
        if self._device is None or self.has_given_up:
            return
        self._marks.append((self._device.mark(), part))
        self._collect()
        if len(self._marks) > MAX_MARKS:
            # They are dropped, not reused, as the device may still have to pass them.
            self._marks.clear()
            self.has_given_up = True

    def _collect(self) -> None:
        """Read the marks that the device has passed, without waiting."""
        device, marks = self._device, self._marks
        if device is None:
            return
        while len(marks) > 1 and device.is_reached(marks[1][0]):
            (begin, part), (end, _) = marks[0], marks[1]
            elapsed_ns = 0 if part is None else device.elapsed_ns(begin, end)
            if elapsed_ns is None:  # another stream is behind
                return
            marks.popleft()
            device.release(begin)
            if elapsed_ns < 0:  # marks of streams that overtook each other are useless
                marks.clear()
                self.has_given_up = True
            elif part is not None:
                self._device_ns[part] += elapsed_ns
