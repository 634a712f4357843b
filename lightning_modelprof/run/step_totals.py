"""Exact sums over all finished steps, of a size that doesn't grow with their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.run.steps import NOT_CLEAN, NOT_MEASURED, PROFILER, StepTimings

_LARGEST: Final = np.iinfo(np.int64).max

ADDED: Final = (
    "num_steps",
    "duration_ns",
    "samples",
    "num_counted",
    "phases_ns",
    "num_in_phase",
    "num_measured",
    "device_ns",
    "num_on_device",
)
"""Columns that are sums; the others are a step's maximum or minimum."""

_OF_PHASES: Final = ("phases_ns", "phases_max_ns", "phases_min_ns", "num_in_phase")


class StepTotals:
    """Steps summed by their set of tags, as columns; a figure selects its steps by tags alone.

    Attributes:
        tags: int64, shape (c,): distinct sets of :class:`StepTag` bits, ascending.
        num_steps: int64, shape (c,): steps with these tags.
        duration_ns, duration_max_ns, duration_min_ns: int64, shape (c,): wall time: sum, maximum and minimum.
        net_max_ns, net_min_ns: int64, shape (c,): maximum and minimum without the phase ``profiler``.
        samples: int64, shape (c,): in the steps where they are known.
        num_counted: int64, shape (c,): number of those steps.
        phases_ns, phases_max_ns, phases_min_ns: int64, shape (c, len(PHASES)): self time: sum, maximum and
            minimum over the steps in which the phase was measured; 0 if there were none.
        num_in_phase: int64, shape (c, len(PHASES)): steps in which the phase took any time.
        num_measured: int64, shape (c, len(PHASES)): steps in which the phase was measured.
        device_ns: int64, shape (c, len(PHASES)): time between device events, where known.
        num_on_device: int64, shape (c, len(PHASES)): number of those steps.
    """

    __slots__ = (
        "duration_max_ns",
        "duration_min_ns",
        "net_max_ns",
        "net_min_ns",
        "phases_max_ns",
        "phases_min_ns",
        "tags",
        *ADDED,
    )

    tags: NDArray[np.int64]
    num_steps: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    duration_max_ns: NDArray[np.int64]
    duration_min_ns: NDArray[np.int64]
    net_max_ns: NDArray[np.int64]
    net_min_ns: NDArray[np.int64]
    samples: NDArray[np.int64]
    num_counted: NDArray[np.int64]
    phases_ns: NDArray[np.int64]
    phases_max_ns: NDArray[np.int64]
    phases_min_ns: NDArray[np.int64]
    num_in_phase: NDArray[np.int64]
    num_measured: NDArray[np.int64]
    device_ns: NDArray[np.int64]
    num_on_device: NDArray[np.int64]

    def __init__(self, **columns: NDArray[np.int64]) -> None:
        for name in self.__slots__:
            setattr(self, name, columns[name])

    def __len__(self) -> int:
        return int(self.num_steps.sum())

    def columns(self) -> dict[str, NDArray[np.int64]]:
        return {name: getattr(self, name) for name in self.__slots__}

    @staticmethod
    def of(steps: StepTimings) -> StepTotals:
        is_measured = steps.phases_ns != NOT_MEASURED
        is_known = steps.device_phases_ns != NOT_MEASURED
        is_counted = steps.samples != NOT_MEASURED
        one_each = {
            "num_steps": np.ones(len(steps), np.int64),
            "duration_ns": steps.duration_ns,
            "duration_max_ns": steps.duration_ns,
            "duration_min_ns": steps.duration_ns,
            "net_max_ns": steps.net().duration_ns,
            "net_min_ns": steps.net().duration_ns,
            "samples": np.where(is_counted, steps.samples, 0),
            "num_counted": is_counted.astype(np.int64),
            "phases_ns": np.where(is_measured, steps.phases_ns, 0),
            "phases_max_ns": np.where(is_measured, steps.phases_ns, 0),
            "phases_min_ns": np.where(is_measured, steps.phases_ns, _LARGEST),
            "num_in_phase": (steps.phases_ns > 0).astype(np.int64),
            "num_measured": is_measured.astype(np.int64),
            "device_ns": np.where(is_known, steps.device_phases_ns, 0),
            "num_on_device": is_known.astype(np.int64),
        }
        return _by_tags(steps.tags, one_each)

    @staticmethod
    def merge(pieces: Sequence[StepTotals]) -> StepTotals:
        if not pieces:
            return StepTotals.of(StepTimings.empty())
        columns = {
            name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in StepTotals.__slots__
        }
        is_unmeasured = columns["num_measured"] == 0
        columns["phases_min_ns"] = np.where(is_unmeasured, _LARGEST, columns["phases_min_ns"])
        return _by_tags(columns.pop("tags"), columns)

    def select(self, mask: NDArray[np.bool_]) -> StepTotals:
        """The sets of tags where ``mask`` (bool, shape (c,)) is true."""
        return StepTotals(**{name: column[mask] for name, column in self.columns().items()})

    def without(self, tags: int) -> StepTotals:
        return self.select((self.tags & int(tags)) == 0)

    def clean(self) -> StepTotals:
        """The clean steps, without the time of the phase ``profiler``."""
        clean = self.without(NOT_CLEAN)
        phases = {name: getattr(clean, name).copy() for name in _OF_PHASES}
        for column in phases.values():
            column[:, PROFILER] = 0
        duration_ns = clean.duration_ns - clean.phases_ns[:, PROFILER]
        most_and_least = {"duration_max_ns": clean.net_max_ns, "duration_min_ns": clean.net_min_ns}
        return StepTotals(**(clean.columns() | phases | {"duration_ns": duration_ns} | most_and_least))

    def num_with(self, tag: int) -> int:
        return int(self.num_steps[(self.tags & int(tag)) != 0].sum())

    def total(self, name: str) -> NDArray[np.int64]:
        """A column of ``ADDED`` summed over all tags: a number, or shape (len(PHASES),)."""
        total: NDArray[np.int64] = getattr(self, name).sum(axis=0)
        return total

    def measured_phases(self) -> NDArray[np.bool_]:
        """Which phases were measured in every step; bool, shape (len(PHASES),)."""
        everywhere: NDArray[np.bool_] = self.total("num_measured") == len(self)
        return everywhere

    @property
    def has_samples(self) -> bool:
        return int(self.total("num_counted")) == len(self)


def _by_tags(tags: NDArray[np.int64], columns: dict[str, NDArray[np.int64]]) -> StepTotals:
    order = np.argsort(tags, kind="stable")
    known, first = np.unique(tags[order], return_index=True)
    result = {"tags": known}
    for name, column in columns.items():
        if len(known) == 0:
            result[name] = column
        elif name in ADDED:
            result[name] = np.add.reduceat(column[order], first, axis=0)
        elif name.endswith("_max_ns"):
            result[name] = np.maximum.reduceat(column[order], first, axis=0)
        else:
            result[name] = np.minimum.reduceat(column[order], first, axis=0)
    least = result["phases_min_ns"]
    result["phases_min_ns"] = np.where(result["num_measured"] == 0, 0, least)
    return StepTotals(**result)
