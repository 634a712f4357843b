"""Traces become a report: one set of tables for the ranks of a job, one after the other for traces apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lightning_modelprof.analysis.trace_facts import TraceFacts
from lightning_modelprof.report.model import Report, Table
from lightning_modelprof.report.options import DEFAULT_OPTIONS, ReportOptions
from lightning_modelprof.report.tables import trace_tables


def build_trace_report(traces: Sequence[TraceFacts], options: ReportOptions = DEFAULT_OPTIONS) -> Report:
    """The report of one or several trace files.

    Args:
        traces: at least one. Traces of different ranks, as many of each, are taken for one job.
        options: how the tables are cut and sorted.
    """
    groups = group_ranks(traces)
    tables: list[Table] = []
    for number, by_rank in enumerate(groups):
        tables += trace_tables(
            by_rank,
            options,
            id_suffix=f"_{number}" if number else "",
            title_suffix=f" of {_group_name(number, by_rank)}" if len(groups) > 1 else "",
        )
    several = len(traces) > 1
    return Report(
        title=f"lightning-modelprof: {'traces' if several else 'trace'} {_names(traces)}",
        facts=tuple(
            (_label(number, rank, by_rank), f"{facts.source}, {facts.num_events:,} events{_steps(facts)}")
            for number, by_rank in enumerate(groups)
            for rank, facts in by_rank.items()
        ),
        tables=tuple(tables),
        notes=tuple(
            f"{facts.source}: {check}" if several else check for facts in traces for check in facts.checks
        ),
        sections={
            "traces": [
                {
                    "source": facts.source,
                    "rank": facts.rank,
                    "num_events": facts.num_events,
                    "steps": list(facts.step_numbers),
                    "checks": list(facts.checks),
                    "tables_suffix": f"_{number}" if number else "",
                }
                for number, by_rank in enumerate(groups)
                for facts in by_rank.values()
            ]
        },
    )


def group_ranks(traces: Sequence[TraceFacts]) -> list[Mapping[int, TraceFacts]]:
    """Which traces belong together: rank → facts, the n-th trace of every rank in the n-th group.

    Traces that do not say their rank, or are not equally many for every rank, stay apart.
    """
    ranks = Counter(facts.rank for facts in traces)
    if None in ranks or len(ranks) == 1 or len(set(ranks.values())) > 1:
        return [{facts.rank or 0: facts} for facts in traces]
    groups: list[dict[int, TraceFacts]] = [{} for _ in range(next(iter(ranks.values())))]
    for facts in sorted(traces, key=lambda facts: facts.begin_ns):
        rank = facts.rank or 0
        next(group for group in groups if rank not in group)[rank] = facts
    return [dict(sorted(group.items())) for group in groups]


def _group_name(number: int, by_rank: Mapping[int, TraceFacts]) -> str:
    return f"trace {number}" if len(by_rank) == 1 else f"traces {number}"


def _label(number: int, rank: int, by_rank: Mapping[int, TraceFacts]) -> str:
    return f"Trace {number}" if len(by_rank) == 1 else f"Trace {number} rank {rank}"


def _names(traces: Sequence[TraceFacts]) -> str:
    names = [facts.source for facts in traces[:2]]
    return ", ".join(names) + (f" and {len(traces) - 2} more" if len(traces) > 2 else "")


def _steps(facts: TraceFacts) -> str:
    numbers = facts.step_numbers
    if not numbers:
        return ""
    return f", step {numbers[0]}" if len(numbers) == 1 else f", {len(numbers)} steps from {numbers[0]} on"
