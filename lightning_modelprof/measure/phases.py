"""The delegate of ``trainer.profiler``: Lightning's action names become phases.

Lightning tells its profiler when every hook, fetch and step begins and ends. Its own PassThroughProfiler
makes a generator context for each of these about 24 events a step; this one hands out ready objects, and
is cheaper than what it replaces. ``docs/architecture.md`` has the reasons for this seam, and
``tests/test_contract_lightning.py`` holds Lightning to the names used here.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from lightning.pytorch.profilers import Profiler

from lightning_modelprof.measure.actions import (
    INHERIT,
    Action,
    AfterBackwardAction,
    BatchEndAction,
    BatchStartAction,
    CallbackAction,
    DeviceMarkedAction,
    EpochAction,
    FetchAction,
    ManualBackwardEndAction,
    ManualBackwardStartAction,
    OptimizerAction,
    PhaseAction,
    TracedAction,
    ValidationEndAction,
    ValidationStartAction,
)
from lightning_modelprof.measure.ledger import PROFILER, PhaseLedger
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.records import CallbackTime

PHASE_OF_HOOK: Final[dict[str, str]] = {
    "on_before_batch_transfer": "transfer",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "optimizer_zero_grad": "zero_grad",
    "backward": "backward",
    "configure_gradient_clipping": "clip",
    "lr_scheduler_step": "lr_scheduler",
}
"""Hook name (what follows the last dot of an action name) → phase key."""

# These happen inside batch_to_device, where their time belongs anyhow.
INSIDE_TRANSFER: Final = {"transfer_batch_to_device", "on_after_batch_transfer"}

# Only these phases launch work on a device; callbacks and hooks between them keep the mark before them.
DEVICE_PHASES: Final = {
    PHASE_INDEX[key]
    for key in ("transfer", "forward", "backward", "optimizer", "zero_grad", "clip", "checkpoint")
}

REQUIRED_HOOKS: Final = {"run_training_epoch", "train_dataloader_next", "training_step"}
"""Without these the ledger cannot tell steps and phases apart; all are seen before a batch ends."""


class ActionTable(dict[str, Action]):
    """Action name → action, filled the first time a name is seen."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Action:
        action: Action = self._make(name)
        self[name] = action
        return action


