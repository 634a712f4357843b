"""What happens when Lightning's action names are not those we know: public hooks measure instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_modelprof.lightning.phases import PhaseProfiler
from lightning_modelprof.measure.hook_phases import (
    LOST,
    LOST_IN_EVALUATION,
    EvaluationHookPhases,
    HookPhases,
)
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.run.loops import Loop
from lightning_modelprof.run.steps import StepTag


class HookFallback:
    """Sees whether the names are known, and changes over to hooks if they are not.

    Args:
        loop: which loop runs.
        trainer: gets a callback of ours for the rest of the loop.
        ledger: where times go.
        delegate: knows which names came.
        say: takes one sentence, for a warning and a note of the report.
        cleanup: undoes the change in the end.

    Attributes:
        is_used: whether hooks measure.
    """

    def __init__(
        self,
        loop: Loop,
        trainer: Any,
        ledger: PhaseLedger,
        delegate: PhaseProfiler,
        *,
        say: Callable[[str], None],
        cleanup: ExitStack,
    ) -> None:
        self._loop = loop
        self._trainer = trainer
        self._ledger = ledger
        self._delegate = delegate
        self._say = say
        self._cleanup = cleanup
        self._batches_without_fetch = 0
        self.is_used = False

    def begin_batch(self) -> None:
        """A batch starts and no fetch was seen: the step method fetches, or the names are unknown."""
        if self.is_used:
            return
        self._batches_without_fetch += 1
        if self._batches_without_fetch == 2 and self._delegate.missing_hooks():
            self._use_hooks()
            return
        if not self._loop.is_fit:
            self._ledger.begin_evaluation()
        self._ledger.begin_batch()

    def check_first_step(self) -> None:
        """The first step ended: now all names must have come."""
        if not self.is_used and self._delegate.missing_hooks():
            self._use_hooks()

    def check_epoch(self) -> None:
        """An epoch of a fit ended: if no step of it was seen to end, the names are unknown."""
        if self.is_used or self._ledger.steps_ended:
            return
        missing = self._delegate.missing_hooks()
        if not self._batches_without_fetch:
            # No batch came: a fit that resumes where an epoch's batches are all done fetches none in it.
            missing -= {self._loop.fetch}
        # An epoch that was skipped before its first training step says nothing about names.
        if missing or self._delegate.has_trained:
            self._use_hooks()

    def _use_hooks(self) -> None:
        missing = ", ".join(sorted(self._delegate.missing_hooks())) or "the end of a batch"
        is_fit = self._loop.is_fit
        self._say(
            f"this Lightning does not tell its profiler of {missing}; measuring by callback hooks instead."
            f" Lost: {LOST if is_fit else LOST_IN_EVALUATION}"
        )
        self.is_used = True
        self._delegate.disarm()
        self._ledger.restart()
        if not is_fit:
            self._ledger.tags |= StepTag.FIRST_OF_EPOCH  # its fetch is over already
        hooks = HookPhases(self._ledger) if is_fit else EvaluationHookPhases(self._ledger)
        self._trainer.callbacks.append(hooks)
        self._cleanup.callback(self._trainer.callbacks.remove, hooks)
