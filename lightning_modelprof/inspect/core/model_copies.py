"""Copies a model so that a count can run it without changing the original.

A copy whose tensors have shapes but no data takes no memory and almost no time, so models larger than memory
and compiled models can be counted.
"""

from __future__ import annotations

import sys
import types
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_modelprof.errors import ModelProfError, describe_error
from lightning_modelprof.measure.stored import (
    buffers_of,
    class_name,
    modules_of,
    mro_of,
    named_modules,
    namespace_of,
    parameters_of,
    qualified_name,
)

T = TypeVar("T")


ModuleT = TypeVar("ModuleT", bound=nn.Module)


COMPILED_FROM: Final = "_torchdynamo_orig_callable"
"""Attribute that torch.compile sets on each function it wraps."""


_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


_NEEDS_VALUES: Final = tuple(
    found
    for found in (
        getattr(fake_tensor, name, None)
        for name in (
            "DataDependentOutputException",
            "DynamicOutputShapeException",
            "UnsupportedOperatorException",
            "UnsupportedFakeTensorException",
        )
    )
    if found is not None
)


def plain_copy(model: ModuleT) -> ModuleT:
    """Copy a model with its data, for an extra run that must leave no trace.

    Tied weights stay tied. Compiled parts are as before torch.compile. A LightningModule's copy has no
    Trainer, and its ``log`` and ``log_dict`` do nothing.

    Raises:
        ModelProfError: when part of the model can't be copied, also for lack of memory.
    """
    with _copy_errors(model):
        copied = _copy(model, {})
    for module in modules_of(copied):
        _silence(module)
    return copied


def refuse_closures(model: nn.Module) -> None:
    """Refuse a model with hooks that are closures, whose variables a copied hook would share with the model.

    Raises:
        ModelProfError: names the module and the hook.
    """
    for path, module in named_modules(model):
        for kind in _HOOKS:
            for hook in getattr(module, kind, {}).values():
                if isinstance(hook, FunctionType) and hook.__closure__:
                    raise ModelProfError(
                        f"{path or type(module).__name__}: expected hooks that can be copied, got"
                        f" {hook.__qualname__}, which closes over variables"
                    )


def fake_copy(model: ModuleT) -> tuple[ModuleT, FakeTensorMode]:
    """Copy a model without its tensors' data, to run it under the returned mode.

    Otherwise like ``plain_copy``. Meta tensors move to the CPU. A metric that needs values returns zeros.

    Returns:
        The copy and the mode it runs under: ``with mode: copy(*fake_inputs(mode, arguments))``.

    Raises:
        ModelProfError: when part of the model can't be copied.

    Caveats:
        Hooks are copied with their modules; the variables they close over aren't.
    """
    # No fallback kernels, as those compute. What a model holds outside its modules becomes fake.
    mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    with _copy_errors(model):
        tensors = (*parameters_of(model), *buffers_of(model))
        memo = {id(tensor): _on_the_cpu(mode, tensor) for tensor in tensors if tensor.is_meta}
        with fake_tensor.FakeCopyMode(mode):
            copied = _copy(model, memo)
    for module in modules_of(copied):
        _silence(module)
        _do_without_values(module)
    return copied, mode


def fake_inputs(mode: FakeTensorMode, value: T) -> T:
    """Replace the tensors in dicts, sequences, named tuples and dataclasses with fake ones.

    Other objects stay, and anything without tensors is returned unchanged.
    """
    return _replaced(mode, value)  # type: ignore[no-any-return]


def reaches_outside(loss: torch.Tensor) -> bool:
    """Whether a backward pass of a fake-tensor loss would give gradients to real tensors."""
    return any(
        "AccumulateGrad" in node.name() and not isinstance(node.variable, fake_tensor.FakeTensor)
        for node in nodes_behind(loss)
    )


def nodes_behind(loss: torch.Tensor) -> Iterator[Any]:
    """Yield each autograd node that leads to a loss once."""
    with torch._C.DisableTorchFunctionSubclass():  # the loss may be of a user's class
        waiting: list[Any] = [loss.grad_fn]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


@contextmanager
def values_are_missing(what: str, instead: str) -> Iterator[None]:
    """Turn fake tensors' errors into one with advice.

    Args:
        what: our argument or function that runs the copy.
        instead: advice, as a sentence.

    Raises:
        ModelProfError: when the model needs its tensors' values, or has an operator that torch can't run
            without data.
    """
    try:
        yield
    except _NEEDS_VALUES as error:
        raise ModelProfError(
            f"{what}: expected a model that runs on tensors without data, got one that needs their values"
            f" ({describe_error(error)}). {instead}".rstrip()
        ) from error


