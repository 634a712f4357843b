"""The base of the records that one room hands to the next, and the ranges of measured numbers in them.

What an import takes is mostly the making of classes, and one of msgspec is made ten times as fast as a
dataclass. So records are those. Whoever takes one for a dataclass (``replace``, ``asdict``, ``fields``) is
right: what these functions ask for is made when they ask.

A file with a number outside of its range is refused. The ranges leave room to add up many in 64 bits.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta as Meta  # noqa: PLC0414  # records take both from here
from msgspec import field as field  # noqa: PLC0414
from msgspec.structs import asdict as asdict  # noqa: PLC0414  # unlike those of dataclasses only one level
from msgspec.structs import astuple as astuple  # noqa: PLC0414


class _Fields:
    """The fields of a record as :mod:`dataclasses` knows them: names and types, no defaults."""

    def __init__(self) -> None:
        self._known: dict[type[Record], dict[str, dataclasses.Field[Any]]] = {}

    def __get__(self, _: Record | None, kind: type[Record]) -> dict[str, dataclasses.Field[Any]]:
        if kind not in self._known:
            types: dict[str, Any] = {}
            for owner in reversed(kind.__mro__):
                types |= inspect.get_annotations(owner)
            own = [(name, types[name]) for name in kind.__struct_fields__]
            # A text of its own, as dataclasses takes long to write one.
            about = {"__doc__": kind.__doc__ or kind.__name__}
            twin: Any = dataclasses.make_dataclass(
                kind.__name__, own, namespace=about, init=False, repr=False, eq=False
            )
            self._known[kind] = twin.__dataclass_fields__
        return self._known[kind]


class Record(msgspec.Struct, frozen=True):
    """Something that was measured, was derived or is to be shown; it does not change."""

    __dataclass_fields__: ClassVar[Any] = _Fields()


LARGEST: Final = 2**62
MAX_RANKS: Final = 2**20

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
"""How many there are, or the number of one of them."""

Int = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
"""Bytes, nanoseconds, FLOPs, settings; a clock that is put back makes negative ones."""

Real = Annotated[float, Meta(ge=-1e30, le=1e30)]

Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
"""Processes of one training."""
