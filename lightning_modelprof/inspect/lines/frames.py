"""Finds the user's line that is running."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Final, TypeAlias

import torch

from lightning_modelprof.measure.user_code import UserCode, absolute_file
from lightning_modelprof.place import Place
from lightning_modelprof.run.sites import logging_kind

_PLUMBING: Final = frozenset(("_call_impl", "_wrapped_call_impl", "decorate_context", "_fn", "inner"))
"""Torch functions that only call another one."""
_NOT_CALLERS: Final = (
    "lightning_modelprof.",
    "torch._ops",
    "torch.utils._python_dispatch",
    "torch.utils._contextlib",
)
_MOST_CALLERS: Final = 12
_MOST_FRAMES: Final = 500

_LIBRARY, _USER, _OPTIMIZER, _END, _LOGGING = range(5)


Spot: TypeAlias = tuple[int, int]
"""Spot in the user's code: id of the code object, and instruction. Lines are looked up later, as that is
slow. A plain tuple, as each operator creates one."""


class UserLines:
    """Finds the user's innermost line on the stack.

    Args:
        outside: code objects that run the step; their callers aren't part of it.

    Attributes:
        is_logging: whether the last line found had called ``self.log`` or a torchmetrics metric.
    """

    def __init__(self, user_code: UserCode, outside: Iterable[CodeType] = ()) -> None:
        self._user_code = user_code
        self.is_logging = False
        # By id, as hashing code objects is slow; kept alive so that ids stay unique.
        self._kinds: dict[int, int] = {}
        self._codes: dict[int, CodeType] = {}
        for kind, codes in ((_END, (*outside, *_engine_codes())), (_OPTIMIZER, _optimizer_codes())):
            for code in codes:
                self._kinds[id(code)], self._codes[id(code)] = kind, code
        self._files: dict[int, str] = {}

    def _learn(self, frame: FrameType) -> int:
        code = frame.f_code
        is_users = code.co_name != "__torch_dispatch__" and self._user_code.is_users(frame)
        kind = _USER if is_users else _LIBRARY  # a user's mode only passes on what a line called
        if not is_users and logging_kind(str(frame.f_globals.get("__name__", "")), code.co_name):
            kind = _LOGGING
        self._kinds[id(code)], self._codes[id(code)] = kind, code
        if kind == _USER:
            self._files[id(code)] = absolute_file(code.co_filename)
        return kind

    def innermost(self, depth: int) -> Spot | None:
        """Find the user's line, stopping at an optimizer or a backward pass.

        Args:
            depth: number of callers to skip, which are ours.
        """
        return self.above(sys._getframe(depth))

    def above(self, frame: FrameType | None) -> Spot | None:
        """Find the user's line like ``innermost``, starting at a frame."""
        kinds = self._kinds
        is_logging = False
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = self._learn(frame)
            if kind == _LOGGING:
                is_logging = True
            elif kind:
                self.is_logging = is_logging and kind == _USER
                return (id(code), frame.f_lasti) if kind == _USER else None
            frame = frame.f_back
        self.is_logging = False
        return None

    def with_callers(self) -> tuple[Spot | None, tuple[str, ...]]:
        """Return the user's line and the library functions between it and here, innermost first."""
        callers: list[str] = []
        frame: FrameType | None = sys._getframe(2)
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = self._kinds.get(id(code))
            if kind is None:
                kind = self._learn(frame)
            if kind == _USER:
                return (id(code), frame.f_lasti), tuple(callers)
            if kind == _END:
                break
            name = f"{frame.f_globals.get('__name__', '')}.{getattr(code, 'co_qualname', code.co_name)}"
            is_plumbing = code.co_name in _PLUMBING and name.startswith("torch.")
            if not is_plumbing and not name.startswith(_NOT_CALLERS) and len(callers) < _MOST_CALLERS:
                callers.append(name)
            frame = frame.f_back
        return None, tuple(callers)

    def locate(self, spot: Spot) -> tuple[Place, int]:
        """Return the function's first line and the spot's line."""
        key, instruction = spot
        code = self._codes[key]
        location = Place(file=self._files[key], line=code.co_firstlineno, function=code.co_name)
        for begin, end, line in code.co_lines():
            if begin <= instruction < end and line is not None:
                return location, line
        return location, code.co_firstlineno


def _engine_codes() -> tuple[CodeType, ...]:
    """Return the function in which torch enters its autograd engine."""
    function = getattr(torch.autograd.graph, "_engine_run_backward", None)
    return (function.__code__,) if function is not None else ()


def _optimizer_codes() -> tuple[CodeType, ...]:
    """Return the wrapper that torch puts around every optimizer's step."""
    function = getattr(torch.optim.Optimizer, "profile_hook_step", None)
    constants = function.__code__.co_consts if function is not None else ()
    return tuple(constant for constant in constants if isinstance(constant, CodeType))
