"""Loops of a Trainer, through which the engine accesses Lightning."""

from __future__ import annotations

import ast
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from lightning_modelprof.engine.live_figures import LiveFigures
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.lightning.in_validation import time_metrics
from lightning_modelprof.lightning.phases import (
    SILENT_PROFILERS,
    GuardedAction,
    OutsideLoopClock,
    PhaseProfiler,
    make_delegate,
    uninstall,
)
from lightning_modelprof.lightning.rank_wait import stand_in, time_broadcast
from lightning_modelprof.measure.setup.environment import read_libraries, trainer_call, written_class
from lightning_modelprof.measure.setup.model_setup import calls_by_name, class_files, convolution_biases
from lightning_modelprof.measure.setup.statements import Statements, outside_optimizers
from lightning_modelprof.measure.setup.training_setup import Live, Reader, loader_setup
from lightning_modelprof.measure.stand_in import StandIn
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.measure.stored import is_trained, parameters_of
from lightning_modelprof.measure.user_code import own_methods, place_of
from lightning_modelprof.run.loops import LoopKind
from lightning_modelprof.run.records import OutsideLoop
from lightning_modelprof.run.setup import CallbackSetup, CheckpointSetup, LoaderSetup

_CONTEXTS: Final = {
    "fit": "train_step_context",
    "validate": "val_step_context",
    "test": "test_step_context",
    "predict": "predict_step_context",
}
"""Contexts of the precision plugin in which Lightning runs a step, by loop."""

_BATCHES: Final = {
    "validate": "num_val_batches",
    "test": "num_test_batches",
    "predict": "num_predict_batches",
}
"""Trainer attributes with the number of batches of each dataloader, by evaluation loop."""


class TrainerLoop(Loop):
    """One loop of a Trainer.

    Args:
        own_prefix: start of the profiler actions of our own callback.
        outside_clock: times actions outside the loop; ``None`` if they aren't measured.
    """

    def __init__(
        self,
        trainer: Any,
        kind: LoopKind,
        own_prefix: str = "",
        outside_clock: OutsideLoopClock | None = None,
    ) -> None:
        self.trainer = trainer
        self.kind = kind
        self._own_prefix, self._outside_clock = own_prefix, outside_clock
        self.rank, self.world_size = trainer.global_rank, trainer.world_size
        self.is_first = bool(trainer.is_global_zero)
        self.precision, self.strategy = str(trainer.precision), type(trainer.strategy).__name__

    @property
    def module(self) -> Any:
        return self.trainer.lightning_module

    @property
    def holders(self) -> Sequence[Any]:
        trainer = self.trainer
        return (self.module, *trainer.callbacks, *trainer.loggers, getattr(trainer, "datamodule", None))

    @property
    def run_by(self) -> tuple[type, ...]:  # type: ignore[override]
        return type(self.trainer), written_class(self.module)

    @property
    def accumulate(self) -> int:  # type: ignore[override]
        return int(self.trainer.accumulate_grad_batches) if self.kind.is_fit else 1

    @property
    def log_every_n_steps(self) -> int:  # type: ignore[override]
        return int(self.trainer.log_every_n_steps)

    @property
    def loggers(self) -> Sequence[Any]:  # type: ignore[override]
        return list(self.trainer.loggers)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.trainer.strategy.root_device
        return device

    @property
    def optimizers(self) -> Sequence[Any]:
        return list(self.trainer.optimizers)

    @property
    def num_steps(self) -> int | None:
        trainer = self.trainer
        if self.kind.is_fit:
            has_end = trainer.max_epochs not in (None, -1)
            limits = [trainer.num_training_batches * trainer.max_epochs] if has_end else []
            if trainer.max_steps != -1:
                limits.append(trainer.max_steps * trainer.accumulate_grad_batches)
        else:
            limits = [sum(getattr(trainer, _BATCHES[self.kind.key]))]
        shortest = min(limits, default=math.inf)
        return None if shortest == math.inf else int(shortest)

    @property
    def logger_step(self) -> int:
        epoch_loop = self.trainer.fit_loop.epoch_loop
        return max(0, int(getattr(epoch_loop, "_batches_that_stepped", self.trainer.global_step)) - 1)

    @property
    def is_validating(self) -> bool:
        return self.kind.is_fit and bool(self.trainer.validating)

    @property
    def is_launched(self) -> bool:
        return getattr(self.trainer.strategy, "launcher", None) is not None

    @property
    def progress_bar(self) -> Any:
        return self.trainer.progress_bar_callback

    @property
    def _loop_object(self) -> Any:
        return getattr(self.trainer, self.kind.trainer_attribute)

    def iterators(self) -> Sequence[Any]:
        iterators: Sequence[Any] = self._loop_object._combined_loader._iterator.iterators
        return iterators

    def loaders(self) -> Sequence[Any]:
        loaders: Sequence[Any] = self._loop_object._combined_loader.flattened
        return loaders

    def prefetched(self) -> Sequence[Any]:
        return getattr(self.trainer.fit_loop._data_fetcher, "batches", ())

    def live(self) -> Live:
        return LiveTrainer(self)

    def make_phase_source(self, ledger: PhaseLedger) -> Any:
        """Replace ``trainer.profiler`` by its delegate."""
        trainer = self.trainer
        delegate = make_delegate(
            trainer.profiler, ledger, trainer, self._own_prefix, self.kind, outside_clock=self._outside_clock
        )
        trainer.profiler = delegate
        return delegate

    def begin(self, phase_source: Any, ledger: PhaseLedger, cleanup: ExitStack) -> None:
        if self.kind.is_fit:
            time_broadcast(self.trainer, ledger, cleanup)
            time_metrics(self.trainer, ledger, partial(GuardedAction, phase_source), cleanup)

    def take_out(self, phase_source: Any) -> None:
        uninstall(self.trainer, phase_source)
        phase_source.outside_clock.give_up()

    def outside_times(self) -> OutsideLoop | None:
        return None if self._outside_clock is None else self._outside_clock.times()

    def watch_loaders(self, watched: Any, cleanup: ExitStack) -> None:
        """Report loaders where Lightning lets the strategy change them."""
        strategy = self.trainer.strategy
        stand_in(strategy, "process_dataloader", _WatchesLoaders(self, watched), cleanup)

    def join_progress_bar(self, live: LiveFigures, cleanup: ExitStack) -> None:
        """Show throughput in the progress bar by adding to the metrics it asks for.

        Nothing is logged for it, as ``self.log(prog_bar=True)`` would put our figures among the model's.
        """
        bar = self.progress_bar
        stand_in(bar, "get_metrics", _WithThroughput(live, bar.get_metrics), cleanup)

    def stop(self) -> None:
        self.trainer.should_stop = True

    def run_step(self, module: Any, arguments: tuple[Any, ...]) -> Any:
        with getattr(self.trainer.precision_plugin, _CONTEXTS[self.kind.key])():
            step: Callable[..., Any] = getattr(module, self.kind.step_hook)
            return step(*arguments)


