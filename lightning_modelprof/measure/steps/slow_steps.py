"""Finds slow steps and what else happened in them, at little cost: nothing is done within a step.

Steps are checked many at a time, long after they ran. They cover the loop's time without gaps, so each step's
start follows from the last one's end, and anything noted with its time can be assigned to its step.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.measure.resources.cpu import cpu_wait_ns
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.steps import NOT_CLEAN, SPECIAL, SlowStep, SlowSteps, StepTimings

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

FACTOR: Final = 3.0
"""A step is slow from this multiple of the median."""

MAX_KEPT: Final = 8
"""Most slow steps kept, for clean steps and for those with a validation or epoch start each."""

_FEW: Final = 20
"""Clean steps needed to determine the usual time."""
_TOO_FEW: Final = f"at least {_FEW} clean steps are needed to tell which are slow"
_RECENT: Final = 512
_LEAST_NS: Final = 1_000_000
"""Shorter runs of the garbage collector are part of any step."""

_NOT_COUNTED: Final = "not available on this system; needs Linux with scheduler statistics"

_OURS: Final = int(NOT_CLEAN) & ~SPECIAL


class CollectorWatch:
    """Notes long runs of Python's garbage collector, in any thread."""

    def __init__(self) -> None:
        self._begin_ns = 0
        self._runs: deque[tuple[int, int, int]] = deque(maxlen=1_024)

    def start(self) -> None:
        if self._note not in gc.callbacks:
            gc.callbacks.append(self._note)

    def stop(self) -> None:
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def between(self, begin_ns: int, end_ns: int) -> tuple[int, int | None]:
        """Return the nanoseconds that it ran in this time, and the oldest collected generation."""
        runs = [
            (min(end, end_ns) - max(begin, begin_ns), generation)
            for begin, end, generation in list(self._runs)
            if begin < end_ns and end > begin_ns
        ]
        return sum(ns for ns, _ in runs), max((generation for _, generation in runs), default=None)

    def _note(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "start":
            self._begin_ns = host_clock()
            return
        end_ns = host_clock()
        if end_ns - self._begin_ns >= _LEAST_NS:
            self._runs.append((self._begin_ns, end_ns, int(info["generation"])))


class SlowStepWatch:
    """Finds a loop's slow steps and keeps the slowest."""

    def __init__(self, factor: float = FACTOR) -> None:
        self.collector = CollectorWatch()
        self._factor = factor
        self._unseen: list[StepTimings] = []
        self._usual: NDArray[np.int64] = np.zeros(0, np.int64)
        self._first: Counts | None = None
        self._counts: Counts | None = None
        # Total time of looks without slow steps, and how long the thread waited for a CPU in them.
        self._quiet_ns = self._quiet_wait_ns = 0
        self._has_compared = False
        self._found = SlowSteps(factor=factor)
        self._worst: dict[bool, list[SlowStep]] = {False: [], True: []}  # by whether they are special

    def start(self) -> None:
        """Start in the loop's thread; earlier counts don't belong to the loop."""
        self._first = self._counts = _counts()
        self.collector.start()

    def stop(self) -> None:
        self.collector.stop()

    def add(self, steps: StepTimings) -> None:
        """Add the steps that ended since the last call."""
        if len(steps):
            self._unseen.append(steps)

    def look(self, end_ns: int) -> None:
        """Check the added steps, in their thread; the last one ended at ``end_ns``."""
        unseen, self._unseen = StepTimings.concatenate(self._unseen), []
        steps = unseen.net()
        before, self._counts = self._counts, _counts()
        if not len(steps):
            return
        clean_ns = steps.clean().duration_ns
        known_ns = self._usual if len(self._usual) >= _FEW else np.concatenate([self._usual, clean_ns])
        if len(known_ns) >= _FEW:
            self._has_compared = True
            usual_ns = float(np.median(known_ns))
            is_slow = (steps.duration_ns > self._factor * usual_ns) & ((steps.tags & _OURS) == 0)
            context = _since(before, self._counts, unseen, self._factor * usual_ns, usual_ns)
            if is_slow.any():
                ends_ns = end_ns - unseen.duration_ns.sum() + np.cumsum(unseen.duration_ns)
                for place in np.flatnonzero(is_slow).tolist():
                    self._note(steps, place, int(ends_ns[place]), usual_ns, context)
            if context["cpu_wait_ns"] is not None and not (is_slow & ((steps.tags & SPECIAL) == 0)).any():
                self._quiet_ns += context["watched_ns"]
                self._quiet_wait_ns += context["cpu_wait_ns"]
            # Slow steps don't gradually become usual, unless most steps are slow.
            usual = clean_ns <= self._factor * usual_ns
            clean_ns = clean_ns[usual] if 2 * usual.sum() > len(usual) else clean_ns
        self._usual = np.concatenate([self._usual, clean_ns])[-_RECENT:]

    def record(self) -> SlowSteps:
        found, worst = self._found, [*self._worst[False], *self._worst[True]]
        return SlowSteps(
            factor=found.factor,
            count=found.count,
            excess_ns=found.excess_ns,
            num_special=found.num_special,
            why_not_looked_for="" if self._has_compared else _TOO_FEW,
            usual_cpu_wait=self._quiet_wait_ns / self._quiet_ns if self._quiet_ns else None,
            cpu_wait_share=_waiting_share(self._first, self._counts),
            why_no_cpu_wait=_NOT_COUNTED if self._counts is None or self._counts.cpu_wait_ns is None else "",
            worst=tuple(sorted(worst, key=lambda one: one.step)),
        )

    def _note(
        self, steps: StepTimings, place: int, end_ns: int, usual_ns: float, context: dict[str, Any]
    ) -> None:
        duration_ns, tags = int(steps.duration_ns[place]), int(steps.tags[place])
        is_special, found = bool(tags & SPECIAL), self._found
        self._found = SlowSteps(
            factor=found.factor,
            count=found.count + (not is_special),
            excess_ns=found.excess_ns + (0 if is_special else round(duration_ns - usual_ns)),
            num_special=found.num_special + is_special,
        )
        kept = self._worst[is_special]
        if len(kept) == MAX_KEPT and duration_ns <= min(one.duration_ns for one in kept):
            return
        collector_ns, generation = self.collector.between(end_ns - duration_ns, end_ns)
        times_ns = zip(PHASES, steps.phases_ns[place].tolist(), strict=True)
        kept.append(
            SlowStep(
                step=int(steps.step[place]),
                tags=tags,
                duration_ns=duration_ns,
                usual_ns=usual_ns,
                phases_ns={phase.key: ns for phase, ns in times_ns if ns > 0},
                collector_ns=collector_ns,
                generation=generation,
                **context,
            )
        )
        kept.sort(key=lambda one: -one.duration_ns)
        del kept[MAX_KEPT:]


class Counts(NamedTuple):
    """System counters at one moment; ``None`` where the system doesn't count.

    Attributes:
        at_ns: the moment, by the host clock.
        major_faults: page faults of this process that read from a disk.
        cpu_wait_ns: how long this thread was ready to run without a CPU.
    """

    at_ns: int
    major_faults: int | None
    cpu_wait_ns: int | None


def _counts() -> Counts:
    faults = None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return Counts(host_clock(), faults, cpu_wait_ns())


def _since(
    before: Counts | None, after: Counts, steps: StepTimings, slow_ns: float, usual_ns: float
) -> dict[str, Any]:
    """Return the counts over these steps, and which of them may contain a wait."""
    steps_ns = int(steps.duration_ns.sum())
    before = before or Counts(after.at_ns - steps_ns, None, None)
    # Longer than the steps, if something came before the first one or after the last.
    watched_ns = max(steps_ns, after.at_ns - before.at_ns)
    others_ns = steps.duration_ns[steps.duration_ns <= slow_ns]
    num_long = len(steps) - len(others_ns)
    return {
        "first_watched": int(steps.step[0]),
        "last_watched": int(steps.step[-1]),
        "watched_ns": watched_ns,
        "beyond_ns": round(watched_ns - int(others_ns.sum()) - num_long * usual_ns),
        "spread_ns": int((others_ns - others_ns.min()).sum()) if len(others_ns) else 0,
        "major_faults": _difference(before.major_faults, after.major_faults),
        "cpu_wait_ns": _difference(before.cpu_wait_ns, after.cpu_wait_ns),
    }


def _waiting_share(first: Counts | None, last: Counts | None) -> float | None:
    if first is None or last is None or last.at_ns <= first.at_ns:
        return None
    wait_ns = _difference(first.cpu_wait_ns, last.cpu_wait_ns)
    return None if wait_ns is None else wait_ns / (last.at_ns - first.at_ns)


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
