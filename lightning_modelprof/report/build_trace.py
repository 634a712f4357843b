"""Build a report from traces: one set of tables per job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts.all_charts import trace_charts
from lightning_modelprof.report.model import OTHER_TRACES, WARNING, Chart, Report, Table
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions
from lightning_modelprof.report.rules.engine import diagnose_traces
from lightning_modelprof.report.step_card import step_card_of_traces
from lightning_modelprof.report.summary import OtherTraces, Summary, TraceSummary
from lightning_modelprof.report.tables.trace.trace_tables import trace_tables
from lightning_modelprof.trace.damaged import OF_WHOLE_FILE


def build_trace_report(
    traces: Sequence[TraceFacts],
    options: TableOptions = DEFAULT_OPTIONS,
    skipped: Sequence[str] = (),
    *,
    is_brief: bool = False,
) -> Report:
    """Build the report of one or more trace files.

    Args:
        traces: at least one; ranks of one job share a set of tables.
        skipped: a sentence for each given file that isn't a trace.
        is_brief: whether to leave out tables and charts.
    """
    groups = group_ranks(traces)
    tables: list[Table] = []
    charts: list[Chart] = []
    for number, by_rank in enumerate([] if is_brief else groups):
        id_suffix = f"_{number}" if number else ""
        title_suffix = f" of {_group_name(number, by_rank)}" if len(groups) > 1 else ""
        tables += trace_tables(by_rank, options, id_suffix=id_suffix, title_suffix=title_suffix)
        charts += trace_charts(by_rank, id_suffix=id_suffix, title_suffix=title_suffix)
    newest = max(groups, key=_recency)
    names = _distinct_names(groups)
    several = len(traces) > 1
    newest_first = [newest, *(group for group in groups if group is not newest)]
    by_age = [facts for group in newest_first for facts in group.values()]
    checks = [f"{facts.source}: {check}" if several else check for facts in by_age for check in facts.checks]
    origins = dict.fromkeys(
        f"{facts.source}: {facts.step_origin}" if several else facts.step_origin
        for facts in by_age
        if facts.step_origin
    )
    # Traces of other times or jobs can't share a verdict: the newest gets the report, the others a line each.
    job = JobFacts(newest.values())
    verdict, findings = diagnose_traces(job)
    card = step_card_of_traces(job, findings)
    others = [
        (name, group, diagnose_traces(JobFacts(group.values()))[0])
        for name, group in sorted(
            zip(names, groups, strict=True), key=lambda named: _recency(named[1]), reverse=True
        )
        if group is not newest
    ]
    facts_of = [(number, rank, by_rank) for number, by_rank in enumerate(groups) for rank in by_rank]
    which = f"{names[groups.index(newest)]}, newest of {len(groups)}: " if others else ""
    return Report(
        title=f"lightning-modelprof: {which}{_title(newest)}",
        facts=(
            *((OTHER_TRACES, f"{name}: {its.word}: {its.summary}") for name, _, its in others),
            *(
                (_label(*place, is_only=len(groups) == 1), _describe(place[2][place[1]]))
                for place in facts_of
            ),
            *(("Steps", origin) for origin in origins),
            # Warnings come first: readers may never reach the notes.
            *((WARNING, check) for check in checks),
        ),
        charts=tuple(charts),
        tables=tuple(tables),
        notes=(*skipped, *_grouping_notes(groups)),
        verdict=verdict,
        findings=findings,
        step_card=card,
        summary=Summary(
            traces=tuple(
                TraceSummary(
                    source=facts.source,
                    rank=facts.rank,
                    num_events=facts.num_events,
                    steps=tuple(facts.step_numbers),
                    step_origin=facts.step_origin,
                    checks=tuple(facts.checks),
                    is_damaged=any(check.startswith(OF_WHOLE_FILE) for check in facts.checks),
                    tables_suffix=f"_{number}" if number else "",
                )
                for number, by_rank in enumerate(groups)
                for facts in by_rank.values()
            ),
            others=tuple(
                OtherTraces(name=name, ranks=tuple(facts.rank for facts in group.values()), verdict=its)
                for name, group, its in others
            ),
        ),
    )


def group_ranks(traces: Sequence[TraceFacts]) -> list[Mapping[int, TraceFacts]]:
    """Group traces by job and time: rank → facts, in step order.

    Ranks belong together if they differ, have the same world size, and share a step or, without steps,
    overlap in time. Two directories that hold the same rank belong to different jobs or times. A trace
    without a rank takes it from its path; without a rank there either, it stays alone.
    """
    traces = [facts.replaced(rank=_rank_of(facts)) for facts in traces]
    ranks_in: dict[Path, set[int | None]] = {}
    for facts in traces:
        ranks_in.setdefault(_folder_of(facts), set()).add(facts.rank)
    groups: list[dict[int, TraceFacts]] = []
    for facts in sorted(
        traces, key=lambda facts: (facts.step_numbers[:1], facts.begin_ns, _natural_sort_key(facts))
    ):
        fitting = (group for group in groups if _belongs(facts, group, ranks_in))
        group = next(fitting, None)
        if group is None:
            groups.append({facts.rank or 0: facts})
        elif facts.rank is not None:
            group[facts.rank] = facts
    if len(groups) == len(traces):  # order as given
        return [{facts.rank or 0: facts} for facts in traces]
    return [dict(sorted(group.items())) for group in groups]


_RANK_IN_NAME: Final = re.compile(r"(?<![a-z])rank[-_.]?([0-9]{1,7})(?![0-9])", re.IGNORECASE)


def _rank_of(facts: TraceFacts) -> int | None:
    """Return the trace's own rank, else the one in its path, such as ``rank0_trace.json``."""
    if facts.rank is not None:
        return facts.rank
    found = [match for part in Path(facts.source).parts if (match := _RANK_IN_NAME.search(part))]
    return int(found[-1][1]) if found else None


