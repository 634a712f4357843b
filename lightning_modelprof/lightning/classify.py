"""Choose the action for each name in Lightning's profiler interface, once per name.

Names look like ``[LightningModule]Net.on_before_backward``: owner, class or state, hook. They're the same
from Lightning 2.2 to 2.6 but not guaranteed; ``tests/lightning/test_contract_lightning.py`` checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from lightning_modelprof.lightning.in_validation import (
    DATALOADER_INIT,
    EPOCH_END,
    FORWARD,
    MODULE_HOOKS,
    OTHER,
    TRANSFER,
    BatchEndPartAction,
    FetchPartAction,
    PartAction,
    PartBeginAction,
    ValidationEndAction,
    ValidationStartAction,
)
from lightning_modelprof.measure.steps.actions import (
    INHERIT,
    Action,
    AfterBackwardAction,
    BatchEndAction,
    BatchStartAction,
    CallbackAction,
    DeviceMarkedAction,
    EpochAction,
    ExceptionAction,
    FetchAction,
    ManualBackwardEndAction,
    ManualBackwardStartAction,
    PhaseAction,
)
from lightning_modelprof.measure.steps.ledger import PREDICTIONS, PhaseLedger
from lightning_modelprof.run.loops import PREDICT, VALIDATE, LoopKind
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES

PHASE_OF_HOOK: Final[dict[str, str]] = {
    "on_before_batch_transfer": "transfer",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "optimizer_zero_grad": "zero_grad",
    "backward": "backward",
    "configure_gradient_clipping": "clip",
    "lr_scheduler_step": "lr_scheduler",
}
"""Phase key by hook name, which follows the last dot of an action name."""


# These happen inside batch_to_device, whose phase their time belongs to.
INSIDE_TRANSFER: Final = {"transfer_batch_to_device", "on_after_batch_transfer"}


MODEL_ZERO_GRAD: Final = "on_validation_model_zero_grad"


MODEL_EVAL: Final = "on_validation_model_eval"
"""Module hooks with which a validation loop inside a fit starts."""


ENDS_BATCHES: Final[dict[str, int]] = {"on_validation_epoch_end": EPOCH_END, "on_validation_end": OTHER}
"""Hooks after a validation's last batch, with the part that lasts from there to the next one."""


