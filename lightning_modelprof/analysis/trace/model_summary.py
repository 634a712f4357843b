"""Model Summary: what the profiled steps consist of, on the host and on the device, phase by phase."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.sums import of_known, sum_of_known
from lightning_modelprof.analysis.timeline.host_phases import (
    HostTime,
    PhaseSource,
    Steps,
    has_step_ranges,
    recorded_steps,
)
from lightning_modelprof.analysis.timeline.intervals import length, locate
from lightning_modelprof.analysis.timeline.tally import share, sum_by
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import PHASES

_CORE_KEYS: Final = tuple(phase.key for phase in PHASES if phase.is_core)


_LABELS: Final = {phase.key: phase.label for phase in PHASES}


_DERIVED_NOTE: Final = (
    "The trace has no lightning-modelprof ranges, so phases come from torch's own. Dataloader, Optimization"
    " and Zero grad are torch's ranges, Backward is time in autograd nodes on any thread, and Forward is"
    " time in operators before a step's first backward, including the batch's transfer. With a closure, the"
    " optimizer step starts after its backward. Phases without a range are left out."
)


_NO_PHASES_NOTE: Final = "The trace has no ranges that separate the phases, so all time is in Others."


NO_DEVICE_NOTE: Final = "The trace has no GPU events, so GPU figures are dashes."


NO_STEPS: Final = "the trace has none of the recorded steps"


NO_RANGES: Final = "the trace has no ProfilerStep ranges (profiler.step() was not called)"


EMPTY_RANGES: Final = "the trace's ProfilerStep ranges have length 0"


class ModelSummaryRow(Record, frozen=True, kw_only=True):
    """Time of one phase; ``None`` is *not measured*.

    Attributes:
        key: phase key, or ``profile_step``, ``others``, ``unattributed``.
        depth: 0 for the steps, 1 for the phases that Paddle shows and Others, 2 for what Others consists of.
        calls: ranges that begin in a step; ``None`` for what is not a range.
        host_total_ns: time in which the phase is the innermost one, clipped to the steps.
        host_avg_ns, host_max_ns, host_min_ns: the same per call (for the steps per step).
        host_ratio: share of the steps' time; ``None`` if that is 0.
        device_total_ns: summed durations of the device events launched in that time.
        device_avg_ns, device_max_ns, device_min_ns: the same per call.
        device_ratio: share of the device time launched in the steps; ``None`` if that is 0.
    """

    key: str
    label: str
    depth: int
    calls: int | None
    host_total_ns: int
    host_avg_ns: float | None
    host_max_ns: int | None
    host_min_ns: int | None
    host_ratio: float | None
    device_total_ns: int | None
    device_avg_ns: float | None
    device_max_ns: int | None
    device_min_ns: int | None
    device_ratio: float | None


class ModelSummary(Record, frozen=True, kw_only=True):
    """Where the time of a window's steps went.

    The rows of depth 1 sum to the first row, and those of depth 2 to Others, exactly.

    Attributes:
        rows: ProfileStep, the phases, Others and its parts.
        step_numbers: their numbers, in order of time.
        device_outside_ns: durations of the device events that are in no row, because their launch lies
            outside the steps or is not in the trace; ``None`` without device events.
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

    A phase owns the time in which its range is the innermost one on the steps' thread, and the device
    events that any thread launched during that time.

    Raises:
        NotMeasured: when the trace has no ``ProfilerStep`` ranges, or none of those that were to be recorded.
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
    if not has_device:
        notes.append(NO_DEVICE_NOTE)
    elif outside.any():
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


