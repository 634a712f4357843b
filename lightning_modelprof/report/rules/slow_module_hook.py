"""How much of a step goes into hooks of the LightningModule, the DataModule and the Strategy?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.report.rules.phases import PhaseShareRule
from lightning_modelprof.run.setup import CodePlace, TrainingSetup


@dataclass(frozen=True, kw_only=True)
class SlowModuleHook(PhaseShareRule):
    """The phase Module hooks. The phase has all hooks in one: with several, all of them are named."""

    kind: ClassVar[str] = "slow_module_hook"
    title: ClassVar[str] = "Hooks of the module take long"
    phase: ClassVar[str] = "module_hooks"
    what: ClassVar[str] = "The time in hooks of the module"
    is_in_every_step: ClassVar[bool] = False
    less: ClassVar[str] = "Do less in {names}, or do it in fewer steps."

    def action(self, setup: TrainingSetup) -> str:
        """Do less there."""
        names = ", ".join(one.name for one in self.places(setup)) or "the DataModule's or Strategy's hooks"
        return f"Do less in {names}, or do it in fewer steps."

    def places(self, setup: TrainingSetup) -> list[CodePlace]:
        """The module's own hooks that run in a step, and those that it has from a library."""
        return [
            place
            for name, place in setup.module_hooks.items()
            if name.startswith("on_")
            and "batch_transfer" not in name
            and (place.package or not place.is_library)
        ]
