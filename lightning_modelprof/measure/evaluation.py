"""The names of validate, test and predict: what an evaluation loop's profiler actions mean to the ledger.

Lightning has no action for such a loop as a whole. It begins with the fetch of its first batch, and its last
batch ends with the first of the hooks that end an epoch; there always is one, that of our own callback.
"""

from __future__ import annotations

from typing import Any

from lightning_modelprof.lightning.actions import (
    INHERIT,
    Action,
    BatchEndAction,
    BatchStartAction,
    CallbackAction,
    FetchAction,
    PhaseAction,
)
from lightning_modelprof.lightning.classify import Classifier
from lightning_modelprof.measure.steps.ledger import PREDICTIONS, PhaseLedger
from lightning_modelprof.run.loops import PREDICT, Loop
from lightning_modelprof.run.phases import PHASE_INDEX


class EvaluationFetchAction(FetchAction):
    """The fetch of a batch: the first one begins step 0, the others end the step before them."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.ledger.begin_evaluation()
        super().__enter__()


class EvaluationBatchStartAction(BatchStartAction):
    """A callback's hook at a batch's start: where a step begins if the step method fetches for itself."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.ledger.begin_evaluation()
        super().__enter__()


class PredictionBatchEndAction(BatchEndAction):
    """The end of another action is the end of the batch: its predictions are kept until the next fetch."""

    __slots__ = ()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        ledger = self.ledger
        ledger.charge()
        ledger.batch_ended = True
        if ledger.ranges is not None:
            self._close_range(ledger.ranges)
        ledger.open_gap(PREDICTIONS)
        if ledger.device is not None:
            ledger.device.mark(PREDICTIONS)


class LoopEndAction(Action):
    """A hook at the end of the epoch; the first one ends the last step."""

    __slots__ = ("action", "ledger")

    def __init__(self, ledger: PhaseLedger, action: Action) -> None:
        self.ledger = ledger
        self.action = action

    def __enter__(self) -> None:
        end_loop(self.ledger)
        self.action.__enter__()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self.action.__exit__(kind, error, trace)


class CallbackLoopEndAction(CallbackAction):
    """The same of another callback, with its own total."""

    __slots__ = ()

    def __enter__(self) -> None:
        end_loop(self.ledger)
        super().__enter__()


def end_loop(ledger: PhaseLedger) -> None:
    """The batches are over, if this has not been said yet."""
    if ledger.batch_began:
        ledger.end_epoch()


class EvaluationClassifier(Classifier):
    """Makes the actions of one evaluation loop.

    Args:
        ledger: what the actions write to.
        trainer: whose callbacks, strategy and module the actions are about.
        own_prefix: start of the action names of our own callback; they are not measured.
        loop: which one.
    """

    def __init__(self, ledger: PhaseLedger, trainer: Any, own_prefix: str, loop: Loop) -> None:
        super().__init__(ledger, trainer, own_prefix)
        self._loop = loop

    def _make(self, name: str) -> Action:
        loop, ledger = self._loop, self._ledger
        hook = name.rpartition(".")[2]
        if not name.startswith("["):
            return super()._make(name)
        if hook == loop.fetch:
            return EvaluationFetchAction(ledger)
        if hook == f"on_{loop.hooks}_epoch_end":
            return self._loop_end(name, hook)
        if name.startswith("[Strategy]") and hook == loop.step_hook:
            return self._marked(PhaseAction(ledger, PHASE_INDEX["forward"]))
        if name.startswith("[LightningModule]") and hook == f"on_{loop.hooks}_batch_end":
            kind = PredictionBatchEndAction if loop is PREDICT else BatchEndAction
            return kind(ledger, self._module_hook(name, hook))
        return super()._make(name)

    def _callback(self, hook: str) -> Action:
        if hook == f"on_{self._loop.hooks}_batch_start":
            return EvaluationBatchStartAction(self._ledger)
        return super()._callback(hook)

    def _loop_end(self, name: str, hook: str) -> Action:
        if name.startswith(self._own_prefix) or self._does_nothing(name, hook):
            return LoopEndAction(self._ledger, INHERIT)
        if name.startswith("[Callback]"):
            return CallbackLoopEndAction(self._ledger)
        return LoopEndAction(self._ledger, self._module_hook(name, hook))


def make_classifier(ledger: PhaseLedger, trainer: Any, own_prefix: str, loop: Loop) -> Classifier:
    """What knows the names of a loop."""
    if loop.is_fit:
        return Classifier(ledger, trainer, own_prefix)
    return EvaluationClassifier(ledger, trainer, own_prefix, loop)
