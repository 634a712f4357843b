"""Finds what makes a sample: the data set and its transforms. Only reads.

Nothing here runs user code: no attribute is looked up, compared or hashed, and no iterator is created.
Classes are read through ``type``'s own descriptors, which a metaclass can't change.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType, GetSetDescriptorType, MethodType, ModuleType
from typing import Any, Final

import msgspec
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_modelprof.measure.user_code import UserCode, absolute_file, library_of

MOST_CALLS: Final = 64
"""Rows per worker."""

_MOST_OBJECTS: Final = 1_000
_DEEPEST: Final = 6

_INSIDE: Final = ("transforms", "transform", "target_transform")
"""Attributes in which library objects hold transforms."""
_FUNCTION: Final = ("f", "fn", "func", "function")

_mro: Final = type.__dict__["__mro__"].__get__
_namespace: Final = type.__dict__["__dict__"].__get__
_qualname: Final = type.__dict__["__qualname__"].__get__
_partial_func: Final = functools.partial.__dict__["func"].__get__


class CallName(msgspec.Struct, frozen=True):
    """One row, as the worker knows it; fields as in CallTimes."""

    name: str
    kind: str
    depth: int = 0
    file: str = ""
    line: int = 0
    is_users: bool = False
    package: str = ""


def is_a(kind: Any, *bases: type) -> bool:
    """Like ``issubclass``, without calling metaclasses."""
    return any(one is base for one in _mro(kind) for base in bases)


def _of_class(kind: Any, name: str) -> Any:
    """Return what a class stores under a name, unchanged; ``None`` without."""
    spaces = (_namespace(one) for one in _mro(kind))
    return next((space[name] for space in spaces if name in space), None)


def _method(kind: Any, name: str) -> FunctionType | None:
    found = _of_class(kind, name)
    return found if type(found) is FunctionType else None


def _attributes(one: Any) -> dict[str, Any]:
    """Return the object's own ``__dict__``, bypassing a property of that name; empty with ``__slots__``."""
    descriptor = _of_class(type(one), "__dict__")
    found = descriptor.__get__(one) if type(descriptor) is GetSetDescriptorType else {}
    return {name: value for name, value in dict.items(found) if type(name) is str}


def _innermost(function: FunctionType) -> FunctionType:
    for _ in range(_DEEPEST):
        inner = function.__dict__.get("__wrapped__")
        if type(inner) is not FunctionType:
            break
        function = inner
    return function


def _running(call: Any) -> tuple[FunctionType | None, Any]:
    """Return the Python function that runs on a call, and its first argument; ``None`` without."""
    kind = type(call)
    if kind is FunctionType:
        return call, None
    if kind is MethodType:
        return (call.__func__, call.__self__) if type(call.__func__) is FunctionType else (None, None)
    if is_a(kind, functools.partial):
        return _running(_partial_func(call))
    return _method(kind, "__call__"), call


def _is_function(one: Any) -> bool:
    return is_a(type(one), FunctionType, MethodType, functools.partial)


def _is_dataset(one: Any) -> bool:
    return is_a(type(one), Dataset)


