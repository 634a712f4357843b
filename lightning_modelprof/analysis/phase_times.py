"""Where the time of all finished steps went, by phase."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.records import NOT_MEASURED, StepTimings


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


def phase_times(steps: StepTimings) -> tuple[PhaseTime, ...]:
    """Time by phase, in the order of ``PHASES``; phases without any time are left out."""
    found = []
    wall_ns = int(steps.duration_ns.sum())
    for index, phase in enumerate(PHASES):
        column = steps.phases_ns[:, index]
        device = steps.device_phases_ns[:, index]
        device = device[device != NOT_MEASURED]
        measured = len(column) > 0 and bool((column != NOT_MEASURED).all())
        if len(column) == 0 or (measured and not column.any()):
            continue
        total_ns = int(column.sum()) if measured else None
        found.append(
            PhaseTime(
                key=phase.key,
                label=phase.label,
                num_steps=int((column > 0).sum()),
                total_ns=total_ns,
                avg_ns=None if total_ns is None else total_ns / len(column),
                max_ns=int(column.max()) if measured else None,
                min_ns=int(column.min()) if measured else None,
                ratio=None if total_ns is None or wall_ns == 0 else total_ns / wall_ns,
                device_total_ns=int(device.sum()) if len(device) else None,
                device_num_steps=len(device),
            )
        )
    return tuple(found)
