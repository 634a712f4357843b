"""What stands in the place of something of the user's, in a worker: it behaves as that does, and is timed."""

from __future__ import annotations

import copy
import copyreg
import dis
import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, Final, cast

_OWN: Final = "_modelprof_own"
"""In a derived class: the class that its objects have without us."""


def drop_frame(error: BaseException) -> None:
    """Take the frame that has caught an error out of its traceback; a bare ``raise`` has to follow.

    What the user reads is then as without us. Before Python 3.11 such a frame stays.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def itself(original: Any) -> tuple[Any, ...]:
    """A pickle that becomes something of the user's, also where there is nothing of ours."""
    return cast, (None, original)


class InPlaceOf:
    """What is called in the place of something of the user's, and else is that, but for ``is`` and ``type``.

    Args:
        original: the user's.
        ours: attributes of ours; all others are the user's.
    """

    __slots__ = ("__weakref__", "original")

    def __init__(self, original: Any, **ours: Any) -> None:
        for name, value in {"original": original, **ours}.items():
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For ``isinstance``."""
        return type(self.original)

    def __eq__(self, other: object) -> bool:
        return bool(self.original == _theirs(other))

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __reduce__(self) -> tuple[Any, ...]:
        return itself(self.original)

    def __copy__(self) -> Any:
        return copy.copy(self.original)

    def __getattr__(self, name: str) -> Any:
        return getattr(_theirs(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)


def _theirs(one: Any) -> Any:
    return object.__getattribute__(one, "original") if issubclass(type(one), InPlaceOf) else one


class TimedCall(InPlaceOf):
    """A function, timed; it stands in its place in the worker's copy of the data set.

    Args:
        original: the function.
        timed: the same with its time.
        noted: the same while calls are not timed; ``None`` if that is the function.
    """

    __slots__ = ("_call", "_noted", "_timed")

    def __init__(
        self, original: Callable[..., Any], timed: Callable[..., Any], noted: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(original, _timed=timed, _call=timed, _noted=original if noted is None else noted)

    def switch(self, is_timing: bool | None) -> None:
        """Whether it is timed; ``None`` is as without us."""
        call = self.original if is_timing is None else self._timed if is_timing else self._noted
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function."""
        try:
            return self._call(*args, **kwargs)
        except BaseException as error:
            drop_frame(error)
            raise


for _name in ("__module__", "__doc__"):  # those of the class would be found first
    setattr(TimedCall, _name, property(attrgetter(f"original.{_name}")))


class TimedIterator:
    """An iterator over a data set whose items are timed.

    Args:
        iterator: the data set's own.
        take: the first takes an item from it, timed or not.
    """

    def __init__(self, iterator: Iterator[Any], take: Sequence[Callable[[Iterator[Any]], Any]]) -> None:
        self._iterator, self._take = iterator, take

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For ``isinstance``."""
        return type(self._iterator)

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        try:
            return self._take[0](self._iterator)
        except BaseException as error:
            drop_frame(error)
            raise

    def __getattr__(self, name: str) -> Any:
        if name in ("_iterator", "_take"):
            raise AttributeError(name)
        return getattr(self._iterator, name)


def can_be_derived(own: type) -> bool:
    """Whether objects of a class behave as before once they are of one that is derived from it.

    Not where its code asks for the parent of the object's type, which would be itself.
    """
    for kind in own.__mro__:
        if kind.__module__.partition(".")[0] in ("builtins", "torch", "typing", "abc"):
            continue
        if any(_asks_for_parent(one) for one in vars(kind).values()):
            return False
    return True


def _asks_for_parent(method: Any) -> bool:
    """Whether it says ``super(type(self), self)``."""
    method = getattr(method, "fget", None) or getattr(method, "__func__", None) or method
    code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
    if code is None or not {"super", "type"} <= set(code.co_names):
        return False
    is_after = False
    for instruction in dis.get_instructions(code):
        if is_after and instruction.argval == "type":
            return True
        if "CALL" in instruction.opname or instruction.opname == "LOAD_SUPER_ATTR":
            is_after = False
        if instruction.argval == "super":
            is_after = True
    return False


def is_plain_method(kind: type, name: str) -> bool:
    """Whether a class's method is a function that takes the object first, and chooses no other."""
    method = inspect.getattr_static(kind, name, None)
    return isinstance(method, FunctionType | WrapperDescriptorType | MethodDescriptorType)


