"""Pool several records into one: of a job's ranks, a trace's threads or their calls.

Records are pooled field by field. Numbers are added, a ``bool`` is true if any is, a text is the first one,
and mappings are pooled by key, as are records in a field. ``None`` means unknown and is skipped. Annotate a
field to pool it differently:

    name: Key[str]
    max_ns: Largest[int]
    size_bytes: OfAll[int]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce
from itertools import chain
from operator import add, attrgetter
from typing import Annotated, Any, Final, TypeVar, get_type_hints

from lightning_modelprof.record import Record, astuple


def of_known(choose: Callable[[list[T]], T], values: Iterable[T | None]) -> T | None:
    """Apply ``choose`` to the known values; ``None`` if there are none."""
    found = [value for value in values if value is not None]
    return choose(found) if found else None


def sum_of_known(values: Iterable[int | None]) -> int | None:
    return of_known(sum, values)


def sum_of_all(values: Iterable[int | None]) -> int | None:
    """Sum; ``None`` if any value is unknown."""
    found = list(values)
    return None if None in found else sum_of_known([0, *found])


T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=Record)
_Values = Sequence[Any]
"""One field's values in all records."""
_How = Callable[[_Values], Any]


def pool(records: Iterable[RecordT]) -> RecordT:
    """Pool at least one record into one."""
    found = tuple(records)
    if len(found) == 1:
        return found[0]
    kind = type(found[0])
    columns = zip(*map(astuple, found), strict=True)
    return kind(**{name: how(values) for (name, how), values in zip(_fields(kind), columns, strict=True)})


def pool_alike(records: Iterable[RecordT]) -> tuple[RecordT, ...]:
    """Pool records with equal keys, in order of first appearance."""
    alike: dict[Any, list[RecordT]] = {}
    key = None
    for one in records:
        key = key or _key(type(one))
        alike.setdefault(key(one), []).append(one)
    return tuple(map(pool, alike.values()))


def _first(values: _Values) -> Any:
    return values[0]


def _largest(values: _Values) -> Any:
    return of_known(max, values)


def _smallest(values: _Values) -> Any:
    return of_known(min, values)


def _in_turn(values: _Values) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(values))


def _of_all(values: _Values) -> Any:
    return None if None in values else _together(values)


Key = Annotated[T, _first]
"""Identifies a record: those with equal keys are pooled."""
Largest = Annotated[T | None, _largest]
Smallest = Annotated[T | None, _smallest]
OfAll = Annotated[T | None, _of_all]
"""Unknown if it's unknown in any record."""
InTurn = Annotated[tuple[T, ...], _in_turn]
"""Concatenated in order, duplicates included."""

_MARKS: Final = (_first, _largest, _smallest, _of_all, _in_turn)


def _together(values: _Values) -> Any:
    known = [value for value in values if value is not None]
    return _TOGETHER.get(type(known[0]), pool)(known) if known else None


def _by_key(mappings: _Values) -> dict[Any, Any]:
    found: dict[Any, list[Any]] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            found.setdefault(key, []).append(value)
    return {key: _together(values) for key, values in found.items()}


def _joined(parts: _Values) -> tuple[Any, ...]:
    """Pool records, deduplicate sentences, deduplicate and sort step numbers."""
    members = tuple(chain.from_iterable(parts))
    if not members or isinstance(members[0], Record):
        return pool_alike(members)
    once = dict.fromkeys(members)
    return tuple(once) if isinstance(members[0], str) else tuple(sorted(once))


def _added(values: _Values) -> Any:
    return reduce(add, values)  # ``sum`` rounds differently


_TOGETHER: Final[Mapping[type, _How]] = {
    bool: any,
    int: sum,
    float: _added,
    str: _first,
    tuple: _joined,
    dict: _by_key,
    frozenset: lambda sets: frozenset().union(*sets),
}
"""Pooling function by type; all other types are records."""


@cache
def _fields(kind: type[Record]) -> tuple[tuple[str, _How], ...]:
    hints = get_type_hints(kind, include_extras=True)
    marks = ((name, getattr(hints[name], "__metadata__", ())) for name in kind.__struct_fields__)
    return tuple((name, mark[0] if mark and mark[0] in _MARKS else _together) for name, mark in marks)


@cache
def _key(kind: type[Record]) -> Callable[[Record], Any]:
    names = [name for name, how in _fields(kind) if how is _first]
    if not names:
        raise TypeError(f"{kind.__name__}: expected a field with Key[...], to tell which are alike")
    return attrgetter(*names)
