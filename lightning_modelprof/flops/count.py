"""Counts the FLOPs of one call of a model, and leaves the model as it was."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.flops.counter import PHASES, FlopCounter, Phase
from lightning_modelprof.flops.formulas import FOURIER_OPERATORS, Formula


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """FLOPs of contractions by phase; a phase that did not run is missing, not 0.

    ``macs`` are half the FLOPs: multiply-adds. ``fourier_flops`` are Fourier transforms, 5 N log2 N, in no
    other total. ``by_module`` holds every module with all that runs inside of it, the root under the empty
    path; ``by_operator`` every operator with a formula, transforms too. ``uncounted`` are calls of operators
    that may hold contractions and have no formula, or one that failed: ``errors`` says why.
    """

    flops: dict[Phase, int]
    macs: dict[Phase, int]
    fourier_flops: dict[Phase, int]
    by_module: dict[Phase, dict[str, int]]
    by_operator: dict[Phase, dict[str, int]]
    uncounted: dict[Phase, dict[str, int]]
    errors: tuple[str, ...]


def summarize(counter: FlopCounter) -> FlopCount:
    """Add up what a counter has seen."""
    by_module: dict[Phase, Counter[str]] = {}
    by_operator: dict[Phase, Counter[str]] = {}
    uncounted: dict[Phase, Counter[str]] = {}
    fourier: Counter[Phase] = Counter()
    for place, flops in counter.flops.items():
        by_operator.setdefault(place.phase, Counter())[place.operator] += flops
        if place.operator in FOURIER_OPERATORS:
            fourier[place.phase] += flops
            continue
        modules = by_module.setdefault(place.phase, Counter())
        parts = place.module.split(".") if place.module else []
        for depth in range(len(parts) + 1):
            modules[".".join(parts[:depth])] += flops
    for place, calls in counter.uncounted.items():
        uncounted.setdefault(place.phase, Counter())[place.operator] += calls
    totals = {phase: by_module[phase][""] for phase in PHASES if phase in by_module}
    return FlopCount(
        flops=totals,
        macs={phase: flops // 2 for phase, flops in totals.items()},
        fourier_flops=dict(fourier),
        by_module={phase: dict(counts) for phase, counts in by_module.items()},
        by_operator={phase: dict(counts) for phase, counts in by_operator.items()},
        uncounted={phase: dict(counts) for phase, counts in uncounted.items()},
        errors=tuple(
            f"{operator}: {message} ({times} times)" for (operator, message), times in counter.errors.items()
        ),
    )


def count_flops(
    model: nn.Module,
    *args: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    formulas: Mapping[Any, Formula] | None = None,
    **kwargs: Any,
) -> FlopCount:
    """Run the model once on a real batch and count.

    The model runs in the mode it is in, under the caller's grad mode. Parameters' gradients, buffers, modes
    and random states are as before afterwards, whatever happens; what else the model's Python code changes
    is not.

    Args:
        model: any module, compiled ones too (this call runs eagerly, later ones compiled).
        args: the model's arguments.
        loss_fn: makes a scalar of the output; with it, backward is run and counted too.
        formulas: own formulas by operator, called as ``formula(*args, **kwargs, out_val=result)``.
        kwargs: the model's keyword arguments.

    Raises:
        ModelProfError: for a model with uninitialised parameters, as running it would give them values.
    """
    lazy = [n for n, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise ModelProfError(
            f"count_flops: expected initialised parameters, got lazy {', '.join(lazy)}."
            " Run the model on one batch first"
        )
    with _unchanged(model, (args, kwargs)), FlopCounter(model, formulas) as counter:
        output = model(*args, **kwargs)
        if loss_fn is not None:
            loss_fn(output).backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
    return summarize(counter)


@contextmanager
def _unchanged(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Give back gradients, buffers, modes and random states as they were."""
    leaves = [t for t in _tensors_in(inputs) if t.is_leaf and t.requires_grad]
    with_grad = {id(t): t for t in [*model.parameters(), *leaves]}.values()
    gradients = [(tensor, tensor.grad) for tensor in with_grad]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    values = {id(b): (b, b.detach().clone()) for _, own in buffers for b in own.values() if b is not None}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = {t.device for t in [*with_grad, *(b for b, _ in values.values())] if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=[d.index for d in devices if d.index is not None]):
        try:
            for tensor, _ in gradients:
                tensor.grad = None
            yield
        finally:
            for tensor, gradient in gradients:
                tensor.grad = gradient
            for module, training in modes:
                module.training = training
            for module, own in buffers:
                module._buffers.clear()
                module._buffers.update(own)
            with torch.no_grad():
                for buffer, value in values.values():
                    buffer.detach().copy_(value)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in dicts, sequences and dataclasses, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name, None))
