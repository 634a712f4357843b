"""Trace tables: a specification plus a function of the ranks' facts; see ``kernels.py`` for an example.

    @trace_table(KERNELS, "kernel", TraceFacts.kernels)
    def kernels_table(ranks: Ranks[Kernels], options: TableOptions) -> Table:
        return KERNELS.table(rows=...)

A fact that only one table shows can be defined in that table's file: a function of ``TraceFacts`` with the
``fact`` decorator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from lightning_modelprof.analysis.lazy import OUTSIDE, NotMeasured, fact
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Table
from lightning_modelprof.report.options import TableOptions, View
from lightning_modelprof.report.specs import TableSpec
from lightning_modelprof.report.tables.rows import Ranks, split_ranks

_Fact = TypeVar("_Fact")
_BuildT = TypeVar("_BuildT", bound=Callable[..., Table])


class TraceTable(Record, Generic[_Fact], frozen=True):
    """One table of a trace.

    Attributes:
        view: name that selects it.
        which: the fact it shows.
        build: builds it from the ranks that have the fact, plus the options if it takes them.
    """

    kind: TableSpec
    view: View
    which: fact[_Fact]
    build: Callable[..., Table]

    def of(self, by_rank: Mapping[int, TraceFacts], options: TableOptions) -> Table:
        """Return the table, or one with the reason why it's absent."""
        notes: tuple[str, ...] = ()
        try:
            ranks: Ranks[_Fact] = split_ranks(by_rank, self.which)  # type: ignore[call-overload]
            notes = ranks.notes
            needs_options = len(inspect.signature(self.build).parameters) > 1
            table = self.build(ranks, options) if needs_options else self.build(ranks)
        except NotMeasured as why:
            table = self.kind.table(absent_reason=why.reason)
        return replace(table, notes=(*table.notes, *notes))


MADE: Final[list[TraceTable[Any]]] = []
"""All tables of the imported files, in definition order."""


def trace_table(kind: TableSpec, view: View, which: fact[Any]) -> Callable[[_BuildT], _BuildT]:
    """Register a function of the ranks that have a fact as a trace table.

    Args:
        view: name that selects it; tables are in the order of the views.
        which: the fact it shows.
    """

    if which.is_outside:
        OUTSIDE.append(which)

    def add(build: _BuildT) -> _BuildT:
        MADE.append(TraceTable(kind, view, which, build))
        return build

    return add