class ActionTable(dict[str, Action]):
    """Actions by name, made on first use."""

    def __init__(self, make: Callable[[str], Action]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Action:
        action: Action = self._make(name)
        self[name] = action
        return action


class Classifier:
    """Makes the actions of one fit, and those it shares with an evaluation loop.

    Args:
        trainer: its callbacks, strategy and module are the subjects of actions.
        own_prefix: start of our own callback's action names, which aren't measured.

    Attributes:
        actions: by name, while the loop runs.
    """

    def __init__(self, ledger: PhaseLedger, trainer: Any, own_prefix: str) -> None:
        self._ledger = ledger
        self._trainer = trainer
        self._own_prefix = own_prefix
        self.actions = ActionTable(self._make)

    @property
    def _is_manual(self) -> bool:
        """Manual optimization, in which ``manual_backward`` needs other actions."""
        return not self._trainer.lightning_module.automatic_optimization

    def _make(self, name: str) -> Action:
        ledger = self._ledger
        hook = name.rpartition(".")[2]
        if name == "run_training_epoch":
            return EpochAction(ledger)
        if name.startswith(self._own_prefix):
            return INHERIT
        if name.startswith("[Callback]"):
            return INHERIT if self._does_nothing(name, hook) else self._callback(hook)
        if hook == "train_dataloader_next":
            return FetchAction(ledger)
        if hook == "optimizer_step":  # the bare name is manual optimization's
            return self._marked(PhaseAction(ledger, PHASE_INDEX["optimizer"]))
        if name == "save_checkpoint":
            return self._marked(PhaseAction(ledger, PHASE_INDEX["checkpoint"]))
        if name.startswith("["):
            return self._hook(name, hook)
        return INHERIT  # run_training_batch and the user's own actions

    def _callback(self, hook: str) -> Action:
        if hook == "on_train_batch_start":
            return BatchStartAction(self._ledger)
        if hook == "on_exception":
            return ExceptionAction(self._ledger)
        if hook == "on_after_backward" and self._is_manual:
            return AfterBackwardAction(self._ledger)
        return CallbackAction(self._ledger)

    def _hook(self, name: str, hook: str) -> Action:
        ledger = self._ledger
        if name.startswith("[LightningModule]") and hook == "on_train_batch_end":
            return BatchEndAction(ledger, self._module_hook(name, hook))
        if self._is_manual and name.startswith("[LightningModule]"):
            if hook == "on_before_backward":
                return ManualBackwardStartAction(ledger, PHASE_INDEX["module_hooks"])
            if hook == "on_after_backward":
                return ManualBackwardEndAction(ledger, PHASE_INDEX["module_hooks"])
        if hook == MODEL_ZERO_GRAD:
            part = self._model_hook_part(hook)
            return ValidationStartAction(ledger, part=part, after=DATALOADER_INIT, takes_gap=False)
        if hook == MODEL_EVAL:  # the first one while gradients accumulate
            part = self._model_hook_part(hook)
            return ValidationStartAction(ledger, part=part, after=OTHER, takes_gap=True)
        if hook in INSIDE_TRANSFER:
            return INHERIT
        if hook in PHASE_OF_HOOK and not self._does_nothing(name, hook):
            return self._marked(PhaseAction(ledger, PHASE_INDEX[PHASE_OF_HOOK[hook]]))
        return self._module_hook(name, hook)

    def _module_hook(self, name: str, hook: str) -> Action:
        if self._does_nothing(name, hook):
            return INHERIT
        return PhaseAction(self._ledger, PHASE_INDEX["module_hooks"])

    def while_idle(self, name: str) -> Action:
        """Measure nothing, except how the loop ends."""
        is_exception_hook = name.startswith("[Callback]") and name.endswith(".on_exception")
        return self.actions[name] if is_exception_hook else INHERIT

    def in_validation(self, name: str) -> Action:
        """Tell callbacks and checkpoints apart inside validation; the rest is one of its parts."""
        ledger, hook = self._ledger, name.rpartition(".")[2]
        if name.startswith("[Callback]") and hook in ENDS_BATCHES:
            return PartBeginAction(ledger, ENDS_BATCHES[hook], self.actions[name])
        if name.startswith("[Callback]") or name == "save_checkpoint":
            return self.actions[name]
        if hook == "on_validation_model_train":
            return ValidationEndAction(ledger, self._model_hook_part(hook))
        if hook in {"train_dataloader_next", "lr_scheduler_step"} or name == "run_training_epoch":
            return self.actions[name]  # training continues without the hook that ends a validation loop
        return self._part(name, hook) if name.startswith("[") else INHERIT

    def _part(self, name: str, hook: str) -> Action:
        ledger = self._ledger
        if hook == VALIDATE.fetch:
            return FetchPartAction(ledger)
        if name.startswith("[Strategy]") and hook == VALIDATE.step_hook:
            return PartAction(ledger, FORWARD)
        if hook == MODEL_EVAL:
            return PartAction(ledger, self._model_hook_part(hook), after=OTHER)
        does_nothing = hook in INSIDE_TRANSFER or self._does_nothing(name, hook)
        if PHASE_OF_HOOK.get(hook) == "transfer" and not does_nothing:
            return PartAction(ledger, TRANSFER)
        inner = PartAction(ledger, MODULE_HOOKS) if hook.startswith("on_") and not does_nothing else INHERIT
        if name.startswith("[LightningModule]") and hook == "on_validation_batch_end":
            return BatchEndPartAction(ledger, inner)
        if name.startswith("[LightningModule]") and hook in ENDS_BATCHES:
            is_epoch_end = ENDS_BATCHES[hook] == EPOCH_END
            return PartBeginAction(ledger, ENDS_BATCHES[hook], INHERIT if is_epoch_end else inner)
        return inner

    def _model_hook_part(self, hook: str) -> int:
        """Part of a module hook that does something even if it isn't overridden."""
        module = self._trainer.lightning_module
        return MODULE_HOOKS if _overrides(module, "LightningModule", hook) else OTHER

    def _marked(self, action: PhaseAction) -> Action:
        if self._ledger.device is not None and PHASES[action.phase].on_device:
            return DeviceMarkedAction(self._ledger, action)
        return action

    def _does_nothing(self, name: str, hook: str) -> bool:
        """Whether the hook isn't overridden, so that it isn't worth two clock reads per step."""
        trainer = self._trainer
        if name.startswith("[Callback]"):
            owners = [c for c in trainer.callbacks if name == f"[Callback]{c.state_key}.{hook}"]
            return bool(owners) and not any(_overrides(owner, "Callback", hook) for owner in owners)
        # Only hooks named on_...: the others (optimizer_step, ...) do something themselves.
        if not hook.startswith("on_") or hook.startswith("on_validation_model"):
            return False
        kind = name[1:].partition("]")[0]
        owner = {
            "LightningModule": trainer.lightning_module,
            "LightningDataModule": getattr(trainer, "datamodule", None),
            "Strategy": trainer.strategy,
        }.get(kind)
        return owner is not None and not _overrides(owner, kind, hook)


def _overrides(owner: Any, base_name: str, hook: str) -> bool:
    """Whether ``owner`` has its own hook; base classes go by name, as there are two Lightnings."""
    if hook in vars(owner):
        return True
    base = next((kind for kind in type(owner).__mro__ if kind.__name__ == base_name), None)
    return base is None or getattr(type(owner), hook, None) is not getattr(base, hook, None)


class EvaluationFetchAction(FetchAction):
    """Fetch of a batch: the first one starts step 0, the others end the step before."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.ledger.begin_evaluation()
        super().__enter__()


class EvaluationBatchStartAction(BatchStartAction):
    """Callback hook at a batch's start, where a step starts if the step method fetches its batches."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.ledger.begin_evaluation()
        super().__enter__()


class PredictionBatchEndAction(BatchEndAction):
    """Action that ends with its batch, whose predictions are stored until the next fetch."""

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
    """Hook at the epoch's end, the first of which ends the last step."""

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
    """The same for a callback, with its own total."""

    __slots__ = ()

    def __enter__(self) -> None:
        end_loop(self.ledger)
        super().__enter__()


def end_loop(ledger: PhaseLedger) -> None:
    if ledger.batch_began:
        ledger.end_epoch()


class EvaluationClassifier(Classifier):
    def __init__(self, ledger: PhaseLedger, trainer: Any, own_prefix: str, loop_kind: LoopKind) -> None:
        super().__init__(ledger, trainer, own_prefix)
        self._loop_kind = loop_kind

    def _make(self, name: str) -> Action:
        loop_kind, ledger = self._loop_kind, self._ledger
        hook = name.rpartition(".")[2]
        if not name.startswith("["):
            return super()._make(name)
        if hook == loop_kind.fetch:
            return EvaluationFetchAction(ledger)
        if hook == f"on_{loop_kind.hooks}_epoch_end":
            return self._loop_end(name, hook)
        if name.startswith("[Strategy]") and hook == loop_kind.step_hook:
            return self._marked(PhaseAction(ledger, PHASE_INDEX["forward"]))
        if name.startswith("[LightningModule]") and hook == f"on_{loop_kind.hooks}_batch_end":
            action = PredictionBatchEndAction if loop_kind is PREDICT else BatchEndAction
            return action(ledger, self._module_hook(name, hook))
        return super()._make(name)

    def _callback(self, hook: str) -> Action:
        if hook == f"on_{self._loop_kind.hooks}_batch_start":
            return EvaluationBatchStartAction(self._ledger)
        return super()._callback(hook)

    def _loop_end(self, name: str, hook: str) -> Action:
        if name.startswith(self._own_prefix) or self._does_nothing(name, hook):
            return LoopEndAction(self._ledger, INHERIT)
        if name.startswith("[Callback]"):
            return CallbackLoopEndAction(self._ledger)
        return LoopEndAction(self._ledger, self._module_hook(name, hook))


def make_classifier(ledger: PhaseLedger, trainer: Any, own_prefix: str, loop_kind: LoopKind) -> Classifier:
    if loop_kind.is_fit:
        return Classifier(ledger, trainer, own_prefix)
    return EvaluationClassifier(ledger, trainer, own_prefix, loop_kind)
