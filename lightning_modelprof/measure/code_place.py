"""Where a live function or class is written."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch

from lightning_modelprof.measure.user_code import absolute_file, is_library, library_of
from lightning_modelprof.run.setup import CodePlace


def place_of(thing: Any) -> CodePlace | None:
    """The place of a function, method, ``functools.partial``, class or module's forward.

    What decorators wrap is unwrapped as far as they say so (``functools.wraps``).

    Returns:
        ``None`` if it has no name.
    """
    while isinstance(thing, functools.partial | functools.partialmethod):
        thing = thing.func
    if isinstance(thing, torch.nn.Module):
        thing = thing.forward
    thing = inspect.unwrap(thing)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    if not isinstance(name, str):
        return place_of(type(thing).__call__) if callable(thing) else None
    code = getattr(thing, "__code__", None)
    if code is not None:
        file, line = code.co_filename, code.co_firstlineno
    elif isinstance(thing, type):
        # A class has no line of its own before Python 3.13; that of its constructor is near enough.
        code = getattr(vars(thing).get("__init__"), "__code__", None)
        file = getattr(sys.modules.get(thing.__module__), "__file__", None)
        line = getattr(thing, "__firstlineno__", None) or getattr(code, "co_firstlineno", None)
    else:
        file = line = None
    file = None if file is None else absolute_file(file)
    return CodePlace(
        name=name,
        file=file,
        line=line,
        is_library=is_library(file),
        package=library_of(str(getattr(thing, "__module__", "")), file),
    )


def own_methods(owner: Any, base_names: tuple[str, ...]) -> dict[str, CodePlace]:
    """The public methods that an object's class, or the object, has beyond the named base classes.

    Args:
        owner: a callback or a LightningModule.
        base_names: names of classes whose methods are Lightning's; by name, as there are two Lightnings.
    """
    found: dict[str, CodePlace] = {}
    namespaces = [vars(owner)]
    for kind in type(owner).__mro__:
        if kind.__name__ in base_names:
            break
        namespaces.append(dict(vars(kind)))
    for namespace in namespaces:
        for name, value in namespace.items():
            if not name.startswith("_") and name not in found and inspect.isroutine(value):
                place = place_of(getattr(value, "__func__", value))
                if place is not None:
                    found[name] = place
    return found