class _WithThroughput(StandIn):
    def __init__(self, figures: LiveFigures, get_metrics: Callable[..., dict[str, Any]]) -> None:
        super().__init__(get_metrics)
        self._figures = figures

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        metrics = self.original(*args, **kwargs)
        newest = self._figures.newest
        if newest is None or newest.steps_per_s is None or not isinstance(metrics, dict):
            return metrics
        ours: dict[str, Any] = {"ips": float(f"{newest.steps_per_s:.4g}")}
        if newest.reader_ratio is not None:
            ours["reader"] = f"{100 * newest.reader_ratio:.0f}%"
        return {**metrics, **ours}  # the bar may keep theirs, so don't change it


class _WatchesLoaders(StandIn):
    """Wraps a strategy's ``process_dataloader``, which is called before the first worker starts.

    Lightning seeds workers without a ``worker_init_fn`` after this call. We do that first, as our own
    ``worker_init_fn`` would prevent it.
    """

    def __init__(self, loop: TrainerLoop, watched: Any) -> None:
        super().__init__(loop.trainer.strategy.process_dataloader)
        self._loop, self._watched = loop, watched

    def __call__(self, dataloader: Any) -> Any:
        trainer = self._loop.trainer
        dataloader = self.original(dataloader)
        is_of_loop = trainer.training if self._loop.kind.is_fit else not trainer.training
        with suppress(Exception):  # batches come as without us
            if not is_of_loop:
                self._watched.add_other(dataloader)
            else:
                seed = vars(sys.modules[type(trainer._data_connector).__module__])["_auto_add_worker_init_fn"]
                seed(dataloader, trainer.global_rank)
                self._watched.add(dataloader, trainer.current_epoch)
        return dataloader


