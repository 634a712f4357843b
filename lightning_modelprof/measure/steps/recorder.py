"""Stores the ledger's steps in memory that doesn't grow with their number."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.measure.steps.batch_shapes import BatchShapes
from lightning_modelprof.measure.steps.device_phases import MAX_PENDING
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import MAX_HALVED, NOT_CLEAN, NOT_MEASURED, StepTag, StepTimings, is_kept

MAX_SHARE_QUEUED: Final = 0.01
"""Share of the device's time that may be queued at the end of a run of clean steps."""


MAX_STEPS_QUEUED: Final = 0.25
"""The same in steps: the device may finish its last step a little after the CPU."""


def tag_steps_run_ahead(steps: StepTimings) -> None:
    """Set and clear ``StepTag.RUN_AHEAD``, in place.

    In each run of clean steps with device times, tags the shortest prefix after which the remaining steps
    take the CPU as long as the device. Without such a prefix, none is tagged: the analysis then uses the
    device's step time.

    Args:
        steps: consecutive steps, with known device times.
    """
    steps.tags &= ~np.int64(StepTag.RUN_AHEAD)
    has_device = (steps.device_phases_ns != NOT_MEASURED).all(axis=1)
    if not has_device.any():
        return
    device_ns = steps.device_phases_ns.sum(axis=1)
    is_clean = (steps.tags & int(NOT_CLEAN)) == 0
    for begin, end in _runs(is_clean & has_device):
        behind = begin + _num_run_ahead(steps.duration_ns[begin:end], device_ns[begin:end])
        steps.tags[begin:behind] |= int(StepTag.RUN_AHEAD)


def _num_run_ahead(host_ns: NDArray[np.int64], device_ns: NDArray[np.int64]) -> int:
    """Count the first steps to exclude; 0 if no remainder takes the CPU as long as the device."""
    # Position k covers the steps from k to the last.
    queued_ns = np.cumsum((device_ns - host_ns)[::-1])[::-1]
    allowed_ns = np.maximum(
        MAX_SHARE_QUEUED * np.cumsum(device_ns[::-1])[::-1], MAX_STEPS_QUEUED * np.median(device_ns)
    )
    is_balanced = queued_ns <= allowed_ns
    return int(np.argmax(is_balanced))