class _Figures(Record, frozen=True, kw_only=True):
    """What a row is made of: totals, and the values per call, ``None`` for what has no calls.

    ``device_total_ns`` and ``device_values_ns`` are ``None`` without device events.
    """

    host_total_ns: int
    host_values_ns: NDArray[np.int64] | None
    device_total_ns: int | None
    device_values_ns: NDArray[np.int64] | None

    def minus(self, others: Collection[_Figures]) -> _Figures:
        """What is left when others, which are parts of this, are taken out."""
        device = self.device_total_ns
        return _Figures(
            host_total_ns=self.host_total_ns - sum(other.host_total_ns for other in others),
            host_values_ns=None,
            device_total_ns=None
            if device is None
            else device - sum(other.device_total_ns or 0 for other in others),
            device_values_ns=None,
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
    rows = [_row("profile_step", "ProfileStep", 0, whole, whole)]
    rows += [_row(key, _LABELS[key], 1, figures, whole) for key, figures in core.items()]
    rows.append(_row("others", "Others", 1, others, whole))
    for key, figures in parts.items():
        label = "Not in any range" if key == "unattributed" else _LABELS.get(key, key)
        row = _row(key, label, 2, figures, whole)
        if row.calls or row.host_total_ns or row.device_total_ns:
            rows.append(row)
    return tuple(rows)


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
        host_values_ns=steps.intervals[:, 1] - steps.intervals[:, 0],
        device_total_ns=int(step_device.sum()) if has_device else None,
        device_values_ns=step_device if has_device else None,
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
    for key in [*known, *(key for key in seen if key not in _LABELS)]:
        own = host.phase == key
        counted = own & begins_in_step
        has_calls = key not in host.not_ranges
        by_phase[key] = _Figures(
            host_total_ns=int(call_host[own].sum()),
            host_values_ns=call_host[counted] if has_calls else None,
            device_total_ns=int(call_device[own].sum()) if has_device else None,
            device_values_ns=call_device[counted] if has_calls and has_device else None,
        )
    return whole, by_phase


def _row(key: str, label: str, depth: int, figures: _Figures, whole: _Figures) -> ModelSummaryRow:
    values, device_values = figures.host_values_ns, figures.device_values_ns
    host_avg, host_max, host_min = _per_call(values)
    device_avg, device_max, device_min = _per_call(device_values)
    return ModelSummaryRow(
        key=key,
        label=label,
        depth=depth,
        calls=None if values is None else len(values),
        host_total_ns=figures.host_total_ns,
        host_avg_ns=host_avg,
        host_max_ns=host_max,
        host_min_ns=host_min,
        host_ratio=share(figures.host_total_ns, whole.host_total_ns),
        device_total_ns=figures.device_total_ns,
        device_avg_ns=device_avg,
        device_max_ns=device_max,
        device_min_ns=device_min,
        device_ratio=share(figures.device_total_ns, whole.device_total_ns),
    )


def _per_call(values_ns: NDArray[np.int64] | None) -> tuple[float | None, int | None, int | None]:
    """Average, maximum and minimum; ``None`` without a call."""
    if values_ns is None or not len(values_ns):
        return None, None, None
    return int(values_ns.sum()) / len(values_ns), int(values_ns.max()), int(values_ns.min())


_SOME_DEVICES_NOTE: Final = "Some ranks have no GPU events, so GPU figures only cover the others."


def pool_model_summaries(ranks: Sequence[ModelSummary]) -> ModelSummary:
    """One summary over all ranks' steps: calls and totals are summed, maxima and minima are over all ranks.

    A device total is summed over the ranks that have device events.
    """
    if len(ranks) == 1:
        return ranks[0]
    # Every rank lists its rows in the same order, but one may lack some.
    keys = [row.key for row in max(ranks, key=lambda rank: len(rank.rows)).rows]
    keys += [row.key for rank in ranks for row in rank.rows if row.key not in keys]
    by_key = {
        key: [row for rank in ranks for row in rank.rows if row.key == key] for key in dict.fromkeys(keys)
    }
    whole = by_key["profile_step"]
    host_whole_ns = sum(row.host_total_ns for row in whole)
    device_whole_ns = sum_of_known([row.device_total_ns for row in whole])
    outside_ns = [rank.device_outside_ns for rank in ranks]
    has_device = [rank.has_device for rank in ranks]
    notes = dict.fromkeys(note for rank in ranks for note in rank.notes)
    if any(has_device) and not all(has_device):
        del notes[NO_DEVICE_NOTE]
        notes[_SOME_DEVICES_NOTE] = None
    return ModelSummary(
        rows=tuple(_pool_row(rows, host_whole_ns, device_whole_ns) for rows in by_key.values()),
        num_steps=sum(rank.num_steps for rank in ranks),
        step_numbers=tuple(sorted({number for rank in ranks for number in rank.step_numbers})),
        has_device=any(has_device),
        phase_source=ranks[0].phase_source,
        device_outside_ns=sum_of_known(outside_ns),
        notes=tuple(notes),
    )


def _pool_row(
    rows: Sequence[ModelSummaryRow], host_whole_ns: int, device_whole_ns: int | None
) -> ModelSummaryRow:
    host_total_ns = sum(row.host_total_ns for row in rows)
    device_total_ns = sum_of_known([row.device_total_ns for row in rows])
    # A phase that is a range on one rank and pieced together on another has no calls that could be counted.
    calls = None if any(row.calls is None for row in rows) else sum_of_known([row.calls for row in rows])
    has_device_calls = calls and any(row.device_avg_ns is not None for row in rows)
    return ModelSummaryRow(
        key=rows[0].key,
        label=rows[0].label,
        depth=rows[0].depth,
        calls=calls,
        host_total_ns=host_total_ns,
        host_avg_ns=_mean([(row.host_avg_ns, row.calls) for row in rows]) if calls else None,
        host_max_ns=of_known(max, [row.host_max_ns for row in rows]) if calls else None,
        host_min_ns=of_known(min, [row.host_min_ns for row in rows]) if calls else None,
        host_ratio=share(host_total_ns, host_whole_ns),
        device_total_ns=device_total_ns,
        device_avg_ns=_mean([(row.device_avg_ns, row.calls) for row in rows]) if has_device_calls else None,
        device_max_ns=of_known(max, [row.device_max_ns for row in rows]) if calls else None,
        device_min_ns=of_known(min, [row.device_min_ns for row in rows]) if calls else None,
        device_ratio=share(device_total_ns, device_whole_ns),
    )


def _mean(pairs: Sequence[tuple[float | None, int | None]]) -> float | None:
    """Mean of averages, weighted by their calls."""
    known = [(value, calls) for value, calls in pairs if value is not None and calls]
    if not known:
        return None
    return sum(value * calls for value, calls in known) / sum(calls for _, calls in known)
