"""What stands in the place of something of the user's, in a worker: it behaves as that does, and is timed."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any


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

    namespace = {
        "__slots__": (),
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__reduce_ex__": reduce,
        **methods,
    }
    return type(own)(own.__name__, (own,), namespace)
