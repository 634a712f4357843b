"""Device time by phase from marks on the stream, read late and never waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lightning_modelprof.measure.clock import DeviceClock
from lightning_modelprof.run.phases import PHASES

MAX_PENDING: Final = 64
"""Steps whose marks may wait for the device; beyond it the oldest is given up, so memory stays bounded."""


@dataclass(slots=True)
class _PendingStep:
    step: int
    marks: list[tuple[Any, int]]
    end: Any


class DevicePhases:
    """Turns marks at phase boundaries into nanoseconds per phase and step.

    The device's time between two marks belongs to the phase that began at the first. It includes the time
    in which the device waited for the host: it is elapsed time on the stream, not busy time.

    Args:
        clock: where marks come from.
        on_step: called with (step, nanoseconds per phase in PHASES order) once a step's marks are reached.
            Steps that are given up are not reported: they stay not measured.
    """

    def __init__(self, clock: DeviceClock, on_step: Callable[[int, tuple[int, ...]], None]) -> None:
        self._clock = clock
        self._on_step = on_step
        self._marks: list[tuple[Any, int]] = []
        self._pending: list[_PendingStep] = []
        self.num_given_up = 0

    def mark(self, phase: int) -> None:
        """From here on the device's time belongs to ``phase``."""
        self._marks.append((self._clock.mark(), phase))

    def close_step(self, step: int) -> None:
        """The step ends at the last mark, where the next one begins; steps the device has passed are read."""
        if not self._marks:
            return
        end = self._marks[-1]
        if len(self._marks) > 1:
            self._pending.append(_PendingStep(step, self._marks[:-1], end[0]))
        self._marks = [end]
        self.collect()
        if len(self._pending) > MAX_PENDING:
            # Its marks are dropped, not reused: the device may still be going to pass them.
            self._pending.pop(0)
            self.num_given_up += 1

    def discard(self) -> None:
        """Forget the marks since the last step ended, but for the last one."""
        self._marks = self._marks[-1:]

    def collect(self) -> None:
        """Read the steps whose marks the device has passed, in order; the others wait.

        A step shares its last mark with the next one, which releases it: no step may be read too early.
        """
        while self._pending and self._read(self._pending[0]):
            self._pending.pop(0)

    def _read(self, pending: _PendingStep) -> bool:
        clock = self._clock
        if not clock.is_reached(pending.end):
            return False
        phases_ns = [0] * len(PHASES)
        ends = [mark for mark, _ in pending.marks[1:]] + [pending.end]
        for (begin, phase), end in zip(pending.marks, ends, strict=True):
            elapsed_ns = clock.elapsed_ns(begin, end)
            if elapsed_ns is None:  # another stream is behind; look again at the next step
                return False
            if elapsed_ns < 0:  # marks of streams that overtook each other tell nothing
                self.num_given_up += 1
                return True
            phases_ns[phase] += elapsed_ns
        # The end mark is the next step's first one and is released with that step.
        for mark, _ in pending.marks:
            clock.release(mark)
        self._on_step(pending.step, tuple(phases_ns))
        return True
