"""The Trainer's loops that are measured."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.record import Count, Int, Real, Record


class LoopKind(Record, frozen=True, kw_only=True):
    """One of the Trainer's loops. A validation loop inside a fit is part of the fit.

    Attributes:
        key: the Trainer's method, which is also the stage that Lightning passes to ``setup``.
        name: as shown in reports.
        hooks: the loop in names of hooks, as in ``on_validation_batch_start``.
        fetch: suffix of the profiler action that fetches a batch.
        step_hook: the LightningModule's method for one batch.
        step, steps: one batch and several, as shown in reports.
        more: how to get more of them.
    """

    key: str
    name: str
    hooks: str
    fetch: str
    step_hook: str
    trainer_attribute: str
    step: str = "batch"
    steps: str = "batches"
    more: str = "use more batches"

    @property
    def is_fit(self) -> bool:
        return self.key == "fit"

    @property
    def subject(self) -> str:
        return self.name if self.is_fit else f"the {self.name} loop"

    @property
    def first_of(self) -> str:
        """Why a step with ``FIRST_OF_EPOCH`` is excluded; an evaluation runs each dataloader once."""
        return "first in an epoch" if self.is_fit else "first in a dataloader"


FIT: Final = LoopKind(
    key="fit",
    name="training",
    hooks="train",
    fetch="train_dataloader_next",
    step_hook="training_step",
    trainer_attribute="fit_loop",
    step="step",
    steps="steps",
    more="train for longer",
)


VALIDATE: Final = LoopKind(
    key="validate",
    name="validation",
    hooks="validation",
    fetch="val_next",
    step_hook="validation_step",
    trainer_attribute="validate_loop",
)


TEST: Final = LoopKind(
    key="test",
    name="test",
    hooks="test",
    fetch="test_next",
    step_hook="test_step",
    trainer_attribute="test_loop",
)


PREDICT: Final = LoopKind(
    key="predict",
    name="prediction",
    hooks="predict",
    fetch="predict_next",
    step_hook="predict_step",
    trainer_attribute="predict_loop",
)


LOOPS: Final[dict[str, LoopKind]] = {loop.key: loop for loop in (FIT, VALIDATE, TEST, PREDICT)}


def loop_of(key: str) -> LoopKind:
    """The loop of a saved run; unknown ones are read as a fit."""
    return LOOPS.get(key, FIT)


MAX_KEPT: Final = 4096
"""Durations saved per kind of short loop."""


MAX_LINES: Final = 1000
"""Loops with a :class:`LoopLine`; later ones have none."""


class ShortLoops(Record, frozen=True, kw_only=True):
    """Loops of one kind and model, each too short for a report of its own.

    Attributes:
        loop: the Trainer's method.
        model: class of the LightningModule.
        calls: number of loops.
        batches: total over all loops.
        total_ns: total wall time, from the fetch of a loop's first batch to its end.
        durations_ns: of each; if there are more than 4,096, of a sample spread evenly.
        failed: loops that ended with an exception.
    """

    loop: str
    model: str
    calls: Count
    batches: Count
    total_ns: Int
    durations_ns: tuple[Int, ...] = ()
    failed: Count = 0


class LoopLine(Record, frozen=True, kw_only=True):
    """One-line summary of a loop that has its own report.

    Attributes:
        loop: the Trainer's method.
        model: class of the LightningModule.
        created: local time of its start, ISO 8601.
        status: how it ended, as in RunInfo.
        steps: finished ones.
        steps_per_s: over its clean steps; ``None`` without any.
        standard_error: of that; ``None`` if unknown.
        verdict: kind of the verdict.
        folder: directory of its files; ``""`` without one.
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
