"""Tells the user's code from that of libraries, and finds the user's line that is running."""

from __future__ import annotations

import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache, partial, partialmethod
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, TypeAlias

import torch

from lightning_modelprof.run.sites import CodeLocation

_LIBRARIES: Final = (
    "torch",
    "functorch",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "lightning_modelprof",
    "numpy",
    "pytorch_lightning",
    "torchmetrics",
)
"""Never the user's, also where they are installed from a checkout."""

_INSTALLED: Final = ("site-packages", "dist-packages")
_TYPED_IN: Final = (
    "<ipython-input",
    "<stdin>",
    "<python-input",
    "<console>",
    "<input>",
    "<command-",
    "<cell",
    "<doctest",
)
"""What notebooks and consoles call code that somebody typed in; other such names are generated code."""

_PLUMBING: Final = frozenset(("_call_impl", "_wrapped_call_impl", "decorate_context", "_fn", "inner"))
"""Functions of torch that only call another one."""
_NOT_CALLERS: Final = (
    "lightning_modelprof.",
    "torch._ops",
    "torch.utils._python_dispatch",
    "torch.utils._contextlib",
)
_LOOPS: Final = ("lightning.pytorch.loops.", "pytorch_lightning.loops.")
_MOST_CALLERS: Final = 12
_MOST_FRAMES: Final = 500

_LIBRARY, _USER, _OPTIMIZER, _END = range(4)


Spot: TypeAlias = tuple[int, int]
"""A place in the user's code: id of the code, and instruction. Its line is looked up in the end, as that is
slow; and it is a plain tuple, as one is made for every operator."""


class UserCode:
    """Says of code whether it is the user's.

    It is when its file is outside of the standard library and of what is installed (editable installs are the
    user's), or was typed into a notebook or a console. The package of an owner is the user's too, wherever it
    is installed, unless it is one of torch, Lightning, torchmetrics, NumPy and this package.

    Args:
        owners: classes of the user, such as that of the LightningModule.
    """

    def __init__(self, owners: Iterable[type] = ()) -> None:
        self._own = tuple(root for owner in owners for root in _package_roots(owner))
        self._foreign = _foreign_roots()

    def is_users(self, frame: FrameType) -> bool:
        """Whether the function that runs in a frame is the user's."""
        file = frame.f_code.co_filename
        if file.startswith("<"):
            is_command = file == "<string>" and "__file__" not in frame.f_globals  # python -c
            return file.startswith(_TYPED_IN) or (
                is_command and frame.f_globals.get("__name__") == "__main__"
            )
        return self.is_users_file(file)

    def is_users_file(self, file: str) -> bool:
        """Whether a file is the user's, by its path."""
        path = os.path.abspath(file)  # noqa: PTH100 - pathlib would need a line more
        if any(_is_below(path, root) for root in self._own):
            return True
        for name in {path, os.path.realpath(path)}:
            if any(_is_below(name, root) for root in self._foreign):
                return False
            if any(part in _INSTALLED or part.startswith("torchinductor_") for part in Path(name).parts):
                return False
        # pip install --target puts packages beside what describes them, without a folder of a known name.
        entries = (entry for entry in sys.path if entry and _is_below(path, entry))
        return not any(_holds_distributions(entry) for entry in entries)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


@cache
def _holds_distributions(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))  # noqa: PTH208
    except OSError:
        return False


def _foreign_roots() -> tuple[str, ...]:
    """Folders of the standard library, of what is installed, and of the libraries known by name."""
    paths = sysconfig.get_paths()
    roots = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib") if key in paths]
    roots += [*getattr(site, "getsitepackages", list)(), getattr(site, "getusersitepackages", str)()]
    roots += [root for name in _LIBRARIES for root in _roots_of(name)]
    return tuple({name for root in roots if root for name in (root, os.path.realpath(root))})


