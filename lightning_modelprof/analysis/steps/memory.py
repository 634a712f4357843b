"""How much memory a loop used, whether it keeps growing, and how much of what is reserved nothing uses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.statistics import medians, theil_sen
from lightning_modelprof.record import Record
from lightning_modelprof.run.memory import MemoryPoint, MemoryRecord

LEAST_POINTS: Final = 20
"""Points that the second half of a curve needs, to say how it grows."""


_MOST_GROUPS: Final = 40
"""Neighbouring points are taken together into at most so many: they depend on each other."""


_KINDS: Final = (("anonymous", "anonymous_bytes"), ("rss", "rss_bytes"), ("allocated", "allocated_bytes"))


_Floats = NDArray[np.floating[Any]]


class Growth(Record, frozen=True, kw_only=True):
    """How one kind of memory grows in the second half of the curve.

    Attributes:
        kind: ``anonymous`` (the process's, without what is mapped from files or shared), ``rss`` where that
            is not known, or ``allocated`` on the device.
        level_bytes: median of the last quarter.
        first_step, last_step: between which it was looked at.
        bytes_per_step: Theil-Sen slope.
        low, high: its 95 % interval.
        low_without_jump: ``low`` without the largest jump from one level to another: what grows on and on
            grows without it, too.
        third, fourth: slopes in the third and in the last quarter of the curve alone.
        in_epochs: how it grows within epochs, where these are known. If it falls at their ends, the slopes
            above are of what remains.
    """

    kind: str
    level_bytes: float
    first_step: int
    last_step: int
    bytes_per_step: float
    low: float
    high: float
    third: float
    fourth: float
    low_without_jump: float
    in_epochs: EpochGrowth | None = None

    @property
    def seen_bytes(self) -> float:
        """By how much it grew from the first of these steps to the last, by its slope."""
        return self.bytes_per_step * (self.last_step - self.first_step)


class MemoryUse(Record, frozen=True, kw_only=True):
    """What is derived from a loop's memory.

    Attributes:
        growth: of each kind that was measured often enough, the host's first.
        unused_bytes: by how much the most that was reserved exceeds the most that was allocated; ``None``
            where torch does not count both.
        unused_share: that over the most that was reserved; ``None`` likewise.
    """

    record: MemoryRecord
    growth: tuple[Growth, ...]
    unused_bytes: int | None
    unused_share: float | None


def memory_use(record: MemoryRecord | None, epoch_starts: Sequence[int] = ()) -> MemoryUse:
    """Derive what a loop's memory says; absent in runs of versions that did not look.

    Args:
        epoch_starts: steps in which an epoch begins; empty if they are not all known.
    """
    if record is None:
        raise NotMeasured("memory wasn't recorded (an older version saved this run)")
    growth: dict[str, Growth] = {}
    for kind, attribute in _KINDS:
        found = (
            None
            if kind == "rss" and "anonymous" in growth
            else grown(record.curve, attribute, kind, epoch_starts)
        )
        if found is not None:
            growth[kind] = found
    reserved, allocated = record.peak_reserved_bytes, record.peak_allocated_bytes
    unused = None if reserved is None or allocated is None else max(0, reserved - allocated)
    return MemoryUse(
        record=record,
        growth=tuple(growth.values()),
        unused_bytes=unused,
        unused_share=None if unused is None or not reserved else unused / reserved,
    )


def grown(
    curve: Sequence[MemoryPoint], attribute: str, kind: str, epoch_starts: Sequence[int] = ()
) -> Growth | None:
    """How one kind of memory grows in the second half of a curve; ``None`` with too few points.

    The first half is warm-up: caches fill, workers start, kernels load. The second half is put into groups of
    neighbouring points, whose medians are then one point each.
    """
    points = [(point.step, value) for point in curve if (value := getattr(point, attribute)) is not None]
    if len(points) < 2 * LEAST_POINTS:
        return None
    steps, sizes = np.array(points, float).T
    in_epochs = within_epochs(steps, sizes, epoch_starts)
    if in_epochs is not None and in_epochs.falls:
        steps, sizes = without_growth(steps, sizes, epoch_starts, in_epochs)
    is_late = steps >= (steps[0] + steps[-1]) / 2
    steps, sizes = steps[is_late], sizes[is_late]
    if len(steps) < LEAST_POINTS:
        return None
    x, y = medians(steps, _MOST_GROUPS), medians(sizes, _MOST_GROUPS)
    slope, low, high = theil_sen(x, y)
    middle = len(x) // 2
    return Growth(
        kind=kind,
        level_bytes=float(np.median(sizes[len(sizes) // 2 :])),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        bytes_per_step=slope,
        low=low,
        high=high,
        third=theil_sen(x[:middle], y[:middle])[0],
        fourth=theil_sen(x[middle:], y[middle:])[0],
        low_without_jump=theil_sen(x, _without_jump(y))[1],
        in_epochs=in_epochs,
    )


_JUMP: Final = 3
"""Neighbouring points whose median is the level before or after a jump."""


def _without_jump(sizes: _Floats) -> _Floats:
    """The curve without the largest rise between the levels before and after a point."""
    numbers = range(_JUMP, len(sizes) - _JUMP + 1)
    rises = [
        float(np.median(sizes[number : number + _JUMP]) - np.median(sizes[number - _JUMP : number]))
        for number in numbers
    ]
    if not rises:
        return sizes
    largest = int(np.argmax(rises))
    flat: _Floats = sizes.copy()
    flat[numbers[largest] :] -= max(0.0, rises[largest])
    return flat


_LEAST_POINTS: Final = 4
"""Points that an epoch needs to count; the halves of an epoch have a slope of their own."""


_LEAST_IN_ALL: Final = 20


_FALLS: Final = 0.5
"""Share of what an epoch grows by that has to be gone after it."""


class EpochGrowth(Record, frozen=True, kw_only=True):
    """How one kind of memory grows within epochs; every figure compares points of one epoch only.

    Attributes:
        level_bytes: median over epochs of the highest level.
        num_epochs: with enough points.
        num_steps: median length of these in steps.
        bytes_per_step: Theil-Sen slope over the pairs of points of the same epoch.
        low, high: its 95 % interval.
        first, second: slopes of the first and of the second halves of the epochs alone.
        fallen_bytes: median over the ends of epochs: the last level before less the first one after.
    """

    level_bytes: float
    num_epochs: int
    num_steps: float
    bytes_per_step: float
    low: float
    high: float
    first: float
    second: float
    fallen_bytes: float

    @property
    def grown_bytes(self) -> float:
        return self.bytes_per_step * self.num_steps

    @property
    def falls(self) -> bool:
        """Whether it grows in each epoch, surely, and at least half of that is gone after it."""
        return self.low > 0 and self.fallen_bytes >= _FALLS * self.grown_bytes


def within_epochs(steps: _Floats, sizes: _Floats, starts: Sequence[int]) -> EpochGrowth | None:
    """How memory grows within epochs; ``None`` with fewer than two epochs that have enough points.

    Args:
        steps: shape (n,), rising: where memory was looked at.
        sizes: shape (n,), in bytes.
        starts: the steps in which an epoch begins, rising. Their own points are left out: what an epoch kept
            is cleared within them, before or after memory was looked at.
    """
    bounds = np.asarray(starts, float)
    inside = ~np.isin(steps, bounds)
    steps, sizes = steps[inside], sizes[inside]
    of_epoch = np.searchsorted(bounds, steps)
    epochs = [one for one in np.unique(of_epoch) if (of_epoch == one).sum() >= _LEAST_POINTS]
    if len(epochs) < 2 or np.isin(of_epoch, epochs).sum() < _LEAST_IN_ALL:
        return None
    num_groups = max(_LEAST_POINTS, _MOST_GROUPS // len(epochs))
    curves = [
        (medians(steps[mask], num_groups), medians(sizes[mask], num_groups))
        for mask in (of_epoch == one for one in epochs)
    ]
    slope, low, high = _slope(curves)
    lengths = [curve[0][-1] - curve[0][0] for curve in curves]
    return EpochGrowth(
        level_bytes=float(np.median([curve[1].max() for curve in curves])),
        num_epochs=len(epochs),
        num_steps=float(np.median(lengths)),
        bytes_per_step=slope,
        low=low,
        high=high,
        first=_slope([(x[: len(x) // 2], y[: len(x) // 2]) for x, y in curves])[0],
        second=_slope([(x[len(x) // 2 :], y[len(x) // 2 :]) for x, y in curves])[0],
        fallen_bytes=float(np.median([one[1][-1] - other[1][0] for one, other in pairwise(curves)])),
    )


def without_growth(
    steps: _Floats, sizes: _Floats, starts: Sequence[int], growth: EpochGrowth
) -> tuple[_Floats, _Floats]:
    """The points without those of the steps in which an epoch begins, less what it grew by in its epoch."""
    bounds = np.asarray(starts, float)
    inside = ~np.isin(steps, bounds)
    steps, sizes = steps[inside], sizes[inside]
    begins = np.concatenate([steps[:1], bounds])[np.searchsorted(bounds, steps)]
    return steps, sizes - growth.bytes_per_step * (steps - begins)


def _slope(curves: Sequence[tuple[_Floats, _Floats]]) -> tuple[float, float, float]:
    strata = np.repeat(np.arange(len(curves)), [len(x) for x, _ in curves])
    return theil_sen(np.concatenate([x for x, _ in curves]), np.concatenate([y for _, y in curves]), strata)
