"""Build dashboard entries from runs and windows."""

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
    """Build the entry of a whole loop, with the steps of the first rank."""
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
    """Build the entry of one window, or of imported traces of one job, with distinct ranks."""
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
    """Return each step's phases and the reason why the benchmark excludes it.

    Phases that took no time in any step are left out. Phases that couldn't be measured stay, as
    ``NOT_MEASURED``, to tell them apart.

    Args:
        steps: finished steps of one rank, or the saved ones.
        loop: loop kind; evaluation loops word one of the reasons differently.
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
    """Restore the measured steps, without device phase times, which aren't stored.

    Phases unknown to this version are left out.
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
    """Return each step's position in ``reasons``; the benchmark judges one step per set of tags."""
    _, first, kind = np.unique(steps.tags, return_index=True, return_inverse=True)
    of_kind = np.zeros(len(first), np.int64)
    for place, index in enumerate(first.tolist()):
        alone = StepTimings(**{name: column[index : index + 1] for name, column in steps.columns().items()})
        for exclusion in exclusions(StepTotals.of(alone), loop):
            of_kind[place] = reasons.index(exclusion.reason)
    return of_kind[kind.reshape(-1)]
