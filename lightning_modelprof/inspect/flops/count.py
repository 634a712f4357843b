"""Counts the FLOPs of one model call without changing the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.errors import ModelProfError, quoted
from lightning_modelprof.inspect.core.counter import CountedPlace, FlopCounter
from lightning_modelprof.inspect.core.model_copies import fake_copy, fake_inputs, values_are_missing
from lightning_modelprof.inspect.core.preserved import preserved, random_states_kept
from lightning_modelprof.inspect.core.whereabouts import Phase
from lightning_modelprof.inspect.flops.formulas import Formula, own_formulas
from lightning_modelprof.record import Record
from lightning_modelprof.run.model_cost import FLOP_PHASES, FOURIER_OPERATORS, OperatorCount, StepCount

_ON_REAL_TENSORS: Final = "Set on_fake_tensors=False to count it on real tensors."


class FlopCount(Record, frozen=True, kw_only=True):
    """FLOPs per phase, contractions only; a phase that didn't run is missing, not 0.

    Attributes:
        flops: FLOPs by phase.
        macs: Multiply-adds by phase, half the FLOPs.
        fourier_flops: FLOPs of Fourier transforms by phase, 5 N log2 N, in no other total.
        by_module: FLOPs by module path, with everything inside the module; the model's path is empty.
        by_operator: FLOPs by operator, Fourier transforms included.
        by_module_and_operator: FLOPs by operator within the innermost module that ran it.
        uncounted: Calls of operators that may contain contractions but have no formula, or one that failed.
        errors: Why formulas failed.
    """

    flops: dict[Phase, int]
    macs: dict[Phase, int]
    fourier_flops: dict[Phase, int]
    by_module: dict[Phase, dict[str, int]]
    by_operator: dict[Phase, dict[str, int]]
    by_module_and_operator: dict[Phase, dict[str, dict[str, int]]]
    uncounted: dict[Phase, dict[str, int]]
    errors: tuple[str, ...]


def step_count(
    counter: FlopCounter,
    *,
    step: int | None = None,
    samples: int | None = None,
    on_fake_tensors: bool = False,
    copy_reason: str = "",
) -> StepCount:
    """Return a counter's record of its step.

    An operator whose formula worked for some calls and failed for others appears twice at the same place:
    with and without FLOPs.

    Args:
        counter: after its step.
        step: step number within the fit.
        samples: batch size.
        on_fake_tensors: whether a copy on tensors without data was counted.
        copy_reason: why it was.
    """
    counted = [_operator(place, counter.calls[place], flops) for place, flops in counter.flops.items()]
    uncounted = [_operator(place, calls, None) for place, calls in counter.uncounted.items()]
    return StepCount(
        step=step,
        samples=samples,
        on_fake_tensors=on_fake_tensors,
        copy_reason=copy_reason,
        operators=(*counted, *uncounted),
        errors=tuple(
            f"{operator}: {message} ({times} times)" for (operator, message), times in counter.errors.items()
        ),
    )


def _operator(place: CountedPlace, calls: int, flops: int | None) -> OperatorCount:
    return OperatorCount(**place._asdict(), calls=calls, flops=flops)


def summarize(counter: FlopCounter) -> FlopCount:
    """Add up a counter's FLOPs."""
    return added_up(step_count(counter))


def added_up(count: StepCount) -> FlopCount:
    """Add up the FLOPs of a step's record."""
    by_module: dict[Phase, Counter[str]] = {}
    by_operator: dict[Phase, Counter[str]] = {}
    by_both: dict[Phase, dict[str, Counter[str]]] = {}
    uncounted: dict[Phase, Counter[str]] = {}
    fourier: Counter[Phase] = Counter()
    for one in count.operators:
        phase = cast("Phase", one.phase)
        if one.flops is None:
            uncounted.setdefault(phase, Counter())[one.operator] += one.calls
            continue
        by_operator.setdefault(phase, Counter())[one.operator] += one.flops
        by_both.setdefault(phase, {}).setdefault(one.module, Counter())[one.operator] += one.flops
        if one.operator in FOURIER_OPERATORS:
            fourier[phase] += one.flops
            continue
        modules = by_module.setdefault(phase, Counter())
        names = one.module.split(".") if one.module else []
        for depth in range(len(names) + 1):
            modules[".".join(names[:depth])] += one.flops
    totals = {phase: by_module[phase][""] for phase in FLOP_PHASES if phase in by_module}
    return FlopCount(
        flops=totals,
        macs={phase: flops // 2 for phase, flops in totals.items()},
        fourier_flops=dict(fourier),
        by_module={phase: dict(counts) for phase, counts in by_module.items()},
        by_operator={phase: dict(counts) for phase, counts in by_operator.items()},
        by_module_and_operator={
            phase: {module: dict(counts) for module, counts in modules.items()}
            for phase, modules in by_both.items()
        },
        uncounted={phase: dict(counts) for phase, counts in uncounted.items()},
        errors=count.errors,
    )


def count_flops(
    model: nn.Module,
    *args: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    formulas: Mapping[Any, Formula] | None = None,
    on_fake_tensors: bool = False,
    **kwargs: Any,
) -> FlopCount:
    """Count the FLOPs of one call of a model.

    The model runs once, in its current mode and under the caller's grad mode. Gradients, buffers, modes and
    random states are always restored; anything else the model's code changes isn't.

    Args:
        model: Any module. A compiled one runs eagerly in this call.
        args: Positional arguments for the model.
        loss_fn: Function from the output to a scalar loss; if given, backward runs and is counted too.
        formulas: FLOP formulas by operator, called as ``formula(*args, **kwargs, out_val=result)``.
        on_fake_tensors: Run a copy of the model whose tensors have shapes but no data. Nothing is computed,
            so the model may be larger than memory. Models on the meta device are always counted this way.
        kwargs: Keyword arguments for the model.

    Raises:
        ModelProfError: If ``model`` isn't a module or has uninitialised parameters, if a formula's operator
            is unknown to torch, or if the model needs values but its tensors have no data.
    """
    if not isinstance(model, nn.Module):
        raise ModelProfError(f"count_flops: expected a torch.nn.Module, got {quoted(model)}.")
    try:
        own_formulas(formulas)
    except KeyError as error:
        raise ModelProfError(f"count_flops: {error.args[0]}. Import the operator's library first.") from None
    lazy = [n for n, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise ModelProfError(
            f"count_flops: expected initialised parameters, got lazy {', '.join(lazy)}."
            " Run the model on one batch first."
        )
    if on_fake_tensors or any(parameter.is_meta for parameter in model.parameters()):
        return _count_on_fake_tensors(model, args, kwargs, loss_fn, formulas)
    with preserved(model, (args, kwargs)), FlopCounter(model, formulas) as counter:
        _run(model, args, kwargs, loss_fn)
    return summarize(counter)


def _count_on_fake_tensors(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[[Any], torch.Tensor] | None,
    formulas: Mapping[Any, Formula] | None,
) -> FlopCount:
    copied, mode = fake_copy(model)
    args, kwargs = fake_inputs(mode, args), fake_inputs(mode, kwargs)
    counter = FlopCounter(copied, formulas)
    with random_states_kept(), values_are_missing("count_flops", _ON_REAL_TENSORS), mode, counter:
        _run(copied, args, kwargs, loss_fn)
    return added_up(step_count(counter, on_fake_tensors=True))


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[[Any], torch.Tensor] | None,
) -> None:
    output = model(*args, **kwargs)
    if loss_fn is not None:
        loss_fn(output).backward()  # type: ignore[no-untyped-call]  # torch doesn't type it
