"""Choose which batch sizes to count, if they vary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from lightning_modelprof.analysis.modules.size_law import REACH, FlopsBySize, why_not_by_size
from lightning_modelprof.measure.steps.batch_shapes import BatchShapes
from lightning_modelprof.measure.window.window_plan import NEVER
from lightning_modelprof.run.batches import PhaseFlops, Shapes, SizeCount
from lightning_modelprof.run.model_cost import FOURIER_OPERATORS, StepCount

MOST_COUNTED: Final = 16
"""Maximum number of steps per loop to count for their size."""


_LOOK_EVERY: Final = 25
"""Steps between checks of which parameters are trained, if copies are counted."""


_AGAIN_AFTER: Final = 25
"""Steps after the first count until a size is counted again."""


_IN_A_ROW: Final = 3
"""Number of steps in a row in which it is, as two networks may take turns."""


_MOST_BETWEEN: Final = 10
"""Maximum number of these with sizes near counted ones; the rest is for sizes far from them."""


class SizePlan:
    """Decides which sizes to count.

    Args:
        trained: returns which parameters are trained now, as anything comparable.

    Attributes:
        counts: results, at first one per size.
        note: why no more sizes are counted; ``""`` while they are.
        again_at: first step at which a counted size is counted again.
    """

    def __init__(self, sizes: BatchShapes, trained: Callable[[], object]) -> None:
        self._sizes = sizes
        self._trained = trained
        self._trained_then: dict[Shapes, object] = {}  # when a copy was last counted with such a batch
        self._by_size = FlopsBySize(())
        self._num_between = 0
        self._first_step = 0  # first counted step
        self.counts: tuple[SizeCount, ...] = ()
        self.note = ""
        self.again_at = NEVER

    def wants(self, step: int, size: int) -> bool:
        shapes = self._sizes.shapes(size)
        if shapes is None or self.note:
            return False
        if self._by_size.counted_step(shapes) is not None:
            return step >= self.again_at and self._may_differ(step, shapes)
        if len(self._sizes) < 2 or self._by_size.num_counted >= MOST_COUNTED:
            return False
        if any(law.is_sure and law.covers(shapes, REACH) for law in self._by_size.laws):
            return False
        return self._num_between < _MOST_BETWEEN or not self._lies_between(shapes)

    def add(self, size: int, step: int, count: StepCount) -> None:
        shapes = self._sizes.shapes(size)
        if shapes is None:
            return
        if self.counts and self._lies_between(shapes):
            self._num_between += 1
        is_again = self._by_size.counted_step(shapes) is not None
        self.counts = (*self.counts, SizeCount(shapes=shapes, step=step, flops=_batch_flops(count)))
        if not is_again:
            self._by_size = FlopsBySize(self.counts)
        if why_not_by_size(self.counts):
            self.again_at = NEVER  # there's nothing more to learn
        elif count.on_fake_tensors:
            self._trained_then[shapes], self.again_at = self._trained(), step + _LOOK_EVERY
        elif len(self.counts) == 1:
            self._first_step, self.again_at = step, step + _AGAIN_AFTER
        elif is_again:
            passed = step - self._first_step
            self.again_at = step + 1 if passed < _AGAIN_AFTER + _IN_A_ROW - 1 else step + 2 * passed + 1

    def _may_differ(self, step: int, shapes: Shapes) -> bool:
        if shapes not in self._trained_then or self._trained() != self._trained_then[shapes]:
            return True
        self.again_at = step + _LOOK_EVERY
        return False

    def stop(self, note: str) -> None:
        """Stop after a step that couldn't be counted, as similar steps can't be either."""
        self.note = note

    def _lies_between(self, shapes: Shapes) -> bool:
        """Whether no dimension is far below or above all counted ones."""
        ranks = tuple(map(len, shapes))
        alike = [one.shapes for one in self.counts if tuple(map(len, one.shapes)) == ranks]
        if not alike:
            return False
        columns = zip(*(_flat(one) for one in alike), strict=True)
        return all(
            value * REACH >= min(column) and value <= max(column) * REACH
            for value, column in zip(_flat(shapes), columns, strict=True)
        )


def _batch_flops(count: StepCount) -> tuple[PhaseFlops, ...]:
    totals: Counter[tuple[str, str]] = Counter()
    for entry in count.operators:
        if entry.phase != "optimizer" and entry.operator not in FOURIER_OPERATORS:
            totals[entry.phase, entry.dtype] += entry.flops or 0
    return tuple(PhaseFlops(phase=phase, dtype=dtype, flops=n) for (phase, dtype), n in totals.items())


def _flat(shapes: Shapes) -> list[int]:
    return [value for shape in shapes for value in shape]