def set_class(one: Any, kind: type) -> None:
    """Make an object one of another class, whatever its own says to that."""
    object.__dict__["__class__"].__set__(one, kind)


class _Blank:
    """The parent of a derived class until it has its own."""


def _own(kind: Any) -> Any:
    """The class that objects of a derived one have without us; anything else as it is."""
    return type.__dict__["__dict__"].__get__(kind).get(_OWN, kind) if isinstance(kind, type) else kind


def _of_own(name: str) -> Callable[..., Any]:
    """A method of a metaclass, of the class that objects of a derived one have without us."""

    def method(kind: Any, *args: Any, **kwargs: Any) -> Any:
        own = _own(kind)
        # It is being made, or somebody has derived from it: ours has the metaclass without us as its parent.
        meta = type(kind).__mro__[1] if own is kind else type(own)
        return getattr(meta, name)(own, *args, **kwargs)

    return method


_is_equal: Final = _of_own("__eq__")

_AS_OWN: Final[dict[str, Any]] = {
    "__eq__": lambda kind, other: _is_equal(kind, _own(other)),
    # Not issubclass: an abstract class asks those that are derived from it, so they cannot ask it.
    "__subclasscheck__": lambda kind, other: type.__subclasscheck__(_own(kind), other),
    **{
        name: _of_own(name)
        for name in ("__hash__", "__call__", "__instancecheck__", "__setattr__", "__delattr__")
    },
}
"""Of the class of a derived class, for code that says ``type(self)``: only ``is`` tells them apart."""


def derived_class(own: type, methods: dict[str, Any]) -> type:
    """A class with other methods that is called the same; pickles of its objects are of their own class."""

    def reduce(one: Any, protocol: Any) -> Any:
        derived = type(one)
        if _own(derived) is derived:  # somebody has derived from ours
            return own_reduce(one, protocol)
        set_class(one, own)
        try:
            return one.__reduce_ex__(protocol)
        finally:
            set_class(one, derived)

    own_reduce: Any = own.__reduce_ex__
    own_equal: Any = own.__eq__

    def equal(one: Any, other: Any) -> Any:
        """As of objects of their own class, which it may ask for."""
        pair = [each for each in (one, other) if vars(type(each)).get(_OWN) is own]
        theirs = [type(each) for each in pair]
        for each in pair:
            set_class(each, own)
        try:
            return own_equal(one, other)
        finally:
            for each, kind in zip(pair, theirs, strict=True):
                set_class(each, kind)

    if own_equal is not object.__eq__:
        methods = {**methods, "__eq__": equal, "__hash__": own.__hash__}
    namespace = {
        "__slots__": (),
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__class__": property(lambda one: _own(type(one)), set_class),
        "__reduce_ex__": reduce,
        **methods,
    }
    kind: Any = type(own)
    make = ABCMeta.__new__ if issubclass(kind, ABCMeta) else type.__new__  # that of a registry would register
    meta = type(kind.__name__, (kind,), _AS_OWN)
    copyreg.pickle(meta, lambda derived: itself(_own(derived)))
    parents = [one for one in own.__mro__ if one.__module__ not in ("builtins", "typing")]
    if any("__init_subclass__" in vars(one) for one in parents):  # which is not to be told
        derived: type = make(meta, own.__name__, (_Blank,), namespace)
        type.__setattr__(derived, "__bases__", (own,))
    else:
        derived = make(meta, own.__name__, (own,), namespace)
    type.__setattr__(derived, _OWN, own)
    return derived
