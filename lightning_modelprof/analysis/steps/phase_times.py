"""Time of all finished steps by phase, and the time around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import REPORT, SANITY_CHECK, ActionTime, OutsideLoop
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.step_totals import StepTotals
from lightning_modelprof.run.steps import SPECIAL, StepTag


class PhaseTime(Record, frozen=True, kw_only=True):
    """One phase over all finished steps, clean or not; the totals sum to the steps' wall time exactly.

    Attributes:
        num_steps: steps in which the phase took any time.
        total_ns: self time; ``None`` if the phase couldn't be measured.
        avg_ns: total over *all* finished steps; ``None`` as above.
        max_ns, min_ns: longest and shortest in one step; ``None`` as above.
        ratio: share of the steps' wall time; ``None`` as above, or without any wall time.
        device_total_ns: elapsed time on the device's stream over the steps with a known device time; ``None``
            without any.
        device_num_steps: number of those steps.
    """

    key: str
    label: str
    num_steps: int
    total_ns: int | None
    avg_ns: float | None
    max_ns: int | None
    min_ns: int | None
    ratio: float | None
    device_total_ns: int | None
    device_num_steps: int


def phase_times(totals: StepTotals) -> tuple[PhaseTime, ...]:
    """Time by phase, in the order of ``PHASES``, without phases that took no time."""
    found: list[PhaseTime] = []
    num_steps, wall_ns = len(totals), int(totals.total("duration_ns"))
    if num_steps == 0:
        return ()
    is_measured = totals.measured_phases()
    sums_ns, device_ns = totals.total("phases_ns"), totals.total("device_ns")
    num_in_phase, num_on_device = totals.total("num_in_phase"), totals.total("num_on_device")
    for index, phase in enumerate(PHASES):
        measured = bool(is_measured[index])
        if measured and not num_in_phase[index]:
            continue
        total_ns = int(sums_ns[index]) if measured else None
        found.append(
            PhaseTime(
                key=phase.key,
                label=phase.label,
                num_steps=int(num_in_phase[index]),
                total_ns=total_ns,
                avg_ns=None if total_ns is None else total_ns / num_steps,
                max_ns=int(totals.phases_max_ns[:, index].max()) if measured else None,
                min_ns=int(totals.phases_min_ns[:, index].min()) if measured else None,
                ratio=None if total_ns is None or wall_ns == 0 else total_ns / wall_ns,
                device_total_ns=int(device_ns[index]) if num_on_device[index] else None,
                device_num_steps=int(num_on_device[index]),
            )
        )
    return tuple(found)


_PROFILER: Final = PHASE_INDEX["profiler"]


_RECORDED: Final = int(StepTag.PROFILED | StepTag.PROFILER_WARMUP)


_INSPECTED: Final = int(StepTag.INSPECTED)


class OwnCost(Record, frozen=True, kw_only=True):
    """Profiler overhead during a loop and after it.

    Attributes:
        work_ns: phase Profiler: opening and closing windows, writing archives, inspections between steps.
        recorded_ns: how much longer the steps inside windows took than typical ones, in addition.
        inspected_ns: the same for the steps whose FLOPs were counted or modules timed.
        report_wait_ns: time that training waited for its report after the loop; ``None`` if not measured, as
            in runs of earlier versions.
        helper_cpu_ns: CPU time of the process that packed and analyzed traces during training, in no other
            figure; ``None`` without one.
        share: of the loop and the wait after it; ``None`` if they took no time.
    """

    work_ns: int
    recorded_ns: float
    inspected_ns: float
    report_wait_ns: int | None
    loop_ns: int
    helper_cpu_ns: int | None
    share: float | None = None

    @property
    def total_ns(self) -> float:
        return self.work_ns + self.recorded_ns + self.inspected_ns + (self.report_wait_ns or 0)


def own_cost(
    totals: StepTotals,
    outside_ns: Mapping[str, int],
    costs: StepCosts,
    helper_cpu_ns: int | None = None,
    report_wait_ns: int | None = None,
) -> OwnCost:
    """Measure the visible overhead, between the steps and in those that were slowed down.

    Args:
        outside_ns: time of the loop outside finished steps, by phase key.

    Caveats: the cost of the clock readings in each step and of the sampling thread is invisible, since there
    is no run without the profiler to compare with (``benchmarks/overhead.py`` does that).
    """
    usual_ns = costs.typical.wall_ns
    cost = OwnCost(
        work_ns=int(totals.total("phases_ns")[_PROFILER]) + outside_ns.get("profiler", 0),
        recorded_ns=_beyond(totals, _RECORDED, 0, usual_ns),
        inspected_ns=_beyond(totals, _INSPECTED, _RECORDED, usual_ns),
        report_wait_ns=report_wait_ns,
        loop_ns=int(totals.total("duration_ns")) + sum(outside_ns.values()),
        helper_cpu_ns=helper_cpu_ns,
    )
    whole_ns = cost.loop_ns + (report_wait_ns or 0)
    return replace(cost, share=cost.total_ns / whole_ns if whole_ns else None)


def _beyond(totals: StepTotals, tags: int, but_tags: int, usual_ns: float) -> float:
    """Excess time of the steps with a tag over as many typical ones, without the phase Profiler.

    Special steps are left out, since the user may be the cause.
    """
    some = totals.select(((totals.tags & tags) != 0) & ((totals.tags & (but_tags | SPECIAL)) == 0))
    taken_ns = int(some.total("duration_ns")) - int(some.total("phases_ns")[_PROFILER])
    return max(0.0, taken_ns - len(some) * usual_ns)


class OutsideRow(Record, frozen=True, kw_only=True):
    """One action outside the loop, and the gap until the next one.

    Attributes:
        is_before: whether it's before the loop, not after it.
        place: the user's method; ``None`` if there is none or it's unknown.
    """

    label: str
    is_before: bool
    calls: int
    total_ns: int
    after_ns: int
    place: Place | None = None

    @property
    def whole_ns(self) -> int:
        return self.total_ns + self.after_ns


class OutsideTimes(Record, frozen=True, kw_only=True):
    """Time around the loop and in it.

    Attributes:
        after_ns: ``None`` if not measured.
        sanity_ns: time of the sanity check; ``None`` without one.
    """

    rows: tuple[OutsideRow, ...]
    before_ns: int
    loop_ns: int
    after_ns: int | None
    sanity_ns: int | None

    def share(self, ns: float) -> float:
        """Share of all measured time."""
        return ns / max(self.before_ns + self.loop_ns + (self.after_ns or 0), 1)


def outside_times(around: OutsideLoop | None, setup: TrainingSetup | None, loop_ns: int) -> OutsideTimes:
    if around is None:
        raise NotMeasured("not measured for your own loops and runs saved by an older version")
    sides = {True: around.before, False: around.after or ()}
    rows = [(_outside_row(one, side, setup), one.action) for side, some in sides.items() for one in some]
    return OutsideTimes(
        rows=tuple(row for row, _ in rows),
        before_ns=sum(row.whole_ns for row, _ in rows if row.is_before),
        loop_ns=loop_ns,
        after_ns=None if around.after is None else sum(row.whole_ns for row, _ in rows if not row.is_before),
        sanity_ns=next((row.total_ns for row, name in rows if name == SANITY_CHECK), None),
    )


def _outside_row(one: ActionTime, is_before: bool, setup: TrainingSetup | None) -> OutsideRow:
    """Strip the owner's state: ``[Callback]ModelCheckpoint{...}.on_fit_end`` is ModelCheckpoint's."""
    owner, _, hook = one.action.rpartition(".")
    kind, _, name = owner[1:].rpartition("]")
    labels = {SANITY_CHECK: "sanity check", REPORT: "this profiler's report"}
    return OutsideRow(
        label=labels.get(one.action, f"{name.partition('{')[0]}.{hook}".lstrip(".")),
        is_before=is_before,
        calls=one.calls,
        total_ns=one.total_ns,
        after_ns=one.after_ns,
        place=None if setup is None else _place(setup, kind, name, hook),
    )


def _place(setup: TrainingSetup, kind: str, name: str, hook: str) -> Place | None:
    hooks = {"LightningModule": setup.module_hooks, "LightningDataModule": setup.data_hooks}.get(kind, {})
    if kind == "Callback":
        hooks = next((one.hooks for one in setup.callbacks if one.callback == name), {})
    return setup.module_hooks.get("validation_step") if hook == SANITY_CHECK else hooks.get(hook)
