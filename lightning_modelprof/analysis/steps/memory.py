"""Memory use of a loop: its growth, and the unused part of reserved memory."""

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
"""Points that the second half of a curve needs to fit its growth."""


_MOST_GROUPS: Final = 40
"""Neighboring points, which depend on each other, are merged into at most this many groups."""


_KINDS: Final = (("anonymous", "anonymous_bytes"), ("rss", "rss_bytes"), ("allocated", "allocated_bytes"))


_Floats = NDArray[np.floating[Any]]


class Growth(Record, frozen=True, kw_only=True):
    """Growth of one kind of memory in the second half of the curve.

    Attributes:
        kind: ``anonymous`` (the process's, without mapped files and shared memory), ``rss`` if that is
            unknown, or ``allocated`` on the device.
        level_bytes: median of the last quarter.
        first_step, last_step: range of the measurements.
        bytes_per_step: Theil-Sen slope.
        low, high: its 95% interval.
        low_without_jump: ``low`` without the largest jump between two levels: continuous growth is still
            there without it.
        third, fourth: slopes in the third and last quarter of the curve.
        in_epochs: growth within epochs, if these are known. If memory falls at their ends, the slopes above
            are of what remains.
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
        """Growth from the first of these steps to the last, by the slope."""
        return self.bytes_per_step * (self.last_step - self.first_step)


class MemoryUse(Record, frozen=True, kw_only=True):
    """Derived figures of a loop's memory.

    Attributes:
        growth: of each kind that was measured often enough, the host's first.
        unused_bytes: peak reserved minus peak allocated; ``None`` if torch doesn't count both.
        unused_share: that over peak reserved; ``None`` as above.
    """

    record: MemoryRecord
    growth: tuple[Growth, ...]
    unused_bytes: int | None
    unused_share: float | None


def memory_use(record: MemoryRecord | None, epoch_starts: Sequence[int] = ()) -> MemoryUse:
    """Derive figures from a loop's memory.

    Args:
        epoch_starts: first steps of epochs; empty if some are unknown.

    Raises:
        NotMeasured: for runs of versions that didn't record it.
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
    """Growth of one kind of memory in the second half of a curve; ``None`` with too few points.

    The first half is warm-up: caches fill, workers start, kernels load. The points of the second half are
    grouped with their neighbors, and each group's median is one point.
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
"""Neighboring points whose median is the level before or after a jump."""


def _without_jump(sizes: _Floats) -> _Floats:
    """The curve without its largest rise between the levels before and after a point."""
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
"""Points that an epoch needs to count; each half of an epoch has its own slope."""


_LEAST_IN_ALL: Final = 20


_FALLS: Final = 0.5
"""Share of an epoch's growth that must be gone after it."""


class EpochGrowth(Record, frozen=True, kw_only=True):
    """Growth of one kind of memory within epochs; every figure compares points of the same epoch.

    Attributes:
        level_bytes: median over epochs of the highest level.
        num_epochs: epochs with enough points.
        num_steps: their median length in steps.
        bytes_per_step: Theil-Sen slope over the pairs of points of the same epoch.
        low, high: its 95% interval.
        first, second: slopes of the first and second halves of the epochs.
        fallen_bytes: median over the ends of epochs: last level before minus first level after.
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
        """Whether it significantly grows in each epoch, and at least half of that is gone after it."""
        return self.low > 0 and self.fallen_bytes >= _FALLS * self.grown_bytes


def within_epochs(steps: _Floats, sizes: _Floats, starts: Sequence[int]) -> EpochGrowth | None:
    """Growth within epochs; ``None`` with fewer than two epochs that have enough points.

    Args:
        steps: shape (n,), rising: steps of the measurements.
        sizes: shape (n,), in bytes.
        starts: first steps of epochs, rising. Their own points are left out, since memory kept by an epoch is
            freed within them, before or after the measurement.
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
    """Points without those of epochs' first steps, minus the growth within their epoch."""
    bounds = np.asarray(starts, float)
    inside = ~np.isin(steps, bounds)
    steps, sizes = steps[inside], sizes[inside]
    begins = np.concatenate([steps[:1], bounds])[np.searchsorted(bounds, steps)]
    return steps, sizes - growth.bytes_per_step * (steps - begins)


def _slope(curves: Sequence[tuple[_Floats, _Floats]]) -> tuple[float, float, float]:
    strata = np.repeat(np.arange(len(curves)), [len(x) for x, _ in curves])
    return theil_sen(np.concatenate([x for x, _ in curves]), np.concatenate([y for _, y in curves]), strata)
