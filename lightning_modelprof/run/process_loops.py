"""The loops that one process ran, one after the other: short ones summed up, others with a line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_modelprof.run.ranges import Count, Real, Whole

MAX_KEPT: Final = 4096
"""Durations that are kept of the short loops of one kind."""

MAX_LINES: Final = 1000
"""Loops that have a line; later ones have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortLoops:
    """Loops of one kind and model, each too short for a report of its own.

    Attributes:
        loop: the Trainer's method.
        model: class of the LightningModule.
        calls: how many there were.
        batches: of all of them together.
        total_ns: wall time of all, from where the first batch is fetched to the loop's end.
        durations_ns: of each; where there are more than 4,096, of some of them, spread evenly.
        failed: those that ended with an exception.
    """

    loop: str
    model: str
    calls: Count
    batches: Count
    total_ns: Whole
    durations_ns: tuple[Whole, ...] = ()
    failed: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLine:
    """A loop that has a report of its own, in one line.

    Attributes:
        loop: the Trainer's method.
        model: class of the LightningModule.
        created: local time of its start, ISO 8601.
        status: how it ended, as in RunInfo.
        steps: finished ones.
        steps_per_s: over its clean steps; ``None`` where none is clean.
        standard_error: of that; ``None`` where it is not known.
        verdict: kind of the verdict.
        folder: of its files; ``""`` where it has none.
    """

    loop: str
    model: str
    created: str
    status: str
    steps: Count
    steps_per_s: Real | None
    standard_error: Real | None
    verdict: str
    folder: str
