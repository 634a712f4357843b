"""What a table of traces is: a specification and a function of the ranks' facts; see ``kernels.py`` for one.

    @trace_table(KERNELS, "kernel", TraceFacts.kernels)
    def kernels_table(ranks: Ranks[Kernels], options: TableOptions) -> Table:
        return KERNELS.table(rows=...)

A fact that only one table shows can stand in the file of its table: a function of ``TraceFacts`` with the
decorator ``fact``.
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
        view: the name by which a reader asks for it.
        which: what of a trace it shows.
        build: makes it of the ranks that have the fact, and of the options if it needs them.
    """

    kind: TableSpec
    view: View
    which: fact[_Fact]
    build: Callable[..., Table]

    def of(self, by_rank: Mapping[int, TraceFacts], options: TableOptions) -> Table:
        """The table, or its reason to be absent."""
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
"""All tables of the files that are imported, as they stand there."""


def trace_table(kind: TableSpec, view: View, which: fact[Any]) -> Callable[[_BuildT], _BuildT]:
    """Make a table of traces of a function that takes the ranks with a fact.

    Args:
        view: the name by which a reader asks for it; tables are in the order of the views.
        which: what of a trace it shows.
    """

    if which.is_outside:
        OUTSIDE.append(which)

    def add(build: _BuildT) -> _BuildT:
        MADE.append(TraceTable(kind, view, which, build))
        return build

    return add
