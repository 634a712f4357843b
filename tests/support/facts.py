"""Invented and missing facts for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Table
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions
from lightning_modelprof.report.specs import TableSpec
from lightning_modelprof.report.tables.run.all_tables import TABLES, TRACE_TABLES
from tests.support.traces import make_trace


def why_not(derive: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The reason that a fact isn't measured."""
    with pytest.raises(NotMeasured) as caught:
        derive(*args, **kwargs)
    return caught.value.reason


def fact_or_why(derive: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The fact, or why it isn't measured."""
    try:
        return derive(*args, **kwargs)
    except NotMeasured as why:
        return why.reason


def tables_of(facts: Facts, *kinds: TableSpec, options: TableOptions = DEFAULT_OPTIONS) -> list[Table]:
    """The run's tables of these kinds."""
    entries = [entry for entry in TABLES if any(kind is one for kind in kinds for one in entry.kinds)]
    return [table for entry in entries for table in entry.of(facts, options)]


def ranks_with(name: str, by_rank: Mapping[int, Any]) -> dict[int, TraceFacts]:
    """Traces of ranks with one known fact: rank → the fact, or the reason why it isn't measured."""
    facts = TraceFacts(make_trace([]))
    return {
        rank: facts.replaced(**{name: NotMeasured(known) if isinstance(known, str) else known})
        for rank, known in by_rank.items()
    }


def table_of(kind: TableSpec, by_rank: Mapping[int, Any], options: TableOptions = DEFAULT_OPTIONS) -> Table:
    """The table of one fact by rank, or of the reason why it isn't measured."""
    [entry] = [one for one in TRACE_TABLES if one.kind is kind]
    return entry.of(ranks_with(entry.which.name, by_rank), options)
