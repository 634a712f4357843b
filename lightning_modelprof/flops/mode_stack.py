"""Dispatch modes of ours among those of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


def modes_on() -> list[Any]:
    """The modes that are on, outermost first, without those of torch itself, such as fake tensors'."""
    return [one for one in _get_current_dispatch_mode_stack() if getattr(one, "_mode_key", None) is None]


def leave_mode(mode: TorchDispatchMode, leave: Callable[[Any, Any, Any], Any]) -> None:
    """Leave a mode, and keep those on that were entered after it and are to stay longer.

    Does nothing if the mode is not on: somebody else has left their mode first, and took this one for it.

    Args:
        mode: to be left.
        leave: the mode's own ``__exit__`` of ``TorchDispatchMode``.
    """
    stack = modes_on()
    if mode not in stack:
        return
    later = stack[stack.index(mode) + 1 :]
    for _ in later:
        _pop_mode()
    leave(None, None, None)
    for one in later:
        _push_mode(one)
