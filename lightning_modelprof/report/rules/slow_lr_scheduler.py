"""How much of a step goes into learning-rate schedulers?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.report.rules.phases import PhaseShareRule, hooks_named
from lightning_modelprof.run.setup import CodePlace, TrainingSetup


@dataclass(frozen=True, kw_only=True)
class SlowLearningRateScheduler(PhaseShareRule):
    """The phase LR scheduler."""

    kind: ClassVar[str] = "slow_lr_scheduler"
    title: ClassVar[str] = "Stepping the learning rate takes long"
    phase: ClassVar[str] = "lr_scheduler"
    what: ClassVar[str] = "Stepping learning-rate schedulers"
    less: ClassVar[str] = "Do less in {names}, or step less often (interval='epoch' or frequency=...)."

    def action(self, setup: TrainingSetup) -> str:
        """Step less often."""
        own = hooks_named(setup, "lr_scheduler_step")
        if own:
            return f"Do less in {own[0].name}, or step less often (interval='epoch' or frequency=...)."
        return "Step the scheduler less often (interval='epoch' or frequency=...), or make it cheaper."

    def places(self, setup: TrainingSetup) -> list[CodePlace]:
        """The module's ``lr_scheduler_step``, and where schedulers are made."""
        return hooks_named(setup, "lr_scheduler_step", "configure_optimizers")