def _folder_of(facts: TraceFacts) -> Path:
    """Return the directory shared with other ranks: the one above if each rank has its own."""
    folder = Path(facts.source).parent
    while _RANK_IN_NAME.search(folder.name):
        folder = folder.parent
    return folder


def _natural_sort_key(facts: TraceFacts) -> list[str | int]:
    parts = re.split("([0-9]{1,20})", facts.source)  # every second part is a number
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _recency(group: Mapping[int, TraceFacts]) -> tuple[int, list[str | int]]:
    return max((facts.end_ns, _natural_sort_key(facts)) for facts in group.values())


def _belongs(
    facts: TraceFacts, group: Mapping[int, TraceFacts], ranks_in: Mapping[Path, set[int | None]]
) -> bool:
    first = next(iter(group.values()))
    if facts.rank is None or first.rank is None or facts.rank in group:
        return False
    if facts.world_size != first.world_size:
        return False
    folder, its = _folder_of(first), _folder_of(facts)
    if folder != its and not ranks_in[folder].isdisjoint(ranks_in[its]):
        return False
    if facts.step_numbers or first.step_numbers:
        return not set(facts.step_numbers).isdisjoint(first.step_numbers)
    return facts.begin_ns < first.end_ns and first.begin_ns < facts.end_ns


def _distinct_names(groups: Sequence[Mapping[int, TraceFacts]]) -> list[str]:
    firsts = [next(iter(group.values())) for group in groups]
    folders = [_folder_of(facts) for facts in firsts]
    above = os.path.commonpath([str(folder) or "." for folder in folders]) if len(set(folders)) > 1 else ""
    for names in (
        [os.path.relpath(folder, above) for folder in folders] if above else [],
        [steps_text(facts.step_numbers) for facts in firsts],
        [Path(facts.source).name for facts in firsts],
    ):
        if len(set(names)) == len(groups):
            return names
    return [facts.source for facts in firsts]


def _grouping_notes(groups: Sequence[Mapping[int, TraceFacts]]) -> list[str]:
    notes = []
    ranks = {facts.rank for group in groups for facts in group.values()} - {None}
    if len(groups) > 1 and len(ranks) > 1:
        notes.append(
            "Traces of different ranks share a set of tables if they have a step in common and jobs of the"
            " same size. Others are shown separately."
        )
    for number, group in enumerate(groups):
        if len({facts.step_numbers for facts in group.values()}) > 1:
            held = "; ".join(f"rank {rank} {steps_text(facts.step_numbers)}" for rank, facts in group.items())
            which = f" of trace {number}" if len(groups) > 1 else ""
            notes.append(f"The ranks{which} have different steps: {held}.")
    return notes


def _group_name(number: int, by_rank: Mapping[int, TraceFacts]) -> str:
    return f"trace {number}" if len(by_rank) == 1 else f"traces {number}"


def _label(number: int, rank: int, by_rank: Mapping[int, TraceFacts], *, is_only: bool) -> str:
    name = "Trace" if is_only else f"Trace {number}"
    return name if len(by_rank) == 1 else f"{name} rank {rank}"


def _title(group: Mapping[int, TraceFacts]) -> str:
    if len(group) > 1:
        return f"{len(group)} ranks of one job"
    return f"trace {Path(next(iter(group.values())).source).name}"


def _describe(facts: TraceFacts) -> str:
    steps = steps_text(facts.step_numbers)
    return f"{facts.source}, {facts.num_events:,} events" + (f", {steps}" if steps else "")


def steps_text(numbers: Sequence[int]) -> str:
    """Describe ascending step numbers: ``steps 5 to 10``."""
    if not numbers:
        return "no steps"
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    return f"steps {numbers[0]} to {numbers[-1]}"
