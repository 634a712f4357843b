"""The modules of a model, with the parameters of each."""

from __future__ import annotations

from collections import Counter
from typing import Final

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_modelprof.flops.packed_weights import packed_elements
from lightning_modelprof.inspect.modules.tensor_memory import unnoticed
from lightning_modelprof.measure.user_code import UserCode, place_of
from lightning_modelprof.run.model_cost import ModuleRecord
from lightning_modelprof.run.setup import CodePlace

WRAPPED: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Under these names torch.compile, FSDP and activation checkpointing keep the module that they wrap."""


def plain_path(path: str) -> str:
    """The path that the user knows, without the wrappers': ``a._orig_mod.b`` → ``a.b``."""
    return ".".join(part for part in path.split(".") if part not in WRAPPED)


def module_records(root: nn.Module) -> tuple[ModuleRecord, ...]:
    """One record for every module, in the order of ``named_modules``.

    A wrapper has no record of its own: the module inside of it has its path, and has the parameters that
    the wrapper keeps (FSDP's flat ones) added to its own. A wrapper around a module that has a name before
    it is one more name of that module, and has no record at all.

    Parameters are those that are registered, and the weights and biases that torch.ao packs, which are not
    trainable: weights that are kept as buffers are none. A parameter that is sharded as a DTensor has the
    elements of the whole; a flat one of FSDP has those that this process holds.
    """
    path_of: dict[int, str] = {}
    types: dict[str, str] = {}
    written: dict[str, CodePlace | None] = {}
    user_code = UserCode((type(root),))
    own: dict[str, list[nn.Parameter]] = {}
    packed: Counter[str] = Counter()
    counted: set[int] = set()
    for name, module in root.named_modules():
        inner = _unwrapped(module)
        path = path_of.setdefault(id(inner), plain_path(name))
        types[path] = _type_name(inner)
        written[path] = _forward_of(inner, user_code)
        packed[path] += packed_elements(module)
        parameters = own.setdefault(path, [])
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in counted:
                counted.add(id(parameter))
                parameters.append(parameter)
    return tuple(
        _record(path, types[path], parameters, packed[path], written[path])
        for path, parameters in own.items()
    )


def _forward_of(module: nn.Module, user_code: UserCode) -> CodePlace | None:
    """Where the module's forward is written, if the user wrote it."""
    try:
        place = place_of(type(module).forward)
        is_users = place is not None and place.file is not None and user_code.is_users_file(place.file)
    except Exception:  # a class that is not what it seems to be
        return None
    return place if is_users else None


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, or what its wrappers are around."""
    for name in WRAPPED & module._modules.keys():
        inner = module._modules[name]
        if inner is not None:
            return _unwrapped(inner)
    return module


def _type_name(module: nn.Module) -> str:
    """Name of the class that the user wrote: fully_shard puts one with an own name in its place."""
    kind = type(module)
    is_sharded = kind.__bases__[0].__name__ == "FSDPModule"
    return (kind.__bases__[-1] if is_sharded else kind).__name__


def _record(
    path: str, type_name: str, parameters: list[nn.Parameter], packed: int, forward: CodePlace | None
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
        )
