"""What is checked and set before a model is timed, and put back afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import index
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from lightning_modelprof.errors import ConfigError, quoted, told
from lightning_modelprof.measure.inference_times import METHODS


def check_arguments(model: Any, method: Any, **numbers: Any) -> None:
    """Refuses what ``benchmark_inference`` cannot use."""
    if not callable(model):
        raise ConfigError(f"benchmark_inference(model): expected something to call, got {quoted(model)}.")
    if method is not None and method not in METHODS:
        raise ConfigError(
            f"benchmark_inference(method): expected one of {', '.join(METHODS)}, or None, got"
            f" {quoted(method)}."
        )
    for key, value in numbers.items():
        at_least = 0 if key == "warm_up" else 1
        if value is None and key in {"samples", "tokens"}:
            continue
        try:
            number = index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool | torch.Tensor) or number < at_least:
            raise ConfigError(
                f"benchmark_inference({key}): expected a whole number of at least {at_least}, got"
                f" {quoted(value)}."
            )


def devices_of(module: torch.nn.Module | None, batch: Any) -> tuple[torch.device, ...]:
    """Where the work is: the devices of the model and, if it has no tensors, of the batch; else the CPU.

    The CPU counts only if there is nothing else.
    """
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        raise ConfigError(
            "benchmark_inference(model): expected a model that is ready, got one with lazy layers, whose"
            " parameters could not be trained if they were made here. Run it on a batch first."
        )
    devices = dict.fromkeys(tensor.device for tensor in [*tensors, *tensors_in(batch)])
    for device in devices:
        if device.type == "meta":
            raise ConfigError(
                "benchmark_inference(model): expected tensors that hold values, got some on the device meta."
                " Move the model and the batch to the device to be timed."
            )
    others = tuple(device for device in devices if device.type != "cpu")
    return others or (torch.device("cpu"),)


def tensors_in(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors of nested mappings, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth < 8 and isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(part, depth + 1)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the batch is passed: positional and keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple) else ((batch,), {})


def run_first(call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any], warm_up: int) -> None:
    """The runs before the timed ones; says how the batch was passed if the model cannot take it."""
    try:
        if warm_up:
            call()
    except TypeError as error:
        passed = (
            f"the keyword arguments {', '.join(map(str, kwargs))}" if kwargs else f"{len(args)} argument(s)"
        )
        raise ConfigError(
            f"benchmark_inference(batch): expected a batch that the model can take, got"
            f" {told(error)}. It was passed as {passed}: a mapping goes in"
            " as keyword arguments, a tuple as positional ones, and (batch,) as it is."
        ) from error
    for _ in range(warm_up - 1):
        call()


@contextmanager
def in_eval_mode(module: torch.nn.Module | None) -> Iterator[None]:
    """The module and its children in eval mode; every ``training`` flag as before afterwards."""
    if module is None or not any(child.training for child in module.modules()):
        yield
        return
    flags = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        yield
    finally:
        # train() first: some modules override it to merge weights for eval, and to split them again.
        module.train(flags[0][1])
        for child, training in flags:
            child.training = training


@contextmanager
def random_states_restored(devices: tuple[torch.device, ...]) -> Iterator[None]:
    """The random generators of Python, NumPy, torch and the devices as before afterwards."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_devices = []
    for device in devices:
        namespace: Any = getattr(torch, device.type, None)
        if device.type != "cpu" and hasattr(namespace, "get_rng_state"):
            where = () if device.type == "mps" else (device,)
            of_devices.append((namespace, namespace.get_rng_state(*where), where))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for namespace, state, where in of_devices:
            namespace.set_rng_state(state, *where)
