"""How much of a step goes into clipping gradients?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.report.model import Evidence
from lightning_modelprof.report.rules.base import count
from lightning_modelprof.report.rules.phases import PhaseShareRule, hooks_named
from lightning_modelprof.run.setup import CodePlace, TrainingSetup


@dataclass(frozen=True, kw_only=True)
class ClipCost(PhaseShareRule):
    """The phase Gradient clipping."""

    kind: ClassVar[str] = "clip_cost"
    title: ClassVar[str] = "Clipping gradients takes long"
    phase: ClassVar[str] = "clip"
    what: ClassVar[str] = "Clipping gradients"

    def action(self, setup: TrainingSetup) -> str:
        """Cheaper clipping."""
        own = hooks_named(setup, "configure_gradient_clipping")
        if own:
            return f"Do less in {own[0].name}; torch.nn.utils.clip_grad_norm_(foreach=True) is one pass."
        return "Clip by value (gradient_clip_algorithm='value'), which needs no norm, or do not clip."

    def places(self, setup: TrainingSetup) -> list[CodePlace]:
        """The module's own clipping."""
        return hooks_named(setup, "configure_gradient_clipping")

    def more(self, setup: TrainingSetup) -> list[Evidence]:
        """Of how many gradients."""
        return [count("parameters with gradients", setup.num_trainable_tensors)]
