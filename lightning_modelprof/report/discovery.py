"""Finds what decorators made in the files of a folder: rules, tables and charts, which no list names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def found_beside(
    module: str, made: Sequence[T], key: Callable[[T], Any], *, without: Collection[str] = ()
) -> tuple[T, ...]:
    """What the files beside a module made, in order.

    Args:
        module: ``__name__`` of whoever asks.
        made: what their decorators add to.
        key: to sort by.
        without: files that import the one that asks.
    """
    package = module.rpartition(".")[0]
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if file.name not in without:
            importlib.import_module(f"{package}.{file.name}")
    if not made:
        raise ImportError(f"{package}: expected its modules, found none. Bundle all of lightning_modelprof.")
    return tuple(sorted(made, key=key))


def place_in(order: Sequence[str], name: str) -> int:
    """Where a name stands in an order; those that it lacks come last."""
    return order.index(name) if name in order else len(order)
