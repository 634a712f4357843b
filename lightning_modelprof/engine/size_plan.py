"""Which sizes of batches are counted, where batches vary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from lightning_modelprof.analysis.modules.size_law import REACH, FlopsBySize, why_not_by_size
from lightning_modelprof.measure.steps.batch_shapes import BatchShapes
from lightning_modelprof.measure.window.schedule import NEVER
from lightning_modelprof.run.batches import PhaseFlops, Shapes, SizeCount
from lightning_modelprof.run.model_cost import FOURIER_OPERATORS, StepCount

MOST_COUNTED: Final = 16
"""Steps of a loop that are counted for their size."""


_LOOK_EVERY: Final = 25
"""Steps between two looks at which parameters are trained, where copies are counted."""


_AGAIN_AFTER: Final = 25
"""Steps after the first count in which a size is counted again."""


_IN_A_ROW: Final = 3
"""Steps in which it is: two networks may be trained in turns."""


_MOST_BETWEEN: Final = 10
"""Of these, sizes in the reach of the counted ones; the others are left for those far from them."""


class SizePlan:
    """Decides, size by size, what to count.

    Args:
        trained: which parameters are trained now: anything that can be compared.

    Attributes:
        counts: what was counted, at first one for each size.
        note: why no more sizes are counted; ``""`` while they are.
        again_at: the next step from which on a size is counted again.
    """

    def __init__(self, sizes: BatchShapes, trained: Callable[[], object]) -> None:
        self._sizes = sizes
        self._trained = trained
        self._trained_then: dict[Shapes, object] = {}  # when a copy was last counted with such a batch
        self._by_size = FlopsBySize(())
        self._num_between = 0
        self._first_step = 0  # that was counted
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
        self.counts = (*self.counts, SizeCount(shapes=shapes, step=step, flops=_by_part(count)))
        if not is_again:
            self._by_size = FlopsBySize(self.counts)
        if why_not_by_size(self.counts):
            self.again_at = NEVER  # nothing more can be learnt
        elif count.on_fake_tensors:
            self._trained_then[shapes], self.again_at = self._trained(), step + _LOOK_EVERY
        elif len(self.counts) == 1:
            self._first_step, self.again_at = step, step + _AGAIN_AFTER
        elif is_again:
            passed = step - self._first_step
            self.again_at = step + 1 if passed < _AGAIN_AFTER + _IN_A_ROW - 1 else step + 2 * passed + 1

    def _may_differ(self, step: int, shapes: Shapes) -> bool:
        """Whether it is worth counting a size once more."""
        if shapes not in self._trained_then or self._trained() != self._trained_then[shapes]:
            return True
        self.again_at = step + _LOOK_EVERY
        return False

    def stop(self, note: str) -> None:
        """A step could not be counted: others of its kind cannot either."""
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


def _by_part(count: StepCount) -> tuple[PhaseFlops, ...]:
    """FLOPs that depend on the batch."""
    totals: Counter[tuple[str, str]] = Counter()
    for entry in count.operators:
        if entry.phase != "optimizer" and entry.operator not in FOURIER_OPERATORS:
            totals[entry.phase, entry.dtype] += entry.flops or 0
    return tuple(PhaseFlops(phase=phase, dtype=dtype, flops=n) for (phase, dtype), n in totals.items())


def _flat(shapes: Shapes) -> list[int]:
    return [value for shape in shapes for value in shape]
