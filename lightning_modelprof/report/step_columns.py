"""The steps of a run as the columns that a dashboard draws, and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.steps.benchmark import exclusions
from lightning_modelprof.report.profile import StepColumns
from lightning_modelprof.run.loops import FIT, Loop
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings


def step_columns(steps: StepTimings, loop: Loop = FIT) -> StepColumns:
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


def _exclusion(steps: StepTimings, loop: Loop, reasons: tuple[str, ...]) -> NDArray[np.int64]:
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
