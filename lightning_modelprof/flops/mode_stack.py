"""Dispatch modes of ours among those of others."""

from __future__ import annotations

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


def enter_mode(mode: TorchDispatchMode) -> None:
    """Enter a mode of ours, outside of those of others: who leaves theirs must not leave ours.

    Torch's own ``__enter__`` and ``__exit__`` also note whether any mode is on, each what it met; with ours
    left before theirs, or after, that would be wrong from then on, and nothing would be compiled any more.

    Args:
        mode: to be entered; :func:`leave_mode` leaves it.
    """
    others = modes_on()
    for _ in others:
        _pop_mode()
    _push_mode(mode)
    for one in others:
        _push_mode(one)


def leave_mode(mode: TorchDispatchMode) -> None:
    """Leave a mode of ours, and keep those of others; does nothing if it is not on.

    Args:
        mode: that was entered by :func:`enter_mode`.
    """
    stack = modes_on()
    if mode not in stack:
        return
    later = stack[stack.index(mode) + 1 :]
    for _ in (mode, *later):
        _pop_mode()
    for one in later:
        _push_mode(one)
