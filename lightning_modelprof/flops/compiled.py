"""Whether torch.compile has to do with a model: such a model is counted in another way."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
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

    Looked at are the modules, their methods, and the functions of the files that define their classes. A
    compiled function from elsewhere is not found.
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
        function = _find_function(vars(kind)) or _find_function(
            vars(sys.modules.get(kind.__module__, _NOTHING))
        )
        if function is not None:
            return f"{function} beside {kind.__name__}"
    return None


def _is_compiled(module: nn.Module) -> bool:
    wrapped = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    return wrapped or _find_function(vars(module)) is not None


def _find_function(names: Any) -> str | None:
    """The first of the named objects that torch.compile made; asked without running code of theirs."""
    for name, value in list(names.items()):
        if isinstance(value, FunctionType) and _ORIGINAL in vars(value) and not name.startswith(_OF_DYNAMO):
            return str(name)
    return None
