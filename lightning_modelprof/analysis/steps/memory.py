"""How much memory a loop used, whether it keeps growing, and how much of what is reserved nothing uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.epoch_growth import EpochGrowth, within_epochs, without_growth
from lightning_modelprof.analysis.theil_sen import theil_sen
from lightning_modelprof.run.memory import MemoryPoint, MemoryRecord

LEAST_POINTS: Final = 20
"""Points that the second half of a curve needs, to say how it grows."""
_MOST_GROUPS: Final = 40
"""Neighbouring points are taken together into at most so many: they depend on each other."""
_KINDS: Final = (("anonymous", "anonymous_bytes"), ("rss", "rss_bytes"), ("allocated", "allocated_bytes"))

_Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How one kind of memory grows in the second half of the curve.

    Attributes:
        kind: ``anonymous`` (the process's, without what is mapped from files or shared), ``rss`` where that
            is not known, or ``allocated`` on the device.
        level_bytes: median of the last quarter.
        first_step, last_step: between which it was looked at.
        bytes_per_step: Theil-Sen slope.
        low, high: its 95 % interval.
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
    in_epochs: EpochGrowth | None = None

    @property
    def seen_bytes(self) -> float:
        """By how much it grew from the first of these steps to the last, by its slope."""
        return self.bytes_per_step * (self.last_step - self.first_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What is derived from a loop's memory.

    Attributes:
        record: what was measured.
        growth: of each kind that was measured often enough, the host's first.
        unused_bytes: by how much the most that was reserved exceeds the most that was allocated; ``None``
            where torch does not count both.
        unused_share: that over the most that was reserved; ``None`` likewise.
    """

    record: MemoryRecord
    growth: tuple[Growth, ...]
    unused_bytes: int | None
    unused_share: float | None


def memory_use(record: MemoryRecord | None, epoch_starts: Sequence[int] = ()) -> MemoryUse | Absent:
    """Derive what a loop's memory says; absent in runs of versions that did not look.

    Args:
        record: what was measured.
        epoch_starts: steps in which an epoch begins; empty if they are not all known.
    """
    if record is None:
        return Absent("the run does not say how much memory it used (it was saved by an older version)")
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
    x, y = _medians(steps, sizes)
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
        in_epochs=in_epochs,
    )


def _medians(x: _Floats, y: _Floats) -> tuple[_Floats, _Floats]:
    """Medians of groups of neighbours, of as equal a size as can be."""
    groups = min(_MOST_GROUPS, len(x))
    parts = zip(np.array_split(x, groups), np.array_split(y, groups), strict=True)
    medians = np.array([(np.median(one), np.median(other)) for one, other in parts])
    return medians[:, 0], medians[:, 1]
