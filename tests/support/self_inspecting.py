"""Data sets and transforms whose samples depend on introspection.

This module imports little, as spawned workers import it too.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import io
import pickle
import sys
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

SIZE = 8
T = TypeVar("T")


def same(value: Any) -> Any:
    return value


def parent_of(one: Any) -> Any:
    return super(type(one), one)


def number(thing: Any) -> float:
    """A number that changes with anything in a thing."""
    return int(hashlib.sha256(repr(thing).encode()).hexdigest()[:8], 16) / 2**16


def pickled(thing: Any) -> float:
    """A number from the pickle, including functions and classes, as in joblib.hash."""
    file = io.BytesIO()
    pickle._Pickler(file, 4).dump(thing)  # the Python class, which joblib extends
    return number((file.getvalue(), pickle.dumps(thing)))


class Adds:
    """A transform with everything that code may introspect."""

    known: ClassVar[list[str]] = []
    by: float = 2.0

    def __call__(self, value: Any) -> Any:
        return value + self.by


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 2.0, 3.0

    def __call__(self, value: Any) -> Any:
        return value * sum(getattr(self, name) for name in type(self).__slots__)


class Registry(type):
    """Records its classes, and counts comparisons and hashes of them."""

    classes: ClassVar[list[str]] = []
    asked: ClassVar[list[str]] = []

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        Registry.classes.append(cls.__name__)

    def __eq__(cls, other: object) -> bool:
        Registry.asked.append("eq")
        return cls is other

    def __hash__(cls) -> int:
        Registry.asked.append("hash")
        return 7

    def __instancecheck__(cls, one: Any) -> bool:
        Registry.asked.append("instance")
        return type.__instancecheck__(cls, one)

    def __subclasscheck__(cls, kind: Any) -> bool:
        Registry.asked.append("subclass")
        return type.__subclasscheck__(cls, kind)


class Registered(metaclass=Registry):
    def __call__(self, value: Any) -> Any:
        return value + len(Registry.classes) + 100 * len(Registry.asked)


class Plugin:
    kinds: ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Plugin.kinds.append(cls.__name__)


class Flip(Plugin):
    def __call__(self, value: Any) -> Any:
        return value * (1 + len(Plugin.kinds)) + len(Plugin.__subclasses__()) + len(Flip.__subclasses__())


class Counts:
    """Counts every access to it."""

    def __init__(self) -> None:
        object.__setattr__(self, "asked", [])

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "asked").append(name)
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        object.__getattribute__(self, "asked").append("eq")
        return self is other

    def __hash__(self) -> int:
        object.__getattribute__(self, "asked").append("hash")
        return 1

    def __bool__(self) -> bool:
        object.__getattribute__(self, "asked").append("bool")
        return True

    def __len__(self) -> int:
        object.__getattribute__(self, "asked").append("len")
        return 3

    def __call__(self, value: Any) -> Any:
        asked = object.__getattribute__(self, "asked")
        return value + len(asked) + number(asked)


class Proxy:
    """Stands in for another object."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "asked", [])

    @property
    def __class__(self) -> Any:
        object.__getattribute__(self, "asked").append("class")
        return type(object.__getattribute__(self, "inner"))

    @property
    def __dict__(self) -> Any:
        object.__getattribute__(self, "asked").append("dict")
        return {"transforms": [same]}

    def __getattr__(self, name: str) -> Any:
        object.__getattribute__(self, "asked").append(name)
        return getattr(object.__getattribute__(self, "inner"), name)

    def __call__(self, value: Any) -> Any:
        asked = object.__getattribute__(self, "asked")
        return object.__getattribute__(self, "inner")(value) + len(asked)


class Counted(list):
    """Counts iterations, length queries and item accesses."""

    asked = 0

    def __iter__(self) -> Any:
        type(self).asked += 1
        return super().__iter__()

    def __len__(self) -> int:
        type(self).asked += 1
        return super().__len__()

    def __getitem__(self, place: Any) -> Any:
        type(self).asked += 1
        return super().__getitem__(place)


class Abstract(ABC):
    @abstractmethod
    def __call__(self, value: Any) -> Any: ...


