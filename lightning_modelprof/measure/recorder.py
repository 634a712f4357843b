"""Keeps what the ledger counts, step by step, and hands it out as columns."""

from __future__ import annotations

import numpy as np

from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import NOT_MEASURED, StepTag, StepTimings

OPTIMIZER = PHASE_INDEX["optimizer"]


class Recorder:
    """Collects steps cheaply (one tuple each) and makes columns of them when a cut is asked for.

    Args:
        skip_first: the first steps of the loop, tagged so that the benchmark leaves them out.

    Attributes:
        add: takes one step: (nanoseconds per phase in PHASES order, tags, samples).
    """

    def __init__(self, skip_first: int = 0) -> None:
        self._skip_first = skip_first
        self._rows: list[tuple[list[int], int, int]] = []
        # A list's own append, so that a step costs no Python frame here.
        self.add = self._rows.append
        self._parts: list[StepTimings] = []
        self._num_cut = 0
        self._device_rows: list[tuple[int, tuple[int, ...]]] = []
        self._draining: list[tuple[int, int]] = []  # (first step, step behind the last)

    @property
    def num_steps(self) -> int:
        """Finished steps so far."""
        return self._num_cut + len(self._rows)

    def add_device(self, step: int, phases_ns: tuple[int, ...]) -> None:
        """The device's times of a step are known now, a step or more after it ended."""
        self._device_rows.append((step, phases_ns))

    def drain(self, step: int, num_prefetched: int) -> None:
        """The loop stood still when step number ``step`` began.

        Args:
            step: the running step.
            num_prefetched: batches that the workers got ready meanwhile; so many steps after it find theirs
                at once and are tagged.
        """
        if num_prefetched > 0:
            self._draining.append((step + 1, step + 1 + num_prefetched))

    def cut(self) -> StepTimings:
        """The steps since the last cut, as columns; without device times, which come later."""
        rows = self._rows
        if not rows:
            return StepTimings.empty()
        step = np.arange(self._num_cut, self._num_cut + len(rows), dtype=np.int64)
        phases_ns = np.array([row[0] for row in rows], np.int64)
        tags = np.array([row[1] for row in rows], np.int64)
        tags[step < self._skip_first] |= StepTag.SKIP_FIRST
        tags[phases_ns[:, OPTIMIZER] == 0] |= StepTag.NO_OPTIMIZER_STEP
        for first, behind in self._draining:
            tags[(step >= first) & (step < behind)] |= StepTag.DRAINING
        part = StepTimings(
            step=step,
            duration_ns=np.where(phases_ns == NOT_MEASURED, 0, phases_ns).sum(axis=1),
            phases_ns=phases_ns,
            device_phases_ns=np.full((len(rows), len(PHASES)), NOT_MEASURED, np.int64),
            samples=np.array([row[2] for row in rows], np.int64),
            tags=tags,
        )
        self._num_cut += len(rows)
        self._draining = [span for span in self._draining if span[1] > self._num_cut]
        rows.clear()
        self._parts.append(part)
        return part

    def since(self, first: int) -> StepTimings:
        """The steps from number ``first`` on, without device times."""
        self.cut()
        parts = []
        for part in reversed(self._parts):
            parts.append(part)
            if len(part) and part.step[0] <= first:
                break
        steps = StepTimings.concatenate(parts[::-1])
        return steps.select(steps.step >= first)

    def steps(self) -> StepTimings:
        """All steps so far, with the device times known so far."""
        self.cut()
        steps = StepTimings.concatenate(self._parts)
        for step, phases_ns in self._device_rows:
            steps.device_phases_ns[step] = phases_ns
        self._parts, self._device_rows = [steps], []
        return steps