class PhaseProfiler(Profiler):
    """Stands in for ``trainer.profiler`` during a fit and forwards everything to the one it replaces.

    Args:
        inner: the profiler that was there.
        ledger: where times go.
        own_prefix: start of the action names of our own callback; they are not measured.

    Attributes:
        automatic_optimization: of the LightningModule; ``manual_backward`` needs other actions.
    """

    inner: Any

    def __init__(self, inner: Any, ledger: PhaseLedger, own_prefix: str) -> None:
        # Profiler.__init__ is not called: dirpath, filename and the rest are those of ``inner``.
        self.inner = inner
        self.ledger = ledger
        self._own_prefix = own_prefix
        self.automatic_optimization = True
        self._thread = threading.get_ident()
        # Compared by name: lightning and pytorch_lightning each have a class of their own.
        self._forwards = type(inner).__name__ != "PassThroughProfiler"
        self._base = ActionTable(self._classify)
        self._tables = {
            "idle": self._table(lambda _: INHERIT),
            "training": self._table(lambda name: self._base[name]),
            "validation": self._table(self._classify_in_validation),
            "traced training": self._table(lambda name: self._traced(self._base[name])),
            "traced validation": self._table(lambda name: self._traced(self._classify_in_validation(name))),
        }
        self.armed = False
        self.table = self._tables["idle"]
        ledger.on_validation_change = self.choose_table

    # Lightning's interface

    def profile(self, action_name: str) -> Action:  # type: ignore[override]
        """The context of one action; used by nearly all of Lightning's calls."""
        return self.table[action_name]

    def start(self, action_name: str) -> None:
        """An action begins."""
        self.table[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        """An action ends."""
        self.table[action_name].__exit__(None, None, None)

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Forwarded."""
        self.inner.setup(*args, **kwargs)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Forwarded."""
        self.inner.teardown(*args, **kwargs)

    def summary(self) -> str:
        """Forwarded."""
        return str(self.inner.summary())

    def describe(self) -> None:
        """Forwarded."""
        self.inner.describe()

    @property
    def _lightning_module(self) -> Any:
        return self.inner._lightning_module

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        # The Trainer assigns this on whatever its profiler is.
        self.inner._lightning_module = module

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look attributes up before __init__ has run
        if "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __del__(self) -> None:
        # Profiler.__del__ calls teardown(), which would close the user's live profiler.
        pass

    # Ours

    def arm(self, *, automatic_optimization: bool) -> None:
        """Start to measure: training begins."""
        self.automatic_optimization = automatic_optimization
        self.ledger.restart()
        self.armed = True
        self.choose_table()

    def disarm(self) -> None:
        """Stop to measure: training is over. Actions still open end without effect."""
        if self.armed:
            self.ledger.charge()
            self.ledger.discard()
            self.armed = False
            self.choose_table()

    def mute(self) -> None:
        """Let actions pass unmeasured from now on; something else feeds the ledger."""
        self.armed = False
        self.choose_table()

    def choose_table(self) -> None:
        """Use the actions that fit what is going on: idle, training or validation, traced or not."""
        if not self.armed:
            self.table = self._tables["idle"]
            return
        kind = "validation" if self.ledger.in_validation else "training"
        self.table = self._tables[kind if self.ledger.ranges is None else f"traced {kind}"]

    def missing_hooks(self) -> set[str]:
        """Which of the required hooks have not been seen since training began."""
        return REQUIRED_HOOKS - {name.rpartition(".")[2] for name in self._base}

    def callback_times(self) -> tuple[CallbackTime, ...]:
        """Time by callback and hook so far, longest first."""
        times = [
            CallbackTime(
                callback=name.removeprefix("[Callback]").rpartition(".")[0],
                hook=name.rpartition(".")[2],
                calls=action.calls,
                total_ns=action.total_ns,
            )
            for name, action in self._base.items()
            if isinstance(action, CallbackAction) and action.calls
        ]
        return tuple(sorted(times, key=lambda time: -time.total_ns))

    def _table(self, make: Any) -> ActionTable:
        if self._forwards:
            return ActionTable(lambda name: ForwardedAction(self, name, make(name)))
        return ActionTable(make)

    def _traced(self, action: Action) -> Action:
        # Fetches and gaps write their ranges themselves.
        if isinstance(action, DeviceMarkedAction):
            return TracedAction(self.ledger, action, action.action.phase)
        if isinstance(action, PhaseAction) and not isinstance(action, FetchAction):
            return TracedAction(self.ledger, action, action.phase)
        return action

    def _classify(self, name: str) -> Action:
        """The action of a name during training."""
        ledger = self.ledger
        hook = name.rpartition(".")[2]
        if name == "run_training_epoch":
            return EpochAction(ledger)
        if name.startswith(self._own_prefix):
            return INHERIT
        if name.startswith("[Callback]"):
            return self._classify_callback(hook)
        if hook == "train_dataloader_next":
            return FetchAction(ledger)
        if hook == "optimizer_step":  # the bare name is manual optimization's
            return self._marked(OptimizerAction(ledger, PHASE_INDEX["optimizer"]))
        if name == "save_checkpoint":
            return self._marked(PhaseAction(ledger, PHASE_INDEX["checkpoint"]))
        if name.startswith("["):
            return self._classify_hook(name, hook)
        return INHERIT  # run_training_batch and the user's own actions

    def _classify_callback(self, hook: str) -> Action:
        if hook == "on_train_batch_start":
            return BatchStartAction(self.ledger)
        if hook == "on_after_backward" and not self.automatic_optimization:
            return AfterBackwardAction(self.ledger)
        return CallbackAction(self.ledger)

    def _classify_hook(self, name: str, hook: str) -> Action:
        """Hooks of the LightningModule, the DataModule, the Strategy and the loops."""
        ledger = self.ledger
        if hook in PHASE_OF_HOOK:
            return self._marked(PhaseAction(ledger, PHASE_INDEX[PHASE_OF_HOOK[hook]]))
        if hook in INSIDE_TRANSFER:
            return INHERIT
        if hook in {"on_validation_model_zero_grad", "on_validation_model_eval"}:
            return ValidationStartAction(ledger, takes_gap=hook == "on_validation_model_eval")
        module_hooks = PHASE_INDEX["module_hooks"]
        if name.startswith("[LightningModule]"):
            if hook == "on_train_batch_end":
                return BatchEndAction(ledger, module_hooks)
            if hook == "on_before_backward" and not self.automatic_optimization:
                return ManualBackwardStartAction(ledger, module_hooks)
            if hook == "on_after_backward" and not self.automatic_optimization:
                return ManualBackwardEndAction(ledger, module_hooks)
        return PhaseAction(ledger, module_hooks)

    def _classify_in_validation(self, name: str) -> Action:
        """Inside validation only callbacks and checkpoints are told apart."""
        hook = name.rpartition(".")[2]
        if name.startswith("[Callback]") or name == "save_checkpoint":
            return self._base[name]
        if hook == "on_validation_model_train":
            return ValidationEndAction(self.ledger)
        if hook == "train_dataloader_next" or name == "run_training_epoch":
            return self._base[name]  # training goes on without the hook that ends a validation loop
        return INHERIT

    def _marked(self, action: PhaseAction) -> Action:
        if self.ledger.device is not None and action.phase in DEVICE_PHASES:
            return DeviceMarkedAction(self.ledger, action)
        return action


class ForwardedAction(Action):
    """An action that the user's own profiler is told of as well; its cost is a phase of its own."""

    __slots__ = ("action", "name", "profiler")

    def __init__(self, profiler: PhaseProfiler, name: str, action: Action) -> None:
        self.profiler = profiler
        self.name = name
        self.action = action

    def __enter__(self) -> None:
        self.action.__enter__()
        self.profiler.inner.start(self.name)
        self._charge()

    def __exit__(self, *error: object) -> None:
        self.action.__exit__()
        self.profiler.inner.stop(self.name)
        self._charge()

    def _charge(self) -> None:
        profiler = self.profiler
        if profiler.armed and threading.get_ident() == profiler._thread:
            profiler.ledger.charge(PROFILER)


def find_delegate(profiler: Any, delegate: PhaseProfiler) -> PhaseProfiler | None:
    """The delegate in a chain of delegates whose ``inner`` is ``delegate``, or ``None``."""
    while isinstance(profiler, PhaseProfiler):
        if profiler.inner is delegate:
            return profiler
        profiler = profiler.inner
    return None


def uninstall(trainer: Any, delegate: PhaseProfiler) -> None:
    """Take ``delegate`` out of ``trainer.profiler``, wherever it stands in a chain of delegates."""
    delegate.disarm()
    if trainer.profiler is delegate:
        trainer.profiler = delegate.inner
        return
    outer = find_delegate(trainer.profiler, delegate)
    if outer is not None:
        outer.inner = delegate.inner