class Concrete(Abstract, Generic[T]):
    def __call__(self, value: Any) -> Any:
        return (
            value + len(type(self).__mro__) + len(Abstract.__subclasses__()) + len(Concrete.__subclasses__())
        )


@dataclass(frozen=True)
class Frozen:
    by: float = 3.0

    def __call__(self, value: Any) -> Any:
        return value * sum(getattr(self, one.name) for one in fields(self)) + (type(self) is Frozen)


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Base(Dataset[Any]):
    scale: float = 3.0

    def __init__(self) -> None:
        self.transform: Any = same

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.ones(4, dtype=torch.float64) * index)


class Vars(Base):
    scale: float = 5.0

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * sum(v for k, v in vars(type(self)).items() if k == "scale")


class OwnDict(Base):
    scale: float = 6.0

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * type(self).__dict__.get("scale", 0) + len(self.__dict__)


class Annotations(Base):
    first: int = 1
    second: int = 2

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + len(inspect.get_annotations(type(self)))


class Mro(Base):
    def __getitem__(self, index: int) -> Any:
        return type(self).__mro__[1].__getitem__(self, index) + len(type(self).__mro__)


class Bases(Base):
    def __getitem__(self, index: int) -> Any:
        return type(self).__bases__[0].__getitem__(self, index) + 1


class SuperOfType(Base):
    def __getitem__(self, index: int) -> Any:
        return super(type(self), self).__getitem__(index) + 1


class Helper(Base):
    def __getitem__(self, index: int) -> Any:
        return parent_of(self).__getitem__(index) + 1


class Identity(Base):
    def __getitem__(self, index: int) -> Any:
        is_same = self.transform is same and self.__getitem__.__func__ is Identity.__getitem__
        return super().__getitem__(index) + (type(self) is Identity) + 2 * is_same


class Pickles(Base):
    def __init__(self) -> None:
        super().__init__()
        self.transform, self.frozen, self.function = Adds(), Frozen(), same

    def __getitem__(self, index: int) -> Any:
        things = (self, self.transform, self.frozen, self.function, type(self), type(self.transform))
        return super().__getitem__(index) + sum(map(pickled, things))


class Copies(Base):
    def __init__(self) -> None:
        super().__init__()
        self.transform = Compose(Adds(), same, functools.partial(max, torch.zeros(())))
        self.transform.transforms.pop()

    def __getitem__(self, index: int) -> Any:
        one = copy.deepcopy(self)
        kinds = [type(each).__qualname__ for each in (one, one.transform, *one.transform.transforms)]
        return super().__getitem__(index) + number(kinds) + (copy.copy(self.transform).transforms[1] is same)


class Registers(Base):
    kinds: ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registers.kinds.append(cls.__name__)


class Subclasses(Registers):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + number((Registers.kinds, type(self).__subclasses__()))


class Derived(Base):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + len(type(self).__subclasses__())


class Callers(Base):
    """Inspects its callers and its identity."""

    def __getitem__(self, index: int) -> Any:
        frame, names = sys._getframe(), []
        while frame is not None and frame.f_code.co_name != "_worker_loop":
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        info = get_worker_info()
        return super().__getitem__(index) + number(names) + (info is not None and info.dataset is self)


class References(Base):
    """Counts references to its own objects, and freed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Adds()
        self.gone: list[int] = []

    def __getitem__(self, index: int) -> Any:
        before, self.transform = self.transform, Adds()
        count = sys.getrefcount(before)
        weakref.finalize(before, self.gone.append, index)
        del before
        return super().__getitem__(index) + count + 10 * len(self.gone)


class Locals(Base):
    """Adds to the result of ``locals()``."""

    def __call__(self, value: Any) -> Any:
        names = locals()
        names["more"] = names["value"] = 5.0
        for _ in range(2000):
            names["more"] += 1
        return value + names["more"] + names["value"]

    def __getitem__(self, index: int) -> Any:
        return self(super().__getitem__(index))


class Of(Base):
    """Transforms that inspect themselves."""

    def __init__(self, *transforms: Any) -> None:
        super().__init__()
        self.transform = Compose(*transforms)


class Several(Base):
    def __init__(self) -> None:
        super().__init__()
        self.transforms = Counted([Adds(), Frozen()])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        kind = type(indices) is list
        return [self[index] + kind + len(indices) + Counted.asked for index in indices]


class Forwards(Base):
    """Forwards attribute access to another object, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.asked = Mro(), [0]

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "asked"):
            raise AttributeError(name)
        self.asked[0] += 1
        return getattr(self.inner, name)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index] + self.asked[0]


