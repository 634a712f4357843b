"""Model Summary: composition of the profiled steps by phase, on the host and on the device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.pooling import Key, OfAll
from lightning_modelprof.analysis.timeline.host_phases import (
    HostTime,
    PhaseSource,
    Steps,
    has_step_ranges,
    recorded_steps,
)
from lightning_modelprof.analysis.timeline.intervals import length, locate
from lightning_modelprof.analysis.timeline.tally import Tally, sum_by, tally
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record, asdict
from lightning_modelprof.run.phases import PHASES

_CORE_KEYS: Final = tuple(phase.key for phase in PHASES if phase.is_core)


_LABELS: Final = {
    "profile_step": "ProfileStep",
    **{phase.key: phase.label for phase in PHASES},
    "others": "Others",
    "unattributed": "Not in any range",
}


_DERIVED_NOTE: Final = (
    "The trace has no lightning-modelprof ranges, so phases come from torch's own. Dataloader, Optimization"
    " and Zero grad are torch's ranges, Backward is time in autograd nodes on any thread, and Forward is"
    " time in operators before a step's first backward, including the batch's transfer. With a closure, the"
    " optimizer step starts after its backward. Phases without a range are left out."
)


_NO_PHASES_NOTE: Final = "The trace has no ranges that separate the phases, so all time is in Others."


NO_STEPS: Final = "the trace has none of the recorded steps"


NO_RANGES: Final = "the trace has no ProfilerStep ranges (profiler.step() was not called)"


EMPTY_RANGES: Final = "the trace's ProfilerStep ranges have length 0"


class _Figures(Record, frozen=True, kw_only=True):
    """Time of one phase; ``None`` means not measured.

    Attributes:
        host_total_ns: time in which the phase is the innermost one, clipped to the steps.
        host_calls: the same for each range that starts in a step (for the steps, for each step); ``None`` for
            phases that aren't ranges, or are pieced together on some ranks.
        device_total_ns: summed durations of the device events launched in that time.
        device_calls: the same for each of these ranges.
    """

    host_total_ns: int
    host_calls: OfAll[Tally] = None
    device_total_ns: int | None
    device_calls: Tally | None = None

    @property
    def calls(self) -> int | None:
        return None if self.host_calls is None else self.host_calls.calls

    def minus(self, others: Collection[_Figures]) -> _Figures:
        """Remainder without ``others``, which are parts of this."""
        device = self.device_total_ns
        return _Figures(
            host_total_ns=self.host_total_ns - sum(other.host_total_ns for other in others),
            device_total_ns=None
            if device is None
            else device - sum(other.device_total_ns or 0 for other in others),
        )


class ModelSummaryRow(_Figures, frozen=True, kw_only=True):
    """Time of one phase with its place in the table.

    Attributes:
        key: phase key, or ``profile_step``, ``others``, ``unattributed``.
        depth: 0 for the steps, 1 for the phases that Paddle shows and Others, 2 for the parts of Others.
    """

    key: Key[str]
    label: str
    depth: Key[int]


class ModelSummary(Record, frozen=True, kw_only=True):
    """Time of a window's steps by phase.

    The rows of depth 1 sum to the first row, and those of depth 2 to Others, exactly.

    Attributes:
        rows: ProfileStep, the phases, Others and its parts.
        step_numbers: in order of time.
        device_outside_ns: durations of the device events in no row, because their launch is outside the steps
            or not in the trace; ``None`` without device events.
    """

    rows: tuple[ModelSummaryRow, ...]
    num_steps: int
    step_numbers: tuple[int, ...]
    has_device: bool
    phase_source: PhaseSource
    device_outside_ns: int | None
    notes: tuple[str, ...]


def summarize_model(timeline: Timeline) -> ModelSummary:
    """Split the profiled steps among the phases.

    A phase owns the time in which its range is the innermost one on the steps' thread, and the device events
    that any thread launched during that time.

    Raises:
        NotMeasured: without ``ProfilerStep`` ranges, or without any of the recorded steps.
    """
    trace, found, host = timeline.trace, timeline.steps, timeline.host_time
    if found is None and recorded_steps(trace) is not None:
        raise NotMeasured(NO_STEPS)
    if found is None or host is None or not found.has_ranges:
        raise NotMeasured(EMPTY_RANGES if has_step_ranges(trace) else NO_RANGES)
    work = trace.device.event
    device_ns, launch_ns = trace.end_ns[work] - trace.begin_ns[work], timeline.launch.begin_ns
    has_device = timeline.has_device
    step_of = locate(launch_ns, found.intervals)
    outside = step_of < 0
    notes = list(found.notes)
    if host.source != "modelprof ranges":
        notes.append(_DERIVED_NOTE if host.source == "torch ranges" else _NO_PHASES_NOTE)
    if outside.any():
        notes.append(
            f"{int(outside.sum())} of {len(device_ns)} GPU events aren't in any row because they were"
            " launched outside these steps or their launch isn't in the trace."
        )
    return ModelSummary(
        rows=_rows(found, host, device_ns[~outside], launch_ns[~outside], has_device),
        num_steps=len(found.numbers),
        step_numbers=found.numbers,
        has_device=has_device,
        phase_source=host.source,
        device_outside_ns=int(device_ns[outside].sum()) if has_device else None,
        notes=tuple(notes),
    )


def _rows(
    steps: Steps,
    host: HostTime,
    device_ns: NDArray[np.int64],
    launch_ns: NDArray[np.int64],
    has_device: bool,
) -> tuple[ModelSummaryRow, ...]:
    """All rows; ``device_ns`` and ``launch_ns`` are of the device events launched in the steps."""
    whole, by_phase = _figures(steps, host, device_ns, launch_ns, has_device)
    core = {key: by_phase[key] for key in _CORE_KEYS if key in by_phase}
    parts = {key: by_phase[key] for key in by_phase if key not in core}
    others = whole.minus(core.values())
    parts["unattributed"] = others.minus(parts.values())
    shown = {key: one for key, one in parts.items() if one.calls or one.host_total_ns or one.device_total_ns}
    return (
        _row("profile_step", 0, whole),
        *(_row(key, 1, figures) for key, figures in core.items()),
        _row("others", 1, others),
        *(_row(key, 2, figures) for key, figures in shown.items()),
    )


def _row(key: str, depth: int, figures: _Figures) -> ModelSummaryRow:
    return ModelSummaryRow(key=key, label=_LABELS.get(key, key), depth=depth, **asdict(figures))


def _figures(
    steps: Steps,
    host: HostTime,
    device_ns: NDArray[np.int64],
    launch_ns: NDArray[np.int64],
    has_device: bool,
) -> tuple[_Figures, dict[str, _Figures]]:
    """Figures of the steps, and of each phase in the order of ``PHASES``."""
    step_device = sum_by(locate(launch_ns, steps.intervals), device_ns, len(steps.numbers))
    whole = _Figures(
        host_total_ns=length(steps.intervals),
        host_calls=tally(steps.intervals[:, 1] - steps.intervals[:, 0]),
        device_total_ns=int(step_device.sum()) if has_device else None,
        device_calls=tally(step_device) if has_device else None,
    )
    num_calls = len(host.phase)
    call_host = sum_by(host.call, host.pieces[:, 1] - host.pieces[:, 0], num_calls)
    piece = locate(launch_ns, host.pieces)
    in_phase = piece >= 0
    call_device = sum_by(host.call[piece[in_phase]], device_ns[in_phase], num_calls)
    begins_in_step = locate(host.begin_ns, steps.intervals) >= 0
    seen = dict.fromkeys(host.phase.tolist())
    if host.source == "modelprof ranges":
        seen |= dict.fromkeys(_CORE_KEYS)  # they always have ranges: none here means that none ran
    known = [phase.key for phase in PHASES if phase.key in seen]
    by_phase = {}
    for key in dict.fromkeys((*known, *seen)):
        own = host.phase == key
        counted = own & begins_in_step
        has_calls = key not in host.not_ranges
        by_phase[key] = _Figures(
            host_total_ns=int(call_host[own].sum()),
            host_calls=tally(call_host[counted]) if has_calls else None,
            device_total_ns=int(call_device[own].sum()) if has_device else None,
            device_calls=tally(call_device[counted]) if has_calls and has_device else None,
        )
    return whole, by_phase
