"""Whether torch.compile has to do with a model: such a model is counted in another way."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from torch import nn

_ORIGINAL: Final = "_torchdynamo_orig_callable"
"""What torch.compile puts on every function that it wraps."""

_OF_DYNAMO: Final = "__"
"""Dynamo leaves what it compiles in a file's globals, as ``__compiled_fn_3``, whoever's model it was."""

_NOT_THE_USERS: Final = {"torch", "builtins", "typing", "lightning", "pytorch_lightning", "torchmetrics"}
_NOTHING: Final = ModuleType("nothing")


def find_compiled(root: nn.Module) -> str | None:
    """Name something in a model that torch.compile has wrapped, or ``None`` if nothing was found.

    Looked at are the modules, their methods, and what these methods call by a name of their file. A compiled
    function that is reached in another way is not found.
    """
    if getattr(root, "_compiler_ctx", None):  # how Lightning notes torch.compile(LightningModule)
        return type(root).__name__
    for path, module in root.named_modules():
        if _is_compiled(module):
            return path or type(root).__name__
    kinds = {kind for module in root.modules() for kind in type(module).__mro__}
    for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
        if kind.__module__.partition(".")[0] in _NOT_THE_USERS:
            continue
        file = vars(sys.modules.get(kind.__module__, _NOTHING))
        used = {name: file[name] for name in _names_used_by(kind) if name in file}
        function = _find_function(vars(kind)) or _find_function(used)
        if function is not None:
            return f"{function} beside {kind.__name__}"
    return None


def compiled_frames() -> int:
    """How many functions Dynamo has met in this process: one more, and something was compiled meanwhile."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("frames", {}).get("total", 0))


def _is_compiled(module: nn.Module) -> bool:
    wrapped = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    return wrapped or _find_function(vars(module)) is not None


def _names_used_by(kind: type) -> set[str]:
    """Global names and attributes in the methods of a class, with what is nested in them."""
    codes = [value.__code__ for value in vars(kind).values() if isinstance(value, FunctionType)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names


def _find_function(names: Any) -> str | None:
    """The first of the named objects that torch.compile made; asked without running code of theirs."""
    for name, value in list(names.items()):
        if isinstance(value, FunctionType) and _ORIGINAL in vars(value) and not name.startswith(_OF_DYNAMO):
            return str(name)
    return None
