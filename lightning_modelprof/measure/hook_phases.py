"""The fallback: phase times from public hooks alone, for a Lightning whose action names we do not know.

Hooks see less than the profiler's actions: nothing marks the fetch, the transfer, the loggers or
validation, so all of these are one gap, and the optimizer's time holds clipping, schedulers and the
other callbacks' ends. What cannot be told apart is stored as not measured.
"""

from __future__ import annotations

from typing import Any, Final

from lightning.pytorch.callbacks import Callback

from lightning_modelprof.measure.steps.ledger import (
    BACKWARD,
    OPTIMIZER,
    OTHER,
    PREDICTIONS,
    PROFILER,
    USER_PROFILER,
    PhaseLedger,
)
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag

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