class Calls:
    """A worker's data set and transforms, and the code that identifies their frames.

    Attributes:
        names: names of the rows, in the order in which a sample meets them.
        codes: id of a code → id of its first argument, or 0 for a function → row.
    """

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self.names: list[CallName] = []
        self.codes: dict[int, dict[int, int]] = {}
        self._held: list[CodeType] = []  # keeps ids unique; code objects hold no user data
        self._seen: set[int] = set()
        self._has_stages = False

    def find(self, dataset: Any) -> None:
        """Search a data set, which becomes the first row."""
        self._has_stages = is_a(type(dataset), IterableDataset)
        self._dataset(dataset, 0)
        self._seen = set()

    # Structure

    def _dataset(self, dataset: Any, depth: int) -> None:
        if not self._is_new(dataset, depth):
            return
        kind = type(dataset)
        names = ("__iter__",) if is_a(kind, IterableDataset) else ("__getitems__", "__getitem__")
        methods = {name: method for name in names if (method := _method(kind, name)) is not None}
        name = next(iter(methods), names[-1])
        row = self._row(self._name(f"{_qualname(kind)}.{name}", "sample", depth, methods.get(name)))
        for method in methods.values():
            self._know(method, dataset, row)
        self._values(dataset, depth + 1)

    def _values(self, owner: Any, depth: int) -> None:
        for name, value in _attributes(owner).items():
            if not name.startswith("__"):
                self._value(value, owner, depth)

    def _value(self, value: Any, owner: Any, depth: int) -> None:
        if _is_dataset(value):
            self._dataset(value, depth)
        elif is_a(type(value), list, tuple, dict):
            self._several(value, depth)
        elif self._can_run(value, owner):
            self._call(value, depth)
        elif self._has_stages and _is_stage_of(value, owner) and self._is_new(value, depth):
            self._values(value, depth)

    def _several(self, several: Any, depth: int) -> None:
        items = _items(several)
        if not self._are_calls(items):
            return
        numbers: dict[int, int] = {}
        for item in items:
            if _is_dataset(item):
                self._dataset(item, depth)
                continue
            function = item if _is_function(item) else self._function_in(item)
            what = id(type(item) if function is None else function)
            numbers[what] = numbers.get(what, 0) + 1
            self._call(item, depth, numbers[what])

    def _are_calls(self, items: tuple[Any, ...]) -> bool:
        return 0 < len(items) <= _MOST_OBJECTS and all(
            _is_dataset(one) or self._can_run(one, None) for one in items
        )

    def _can_run(self, value: Any, owner: Any) -> bool:
        """Whether it's callable and runs Python code; a method of its own owner isn't a transform."""
        if not callable(value) or is_a(type(value), type):
            return False
        function, first = _running(value)
        return function is not None and (owner is None or first is not owner)

    def _call(self, call: Any, depth: int, number: int = 1) -> None:
        if not self._is_new(call, depth):
            return
        function, first = _running(call)
        if function is None:
            return
        inner = None if _is_function(call) else self._function_in(call)
        inside = [] if _is_function(call) else self._inside(call)
        kind = "compose" if inside else "transform"
        if inner is not None or _is_function(call):
            name = self._name("", kind, depth, inner or function)
        else:
            name = self._name(_qualname(type(call)), kind, depth, _method(type(call), "forward") or function)
        if number > 1:
            name = msgspec.structs.replace(name, name=f"{name.name} #{number}")
        row = self._row(name)
        self._know(function, first, row)
        if inner is not None:
            self._know(inner, None, row)
        for value in inside:
            self._value(value, call, depth + 1)

    def _inside(self, call: Any) -> list[Any]:
        """Return attributes that hold transforms: all for the user's classes, some for a library's."""
        own = _attributes(call)
        if is_a(type(call), torch.nn.Module):
            modules = own.get("_modules")
            if is_a(type(call), torch.nn.Sequential) and modules:
                return [modules]
            own = {name: one for name, one in own.items() if not name.startswith("_")}
            own |= modules if type(modules) is dict else {}
        names: tuple[str, ...] = _INSIDE
        if self._is_users(type(call)):
            names = tuple(name for name in own if not name.startswith("__"))
        elif self._function_in(call) is not None:
            names = (*_INSIDE, "args")
        return [own[name] for name in names if name in own and self._holds_calls(own[name], call)]

    def _holds_calls(self, value: Any, owner: Any) -> bool:
        if is_a(type(value), torch.nn.ModuleList, torch.nn.ModuleDict):
            return True
        if is_a(type(value), list, tuple, dict):
            return self._are_calls(_items(value))
        return self._can_run(value, owner)

    def _function_in(self, call: Any) -> FunctionType | None:
        """Return the function that a library's object merely calls; ``None`` without one."""
        if self._is_users(type(call)):
            return None
        own = _attributes(call)
        found = [_running(own[name])[0] for name in _FUNCTION if name in own and _is_function(own[name])]
        return found[0] if len(found) == 1 else None

    def _is_users(self, kind: Any) -> bool:
        module = _of_class(kind, "__module__")
        found = sys.modules.get(module) if type(module) is str else None
        file = found.__dict__.get("__file__") if type(found) is ModuleType else None
        if file is None:  # typed into a notebook or a console, or built in
            return bool(module == "__main__")
        return self._user_code.is_users_file(file)

    def _is_new(self, one: Any, depth: int) -> bool:
        if id(one) in self._seen or len(self._seen) >= _MOST_OBJECTS or depth > _DEEPEST:
            return False
        self._seen.add(id(one))
        return True

    # Names

    def _name(self, name: str, kind: str, depth: int, function: FunctionType | None) -> CallName:
        """Build a row's name with the place of its code; ``""`` uses the function's name."""
        if function is None:
            return CallName(name, kind, depth)
        function = _innermost(function)
        code = function.__code__
        name = (name or function.__qualname__).rpartition("<locals>.")[2]
        if code.co_filename.startswith("<frozen"):
            return CallName(name, kind, depth)
        file = absolute_file(code.co_filename)
        is_users = self._user_code.is_users_file(file)
        module = function.__module__
        package = "" if is_users or type(module) is not str else library_of(module, file)
        return CallName(name, kind, depth, file, code.co_firstlineno, is_users, package)

    def collate_name(self, function: Any) -> CallName:
        running = _running(function)[0]
        name = "" if _is_function(function) and running is not None else _qualname(type(function))
        return self._name(name, "collate", 0, running)

    def _row(self, name: CallName) -> int:
        if name in self.names:
            return self.names.index(name)
        if len(self.names) >= MOST_CALLS:
            return -1
        self.names.append(name)
        return len(self.names) - 1

    def _know(self, function: FunctionType, first: Any, row: int) -> None:
        if row < 0:
            return
        code = _innermost(function).__code__
        self._held.append(code)
        self.codes.setdefault(id(code), {}).setdefault(0 if first is None else id(first), row)


def _items(several: Any) -> tuple[Any, ...]:
    """Return a list's, tuple's or dictionary's items without its own methods; nothing for long ones."""
    for kind in (list, tuple, dict):
        if is_a(type(several), kind):
            if kind.__len__(several) > _MOST_OBJECTS:
                return ()
            return tuple(dict.values(several) if kind is dict else kind.__iter__(several))
    return ()


def _is_stage_of(value: Any, owner: Any) -> bool:
    """Whether an iterable comes from the same library, so that it's one of its stages."""
    classes = (type(value), type(owner))
    libraries = {str(_of_class(kind, "__module__")).partition(".")[0] for kind in classes}
    is_iterated = _of_class(type(value), "__iter__") is not None
    return is_iterated and len(libraries) == 1 and not libraries & {"builtins", "torch"}
