"""What this profiler itself takes of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import SPECIAL, StepTag

_PROFILER: Final = PHASE_INDEX["profiler"]
_RECORDED: Final = int(StepTag.PROFILED | StepTag.PROFILER_WARMUP)
_INSPECTED: Final = int(StepTag.INSPECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCost:
    """Time of a loop that is this profiler's.

    Attributes:
        work_ns: phase Profiler: windows opened, closed, read and packed, reports and archives written, looks
            between steps.
        recorded_ns: how much longer the steps inside windows took than typical ones, beside that.
        inspected_ns: the same of the steps in which FLOPs were counted or modules timed.
        loop_ns: the whole loop.
    """

    work_ns: int
    recorded_ns: float
    inspected_ns: float
    loop_ns: int

    @property
    def total_ns(self) -> float:
        """All of it."""
        return self.work_ns + self.recorded_ns + self.inspected_ns

    @property
    def share(self) -> float | None:
        """Of the loop; ``None`` if that took no time."""
        return self.total_ns / self.loop_ns if self.loop_ns else None


def own_cost(
    totals: StepTotals, outside_ns: Mapping[str, int], costs: StepCosts | Absent
) -> OwnCost | Absent:
    """What can be seen of it between the steps and in those that were slowed down.

    Args:
        totals: over all finished steps.
        outside_ns: time of the loop in no finished step, by phase key.
        costs: what a typical step takes.

    Caveats: what the clock reads in each step and the sampling thread cost is not seen: without the
    profiler there would be nothing to compare with (``benchmarks/overhead.py`` does).
    """
    if isinstance(costs, Absent):
        return Absent(costs.reason)
    usual_ns = costs.typical.wall_ns
    return OwnCost(
        work_ns=int(totals.whole("phases_ns")[_PROFILER]) + outside_ns.get("profiler", 0),
        recorded_ns=_beyond(totals, _RECORDED, 0, usual_ns),
        inspected_ns=_beyond(totals, _INSPECTED, _RECORDED, usual_ns),
        loop_ns=int(totals.whole("duration_ns")) + sum(outside_ns.values()),
    )


def _beyond(totals: StepTotals, tags: int, but_tags: int, usual_ns: float) -> float:
    """Time of the steps with a tag, without the phase Profiler, beyond what as many typical ones take.

    How much longer special steps are through us, and how much through the user, we cannot tell.
    """
    some = totals.select(((totals.tags & tags) != 0) & ((totals.tags & (but_tags | SPECIAL)) == 0))
    taken_ns = int(some.whole("duration_ns")) - int(some.whole("phases_ns")[_PROFILER])
    return max(0.0, taken_ns - len(some) * usual_ns)
