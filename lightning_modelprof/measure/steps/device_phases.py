"""Device time by phase, from events at phase boundaries, at bounded cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any, Final

from lightning_modelprof.measure.clock import DeviceClock, HostClock, host_clock
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES

DATALOADER: Final = PHASE_INDEX["dataloader"]


MAX_SHARE: Final = 0.01
"""Share of the loop's time that marking and reading may take in the long run.

A step has about 14 marks. On a virtual machine with an H100, one takes 6 to 20 µs and its reading 1 µs: 0.1
to 0.3 ms of a 2 ms step.
"""


_TIMED_MARKS: Final = 128
"""Number of marks that are timed to estimate their cost. Later ones may block until the device's queue has
room."""


FREE_NS: Final = 50_000_000
"""Free budget for marking and reading, so that short runs and first steps are measured."""


MAX_PENDING: Final = 64
"""Most steps whose marks may wait for the device; beyond that, the oldest is dropped to bound memory."""


@dataclass(slots=True)
class _PendingStep:
    step: int
    marks: list[tuple[Any, int]]
    end: Any
    owns_end: bool


class DevicePhases:
    """Turns marks at phase boundaries into nanoseconds per phase and step.

    The device's time between two marks belongs to the phase that started at the first. It includes time in
    which the device waited for the CPU: it's elapsed time on the stream, not busy time.

    Once marking has taken more than ``FREE_NS`` and ``MAX_SHARE`` of the loop, it pauses for a random number
    of steps. This keeps it within that share, and out of phase with anything periodic in the training.

    Args:
        on_step: called with (step, nanoseconds per phase in PHASES order) once a step's marks are reached.
            Dropped and unmarked steps aren't reported and stay unmeasured.

    Attributes:
        num_given_up: marked steps that couldn't be read.
        num_unmarked: steps in which marking paused.
    """

    def __init__(
        self,
        clock: DeviceClock,
        on_step: Callable[[int, tuple[int, ...]], None],
        now: HostClock = host_clock,
    ) -> None:
        self._clock = clock
        self._on_step = on_step
        self._now = now
        self._began_ns = now()
        self._random = Random(0)
        self._marks: list[tuple[Any, int]] = []
        self._pending: list[_PendingStep] = []
        self._steps_to_rest = 0
        self._num_marks = self._reading_ns = 0
        self._took_ns: list[int] = []
        self._usual_mark_ns = 0.0
        self.num_given_up = self.num_unmarked = 0

    @property
    def cost_ns(self) -> float:
        """Return the wall time of marking and reading, without waits for room in the device's queue."""
        return self._num_marks * self._usual_mark_ns + self._reading_ns

    def mark(self, phase: int) -> None:
        if self._steps_to_rest:
            return
        self._num_marks += 1
        if len(self._took_ns) == _TIMED_MARKS:
            self._marks.append((self._clock.mark(), phase))
            return
        began_ns = self._now()
        self._marks.append((self._clock.mark(), phase))
        self._took_ns.append(self._now() - began_ns)
        if len(self._took_ns) == _TIMED_MARKS:
            self._usual_mark_ns = median(self._took_ns)

    def close_step(self, step: int) -> None:
        """End the step at the last mark, where the next one starts; read steps that the device has passed."""
        if self._steps_to_rest:
            self.num_unmarked += 1
            self._steps_to_rest -= 1
            if not self._steps_to_rest:
                self.mark(DATALOADER)
            return
        if not self._marks:
            return
        began_ns = self._now()
        end = self._marks[-1]
        if len(self._marks) > 1:
            self._pending.append(_PendingStep(step, self._marks[:-1], end[0], owns_end=False))
        self._marks = [end]
        self.collect()
        if len(self._pending) > MAX_PENDING:
            # Its marks are dropped, not reused, as the device may still have to pass them.
            self._pending.pop(0)
            self.num_given_up += 1
        now_ns = self._now()
        self._reading_ns += now_ns - began_ns
        self._rest_if_too_expensive(now_ns - self._began_ns, step + 1)

    def _rest_if_too_expensive(self, loop_ns: int, num_steps: int) -> None:
        too_much_ns = self.cost_ns - FREE_NS - MAX_SHARE * loop_ns
        if too_much_ns <= 0:
            return
        num_steps_that_pay = too_much_ns / (MAX_SHARE * loop_ns / num_steps)
        self._steps_to_rest = 1 + self._random.randrange(int(2 * num_steps_that_pay) + 1)
        (last_mark, _) = self._marks.pop()
        if self._pending and self._pending[-1].end is last_mark:
            self._pending[-1].owns_end = True
        else:
            self._clock.release(last_mark)

    def discard(self) -> None:
        self._marks = self._marks[-1:]

    def collect(self) -> None:
        """Read the steps whose marks the device has passed, in order; others wait.

        A step shares its last mark with the next one, which releases it: no step may be read too early.
        """
        while self._pending and self._read(self._pending[0]):
            self._pending.pop(0)

    def close(self) -> None:
        """Free all marks; unread steps stay unmeasured."""
        self.num_given_up += len(self._pending)
        self._marks.clear()
        self._pending.clear()
        self._clock.close()

    def finish(self, max_wait_s: float = 2.0, sleep: Callable[[float], None] = time.sleep) -> None:
        """Give the device a moment after the loop to finish its queue, and read it.

        The program waits for that work anyway as soon as it uses a result. Polls; never synchronizes.
        """
        poll_s = 0.001
        for _ in range(int(max_wait_s / poll_s)):
            self.collect()
            if not self._pending:
                return
            sleep(poll_s)

    def _read(self, pending: _PendingStep) -> bool:
        clock = self._clock
        if not clock.is_reached(pending.end):
            return False
        phases_ns = [0] * len(PHASES)
        ends = [mark for mark, _ in pending.marks[1:]] + [pending.end]
        for (begin, phase), end in zip(pending.marks, ends, strict=True):
            elapsed_ns = clock.elapsed_ns(begin, end)
            if elapsed_ns is None:  # another stream is behind; check again at the next step
                return False
            if elapsed_ns < 0:  # marks of streams that overtook each other are useless
                self.num_given_up += 1
                return True
            phases_ns[phase] += elapsed_ns
        # If the next step is marked too, the end mark is its first one and is released with it.
        for mark, _ in pending.marks:
            clock.release(mark)
        if pending.owns_end:
            clock.release(pending.end)
        self._on_step(pending.step, tuple(phases_ns))
        return True