def _runs(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return each run of true values as (first, last + 1), shape (n, 2)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return edges.reshape(-1, 2)


OPTIMIZER: Final = PHASE_INDEX["optimizer"]


MAX_KEPT: Final = 4_096
"""Most individually kept steps, in 0.5 to 0.7 MB; of a longer run, at least half as many are kept."""


_FOLDED: Final = 960
"""Steps that are summed and thinned at a time."""


_MAX_PARTS: Final = 32


_FIRST, _WHOLE = int(StepTag.FIRST_OF_EPOCH), int(StepTag.WHOLE_EPOCH)


_INTEGERS: Final = (np.int8, np.int16, np.int32, np.int64)


_STEP: Final = Struct(f"{len(PHASES) + 2}q")
"""Nanoseconds per phase, tags and samples of one step. Packed while they are in the cache: a cut, hundreds of
steps later, would have to load each from memory."""


class Recorder:
    """Collects steps cheaply (a few bytes each) and turns them into columns at a cut.

    All steps are summed. Up to ``max_kept`` are kept individually; beyond that, every other one is dropped
    each time. Which ones depends only on their number, so that all ranks keep the same steps.

    Args:
        skip_first: number of first steps that are tagged as outside the benchmark.
        sizes: receives the ended steps and their tags; ``None`` if off.
    """

    def __init__(
        self, skip_first: int = 0, max_kept: int = MAX_KEPT, *, sizes: BatchShapes | None = None
    ) -> None:
        self.skip_first = skip_first
        self._sizes = sizes
        self._max_kept = max_kept
        self._rows: list[bytes] = []
        self._num_cut = 0
        self._new: list[StepTimings] = []
        self._fresh: list[StepTimings] = []  # whole, as device times may still arrive
        self._num_fresh = 0
        self._kept: list[StepTimings] = []
        self._num_kept = 0
        self._num_halved = 0
        self._totals = StepTotals.of(StepTimings.empty())  # of all steps except the fresh ones
        self._device_rows: dict[int, tuple[int, ...]] = {}
        self._only_firsts = True  # whether each step so far starts an epoch
        self._draining: list[tuple[int, int]] = []  # (first step, last step + 1)

    @property
    def num_steps(self) -> int:
        return self._num_cut + len(self._rows)

    def add(self, step: tuple[list[int], int, int]) -> None:
        """Add one step: (nanoseconds per phase in PHASES order, tags, samples).

        Raises:
            struct.error: when one of them isn't a 64-bit integer, as the clock has failed.
        """
        phases_ns, tags, samples = step
        self._rows.append(_STEP.pack(*phases_ns, tags, samples))

    @property
    def newest_tags(self) -> int:
        """Return the newest step's tags if it isn't in a cut yet; 0 otherwise."""
        return int(_STEP.unpack(self._rows[-1])[-2]) if self._rows else 0

    def add_device(self, step: int, phases_ns: tuple[int, ...]) -> None:
        """Add a step's device times, available at least a step after it ended."""
        self._device_rows[step] = phases_ns

    def drain(self, step: int, num_prefetched: int) -> None:
        """Note that the loop stood still when step number ``step`` started.

        Args:
            num_prefetched: batches that the workers finished in the meantime; as many following steps find
                theirs immediately and are tagged.
        """
        if num_prefetched > 0:
            self._draining.append((step + 1, step + 1 + num_prefetched))

    def cut(self) -> None:
        """Turn the steps since the last cut into columns."""
        rows = self._rows
        if not rows:
            return
        table = np.frombuffer(bytearray().join(rows), np.int64).reshape(len(rows), -1)
        phases_ns, tags = table[:, :-2], table[:, -2].copy()
        step = np.arange(self._num_cut, self._num_cut + len(rows), dtype=np.int64)
        tags[step < self.skip_first] |= StepTag.SKIP_FIRST
        tags[phases_ns[:, OPTIMIZER] == 0] |= StepTag.NO_OPTIMIZER_STEP
        for first, behind in self._draining:
            tags[(step >= first) & (step < behind)] |= StepTag.DRAINING
        self._tag_whole_epochs(tags)
        if self._sizes is not None:
            self._sizes.end(self._num_cut, tags)
        part = StepTimings(
            step=step,
            duration_ns=np.where(phases_ns == NOT_MEASURED, 0, phases_ns).sum(axis=1),
            phases_ns=phases_ns,
            device_phases_ns=np.full((len(rows), len(PHASES)), NOT_MEASURED, np.int64),
            samples=table[:, -1],
            tags=tags,
        )
        self._num_cut += len(rows)
        self._draining = [span for span in self._draining if span[1] > self._num_cut]
        rows.clear()
        self._new.append(part)
        self._fresh.append(part)
        self._num_fresh += len(part)
        if self._num_fresh >= _FOLDED + MAX_PENDING:
            self._fold()

    def _tag_whole_epochs(self, tags: NDArray[np.int64]) -> None:
        """If each step so far starts an epoch, retag them so that they aren't excluded.

        A first step alone is inconclusive, as the next one may be in the same epoch.

        Args:
            tags: tags of the new steps; changed in place, like those of all others once they turn out to
                differ.
        """
        was_whole = self._num_cut > 1 and self._only_firsts
        self._only_firsts &= bool(((tags & _FIRST) != 0).all())
        is_whole = self._num_cut + len(tags) > 1 and self._only_firsts
        if is_whole:
            _swap_tag(tags, _FIRST, _WHOLE)
        if is_whole != was_whole:
            old, new = (_FIRST, _WHOLE) if is_whole else (_WHOLE, _FIRST)
            for part in {id(one): one for one in (*self._new, *self._fresh, *self._kept)}.values():
                _swap_tag(part.tags, old, new)
            _swap_tag(self._totals.tags, old, new)
            self._totals = StepTotals.merge([self._totals])

    def take_new(self) -> StepTimings:
        """Return the steps since the last call, without device times, which come later.

        Call it now and then: until then the steps are kept.
        """
        self.cut()
        new, self._new = self._new, []
        return StepTimings.concatenate(new)

    def steps(self) -> StepTimings:
        """Return the kept steps, with the device times known so far."""
        fresh = self._merged_fresh()
        parts = [*map(_widen, self._kept), fresh.select(self._is_kept(fresh))]
        return StepTimings.concatenate(parts)

    def totals(self) -> StepTotals | None:
        """Return the sums over all steps; ``None`` while all of them are kept."""
        if self._num_halved == 0:
            return None
        return StepTotals.merge([self._totals, StepTotals.of(self._merged_fresh())])

    def _merged_fresh(self) -> StepTimings:
        """Merge the steps that aren't folded yet into one part, with their device times."""
        self.cut()
        fresh = StepTimings.concatenate(self._fresh)
        self._fresh = [fresh]
        if len(fresh):
            first = int(fresh.step[0])
            for step, phases_ns in self._device_rows.items():
                if step >= first:
                    fresh.device_phases_ns[step - first] = phases_ns
            tag_steps_run_ahead(fresh)
        self._device_rows.clear()
        return fresh

    def _fold(self) -> None:
        """Sum and thin the oldest fresh steps, whose device times can no longer arrive."""
        fresh = self._merged_fresh()
        is_old = fresh.step < self._num_cut - MAX_PENDING
        old, young = fresh.select(is_old), fresh.select(~is_old)
        self._fresh, self._num_fresh = [young], len(young)
        self._totals = StepTotals.merge([self._totals, StepTotals.of(old)])
        self._keep(old)
        while self._num_kept + self._num_fresh > self._max_kept and self._num_halved < MAX_HALVED:
            self._num_halved += 1
            kept, self._kept, self._num_kept = self._kept, [], 0
            for part in kept:
                self._keep(part)

    def _keep(self, steps: StepTimings) -> None:
        kept = steps.select(self._is_kept(steps))
        if not len(kept):
            return
        self._kept.append(_narrow(kept))
        self._num_kept += len(kept)
        if len(self._kept) > _MAX_PARTS:
            self._kept = [_narrow(StepTimings.concatenate(self._kept))]

    def _is_kept(self, steps: StepTimings) -> NDArray[np.bool_]:
        # The modules' times are compared with the few steps that they were measured in.
        kept: NDArray[np.bool_] = is_kept(steps.step, self._num_halved) | (
            (steps.tags & int(StepTag.INSPECTED)) != 0
        )
        return kept


def _swap_tag(tags: NDArray[np.int64], old: int, new: int) -> None:
    has_it = (tags & old) != 0
    tags[has_it] = tags[has_it] & ~old | new


def _narrow(steps: StepTimings) -> StepTimings:
    """Convert phase columns to the smallest integers that hold them."""
    return _replaced(steps, lambda column: column.astype(_smallest(column)))


def _widen(steps: StepTimings) -> StepTimings:
    return _replaced(steps, lambda column: column.astype(np.int64))


def _replaced(steps: StepTimings, change: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> StepTimings:
    columns = steps.columns()
    for name in ("phases_ns", "device_phases_ns"):
        columns[name] = change(columns[name])
    return StepTimings(**columns)


def _smallest(column: NDArray[np.int64]) -> np.dtype[Any]:
    least, most = int(column.min()), int(column.max())
    fitting = (kind for kind in _INTEGERS if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max)
    return np.dtype(next(fitting))
