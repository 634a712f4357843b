"""Reports become profiles: what a dashboard shows of a run, and of each of its windows."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.build_trace import build_trace_report, steps_text
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions
from lightning_modelprof.report.profile import Profile
from lightning_modelprof.report.step_columns import step_columns
from lightning_modelprof.report.timeline.timeline import timeline_of
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.records import Run
from lightning_modelprof.trace.model import Trace


def run_profile(run: Run, report: Report) -> Profile:
    """The profile of a whole loop.

    Args:
        run: what was measured; the steps are those of its first rank.
        report: the report of it.
    """
    loop, steps = loop_of(run.info.loop), run.ranks[0].steps
    num_steps = run.ranks[0].num_steps
    return Profile(
        kind="run",
        loop=loop.key,
        window=None,
        label=f"{num_steps:,} {loop.step if num_steps == 1 else loop.steps}, {run.info.status}",
        report=report,
        steps=step_columns(steps, loop),
    )


def window_profile(
    traces: Sequence[tuple[Trace, TraceFacts]],
    *,
    window: int,
    loop: str = "fit",
    options: TableOptions = DEFAULT_OPTIONS,
) -> Profile:
    """The profile of one window, or of traces of one job that somebody else recorded.

    Args:
        traces: of each rank the trace and what it says; at least one, and no two of one rank.
        window: number of the window.
        loop: the Trainer's method.
        options: how the tables are cut and sorted.
    """
    facts = [one for _, one in traces]
    ranks = [one.rank or 0 for one in facts]
    numbers = sorted({number for one in facts for number in one.step_numbers})
    return Profile(
        kind="window",
        loop=loop,
        window=window,
        label=steps_text(numbers),
        report=build_trace_report(facts, options),
        rank_reports={
            rank: build_trace_report([one], options) for rank, one in zip(ranks, facts, strict=True)
        }
        if len(traces) > 1
        else {},
        timelines={rank: timeline_of(*one) for rank, one in zip(ranks, traces, strict=True)},
    )