def _roots_of(name: str) -> tuple[str, ...]:
    """The folders of an imported package, or the file of a module."""
    module = sys.modules.get(name)
    if module is None:
        return ()
    folders = tuple(getattr(module, "__path__", ()))
    file = getattr(module, "__file__", None)
    return folders or ((file,) if file else ())


def _package_roots(owner: type) -> tuple[str, ...]:
    name = owner.__module__.partition(".")[0]
    if name in _LIBRARIES or name in sys.stdlib_module_names or name == "__main__":
        return ()
    return _roots_of(name)


class UserLines:
    """Finds the innermost line of the user's on the stack.

    Args:
        user_code: whose code is whose.
        outside: code that the step runs in: what called it is not part of the step.
    """

    def __init__(self, user_code: UserCode, outside: Iterable[CodeType] = ()) -> None:
        self._user_code = user_code
        # By id, as the hash of a code object takes long; held, so that ids stay their own.
        self._kinds: dict[int, int] = {}
        self._codes: dict[int, CodeType] = {}
        for kind, codes in ((_END, (*outside, *_engine_codes())), (_OPTIMIZER, _optimizer_codes())):
            for code in codes:
                self._kinds[id(code)], self._codes[id(code)] = kind, code
        self._files: dict[int, str] = {}

    def _learn(self, frame: FrameType) -> int:
        code = frame.f_code
        kind = _USER if self._user_code.is_users(frame) else _LIBRARY
        self._kinds[id(code)], self._codes[id(code)] = kind, code
        if kind == _USER:
            file = code.co_filename  # absolute now: the user may change the working directory
            is_file = not file.startswith("<")
            self._files[id(code)] = os.path.abspath(file) if is_file else file  # noqa: PTH100
        return kind

    def innermost(self, depth: int) -> Spot | None:
        """The user's line, not looked for beyond an optimizer or a backward pass.

        Args:
            depth: how many callers to pass over, which are known to be ours.
        """
        kinds = self._kinds
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = self._learn(frame)
            if kind:
                return (id(code), frame.f_lasti) if kind == _USER else None
            frame = frame.f_back
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

    def locate(self, spot: Spot) -> tuple[CodeLocation, int]:
        """Where the function of a spot begins, and the line of the spot."""
        key, instruction = spot
        code = self._codes[key]
        location = CodeLocation(file=self._files[key], line=code.co_firstlineno, function=code.co_name)
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


def loop_codes() -> frozenset[CodeType]:
    """Code of Lightning's loop that is running, and of all that called it. To be called from a hook."""
    found: set[CodeType] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if found or (name.startswith(_LOOPS) and not name.endswith(".fetchers")):
            found.add(frame.f_code)
        frame = frame.f_back
    return frozenset(found)


def location_of(function: Any) -> CodeLocation | None:
    """Where a function, a method, a partial, a callable object or a module's forward is defined.

    What decorators wrap is unwrapped as far as they say so (``functools.wraps``).

    Returns:
        ``None`` for what is not Python, and for what is not known.
    """
    try:
        code = _code_of(function)
    except Exception:  # objects that answer every question, and those that refuse to
        return None
    if code is None:
        return None
    file = code.co_filename
    file = file if file.startswith("<") else os.path.abspath(file)  # noqa: PTH100
    return CodeLocation(file=file, line=code.co_firstlineno, function=code.co_name)


def _code_of(function: Any) -> CodeType | None:
    for _ in range(20):  # no decorator goes on for ever
        if isinstance(function, (partial, partialmethod)):
            function = function.func
        elif isinstance(function, torch.nn.Module):
            function = function.forward
        elif inspect.ismethod(function) or isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        elif inspect.isfunction(function):
            unwrapped = inspect.unwrap(function)
            if unwrapped is function and isinstance(function, FunctionType):
                return function.__code__
            function = unwrapped
        elif inspect.isclass(function):
            function = function.__init__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            function = getattr(type(function), "__call__", None)  # noqa: B004 - looks at it, does not ask
    return None
