"""How long does the host take to move batches to the device?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.report.advice.loader import FEWER_ITEMS
from lightning_modelprof.report.advice.owners import loader_call
from lightning_modelprof.report.model import Evidence
from lightning_modelprof.report.rules.base import text
from lightning_modelprof.report.rules.phases import PhaseShareRule, hooks_named
from lightning_modelprof.run.setup import CodePlace, TrainingSetup


@dataclass(frozen=True, kw_only=True)
class SlowTransfer(PhaseShareRule):
    """The phase Transfer on the host, with the batch-transfer hooks."""

    kind: ClassVar[str] = "slow_transfer"
    title: ClassVar[str] = "Moving batches to the device takes long"
    phase: ClassVar[str] = "transfer"
    what: ClassVar[str] = "Moving the batch to the device"
    less: ClassVar[str] = "Do less in {names}: it runs in the step, work on samples belongs to the workers."

    def action(self, setup: TrainingSetup) -> str:
        """Pin, and do less in the hooks."""
        hooks = ", ".join(one.name for one in self.places(setup))
        parts = [self.less.format(names=hooks)] if hooks else []
        unpinned = next((one for one in setup.loaders if one.pin_memory is False), None)
        if setup.cuda is not None and unpinned is not None:
            parts.append(
                f"{loader_call(setup, unpinned, pin_memory=True)}: False now; copies from pageable memory"
                " block the host."
            )
        return " ".join(parts) or FEWER_ITEMS

    def places(self, setup: TrainingSetup) -> list[CodePlace]:
        """The module's own transfer hooks."""
        return hooks_named(
            setup, "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
        )

    def more(self, setup: TrainingSetup) -> list[Evidence]:
        """Whether memory is pinned."""
        return [
            text("pin_memory", str(one.pin_memory)) for one in setup.loaders if one.pin_memory is not None
        ]
