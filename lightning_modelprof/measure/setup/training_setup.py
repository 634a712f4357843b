"""Reads how a training is set up from the live trainer: once when the loop begins and once when it ends.

Every part is read on its own, so that one that cannot be read costs only itself.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_modelprof.errors import told
from lightning_modelprof.measure.setup.environment import read_libraries, trainer_call, written_class
from lightning_modelprof.measure.setup.model_setup import (
    calls_by_name,
    class_files,
    compile_setup,
    convolution_biases,
)
from lightning_modelprof.measure.user_code import own_methods, place_of
from lightning_modelprof.run.loops import Loop
from lightning_modelprof.run.setup import (
    CallbackSetup,
    CheckpointSetup,
    DeviceSetup,
    LayerShape,
    LoaderSetup,
    OptimizerSetup,
    TrainingSetup,
)

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period of the container's CPU time in microseconds, or ``max``."""


def read_setup(trainer: Any, module: Any, loop: Loop) -> TrainingSetup:
    """What is known when the loop begins. Never raises."""
    live = _Live(trainer, module, loop)
    parts = (
        live.threads,
        live.trainer,
        live.module,
        live.libraries,
        live.callbacks,
        live.loaders,
        live.val_loaders,
        live.optimizers,
        live.layers,
    )
    return _take(TrainingSetup(), parts)


def finish_setup(
    setup: TrainingSetup, trainer: Any, module: Any, loop: Loop, began_s: float
) -> TrainingSetup:
    """The same with what is only known later: validation, memory, compilations. Never raises.

    Args:
        setup: as it was when the loop began.
        trainer: as then.
        module: as then.
        loop: as then.
        began_s: ``time.time()`` when the loop began.
    """
    live = _Live(trainer, module, loop)
    return _take(
        setup,
        (
            live.loaders,
            live.val_loaders,
            live.trainer,
            live.device,
            lambda: {"compiled": compile_setup(began_s)},
        ),
    )


def _take(setup: TrainingSetup, parts: Sequence[Callable[[], dict[str, Any]]]) -> TrainingSetup:
    """The setup with each part that can be read, and a note for each that cannot."""
    for part in parts:
        found, note = _attempt(part)
        found = {name: value for name, value in found.items() if value not in (None, ())}
        setup = replace(setup, notes=(*setup.notes, note) if note else setup.notes, **found)
    return setup


def _attempt(part: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], str]:
    try:
        return part(), ""
    except Exception as error:  # anybody's objects, or another Lightning
        return {}, f"{part.__name__} could not be read: {told(error)}"


