"""How much of a step goes into logging?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.report.model import Evidence
from lightning_modelprof.report.rules.base import count
from lightning_modelprof.report.rules.phases import PhaseShareRule
from lightning_modelprof.run.setup import CodePlace, TrainingSetup


@dataclass(frozen=True, kw_only=True)
class SlowLogger(PhaseShareRule):
    """The phase Logging: collecting metrics after the batch, and the loggers' ``log_metrics``."""

    kind: ClassVar[str] = "slow_logger"
    title: ClassVar[str] = "Logging takes long"
    phase: ClassVar[str] = "logging"
    what: ClassVar[str] = "Logging"

    def action(self, setup: TrainingSetup) -> str:
        """Log less often, or faster."""
        every = setup.log_every_n_steps or 1
        names = ", ".join(one.name.rpartition(".")[0] for one in setup.loggers)
        return (
            f"Trainer(log_every_n_steps={max(50, every * 10)}): {every} now, with {names}; or make"
            " log_metrics hand its work to another thread."
            if names
            else "There is no logger: look at what self.log() is given, and what is computed for it."
        )

    def places(self, setup: TrainingSetup) -> list[CodePlace]:
        """The loggers, the user's own first."""
        return sorted(setup.loggers, key=lambda one: one.is_library)

    def more(self, setup: TrainingSetup) -> list[Evidence]:
        """How often."""
        return [count("log_every_n_steps", setup.log_every_n_steps)]
