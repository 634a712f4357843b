"""Base class of the package's records, and the ranges of measured numbers in them.

Most import time goes into creating classes, and msgspec creates them ten times as fast as dataclasses.
Records still work with ``replace``, ``asdict`` and ``fields`` of :mod:`dataclasses`, whose data is created
on demand.

A file with a number out of range is refused. The ranges leave room to add up many numbers in 64 bits.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta as Meta  # noqa: PLC0414  # records import both from here
from msgspec import field as field  # noqa: PLC0414
from msgspec.structs import asdict as asdict  # noqa: PLC0414  # unlike dataclasses', only one level deep
from msgspec.structs import astuple as astuple  # noqa: PLC0414


class _Fields:
    """A record's fields for :mod:`dataclasses`: names and types, no defaults."""

    def __init__(self) -> None:
        self._known: dict[type[Record], dict[str, dataclasses.Field[Any]]] = {}

    def __get__(self, _: Record | None, kind: type[Record]) -> dict[str, dataclasses.Field[Any]]:
        if kind not in self._known:
            types: dict[str, Any] = {}
            for owner in reversed(kind.__mro__):
                types |= inspect.get_annotations(owner)
            own = [(name, types[name]) for name in kind.__struct_fields__]
            # dataclasses is slow to write a docstring itself.
            about = {"__doc__": kind.__doc__ or kind.__name__}
            twin: Any = dataclasses.make_dataclass(
                kind.__name__, own, namespace=about, init=False, repr=False, eq=False
            )
            self._known[kind] = twin.__dataclass_fields__
        return self._known[kind]


class Record(msgspec.Struct, frozen=True):
    """Something measured, derived or shown; immutable."""

    __dataclass_fields__: ClassVar[Any] = _Fields()


LARGEST: Final = 2**62
MAX_RANKS: Final = 2**20

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
"""A number of things, or the index of one."""

Int = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
"""Bytes, nanoseconds, FLOPs or settings; negative if a clock is set back."""

Real = Annotated[float, Meta(ge=-1e30, le=1e30)]

Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
"""Number of processes in one training run."""
