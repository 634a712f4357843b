"""Reading a batch runs no user code, whatever the batch's classes do."""

from __future__ import annotations

import operator
from abc import ABCMeta
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from lightning_modelprof.measure.steps.batch_shapes import BatchShapes, shapes_of
from lightning_modelprof.measure.steps.batch_sizes import SampleCounter
from lightning_modelprof.run.steps import NOT_MEASURED

calls: Counter[str] = Counter()

HOOKS = (
    *("__getattribute__", "__getattr__", "__len__", "__iter__", "__contains__", "__bool__", "__eq__"),
    *("__hash__", "__getitem__", "__missing__", "keys", "values", "items", "get", "__repr__", "__str__"),
    *("__index__", "__int__"),
)

CLASS_HOOKS = (
    *("__getattribute__", "__hash__", "__eq__", "__instancecheck__", "__subclasscheck__", "__len__"),
    "__bool__",
)


def noted(name, original):
    def method(self, *arguments):
        calls[name] += 1
        if original is None:
            raise AttributeError(name)
        return original(self, *arguments)

    return method


class Meta(ABCMeta):
    """Counts each access to the class."""


for name in CLASS_HOOKS:
    setattr(Meta, name, noted(f"class {name}", getattr(type, name, lambda self: 1)))


def tattling(base):
    """Derive a class that counts each call of a special method, on the class or on its objects."""
    own = {name: noted(name, getattr(base, name, None)) for name in HOOKS}
    own["__class__"] = property(noted("__class__", type))
    return Meta(f"Tattling{base.__name__}", (base,), own)


class TattlingTensor(torch.Tensor):
    """Counts each access that torch makes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        calls["__torch_function__"] += 1
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def shape(self):
        calls["shape"] += 1
        return (99,)

    def __getattribute__(self, name):
        calls[f"tensor {name}"] += 1
        return super().__getattribute__(name)


class Dispatching(torch.Tensor):
    """A wrapper subclass that computes its shape."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dispatch_sizes_strides_policy="sizes")
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        calls["__torch_dispatch__"] += 1
        return func(*[getattr(one, "inner", one) for one in args], **(kwargs or {}))


class TattlingArray(np.ndarray):
    """Counts each access that NumPy makes."""

    def __getattribute__(self, name):
        calls[f"array {name}"] += 1
        return super().__getattribute__(name)


class Fields(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Data:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    y: torch.Tensor


class Object:
    def __init__(self, x, y):
        self.x, self.y = x, y


X, Y = torch.zeros(6, 5), torch.zeros(6)


def of(base, *arguments, **named):
    """An object whose class counts every access."""
    return tattling(base)(*arguments, **named)


def samples():
    kind = tattling(Data)
    return [kind(X[0], Y[:3]) for _ in range(6)]


BATCHES = {
    "a tensor": lambda: X.as_subclass(TattlingTensor),
    "tensors": lambda: [X.as_subclass(TattlingTensor), Y.as_subclass(TattlingTensor)],
    "an array": lambda: (X.numpy().view(TattlingArray), Y),
    "a dict": lambda: of(dict, x=X, y=Y),
    "a dict of what is made on demand": lambda: of(defaultdict, list, x=X, y=Y),
    "an ordered dict": lambda: of(OrderedDict, x=X, y=Y),
    "a UserDict": lambda: of(UserDict, x=X, y=Y),
    "a list": lambda: of(list, [X, Y]),
    "a tuple": lambda: of(tuple, (X, Y)),
    "a named tuple": lambda: of(Fields, X, Y),
    "a dataclass": lambda: of(Data, X, Y),
    "a dataclass with slots": lambda: of(Slotted, X, Y),
    "another object": lambda: of(Object, X, Y),
    "in a dict": lambda: {"a": of(Object, X, Y), "b": of(list, [X, Y])},
    "samples": samples,
    "keys": lambda: {of(str, "x"): X, "y": Y},
}


@pytest.mark.parametrize("name", BATCHES)
def test_reading_batch_runs_no_user_code(name):
    batch, sizes, count = BATCHES[name](), BatchShapes(), SampleCounter()
    calls.clear()
    found = [(sizes(batch), count(batch)) for _ in range(5)]
    assert not calls
    assert found == [(1, NOT_MEASURED if name == "another object" else 6)] * 5
    assert sizes.shapes(1)


@pytest.mark.parametrize("kind", [Dispatching, *map(tattling, (object, Mapping, Sequence))])
def test_batch_that_needs_user_code_is_not_read(kind):
    batch = Dispatching(X) if kind is Dispatching else kind()
    calls.clear()
    assert BatchShapes()(batch) == 0
    assert SampleCounter()(batch) == NOT_MEASURED
    assert SampleCounter()({"a": batch, "b": X}) == 6
    assert not calls


def test_user_torch_modes_see_no_call():
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    nested = [
        torch.nested.nested_tensor([X, X[:2]], layout=layout) for layout in (torch.jagged, torch.strided)
    ]
    batches = [X, [X, Y], {"x": X}, [X.to_sparse()], [X.to_sparse_csr()], *nested, *([one] for one in nested)]
    with Functions(), Operators():
        for batch in batches:
            sizes, count = BatchShapes(), SampleCounter()
            assert [sizes(batch), sizes(batch)] == [1, 1]
            assert count(batch) == count(batch) != NOT_MEASURED
    assert not seen


def test_defaultdict_gets_no_new_keys():
    batches = [defaultdict(list, x=X, y=Y), defaultdict(list, z=X)]
    count = SampleCounter()
    assert [count(batch) for batch in batches] == [6, 6]
    assert [set(batch) for batch in batches] == [{"x", "y"}, {"z"}]


def test_stored_items_count_despite_overridden_methods():
    class Half(dict):
        def __len__(self):
            return operator.floordiv(super().__len__(), 2)

        def values(self):
            return []

    batch = Half(default_collate([{"x": torch.ones(3), "y": 1.0}] * 4))
    assert shapes_of(batch) == ((4, 3), (4,))
    assert SampleCounter()(batch) == 4
