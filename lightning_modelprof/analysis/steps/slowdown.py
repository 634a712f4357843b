"""Whether steps slow down over the loop, and which phase does."""

from __future__ import annotations

from typing import Final

import numpy as np

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.statistics import medians, theil_sen
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, PROFILER, StepTimings

LEAST_STEPS: Final = 60
_GROUPS: Final = 20
_PARTS: Final = 4


class Slowdown(Record, frozen=True, kw_only=True):
    """Trend of the clean steps over a loop.

    Attributes:
        phase: key of the phase that grows most.
        early_ns, late_ns: median of that phase in the first and last quarter.
        excess_ns: the phase's mean minus its median in the first quarter.
        least_ns: lower end of the 95% interval of its growth over the loop.
        halves_ns: growth in the first and second half.
        rest_ns: growth of all other phases together.
        step_ns: median step in the first quarter.
    """

    phase: str
    early_ns: float
    late_ns: float
    excess_ns: float
    least_ns: float
    halves_ns: tuple[float, float]
    rest_ns: float
    step_ns: float


def slowdown(steps: StepTimings) -> Slowdown:
    """Fit Theil-Sen slopes to medians of neighboring steps, by phase.

    Args:
        steps: of the loop, or the saved ones.
    """
    clean = steps.clean()
    if len(clean) < LEAST_STEPS:
        raise NotMeasured(f"fewer than {LEAST_STEPS} steps are clean")
    times = clean.phases_ns
    is_measured = times.any(axis=0) & ~(times == NOT_MEASURED).any(axis=0)
    is_measured[PROFILER] = False
    phases = np.flatnonzero(is_measured)
    if not len(phases):
        raise NotMeasured("no phase was measured")
    x, of_phases = medians(clean.step, _GROUPS), medians(times[:, phases], _GROUPS).T
    slopes = [theil_sen(x, y)[:2] for y in of_phases]
    place = max(range(len(phases)), key=lambda at: slopes[at][0])
    (_, low), y, key = slopes[place], of_phases[place], PHASES[phases[place]].key
    column = times[:, phases[place]].astype(float)
    span, middle = x[-1] - x[0], len(x) // 2
    wall = clean.duration_ns.astype(float) - np.maximum(times[:, PROFILER], 0)
    quarter = max(1, len(column) // _PARTS)
    early = float(np.median(column[:quarter]))
    rest = theil_sen(x, medians(wall - column, _GROUPS))[0] * span
    return Slowdown(
        phase=key,
        early_ns=early,
        late_ns=float(np.median(column[-quarter:])),
        excess_ns=float(np.mean(y)) - early,
        least_ns=low * span,
        halves_ns=tuple(
            theil_sen(x[part], y[part])[0] * (x[part][-1] - x[part][0])
            for part in (slice(None, middle), slice(middle, None))
        ),
        rest_ns=rest,
        step_ns=float(np.median(wall[:quarter])),
    )
