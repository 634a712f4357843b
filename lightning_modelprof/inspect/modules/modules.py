"""A model's modules and their parameters."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.inspect.modules.tensor_memory import unnoticed
from lightning_modelprof.measure.stored import is_a, named_modules, variables_of
from lightning_modelprof.measure.user_code import UserCode, place_of
from lightning_modelprof.place import Place
from lightning_modelprof.run.model_cost import ModuleRecord

WRAPPED: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which torch.compile, FSDP and activation checkpointing keep the wrapped module."""


def plain_path(path: str) -> str:
    """Return the user's name for a path, without wrappers: ``a.b`` for ``a._orig_mod.b``."""
    return ".".join(part for part in path.split(".") if part not in WRAPPED)


def module_records(root: nn.Module) -> tuple[ModuleRecord, ...]:
    """Return one record per module, in the order of ``named_modules``.

    A wrapper has no record: the module inside has its path, and parameters of the wrapper (FSDP's flat ones)
    are added to the module's own. A wrapper around an already named module is just another name of that
    module.

    Parameters are the registered ones, and the weights and biases that torch.ao packs, which aren't
    trainable. Weights kept as buffers aren't parameters. A DTensor's elements are those of the whole
    parameter, a flat FSDP parameter's those in this process.
    """
    path_of: dict[int, str] = {}
    types: dict[str, str] = {}
    written: dict[str, Place | None] = {}
    user_code = UserCode((type(root),))
    own: dict[str, list[nn.Parameter]] = {}
    packed: Counter[str] = Counter()
    arguments: dict[str, tuple[str, ...]] = {}
    counted: set[int] = set()
    for name, module in named_modules(root):
        inner = _unwrapped(module)
        path = path_of.setdefault(id(inner), plain_path(name))
        types[path] = _type_name(inner)
        written[path] = _users_forward(inner, user_code)
        arguments[path] = _arguments_of(inner)
        packed[path] += packed_elements(module)
        parameters = own.setdefault(path, [])
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in counted:
                counted.add(id(parameter))
                parameters.append(parameter)
    return tuple(
        _record(path, types[path], parameters, packed[path], written[path], arguments=arguments[path])
        for path, parameters in own.items()
    )


def _users_forward(module: nn.Module, user_code: UserCode) -> Place | None:
    try:
        place = place_of(type(module).forward)
        is_users = place is not None and place.file is not None and user_code.is_users_file(place.file)
    except Exception:  # an unusual class
        return None
    return place if is_users else None


def _unwrapped(module: nn.Module) -> nn.Module:
    for name in WRAPPED & module._modules.keys():
        inner = module._modules[name]
        if inner is not None:
            return _unwrapped(inner)
    return module


def _type_name(module: nn.Module) -> str:
    """Return the user's class name: fully_shard replaces the class by one with another name."""
    kind = type(module)
    is_sharded = kind.__bases__[0].__name__ == "FSDPModule"
    return (kind.__bases__[-1] if is_sharded else kind).__name__


def _record(
    path: str,
    type_name: str,
    parameters: list[nn.Parameter],
    packed: int,
    forward: Place | None,
    *,
    arguments: tuple[str, ...],
) -> ModuleRecord:
    is_known = not any(is_lazy(parameter) for parameter in parameters)
    with unnoticed():
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        return ModuleRecord(
            path=path,
            type_name=type_name,
            parameters=sum(parameter.numel() for parameter in parameters) + packed if is_known else None,
            trainable=sum(parameter.numel() for parameter in trainable) if is_known else None,
            forward=forward,
            arguments=arguments,
        )


def _arguments_of(module: nn.Module) -> tuple[str, ...]:
    """Return non-default arguments of one of torch's own modules, and of torch's hooks on any module."""
    hooks = variables_of(module).get("_forward_pre_hooks") or {}
    try:
        return tuple(one for part in (module, *hooks.values()) for one in _changed_arguments(part))
    except Exception:  # an unusual class
        return ()


def _changed_arguments(part: Any) -> Iterator[str]:
    kind: Any = type(part)
    if not kind.__module__.startswith("torch.") or isinstance(part, (FunctionType, MethodType)):
        return
    stored = variables_of(part)
    for name, default in _defaults(kind):
        value = stored.get(name)
        if type(value) in (bool, int, float, str) and value != default:
            yield f"{name}={value!r}"


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    parameters = inspect.signature(kind.__init__).parameters.values()
    return tuple((one.name, one.default) for one in parameters if one.default is not one.empty)


class PackedTensor(NamedTuple):
    dtype: str
    elements: int
    num_bytes: int


def packed_objects(module: nn.Module) -> list[Any]:
    """List a module's packed objects, without its children's; scripted modules aren't packed weights."""
    return [
        value
        for value in vars(module).values()
        if is_a(value, torch.ScriptObject) and not is_a(value, torch._C.ScriptModule)
    ]


def packed_tensors(packed: Any) -> list[PackedTensor] | None:
    """Return the weights and biases in a packed object; ``None`` if it doesn't show them.

    Weights are copied for this call, as torch shows them in no other way. Padding and row sums, which packing
    adds, aren't included.
    """
    try:
        return [_described(tensor) for tensor in _unpacked(packed)]
    except Exception:  # a class of another library, or of a backend that can't unpack here
        return None


def packed_elements(module: nn.Module) -> int:
    """Count the elements of a module's packed objects, without its children's or unreadable ones."""
    return sum(
        tensor.elements for packed in packed_objects(module) for tensor in packed_tensors(packed) or ()
    )


def _described(tensor: torch.Tensor) -> PackedTensor:
    # Among weights that aren't quantised only float16 is packed, and torch shows it as float32.
    is_half = tensor.dim() > 1 and tensor.dtype == torch.float32
    num_bytes = 2 * tensor.numel() if is_half else int(tensor.untyped_storage().nbytes())
    dtype = torch.float16 if is_half else tensor.dtype
    return PackedTensor(str(dtype).removeprefix("torch."), tensor.numel(), num_bytes)


def _unpacked(packed: Any) -> Iterator[torch.Tensor]:
    if hasattr(packed, "unpack"):
        yield from _tensors(packed.unpack())
        return
    # A recurrent layer's cell: its biases, and its weights as packed objects that hold the biases again.
    state = packed.__getstate__()
    biases = list(_tensors(state))
    weights = [tensor for found in _objects(state) for tensor in _unpacked(found)]
    if not biases and not weights:
        raise ValueError("nothing in it is a tensor")
    yield from biases
    yield from (tensor for tensor in weights if tensor.dim() > 1 or not biases)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _objects(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.ScriptObject):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _objects(item)
