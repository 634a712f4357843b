"""Find what decorators registered in a package's modules: rules, tables and charts."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def found_beside(
    module: str, made: Sequence[T], key: Callable[[T], Any], *, without: Collection[str] = ()
) -> tuple[T, ...]:
    """Return what the modules next to the calling one registered, in order.

    Args:
        module: the caller's ``__name__``.
        made: list that the decorators append to.
        without: modules that import the caller.
    """
    package = module.rpartition(".")[0]
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if file.name not in without:
            importlib.import_module(f"{package}.{file.name}")
    if not made:
        raise ImportError(f"{package}: expected its modules, found none. Bundle all of lightning_modelprof.")
    return tuple(sorted(made, key=key))


def place_in(order: Sequence[str], name: str) -> int:
    """Return a name's position in an order; missing names come last."""
    return order.index(name) if name in order else len(order)
