"""One record of several: of the ranks of a job, of the threads of a trace, or of the calls in it.

Records are put together field by field. Numbers are added, ``bool`` says whether any is, of a text the first
stands for all, mappings are put together by key and records in a field likewise. ``None`` isn't known and is
skipped. What a field has instead stands on it:

    name: Key[str]
    max_ns: Largest[int]
    size_bytes: OfAll[int]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from itertools import chain
from operator import add
from typing import Annotated, Any, Final, TypeVar, get_type_hints

from lightning_modelprof.analysis.sums import of_known
from lightning_modelprof.record import Record

T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=Record)
_How = Callable[[list[Any]], Any]


def pool(records: Iterable[RecordT]) -> RecordT:
    """All of them in one; there is at least one."""
    found = list(records)
    if len(found) == 1:
        return found[0]
    kind = type(found[0])
    return kind(**{name: how([getattr(one, name) for one in found]) for name, how in _fields(kind)})


def pool_alike(records: Iterable[RecordT]) -> tuple[RecordT, ...]:
    """One for all that have the same keys, in the order in which they come first."""
    alike: dict[tuple[object, ...], list[RecordT]] = {}
    for one in records:
        alike.setdefault(tuple(getattr(one, name) for name in _keys(type(one))), []).append(one)
    return tuple(map(pool, alike.values()))


def _first(values: list[Any]) -> Any:
    return values[0]


def _largest(values: list[Any]) -> Any:
    return of_known(max, values)


def _smallest(values: list[Any]) -> Any:
    return of_known(min, values)


def _of_all(values: list[Any]) -> Any:
    return None if None in values else _together(values)


Key = Annotated[T, _first]
"""What a record is about: those that have it alike are put together."""
Largest = Annotated[T | None, _largest]
Smallest = Annotated[T | None, _smallest]
OfAll = Annotated[T | None, _of_all]
"""Not known where it isn't known of one."""

_MARKS: Final = (_first, _largest, _smallest, _of_all)


def _together(values: list[Any]) -> Any:
    known = [value for value in values if value is not None] if None in values else values
    if not known:
        return None
    first = known[0]
    simple = _SIMPLE.get(type(first))
    if simple is not None:
        return simple(known)
    if isinstance(first, Record):
        return pool(known)
    keys = dict.fromkeys(chain.from_iterable(known))
    return {key: _together([one[key] for one in known if key in one]) for key in keys}


def _joined(parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Records put together, sentences once, and numbers of steps once and in order."""
    members = tuple(chain.from_iterable(parts))
    if not members or isinstance(members[0], Record):
        return pool_alike(members)
    once = dict.fromkeys(members)
    return tuple(once) if isinstance(members[0], str) else tuple(sorted(once))


def _added(values: list[float]) -> float:
    return reduce(add, values)  # ``sum`` rounds in another way


_SIMPLE: Final[Mapping[type, _How]] = {
    bool: any,
    int: sum,
    float: _added,
    str: _first,
    tuple: _joined,
    frozenset: lambda sets: frozenset().union(*sets),
}


@cache
def _fields(kind: type[Record]) -> tuple[tuple[str, _How], ...]:
    """Each field with how it is put together."""
    hints = get_type_hints(kind, include_extras=True)
    marks = ((name, getattr(hints[name], "__metadata__", ())) for name in kind.__struct_fields__)
    return tuple((name, mark[0] if mark and mark[0] in _MARKS else _together) for name, mark in marks)


@cache
def _keys(kind: type[Record]) -> tuple[str, ...]:
    return tuple(name for name, how in _fields(kind) if how is _first)
