"""Reads a training's setup from the live trainer, once when the loop starts and once when it ends.

Each part is read separately, so that an unreadable one costs only itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_modelprof.errors import describe_error
from lightning_modelprof.measure.setup.environment import AnyLoop
from lightning_modelprof.measure.setup.model_setup import (
    calls_by_name,
    class_files,
    compile_setup,
    convolution_biases,
)
from lightning_modelprof.measure.stored import derives, is_a, is_trained, named_modules, parameters_of
from lightning_modelprof.measure.user_code import place_of
from lightning_modelprof.run.setup import (
    DeviceSetup,
    LayerShape,
    LoaderSetup,
    OptimizerSetup,
    TrainingSetup,
)

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period of the container's CPU time in µs, or ``max``."""


def read_setup(loop: AnyLoop) -> TrainingSetup:
    """Read what is available when the loop starts. Never raises."""
    return _take(TrainingSetup(), loop.live().at_begin())


def finish_setup(setup: TrainingSetup, loop: AnyLoop, began_s: float) -> TrainingSetup:
    """Add what is only available later: validation, memory, compilations. Never raises.

    Args:
        began_s: ``time.time()`` at the loop's start.
    """
    return _take(setup, (*loop.live().at_end(), lambda: {"compiled": compile_setup(began_s)}))


def _take(setup: TrainingSetup, readers: Sequence[Callable[[], dict[str, Any]]]) -> TrainingSetup:
    """Add each readable part to the setup, and a note for each unreadable one."""
    for read in readers:
        found, note = _attempt(read)
        found = {name: value for name, value in found.items() if value not in (None, ())}
        setup = replace(setup, notes=(*setup.notes, note) if note else setup.notes, **found)
    return setup


def _attempt(read: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], str]:
    try:
        return read(), ""
    except Exception as error:  # arbitrary objects, or another Lightning
        return {}, f"{read.__name__} couldn't be read: {describe_error(error)}"


def usable_cpus() -> int | None:
    """Return the CPUs that this process may use: its affinity, capped at its container's rounded-up quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity is not None else os.cpu_count()
    try:
        quota, period = _QUOTA.read_text().split()
        return count if quota == "max" or count is None else min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return count


Reader: TypeAlias = Callable[[], dict[str, Any]]


class Live:
    """A loop's live objects; each method reads one part of the setup and may raise."""

    num_nodes = 1

    def __init__(self, loop: AnyLoop) -> None:
        self._loop = loop

    @property
    def _module(self) -> Any:
        return self._loop.module

    def at_begin(self) -> tuple[Reader, ...]:
        of_module = () if self._module is None else (self.module, self.libraries, self.layers)
        return (self.threads, self.loaders, self.optimizers, *of_module)

    def at_end(self) -> tuple[Reader, ...]:
        """Return readers of what may be available only when the loop has ended."""
        return (self.loaders, self.device)

    def threads(self) -> dict[str, Any]:
        """Read CPUs, threads and torch's settings, which may change during the loop."""
        return {
            "usable_cpus": usable_cpus(),
            "num_threads": torch.get_num_threads(),
            "local_world_size": max(1, self._loop.world_size // self.num_nodes),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "detects_anomaly": torch.is_anomaly_enabled(),
        }

    def module(self) -> dict[str, Any]:
        return {
            "module": place_of(type(self._module)),
            "num_trainable_tensors": sum(map(is_trained, parameters_of(self._module))),
        }

    def libraries(self) -> dict[str, Any]:
        """Read the calls in the user's files."""
        return {"calls": calls_by_name(class_files(self._module))}

    def loaders(self) -> dict[str, Any]:
        return {"loaders": tuple(map(loader_setup, self._loop.loaders()))}

    def optimizers(self) -> dict[str, Any]:
        setups = []
        for optimizer in self._loop.optimizers if self._loop.kind.is_fit else ():
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
        found: dict[str, Any] = {"convolution_biases": convolution_biases(self._module)}
        if self._loop.device.type == "cuda":
            found["layers"] = tuple(
                LayerShape(path=path, in_features=layer.in_features, out_features=layer.out_features)
                for path, layer in named_modules(self._module)
                if is_a(layer, nn.Linear)
            )
        return found

    def device(self) -> dict[str, Any]:
        device = self._loop.device
        if device.type != "cuda":
            return {}
        return {
            "cuda": DeviceSetup(
                capability=torch.cuda.get_device_capability(device),
                total_bytes=torch.cuda.get_device_properties(device).total_memory,
                reserved_bytes=torch.cuda.max_memory_reserved(device),
            )
        }


def loader_setup(loader: Any) -> LoaderSetup:
    """Describe a loader; one that isn't a DataLoader only has its kind and ``__iter__``."""
    if not isinstance(loader, DataLoader):
        return LoaderSetup(kind=type(loader).__name__, dataset=place_of(type(loader).__iter__))
    # Innermost first: a Subset or a ConcatDataset isn't where the time goes.
    dataset: Any = loader.dataset
    while derives(type(dataset), Subset):
        dataset = dataset.dataset
    is_iterable = derives(type(dataset), IterableDataset)
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
        worker_init=place_of(loader.worker_init_fn),
    )