def usable_cpus() -> int | None:
    """CPUs that this process may use: its affinity, and no more than its container's quota rounded up."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count()
    try:
        quota, period = _QUOTA.read_text().split()
        return count if quota == "max" or count is None else min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return count


class _Live:
    """The live objects; each method reads one part of the setup and may raise."""

    def __init__(self, trainer: Any, module: Any, loop: Loop) -> None:
        self._trainer = trainer
        self._module = module
        self._loop = loop

    def threads(self) -> dict[str, Any]:
        """CPUs, threads and torch's settings, which may be others when the loop has ended."""
        nodes = max(1, int(getattr(self._trainer, "num_nodes", 1)))
        return {
            "usable_cpus": usable_cpus(),
            "num_threads": torch.get_num_threads(),
            "local_world_size": max(1, int(self._trainer.world_size) // nodes),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "detects_anomaly": torch.is_anomaly_enabled(),
        }

    def trainer(self) -> dict[str, Any]:
        """What the Trainer was told."""
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
            "gradient_clip_val": self._trainer.gradient_clip_val,
        }

    def module(self) -> dict[str, Any]:
        """The LightningModule's own methods."""
        methods = own_methods(self._module, ("LightningModule",))
        hooks = {name: place for name, place in methods.items() if not place.name.startswith("FSDPModule.")}
        return {
            "manual_optimization": not self._module.automatic_optimization,
            "module": place_of(written_class(self._module)),
            "module_hooks": hooks,
            "keeps_gradients": _keeps_gradients(self._module) if "optimizer_zero_grad" in hooks else None,
            "num_trainable_tensors": sum(parameter.requires_grad for parameter in self._module.parameters()),
        }

    def libraries(self) -> dict[str, Any]:
        """Whose loop it is."""
        call = trainer_call()
        return {
            "libraries": read_libraries(self._trainer, self._module, call),
            "package_call": call.from_library,
            "user_call": call.user,
            "calls": calls_by_name(
                call.files | class_files(self._module, getattr(self._trainer, "datamodule", None))
            ),
        }

    def callbacks(self) -> dict[str, Any]:
        """Callbacks, and how often checkpoints are saved."""
        setups, checkpoints = [], []
        for callback in self._trainer.callbacks:
            kinds = [kind.__name__ for kind in type(callback).__mro__]
            setups.append(
                CallbackSetup(
                    callback=str(callback.state_key),
                    kind=kinds[0],
                    hooks={
                        name: place
                        for name, place in own_methods(callback, ("Callback",)).items()
                        if name.startswith("on_")
                    },
                )
            )
            if "ModelCheckpoint" in kinds:
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
        """The loop's dataloaders."""
        return {"loaders": _loaders(getattr(self._trainer, self._loop.trainer_attribute))}

    def val_loaders(self) -> dict[str, Any]:
        """Those of the validations inside a fit, which Lightning makes before the first one."""
        return (
            {"val_loaders": _loaders(self._trainer.fit_loop.epoch_loop.val_loop)} if self._loop.is_fit else {}
        )

    def optimizers(self) -> dict[str, Any]:
        """Of a fit."""
        setups = []
        for optimizer in self._trainer.optimizers if self._loop.is_fit else ():
            inner = getattr(optimizer, "optimizer", optimizer)
            defaults = inner.defaults
            setups.append(
                OptimizerSetup(
                    kind=type(inner).__name__,
                    foreach=defaults.get("foreach"),
                    fused=defaults.get("fused"),
                    has_foreach="foreach" in defaults,
                    has_fused="fused" in defaults,
                    num_tensors=sum(len(group["params"]) for group in inner.param_groups),
                )
            )
        return {"optimizers": tuple(setups)}

    def layers(self) -> dict[str, Any]:
        """What is known from the modules alone."""
        found: dict[str, Any] = {"convolution_biases": convolution_biases(self._module)}
        if self._trainer.strategy.root_device.type == "cuda":
            found["layers"] = tuple(
                LayerShape(path=path, in_features=layer.in_features, out_features=layer.out_features)
                for path, layer in self._module.named_modules()
                if isinstance(layer, nn.Linear)
            )
        return found

    def device(self) -> dict[str, Any]:
        """A CUDA device and its memory."""
        device = self._trainer.strategy.root_device
        if device.type != "cuda":
            return {}
        return {
            "cuda": DeviceSetup(
                capability=torch.cuda.get_device_capability(device),
                total_bytes=torch.cuda.get_device_properties(device).total_memory,
                reserved_bytes=torch.cuda.max_memory_reserved(device),
            )
        }


def _keeps_gradients(module: Any) -> bool | None:
    """Whether ``optimizer_zero_grad`` says ``set_to_none=False``, as far as its source tells."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).optimizer_zero_grad)))
    except (OSError, SyntaxError, TypeError):
        return None
    said = [
        keyword.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "set_to_none" and isinstance(keyword.value, ast.Constant)
    ]
    return any(value is False for value in said)


def _loaders(loop: Any) -> tuple[LoaderSetup, ...]:
    """All dataloaders of one of Lightning's loops; none as long as it has not made them."""
    combined = getattr(loop, "_combined_loader", None)
    if combined is None:
        return ()
    source = loop._data_source
    made_by = place_of(getattr(source.instance, source.name)) if source.is_module() else None
    return tuple(replace(_loader(loader), made_by=made_by) for loader in combined.flattened)


def _loader(loader: Any) -> LoaderSetup:
    """One loader; what is not made like torch's has a kind and no more."""
    if not isinstance(loader, DataLoader):
        return LoaderSetup(kind=type(loader).__name__, dataset=place_of(type(loader).__iter__))
    # Innermost first: a Subset or a ConcatDataset is not where the time goes.
    dataset: Any = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    method = next(
        (
            found
            for name in (("__iter__",) if is_iterable else ("__getitems__", "__getitem__"))
            if (found := getattr(type(dataset), name, None)) is not None
        ),
        None,
    )
    context = loader.multiprocessing_context
    return LoaderSetup(
        kind=type(loader).__name__,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory=loader.pin_memory,
        start_method=(
            None
            if not loader.num_workers
            else context.get_start_method()
            if context is not None
            else torch.multiprocessing.get_start_method()
        ),
        batch_size=loader.batch_size,
        dataset=None if method is None else place_of(method),
        collate=None if loader.collate_fn is None else place_of(loader.collate_fn),
        worker_init=None if loader.worker_init_fn is None else place_of(loader.worker_init_fn),
    )
