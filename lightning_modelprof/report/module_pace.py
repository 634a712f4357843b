"""How much faster or slower the machine was in the steps in which modules were timed."""

from __future__ import annotations

import numpy as np

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.steps import NOT_MEASURED

_FORWARD = PHASE_INDEX["forward"]


def module_pace(analysis: Analysis) -> float:
    """What a module's time in the timed steps is to be multiplied by to be one of a typical step.

    Definition: median of Forward in the clean steps over its median in the timed steps, on the clock of the
    modules; 1 where either is not known.

    Caveats:
        Timing modules takes some time, which is in Forward too: the product is too small by that share.
    """
    cost, costs = analysis.cost, analysis.step_costs
    if cost is None or cost.times is None or isinstance(costs, Absent):
        return 1.0
    is_timed = np.isin(analysis.steps.step, cost.times.step_numbers)
    on_device = cost.times.clock == "device"
    phases_ns = analysis.steps.device_phases_ns if on_device else analysis.steps.phases_ns
    timed = phases_ns[is_timed, _FORWARD]
    means = costs.typical
    typical = means.device_ns.get("forward") if on_device else means.medians_ns.get("forward")
    if not len(timed) or (timed == NOT_MEASURED).any() or not typical or not np.median(timed):
        return 1.0
    return typical / float(np.median(timed))
