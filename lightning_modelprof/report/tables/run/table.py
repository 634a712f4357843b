"""Run tables: specifications plus a function of facts; see ``callback_times.py`` for an example.

@run_table(CALLBACKS)
def callback_times(facts: Facts, options: TableOptions) -> Iterator[Table]:
    yield CALLBACKS.table(facts.callbacks)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured, fact
from lightning_modelprof.report.model import Table
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import TableSpec

Build = Callable[[Facts, TableOptions], Iterable[Table]]


class RunTable(NamedTuple):
    """Tables of a run that one function builds.

    Attributes:
        build: builds them; none if there is nothing to show.
        kinds: their specifications, in order.
        needs: a fact without which there's no table at all, not even an absent one.
    """

    build: Build
    kinds: tuple[TableSpec, ...] = ()
    needs: fact[Any] | None = None

    def of(self, facts: Facts, options: TableOptions) -> tuple[Table, ...]:
        """Return the tables, or absent ones with the reason."""
        needs: fact[Any] | None = self.needs  # type: ignore[call-overload]  # no property here
        if needs is not None and facts.get(needs) is None:
            return ()
        try:
            return tuple(self.build(facts, options))
        except NotMeasured as why:
            return tuple(kind.table(absent_reason=why.reason) for kind in self.kinds)


MADE: Final[list[RunTable]] = []
"""All tables of the imported files, in definition order."""


def run_table(*kinds: TableSpec, needs: fact[Any] | None = None) -> Callable[[Build], Build]:
    """Register a function of facts and options as tables of a run.

    Args:
        kinds: their specifications, in order.
        needs: a fact without which there's no table at all, not even an absent one.
    """

    def add(build: Build) -> Build:
        MADE.append(RunTable(build, kinds, needs))
        return build

    return add