class OfSlots(Dataset[Any]):
    __slots__ = ("opt", "scale")

    def __init__(self) -> None:
        self.opt, self.scale = Slotted(), 4.0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.opt(torch.ones(4) * index) * sum(getattr(self, n) for n in type(self).__slots__[1:])


class Tensors(torch.Tensor):
    """Rows of a tensor subclass."""


CASES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (Vars, OwnDict, Annotations, Mro, Bases, SuperOfType, Helper)},
    **{kind.__name__: kind for kind in (Identity, Pickles, Copies, Subclasses, Callers, References, Locals)},
    **{kind.__name__: kind for kind in (Several, Forwards, OfSlots, Derived)},
    "slots": lambda: Of(Slotted(), Slotted()),
    "a registry": lambda: Of(Registered(), Adds()),
    "subclasses are told": lambda: Of(Flip(), Adds()),
    "what is asked is counted": lambda: Of(Counts(), Counts()),
    "a proxy": lambda: Of(Proxy(Adds()), same),
    "abstract, generic": lambda: Of(Concrete[int](), Frozen()),
    "bound, partial": lambda: Of(Adds().__call__, functools.partial(torch.add, torch.ones(4))),
    "a tensor": lambda: torch.arange(32.0).view(SIZE, 4).as_subclass(Tensors),
    "a list": lambda: [torch.ones(4) * index for index in range(SIZE)],
}


class Yields(IterableDataset[Any]):
    """A generator that inspects itself and records when it's closed."""

    def __init__(self) -> None:
        self.transform = Compose(Adds(), Frozen())
        self.closed = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        try:
            for index in range(first, SIZE, step):
                value = torch.ones(4) * index + len(vars(type(self))) + self.closed
                yield self.transform(value) + (type(self) is Yields) + len(type(self).__mro__)
        finally:
            self.closed += 1


class Iterates(IterableDataset[Any]):
    """Is its own iterator."""

    def __iter__(self) -> Any:
        self.left = list(range(SIZE))
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        kind = type(self) is Iterates
        return torch.ones(4) * self.left.pop() + kind + len(vars(self)) + len(type(self).__bases__)


def stage(data: Any, transform: Any) -> Any:
    for one in data:
        yield transform(one) + (transform is same)


class Pipeline(IterableDataset[Any]):
    """Generators in a row."""

    def __init__(self) -> None:
        self.stages = [functools.partial(stage, transform=same), functools.partial(stage, transform=Adds())]

    def __iter__(self) -> Any:
        data: Any = (torch.ones(4) * index for index in range(SIZE))
        for one in self.stages:
            data = one(data)
            assert inspect.isgenerator(data)
        return data


CASES |= {kind.__name__: kind for kind in (Yields, Iterates, Pipeline)}


class All(Dataset[Any]):
    """Each sample has one of every case, whose objects are reachable from it."""

    def __init__(self) -> None:
        no_pickle = ("a proxy", "what is asked is counted")
        kinds = {name: make for name, make in CASES.items() if name not in no_pickle}
        names = [name for name, make in kinds.items() if isinstance(make(), Base)]
        self.cases = {name: CASES[name]() for name in names}

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return [
            case.__getitems__([index])[0] if isinstance(case, Several) else case[index]
            for case in self.cases.values()
        ]


class CollatesItself:
    """A collate function that inspects itself and counts its batches."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.batches += 1
        told = (type(self).__name__, len(vars(self)), type(samples) is list, self.batches)
        return torch.stack([torch.as_tensor(one) for one in samples]), torch.tensor(number(told))


def start(worker: int) -> None:
    """A ``worker_init_fn`` that inspects the worker's data set."""
    info = get_worker_info()
    assert info is not None
    torch.manual_seed(int(number(type(info.dataset).__name__)) + worker)
