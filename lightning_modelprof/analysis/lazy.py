"""Facts computed on demand, each at most once, and the reasons why one can't be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, overload

T = TypeVar("T")
_FactsT = TypeVar("_FactsT", bound="LazyFacts")

NO_DEVICE: Final = "the trace has no GPU events"


class NotMeasured(Exception):  # noqa: N818  # it's an answer, not an error
    """A fact that can't be derived from what was recorded.

    Attributes:
        reason: continues a sentence that starts with the missing fact; a clause without a full stop.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class fact(Generic[T]):  # noqa: N801  # used like property
    """Property of :class:`LazyFacts` that is computed once; a failure to measure it is cached too."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.name = compute.__name__
        self.key = f"{compute.__module__}.{compute.__qualname__}"
        self.is_outside = True
        self.__doc__ = compute.__doc__

    def __set_name__(self, _: type[LazyFacts], name: str) -> None:
        self.key, self.is_outside = name, False  # a subclass may derive it differently

    @overload
    def __get__(self, facts: None, _: type[LazyFacts]) -> fact[T]: ...

    @overload
    def __get__(self, facts: LazyFacts, _: type[LazyFacts]) -> T: ...

    def __get__(self, facts: LazyFacts | None, _: type[LazyFacts]) -> fact[T] | T:
        if facts is None:
            return self
        known = facts.__dict__.setdefault("_known", {})
        if self.key not in known:
            try:
                known[self.key] = self._compute(facts)
            except NotMeasured as why:
                known[self.key] = NotMeasured(why.reason)
        value = known[self.key]
        if isinstance(value, NotMeasured):
            raise NotMeasured(value.reason)  # a new one, since a raised one accumulates tracebacks
        found: T = value
        return found


OUTSIDE: Final[list[fact[Any]]] = []
"""Facts defined next to the table that shows them, outside any class."""


class LazyFacts:
    """Facts derived from one recording, each ``fact`` on demand.

    Reading a fact that can't be derived raises :class:`NotMeasured`. Readers let it pass: the rule is then
    skipped, or the table or chart left out, with the reason. Use ``get`` where a fact is optional.
    """

    def get(self, which: fact[T]) -> T | None:
        """A fact, e.g. ``facts.get(Facts.memory)``; ``None`` if it wasn't measured."""
        try:
            return self.read(which)
        except NotMeasured:
            return None

    def why_not(self, which: fact[Any]) -> str:
        """Reason why a fact wasn't measured; ``""`` if it was."""
        try:
            self.read(which)
        except NotMeasured as why:
            return why.reason
        return ""

    def read(self, which: fact[T]) -> T:
        """A fact, also one defined outside a class, which isn't an attribute.

        Raises:
            NotMeasured: if it can't be derived.
        """
        # By name, since a subclass may derive it differently.
        chosen: fact[T] = which if which.is_outside else getattr(type(self), which.name)
        return chosen.__get__(self, type(self))

    def replaced(
        self: _FactsT, outside: Mapping[fact[Any], Any] = MappingProxyType({}), /, **values: Any
    ) -> _FactsT:
        """Copy with other values, or :class:`NotMeasured`, for some facts.

        All other facts are derived again, since they may depend on these.

        Args:
            outside: values by fact, for facts defined outside a class.
            values: values by name.
        """
        twin = object.__new__(type(self))  # not copy.copy, which needs pickling support
        keys = {name: name for name in self.names()} | {one.name: one.key for one in OUTSIDE}
        facts = {keys[name]: value for name, value in values.items() if name in keys}
        facts |= {one.key: value for one, value in outside.items()}
        others = {name: value for name, value in values.items() if name not in keys}
        twin.__dict__.update({**self.__dict__, **others})
        given = {**self.__dict__.get("_given", {}), **facts}
        known = given if facts else self.__dict__.get("_known", {})
        twin.__dict__.update(_given=given, _known=dict(known))
        return twin

    @classmethod
    def names(cls) -> list[str]:
        """Names of all facts."""
        return [name for kind in cls.__mro__ for name, one in vars(kind).items() if isinstance(one, fact)]
