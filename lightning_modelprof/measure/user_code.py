"""Distinguishes the user's code from libraries', and both from the loop that calls them."""

from __future__ import annotations

import functools
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch

from lightning_modelprof.measure.stand_in import original_of
from lightning_modelprof.place import Place

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
"""Never the user's, even if installed from a checkout."""


INSTALLED: Final = ("site-packages", "dist-packages")


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
"""File names that notebooks and consoles give to typed code; other such names are generated code."""


_LOOPS: Final = ("lightning.pytorch.loops.", "pytorch_lightning.loops.", "torch.utils.data._utils.worker")


class UserCode:
    """Decides whether code is the user's.

    It is if its file is outside the standard library and installed packages (editable installs are the
    user's), or if it was typed into a notebook or a console. An owner's package is the user's too, wherever
    it is installed, unless it's one of torch, Lightning, torchmetrics, NumPy and this package.

    Args:
        owners: classes of the user, such as that of the LightningModule.
        roots: user folders, from :attr:`roots` in another process.

    Attributes:
        roots: folders of the owners' packages.
    """

    def __init__(self, owners: Iterable[type] = (), roots: Iterable[str] = ()) -> None:
        self.roots = (*roots, *(root for owner in owners for root in _package_roots(owner)))
        self._foreign = _foreign_roots()

    def is_users(self, frame: FrameType) -> bool:
        names = frame.f_globals
        module = str(names.get("__name__", ""))
        return self.owns(frame.f_code.co_filename, module=module, has_file="__file__" in names)

    def owns(self, file: str, *, module: str, has_file: bool) -> bool:
        """Whether code is the user's.

        Args:
            file: the code's file name.
            has_file: whether its module was read from a file.
        """
        if file.startswith("<"):
            is_command = file == "<string>" and not has_file and module == "__main__"  # python -c
            return is_command or file.startswith(_TYPED_IN)
        return self.is_users_file(file)

    def is_users_file(self, file: str) -> bool:
        path = absolute_file(file)
        if any(_is_below(path, root) for root in self.roots):
            return True
        for name in {path, os.path.realpath(path) if os.path.isabs(path) else path}:  # noqa: PTH117
            if any(_is_below(name, root) for root in self._foreign):
                return False
            if any(part in INSTALLED or part.startswith("torchinductor_") for part in Path(name).parts):
                return False
        # pip install --target puts packages next to their metadata, in a folder without a known name.
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
    """Return the folders of the standard library, installed packages, and the libraries known by name."""
    return _roots_with(tuple(name for name in _LIBRARIES if name in sys.modules))


@cache
def _roots_with(imported: tuple[str, ...]) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib", "scripts") if key in paths]
    roots += [*getattr(site, "getsitepackages", list)(), getattr(site, "getusersitepackages", str)()]
    roots += [root for name in imported for root in _roots_of(name)]
    return tuple({name for root in roots if root for name in (root, os.path.realpath(root))})


def _roots_of(name: str) -> tuple[str, ...]:
    """Return the folders of an imported package, or a module's file."""
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


def is_loop(module: str) -> bool:
    """Whether a module of this name is part of Lightning's loops, or of torch's worker loop.

    Fetchers don't count: a ``training_step`` that takes a ``dataloader_iter`` calls them.
    """
    return module.startswith(_LOOPS) and not module.endswith(".fetchers")


def loop_codes() -> frozenset[CodeType]:
    """Return the code of Lightning's running loop and its callers; call from a hook."""
    found: set[CodeType] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if found or is_loop(str(frame.f_globals.get("__name__", ""))):
            found.add(frame.f_code)
        frame = frame.f_back
    return frozenset(found)


def absolute_file(file: str) -> str:
    """Return a source file's path independently of later working folders; other names are unchanged.

    As written, not resolved. Relative if the working folder is gone.
    """
    if file.startswith("<"):
        return file
    return os.path.normpath(os.path.join(working_folder(), file))  # noqa: PTH118


def is_library(file: str | None) -> bool:
    """Whether a file isn't the user's, or is ``None``."""
    return file is None or file.startswith("<frozen") or not UserCode().is_users_file(file)


def library_of(module: str, file: str | None) -> str:
    """Return the package of installed code; ``""`` for the user's, torch's, Lightning's and Python's own.

    Args:
        file: the code's file; ``None`` without one.
    """
    package = module.partition(".")[0]
    if file is None or file.startswith("<") or package in _LIBRARIES or package in sys.stdlib_module_names:
        return ""
    return package if package != "__main__" and is_library(file) else ""


def folders_of(package: str) -> tuple[str, ...]:
    """Return the folders of an imported package, or a module's file; as written, and resolved."""
    roots = map(str, _roots_of(package))
    return tuple(
        dict.fromkeys(name for root in roots for name in (absolute_file(root), os.path.realpath(root)))
    )


def working_folder() -> str:
    """Return the working folder; ``""`` if it's gone."""
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return ""


def place_of(thing: Any) -> Place | None:
    """Return the place of a function, method, ``functools.partial``, class or module's forward.

    Decorated functions are unwrapped where decorators allow it (``functools.wraps``). A stand-in has its
    original's place.

    Returns:
        ``None`` if it has no name.
    """
    thing = original_of(thing)
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
        # A class has no line before Python 3.13; its constructor's is close enough.
        code = getattr(vars(thing).get("__init__"), "__code__", None)
        file = getattr(sys.modules.get(thing.__module__), "__file__", None)
        line = getattr(thing, "__firstlineno__", None) or getattr(code, "co_firstlineno", None)
    else:
        file = line = None
    file = None if file is None else absolute_file(file)
    return Place(
        function=name,
        file=file,
        line=line,
        is_library=is_library(file),
        package=library_of(str(getattr(thing, "__module__", "")), file),
    )


def own_methods(owner: Any, base_names: tuple[str, ...]) -> dict[str, Place]:
    """Return the public methods of an object or its class beyond the named base classes.

    Args:
        owner: a callback or a LightningModule.
        base_names: names of classes whose methods are Lightning's; by name, as there are two Lightning
            packages.
    """
    found: dict[str, Place] = {}
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
