"""What stands in the place of something of the user's, in a worker: it behaves as that does, and is timed."""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, Final

_OWN: Final = "_modelprof_own"
"""In a derived class: the class that its objects have without us."""


def drop_frame(error: BaseException) -> None:
    """Take the frame that has caught an error out of its traceback; a bare ``raise`` has to follow.

    What the user reads is then as without us. Before Python 3.11 such a frame stays.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def itself(original: Any) -> Any:
    """What a pickle of something of ours becomes."""
    return original


class TimedCall:
    """A function, timed; it stands in its place in the worker's copy of the data set.

    Args:
        original: the function.
        timed: the same with its time.
        noted: the same while calls are not timed; ``None`` if that is the function.
    """

    def __init__(
        self, original: Callable[..., Any], timed: Callable[..., Any], noted: Callable[..., Any] | None = None
    ) -> None:
        functools.update_wrapper(self, original, updated=())
        self.original = original
        self._timed = self._call = timed
        self._noted = original if noted is None else noted

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For ``isinstance``."""
        return type(self.original)

    def switch(self, is_timing: bool | None) -> None:
        """Whether it is timed; ``None`` is as without us."""
        self._call = self.original if is_timing is None else self._timed if is_timing else self._noted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function."""
        try:
            return self._call(*args, **kwargs)
        except BaseException as error:
            drop_frame(error)
            raise

    def __eq__(self, other: object) -> bool:
        return bool(
            self.original
            == (object.__getattribute__(other, "original") if type(other) is TimedCall else other)
        )

    def __hash__(self) -> int:
        return hash(self.original)

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self.original,)

    def __getattr__(self, name: str) -> Any:
        if name in ("original", "_call", "_timed", "_noted"):
            raise AttributeError(name)
        return getattr(self.original, name)


class TimedIterator:
    """An iterator over a data set whose items are timed.

    Args:
        iterator: the data set's own.
        take: the first takes an item from it, timed or not.
    """

    def __init__(self, iterator: Iterator[Any], take: Sequence[Callable[[Iterator[Any]], Any]]) -> None:
        self._iterator, self._take = iterator, take

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

    Not where making a class does something (``__init_subclass__``), and not where its code asks for the
    parent of the object's own class, which would be itself.
    """
    for kind in own.__mro__:
        if "__init_subclass__" in vars(kind) and kind.__module__ not in ("builtins", "typing"):
            return False
        if kind.__module__.partition(".")[0] in ("builtins", "torch", "typing", "abc"):
            continue
        if any(_asks_for_parent(one) for one in vars(kind).values()):
            return False
    return True


def _asks_for_parent(method: Any) -> bool:
    """Whether it says ``super(type(self), self)`` or ``super(self.__class__, self)``."""
    method = getattr(method, "fget", None) or getattr(method, "__func__", None) or method
    code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
    if code is None or "super" not in code.co_names or not {"type", "__class__"} & set(code.co_names):
        return False
    is_after = False
    for instruction in dis.get_instructions(code):
        if is_after and instruction.argval in ("type", "__class__"):
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


def _new_object(kind: type, *arguments: Any) -> Any:
    """As of copyreg, under a name that pickle does not know."""
    return kind.__new__(kind, *arguments)


def derived_class(own: type, methods: dict[str, Any]) -> type:
    """A class with other methods that is called the same; pickles of its objects are of their own class."""

    def reduce(one: Any, protocol: Any) -> Any:
        derived = type(one)
        object.__setattr__(one, "__class__", own)
        try:
            reduced = one.__reduce_ex__(protocol)
        finally:
            object.__setattr__(one, "__class__", derived)
        # pickle compares the class that copyreg makes an object of with the object's own.
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_new_object, *reduced[1:])
        return reduced

    own_equal: Any = own.__eq__

    def equal(one: Any, other: Any) -> Any:
        """As of objects of their own class, which it may ask for."""
        pair = [each for each in (one, other) if vars(type(each)).get(_OWN) is own]
        theirs = [type(each) for each in pair]
        for each in pair:
            object.__setattr__(each, "__class__", own)
        try:
            return own_equal(one, other)
        finally:
            for each, kind in zip(pair, theirs, strict=True):
                object.__setattr__(each, "__class__", kind)

    if own_equal is not object.__eq__:
        methods = {**methods, "__eq__": equal, "__hash__": own.__hash__}
    namespace = {
        "__slots__": (),
        _OWN: own,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__reduce_ex__": reduce,
        **methods,
    }
    return type(own)(own.__name__, (own,), namespace)