class LiveTrainer(Live):
    def __init__(self, loop: TrainerLoop) -> None:
        super().__init__(loop)
        self._trainer = loop.trainer
        self.num_nodes = max(1, int(getattr(loop.trainer, "num_nodes", 1)))

    def at_begin(self) -> tuple[Reader, ...]:
        return (
            self.threads,
            self.trainer,
            self.module,
            self.libraries,
            self.callbacks,
            self.loaders,
            self.val_loaders,
            self.optimizers,
            self.layers,
            self.statements,
        )

    def at_end(self) -> tuple[Reader, ...]:
        return (self.loaders, self.val_loaders, self.trainer, self.device, self.untrained)

    def trainer(self) -> dict[str, Any]:
        batches = list(self._trainer.num_val_batches)
        is_known = all(isinstance(number, int) for number in batches)
        interval = self._trainer.val_check_interval
        return {
            "log_every_n_steps": self._trainer.log_every_n_steps,
            "loggers": tuple(
                filter(None, (place_of(type(one).log_metrics) for one in self._trainer.loggers))
            ),
            "val_check_interval": interval if isinstance(interval, int | float) else None,
            "check_every_n_epochs": self._trainer.check_val_every_n_epoch,
            "num_val_batches": sum(batches) if is_known else None,
            "num_sanity_batches": int(sum(self._trainer.num_sanity_val_batches)) if is_known else None,
            "gradient_clip_val": self._trainer.gradient_clip_val,
            "profiler": _users_profiler(self._trainer.profiler),
        }

    def module(self) -> dict[str, Any]:
        methods = own_methods(self._module, ("LightningModule",))
        data = getattr(self._trainer, "datamodule", None)
        hooks = {
            name: place for name, place in methods.items() if not place.function.startswith("FSDPModule.")
        }
        return {
            "manual_optimization": not self._module.automatic_optimization,
            "module": place_of(written_class(self._module)),
            "module_hooks": hooks,
            "data_hooks": {} if data is None else own_methods(data, ("LightningDataModule",)),
            "keeps_gradients": _keeps_gradients(self._module) if "optimizer_zero_grad" in hooks else None,
            "num_trainable_tensors": sum(map(is_trained, parameters_of(self._module))),
        }

    def libraries(self) -> dict[str, Any]:
        call = trainer_call()
        return {
            "libraries": read_libraries(self._trainer, self._module, call),
            "package_call": call.from_library,
            "user_call": call.user,
            "calls": calls_by_name(
                call.files | class_files(self._module, getattr(self._trainer, "datamodule", None))
            ),
        }

    def statements(self) -> dict[str, Any]:
        call, module = trainer_call(), self._module
        hooks = own_methods(module, ("LightningModule",))
        loaders = self.loaders()["loaders"]
        class_names = [type(getattr(one, "optimizer", one)).__name__ for one in self._loop.optimizers]
        found = Statements(call, module, (module, getattr(self._trainer, "datamodule", None)))
        is_fit = self._loop.kind.is_fit
        statements = [
            *found.loader(loaders, position=1),
            *found.trainer(type(self._trainer).__name__),
            *found.logs(),
        ]
        if is_fit:
            biases = convolution_biases(module)
            untrained = outside_optimizers(module, self._loop.optimizers)
            statements += [
                *found.optimizer(hooks.get("configure_optimizers"), class_names),
                *found.copies(hooks),
                *found.convolutions(biases),
                *found.untrained(untrained),
            ]
        return {"statements": tuple(statements), "configured_by": call.configured_by}

    def untrained(self) -> dict[str, Any]:
        optimizers = self._loop.optimizers if self._loop.kind.is_fit else ()
        return {"untrained": outside_optimizers(self._module, optimizers)}

    def callbacks(self) -> dict[str, Any]:
        setups, checkpoints = [], []
        for callback in self._trainer.callbacks:
            class_names = [kind.__name__ for kind in type(callback).__mro__]
            setups.append(
                CallbackSetup(
                    callback=str(callback.state_key),
                    kind=class_names[0],
                    hooks={
                        name: place
                        for name, place in own_methods(callback, ("Callback",)).items()
                        if name.startswith("on_")
                    },
                )
            )
            if "ModelCheckpoint" in class_names:
                checkpoints.append(
                    CheckpointSetup(
                        callback=str(callback.state_key),
                        every_n_train_steps=getattr(callback, "_every_n_train_steps", None),
                        every_n_epochs=getattr(callback, "_every_n_epochs", None),
                        save_top_k=callback.save_top_k,
                        save_last=None if callback.save_last is None else bool(callback.save_last),
                        save_weights_only=callback.save_weights_only,
                    )
                )
        return {
            "callbacks": tuple(setups),
            "checkpoints": tuple(checkpoints),
            "checkpoint_io": place_of(type(self._trainer.strategy.checkpoint_io).save_checkpoint),
        }

    def loaders(self) -> dict[str, Any]:
        return {"loaders": _loaders(getattr(self._trainer, self._loop.kind.trainer_attribute))}

    def val_loaders(self) -> dict[str, Any]:
        """Return the loaders of validations in a fit, which Lightning makes before the first one."""
        return (
            {"val_loaders": _loaders(self._trainer.fit_loop.epoch_loop.val_loop)}
            if self._loop.kind.is_fit
            else {}
        )


def _users_profiler(profiler: Any) -> str:
    while isinstance(profiler, PhaseProfiler):
        profiler = profiler.inner
    name = type(profiler).__name__
    return "" if name in SILENT_PROFILERS else name


def _keeps_gradients(module: Any) -> bool | None:
    """Whether the source of ``optimizer_zero_grad`` passes ``set_to_none=False``; ``None`` if unknown."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).optimizer_zero_grad)))
    except (OSError, SyntaxError, TypeError):
        return None
    values = [
        keyword.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "set_to_none" and isinstance(keyword.value, ast.Constant)
    ]
    return any(value is False for value in values)


def _loaders(loop: Any) -> tuple[LoaderSetup, ...]:
    combined = getattr(loop, "_combined_loader", None)
    if combined is None:
        return ()
    source = loop._data_source
    made_by = place_of(getattr(source.instance, source.name)) if source.is_module() else None
    return tuple(replace(loader_setup(loader), made_by=made_by) for loader in combined.flattened)
