"""Measured facts about the validation loops inside a fit: what their time consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_modelprof.run.phases import PHASE_INDEX, PHASES, Phase
from lightning_modelprof.run.ranges import Count, Whole


def _as_in_a_step(key: str, definition: str) -> Phase:
    """A part that is called what it is called in a training step."""
    return Phase(key, PHASES[PHASE_INDEX[key]].label, definition)


PARTS: Final[tuple[Phase, ...]] = (
    _as_in_a_step("dataloader", "waiting for the next validation batch"),
    _as_in_a_step("transfer", "moving the batch to the device, with the batch-transfer hooks"),
    _as_in_a_step("forward", "validation_step: the model, and what is logged and updated in it"),
    _as_in_a_step("module_hooks", "on_validation_... of the module and Strategy without the epoch's end"),
    Phase(
        "epoch_end",
        "Metrics and epoch end",
        "computing metrics after the last batch, on_validation_epoch_end",
    ),
    _as_in_a_step("logging", "metrics, loggers and progress counters after a batch and after the last one"),
    _as_in_a_step("dataloader_init", "making the dataloader and starting its workers before the first batch"),
    _as_in_a_step("other", "Lightning's loop between the above"),
)
"""The parts of the phase ``validation``: they share its time, each nanosecond in one of them."""

PART_INDEX: Final[dict[str, int]] = {part.key: index for index, part in enumerate(PARTS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """One part of all validation loops of a fit.

    Attributes:
        key: as in ``PARTS``.
        calls: how often it began; ``None`` for what nothing begins, as Lightning's loop.
        total_ns: self time, without callbacks and checkpoints.
        device_ns: elapsed time on the device's stream while it was the running part; ``None`` without a
            device, or where that could not be read.
    """

    key: str
    calls: Count | None
    total_ns: Whole
    device_ns: Whole | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationTimes:
    """What the validation loops of one fit consisted of, whether or not the step around them finished.

    Attributes:
        num_runs: validation loops that began while the fit was measured; the sanity check comes before.
        parts: each part of ``PARTS``; they sum to the phase ``validation`` of the whole fit.
        num_first_fetches: fetches of the first batch of a dataloader.
        first_fetch_ns: time of these, which is in ``dataloader`` too.
    """

    num_runs: Whole
    parts: tuple[PartTime, ...]
    num_first_fetches: Whole = 0
    first_fetch_ns: Whole = 0

    @property
    def num_batches(self) -> int:
        """Batches that ``validation_step`` was called with."""
        return next((part.calls or 0 for part in self.parts if part.key == "forward"), 0)

    @property
    def total_ns(self) -> int:
        """All parts together."""
        return sum(part.total_ns for part in self.parts)
