"""Reports become profiles: what a dashboard shows of a run, and of each of its windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.steps.benchmark import exclusions
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.build_trace import build_trace_report, steps_text
from lightning_modelprof.report.dashboard_entry import DashboardEntry, StepColumns
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions
from lightning_modelprof.report.timeline.timeline import timeline_of
from lightning_modelprof.run.loops import FIT, LoopKind, loop_of
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import Run
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings
from lightning_modelprof.trace.model import Trace


def run_profile(run: Run, report: Report) -> DashboardEntry:
    """The profile of a whole loop.

    Args:
        run: what was measured; the steps are those of its first rank.
    """
    loop, steps = loop_of(run.info.loop), run.ranks[0].steps
    num_steps = run.ranks[0].num_steps
    return DashboardEntry(
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
) -> DashboardEntry:
    """The profile of one window, or of traces of one job that somebody else recorded.

    Args:
        traces: of each rank the trace and what it says; at least one, and no two of one rank.
        loop: the Trainer's method.
    """
    facts = [one for _, one in traces]
    ranks = [one.rank or 0 for one in facts]
    numbers = sorted({number for one in facts for number in one.step_numbers})
    return DashboardEntry(
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
        step_numbers=tuple(numbers),
    )


def step_columns(steps: StepTimings, loop: LoopKind = FIT) -> StepColumns:
    """Every step with its phases and with why the benchmark leaves it out.

    A phase that took no time in any step is left out. One that could not be measured stays, with
    ``NOT_MEASURED`` where that is so: without it nobody could tell it from one that took no time.

    Args:
        steps: the finished steps of one rank, or those of them that were kept.
        loop: what ran; evaluation loops have a word of their own for one of the reasons.
    """
    reasons = ("", *(exclusion.reason for exclusion in exclusions(StepTotals.of(steps), loop)))
    kept = [index for index in range(len(PHASES)) if steps.phases_ns[:, index].any()]
    return StepColumns(
        step=steps.step,
        duration_ns=steps.duration_ns,
        samples=steps.samples,
        tags=steps.tags,
        exclusion=_exclusion(steps, loop, reasons),
        exclusions=reasons,
        phases=tuple((PHASES[index].key, PHASES[index].label) for index in kept),
        phases_ns=steps.phases_ns[:, kept],
    )


def timings_of(columns: StepColumns) -> StepTimings:
    """The steps as they were measured, without the times between events of a device, which are not stored.

    Phases that this version does not know are left out.
    """
    phases_ns = np.zeros((len(columns.step), len(PHASES)), np.int64)
    for place, (key, _) in enumerate(columns.phases):
        if key in PHASE_INDEX:
            phases_ns[:, PHASE_INDEX[key]] = columns.phases_ns[:, place]
    return StepTimings(
        step=columns.step,
        duration_ns=columns.duration_ns,
        phases_ns=phases_ns,
        device_phases_ns=np.full_like(phases_ns, NOT_MEASURED),
        samples=columns.samples,
        tags=columns.tags,
    )


def _exclusion(steps: StepTimings, loop: LoopKind, reasons: tuple[str, ...]) -> NDArray[np.int64]:
    """Position in ``reasons`` of each step's own.

    The benchmark is asked about one step of each set of tags, because tags alone decide. So its figures and
    these columns cannot disagree.
    """
    _, first, kind = np.unique(steps.tags, return_index=True, return_inverse=True)
    of_kind = np.zeros(len(first), np.int64)
    for place, index in enumerate(first.tolist()):
        alone = StepTimings(**{name: column[index : index + 1] for name, column in steps.columns().items()})
        for exclusion in exclusions(StepTotals.of(alone), loop):
            of_kind[place] = reasons.index(exclusion.reason)
    return of_kind[kind.reshape(-1)]
