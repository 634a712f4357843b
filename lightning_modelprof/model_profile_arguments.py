"""The arguments of profile_model: what can be meant by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.errors import ModelProfError, given_path, nearest, quoted
from lightning_modelprof.flops.profiled_call import kind_of
from lightning_modelprof.inspect.modules.modules import plain_path
from lightning_modelprof.run.model_cost import ModuleRecord

MODES: Final = ("forward", "generate")


def target_of(model: Any, mode: str, loss_fn: Any) -> Callable[..., Any]:
    """What is called."""
    if not isinstance(model, nn.Module):
        raise ModelProfError(f"profile_model(model): expected a torch.nn.Module, got {kind_of(model)}.")
    if mode not in MODES:
        raise ModelProfError(
            f"profile_model(mode): expected one of {', '.join(MODES)}, got {quoted(mode)}."
            f"{nearest(mode, MODES)}"
        )
    if mode == "forward":
        return model
    if loss_fn is not None:
        raise ModelProfError(
            "profile_model(loss_fn): expected none with mode='generate', which has no backward. Leave it out."
        )
    target = getattr(model, "generate", None)
    if not callable(target):
        raise ModelProfError(
            f"profile_model(mode='generate'): expected a model with a method generate, got"
            f" {type(model).__name__}, which has none. Use mode='forward'."
        )
    return target  # type: ignore[no-any-return]  # an attribute of anybody's model


def whole_number(name: str, value: Any, at_least: int) -> int:
    """An argument that is a number."""
    try:
        number = index(value)
    except TypeError:
        number = at_least - 1
    if isinstance(value, bool | torch.Tensor) or number < at_least:
        raise ModelProfError(
            f"profile_model({name}): expected a whole number of at least {at_least}, got {quoted(value)}."
        )
    return number


def writeable_file(output_file: str | Path | None) -> Path | None:
    """Where the report goes; ``None`` for nowhere."""
    if output_file is None:
        return None
    path = given_path(output_file, ModelProfError)
    if path.is_dir() or not path.parent.is_dir():
        raise ModelProfError(
            f"profile_model(output_file): expected a file in a folder that exists, got {path}. Make it first."
        )
    return path


def check_tensors(model: nn.Module) -> None:
    """Refuses what has no values yet: running it would give it some, or could not."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ModelProfError(
            f"profile_model(model): expected initialised parameters, got lazy {', '.join(lazy)}."
            " Run the model on one batch first."
        )
    if any(tensor.is_meta for _, tensor in tensors):
        raise ModelProfError(
            "profile_model(model): expected tensors that hold values, got some on the device meta, which"
            " cannot be timed. count_flops counts the FLOPs of such a model."
        )


def input_of(model: nn.Module, shape: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """A batch of ones in the wanted shape, like the model's first parameter."""
    is_shape = isinstance(shape, tuple | list) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or not shape:
        raise ModelProfError(
            "profile_model(input_shape): expected the sizes of a tensor, such as (1, 3, 224, 224), got"
            f" {quoted(shape)}."
        )
    if args:
        raise ModelProfError(
            f"profile_model(input_shape): expected a shape or a batch, got both: {kind_of(args[0])} was"
            " passed as well. Leave out one of them."
        )
    like = next(model.parameters(), torch.ones(()))
    return torch.ones(tuple(shape), dtype=like.dtype, device=like.device)


def ignored_paths(model: nn.Module, records: Iterable[ModuleRecord], wanted: Any) -> set[str]:
    """Paths of the modules that are meant; a class means its subclasses too."""
    by_path = {record.path: record.type_name for record in records}
    by_path_modules = [(plain_path(path), module) for path, module in model.named_modules()]
    paths: set[str] = set()
    for one in [wanted] if isinstance(wanted, str | type) else wanted or ():
        if not isinstance(one, str | type):
            raise ModelProfError(
                "profile_model(ignore_modules): expected classes, their names or paths of modules, got"
                f" {type(one).__name__}."
            )
        if isinstance(one, type):
            found = {path for path, module in by_path_modules if isinstance(module, one)}
            name = one.__name__
        else:
            name = one
            found = {path for path, type_name in by_path.items() if name and name in (path, type_name)}
        if not found:
            names = sorted({*by_path, *by_path.values()} - {""})
            types = ", ".join(sorted(set(by_path.values())))
            hint = nearest(name, names) or f" Its classes are {types}."
            raise ModelProfError(
                "profile_model(ignore_modules): expected classes or paths of modules of this model, got"
                f" {quoted(name)}, which is none.{hint}"
            )
        paths |= found
    return paths