@contextmanager
def _copy_errors(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ModelProfError(f"{type(model).__name__} can't be copied: {describe_error(error)}") from error


def _copy(model: ModuleT, memo: dict[int, Any]) -> ModuleT:
    """Copy a model as it was before torch.compile."""
    for module in modules_of(model):
        # Lightning's mark of torch.compile(LightningModule), whose contents can't be copied.
        if module.__dict__.get("_compiler_ctx") is not None:
            memo[id(module.__dict__["_compiler_ctx"])] = None
    # Innermost first: a wrapper's copy is the copy of the module it wraps.
    for module in reversed(list(modules_of(model))):
        if "_orig_mod" in module._modules:
            memo[id(module)] = deepcopy(module._modules["_orig_mod"], memo)
    copied = deepcopy(model, memo)
    for module in modules_of(model):
        if "_orig_mod" not in module._modules:
            _undo_compiling(module, memo)
    return copied


def _on_the_cpu(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode, torch.no_grad():
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _undo_compiling(module: nn.Module, memo: dict[int, Any]) -> None:
    copied = memo[id(module)]
    copied.__dict__.pop("_compiled_call_impl", None)
    for name, value in module.__dict__.items():
        if name == "_compiled_call_impl" or not isinstance(value, types.FunctionType):
            continue
        original = vars(value).get(COMPILED_FROM)
        if original is None:
            continue
        of_the_class = getattr(type(module), name, None)
        if getattr(original, "__self__", None) is module and original.__func__ is of_the_class:
            copied.__dict__.pop(name, None)
        else:
            copied.__dict__[name] = deepcopy(original, memo)


def _silence(module: nn.Module) -> None:
    if all(hasattr(type(module), name) for name in ("log", "log_dict", "training_step")):
        module.__dict__.update(log=_do_nothing, log_dict=_do_nothing)


def _do_without_values(module: nn.Module) -> None:
    names = {
        base.__qualname__ for base in type(module).__mro__ if base.__module__.startswith("torchmetrics.")
    }
    if "Metric" in names:
        for name in ("forward", "update", "compute"):
            module.__dict__[name] = _without_values(getattr(module, name))
    if "MetricCollection" in names and hasattr(module, "_enable_compute_groups"):
        module.__dict__["_enable_compute_groups"] = False  # compute groups are found by comparing values


def _do_nothing(*_arguments: Any, **_options: Any) -> None:
    pass


def _without_values(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except _NEEDS_VALUES:
            return torch.zeros(())

    return run


def _replaced(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return _on_the_cpu(mode, value)
        return mode.from_tensor(value, static_shapes=True)
    if isinstance(value, (dict, UserDict)):
        return _with_items(value, {key: _replaced(mode, item) for key, item in value.items()})
    if isinstance(value, Mapping):
        items = {key: _replaced(mode, item) for key, item in value.items()}
        return items if _differs(value, items) else value
    if isinstance(value, list):
        return _with_items(value, dict(enumerate(_replaced(mode, item) for item in value)))
    if isinstance(value, tuple):
        replaced = [_replaced(mode, item) for item in value]
        if all(new is old for new, old in zip(replaced, value, strict=True)):
            return value
        return value._make(replaced) if hasattr(value, "_make") else type(value)(replaced)
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(changed, field.name, _replaced(mode, getattr(value, field.name)))
        return changed
    return value


def _differs(value: Any, items: Mapping[Any, Any]) -> bool:
    return any(value[key] is not item for key, item in items.items())


def _with_items(container: Any, items: Mapping[Any, Any]) -> Any:
    """Copy a dict or list, keeping its class, with other items; return it unchanged if nothing differs."""
    if not _differs(container, items):
        return container
    changed = copy(container)
    for key, item in items.items():
        changed[key] = item
    return changed


_OF_DYNAMO: Final = "__"
"""Prefix of the names that Dynamo adds to a file's globals for any model, such as ``__compiled_fn_3``."""


_NOT_THE_USERS: Final = {"torch", "builtins", "typing", "lightning", "pytorch_lightning", "torchmetrics"}


_NOTHING: Final = ModuleType("nothing")


def find_compiled(root: nn.Module) -> str | None:
    """Name something in a model that torch.compile has wrapped, or ``None``.

    Checks the modules, their methods, and the global names that these methods use. Compiled functions reached
    in other ways aren't found.
    """
    if getattr(root, "_compiler_ctx", None):  # Lightning's mark of torch.compile(LightningModule)
        return type(root).__name__
    for path, module in named_modules(root):
        if _is_compiled(module):
            return path or type(root).__name__
    classes = {id(kind): kind for module in modules_of(root) for kind in mro_of(type(module))}
    for kind in sorted(classes.values(), key=qualified_name):
        module_name = str(namespace_of(kind).get("__module__"))
        if module_name.partition(".")[0] in _NOT_THE_USERS:
            continue
        file = vars(sys.modules.get(module_name, _NOTHING))
        used = {name: file[name] for name in _names_used_by(kind) if name in file}
        function = _find_function(namespace_of(kind)) or _find_function(used)
        if function is not None:
            return f"{function}, which {class_name(kind)} uses"
    return None


def compiled_frames() -> int:
    """Count the functions that Dynamo has met in this process; it grows when something is compiled."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("frames", {}).get("total", 0))


def _is_compiled(module: nn.Module) -> bool:
    wrapped = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    return wrapped or _find_function(vars(module)) is not None


def _names_used_by(kind: type) -> set[str]:
    codes = [value.__code__ for value in namespace_of(kind).values() if isinstance(value, FunctionType)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def _find_function(names: Any) -> str | None:
    """Return the first name whose object torch.compile made, without running the objects' code."""
    for name, value in list(names.items()):
        if type(value) is FunctionType and COMPILED_FROM in vars(value) and not name.startswith(_OF_DYNAMO):
            return str(name)
    return None
