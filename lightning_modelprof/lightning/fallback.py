"""What happens when Lightning's action names are not those we know: public hooks measure instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from lightning.pytorch.callbacks import Callback

from lightning_modelprof.lightning.phases import PhaseProfiler
from lightning_modelprof.measure.steps.ledger import (
    BACKWARD,
    OPTIMIZER,
    OTHER,
    PREDICTIONS,
    PROFILER,
    USER_PROFILER,
    PhaseLedger,
)
from lightning_modelprof.run.loops import Loop
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag


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


FORWARD: Final = PHASE_INDEX["forward"]


ZERO_GRAD: Final = PHASE_INDEX["zero_grad"]


MEASURED: Final = {
    FORWARD,
    ZERO_GRAD,
    BACKWARD,
    OPTIMIZER,
    OTHER,
    PROFILER,
    USER_PROFILER,
    PREDICTIONS,  # a fit has none
    PHASE_INDEX["rank_wait"],  # told apart where it is, not by an action
}


UNSEEN: Final = set(range(len(PHASES))) - MEASURED


UNSEEN_IN_EVALUATION: Final = {
    PHASE_INDEX[key]
    for key in ("dataloader", "transfer", "callbacks", "module_hooks", "logging", "checkpoint", "predictions")
}


LOST: Final = (
    "the dataloader, transfer, logging and validation times (they are one gap, phase 'other'), the times by"
    " callback, and the optimizer's time apart from clipping and schedulers"
)


LOST_IN_EVALUATION: Final = (
    "the dataloader, transfer, logging and predictions times (they are one gap, phase 'other'), and the times"
    " by callback"
)


class HookPhases(Callback):
    """Feeds the ledger from public hooks; a step runs from one ``on_train_batch_end`` to the next."""

    def __init__(self, ledger: PhaseLedger) -> None:
        self._ledger = ledger

    def _switch(self, phase: int) -> None:
        _switch(self._ledger, phase)

    def on_train_epoch_start(self, *args: Any) -> None:
        """The step that runs contains an epoch's boundary."""
        self._ledger.tags |= StepTag.FIRST_OF_EPOCH

    def on_validation_start(self, *args: Any) -> None:
        """The step that runs contains validation."""
        self._ledger.tags |= StepTag.VALIDATION

    def on_train_batch_start(self, *args: Any) -> None:
        """Forward begins; before it was the gap."""
        self._switch(FORWARD)
        self._ledger.batch_began = True

    def on_before_zero_grad(self, *args: Any) -> None:
        """Forward is over."""
        self._switch(ZERO_GRAD)

    def on_before_backward(self, *args: Any) -> None:
        """Backward begins."""
        self._switch(BACKWARD)

    def on_after_backward(self, *args: Any) -> None:
        """Backward is over; in a closure or under manual optimization forward may go on."""
        self._switch(FORWARD)

    def on_before_optimizer_step(self, *args: Any) -> None:
        """The optimizer steps."""
        self._switch(OPTIMIZER)

    def on_train_batch_end(self, *args: Any) -> None:
        """The step is over."""
        self._switch(OTHER)
        _end_step(self._ledger, UNSEEN)


class EvaluationHookPhases(Callback):
    """The same for an evaluation loop; a step runs from one end of a batch to the next."""

    def __init__(self, ledger: PhaseLedger) -> None:
        self._ledger = ledger

    def on_validation_batch_start(self, *args: Any) -> None:
        """The step method begins; before it was the gap."""
        _switch(self._ledger, FORWARD)
        self._ledger.batch_began = True

    def on_validation_batch_end(self, *args: Any) -> None:
        """The step is over."""
        _switch(self._ledger, OTHER)
        _end_step(self._ledger, UNSEEN_IN_EVALUATION)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # type: ignore[assignment]
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]


def _switch(ledger: PhaseLedger, phase: int) -> None:
    ledger.charge()
    ledger.current = phase
    if ledger.device is not None:
        ledger.device.mark(phase)


def _end_step(ledger: PhaseLedger, unseen: set[int]) -> None:
    for index in unseen:
        ledger.self_ns[index] = NOT_MEASURED
    ledger.end_step()
    if ledger.device is not None:
        ledger.device.mark(OTHER)  # the fetch is a part of the gap
