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
"""Functions of torch that only call another one."""
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
"""A place in the user's code: id of the code, and instruction. Its line is looked up in the end, as that is
slow; and it is a plain tuple, as one is made for every operator."""


class UserLines:
    """Finds the innermost line of the user's on the stack.

    Args:
        outside: code that the step runs in: what called it is not part of the step.

    Attributes:
        is_logging: whether the line that was found last had called ``self.log``, or a metric of torchmetrics.
    """

    def __init__(self, user_code: UserCode, outside: Iterable[CodeType] = ()) -> None:
        self._user_code = user_code
        self.is_logging = False
        # By id, as the hash of a code object takes long; held, so that ids stay their own.
        self._kinds: dict[int, int] = {}
        self._codes: dict[int, CodeType] = {}
        for kind, codes in ((_END, (*outside, *_engine_codes())), (_OPTIMIZER, _optimizer_codes())):
            for code in codes:
                self._kinds[id(code)], self._codes[id(code)] = kind, code
        self._files: dict[int, str] = {}

    def _learn(self, frame: FrameType) -> int:
        code = frame.f_code
        is_users = code.co_name != "__torch_dispatch__" and self._user_code.is_users(frame)
        kind = _USER if is_users else _LIBRARY  # a mode of the user's only passes on what a line asked for
        if not is_users and logging_kind(str(frame.f_globals.get("__name__", "")), code.co_name):
            kind = _LOGGING
        self._kinds[id(code)], self._codes[id(code)] = kind, code
        if kind == _USER:
            self._files[id(code)] = absolute_file(code.co_filename)
        return kind

    def innermost(self, depth: int) -> Spot | None:
        """The user's line, not looked for beyond an optimizer or a backward pass.

        Args:
            depth: how many callers to pass over, which are known to be ours.
        """
        return self.above(sys._getframe(depth))

    def above(self, frame: FrameType | None) -> Spot | None:
        """The same, from a frame on."""
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
        """The user's line, and the functions of libraries between it and here, innermost first."""
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
        """Where the function of a spot begins, and the line of the spot."""
        key, instruction = spot
        code = self._codes[key]
        location = Place(file=self._files[key], line=code.co_firstlineno, function=code.co_name)
        for begin, end, line in code.co_lines():
            if begin <= instruction < end and line is not None:
                return location, line
        return location, code.co_firstlineno


def _engine_codes() -> tuple[CodeType, ...]:
    """The function in which torch hands over to its autograd engine."""
    function = getattr(torch.autograd.graph, "_engine_run_backward", None)
    return (function.__code__,) if function is not None else ()


def _optimizer_codes() -> tuple[CodeType, ...]:
    """The wrapper that torch puts around every optimizer's step."""
    function = getattr(torch.optim.Optimizer, "profile_hook_step", None)
    constants = function.__code__.co_consts if function is not None else ()
    return tuple(constant for constant in constants if isinstance(constant, CodeType))
