"""Where the time of all finished steps went, by phase."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.step_totals import StepTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase over all finished steps, clean or not; the totals sum to the steps' wall time exactly.

    Attributes:
        key, label: of the phase.
        num_steps: steps in which the phase took any time.
        total_ns: self time; ``None`` when the phase could not be measured.
        avg_ns: total over *all* finished steps; ``None`` as above.
        max_ns, min_ns: longest and shortest in one step; ``None`` as above.
        ratio: share of the steps' wall time; ``None`` as above, or without any wall time.
        device_total_ns: elapsed time on the device's stream over the steps whose device time is known;
            ``None`` when it is known for none.
        device_num_steps: how many steps that is.
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
    """Time by phase, in the order of ``PHASES``; phases without any time are left out.

    Args:
        totals: of all finished steps.
    """
    found: list[PhaseTime] = []
    num_steps, wall_ns = len(totals), int(totals.whole("duration_ns"))
    if num_steps == 0:
        return ()
    is_measured = totals.measured_phases()
    sums_ns, device_ns = totals.whole("phases_ns"), totals.whole("device_ns")
    num_in_phase, num_on_device = totals.whole("num_in_phase"), totals.whole("num_on_device")
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
