"""How much of the training goes into saving checkpoints?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.report.model import Location
from lightning_modelprof.report.rules.base import lines_that_call
from lightning_modelprof.report.rules.phases import PhaseShareRule
from lightning_modelprof.run.setup import CheckpointSetup, CodePlace, TrainingSetup


@dataclass(frozen=True, kw_only=True)
class CheckpointShare(PhaseShareRule):
    """The phase Checkpoint over the whole loop, also after the last step."""

    kind: ClassVar[str] = "checkpoint_share"
    title: ClassVar[str] = "Saving checkpoints takes long"
    phase: ClassVar[str] = "checkpoint"
    what: ClassVar[str] = "Saving checkpoints"
    is_in_every_step: ClassVar[bool] = False

    def action(self, setup: TrainingSetup) -> str:
        """Save less often, or less."""
        settings = "; ".join(map(_settings, setup.checkpoints))
        advice = "Save less often (every_n_train_steps, every_n_epochs), fewer (save_top_k) or less"
        return f"{advice} (save_weights_only=True)." + (f" Now: {settings}." if settings else "")

    def places(self, setup: TrainingSetup) -> list[CodePlace | Location]:
        """The plugin that writes, if it is the user's own, and where ModelCheckpoint is made."""
        plugin = setup.checkpoint_io
        own = [] if plugin is None or plugin.is_library else [plugin]
        return [*own, *lines_that_call(setup, "ModelCheckpoint")]


def _settings(setup: CheckpointSetup) -> str:
    words = {
        "every_n_train_steps": setup.every_n_train_steps,
        "every_n_epochs": setup.every_n_epochs,
        "save_top_k": setup.save_top_k,
        "save_last": setup.save_last,
        "save_weights_only": setup.save_weights_only,
    }
    arguments = ", ".join(f"{name}={value}" for name, value in words.items() if value is not None)
    return f"ModelCheckpoint({arguments})"
