"""The Trainer's loops that are measured, in Lightning's words and in a reader's."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.record import Count, Int, Real, Record


class LoopKind(Record, frozen=True, kw_only=True):
    """One of the Trainer's loops. A validation loop inside a fit is a part of the fit.

    Attributes:
        key: the Trainer's method, which is also the stage that Lightning gives to ``setup``.
        name: what a reader calls it.
        hooks: what stands for the loop in the names of hooks, as in ``on_validation_batch_start``.
        fetch: end of the profiler action that is the fetch of a batch.
        step_hook: the LightningModule's method for one batch.
        step, steps: what a reader calls one batch, and several.
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
        """Why a step with ``FIRST_OF_EPOCH`` is left out; an evaluation goes through each dataloader once."""
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
    """The loop of a saved run; one that this version does not know is read as a fit."""
    return LOOPS.get(key, FIT)


MAX_KEPT: Final = 4096
"""Durations that are kept of the short loops of one kind."""


MAX_LINES: Final = 1000
"""Loops that have a line; later ones have none."""


class ShortLoops(Record, frozen=True, kw_only=True):
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
    total_ns: Int
    durations_ns: tuple[Int, ...] = ()
    failed: Count = 0


class LoopLine(Record, frozen=True, kw_only=True):
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
