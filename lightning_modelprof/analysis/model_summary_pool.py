"""Model Summaries of several ranks as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from lightning_modelprof.analysis.timeline.tally import share
from lightning_modelprof.analysis.trace.model_summary import NO_DEVICE_NOTE, ModelSummary, ModelSummaryRow

_SOME_DEVICES_NOTE: Final = "Some ranks have no device events: the GPU figures are those of the others."


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
    device_whole_ns = _sum([row.device_total_ns for row in whole])
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
        device_outside_ns=_sum(outside_ns),
        notes=tuple(notes),
    )


def _pool_row(
    rows: Sequence[ModelSummaryRow], host_whole_ns: int, device_whole_ns: int | None
) -> ModelSummaryRow:
    host_total_ns = sum(row.host_total_ns for row in rows)
    device_total_ns = _sum([row.device_total_ns for row in rows])
    # A phase that is a range on one rank and pieced together on another has no calls that could be counted.
    calls = None if any(row.calls is None for row in rows) else _sum([row.calls for row in rows])
    has_device_calls = calls and any(row.device_avg_ns is not None for row in rows)
    return ModelSummaryRow(
        key=rows[0].key,
        label=rows[0].label,
        depth=rows[0].depth,
        calls=calls,
        host_total_ns=host_total_ns,
        host_avg_ns=_mean([(row.host_avg_ns, row.calls) for row in rows]) if calls else None,
        host_max_ns=_extreme(max, [row.host_max_ns for row in rows]) if calls else None,
        host_min_ns=_extreme(min, [row.host_min_ns for row in rows]) if calls else None,
        host_ratio=share(host_total_ns, host_whole_ns),
        device_total_ns=device_total_ns,
        device_avg_ns=_mean([(row.device_avg_ns, row.calls) for row in rows]) if has_device_calls else None,
        device_max_ns=_extreme(max, [row.device_max_ns for row in rows]) if calls else None,
        device_min_ns=_extreme(min, [row.device_min_ns for row in rows]) if calls else None,
        device_ratio=share(device_total_ns, device_whole_ns),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    """Sum of what is known; ``None`` when nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(pairs: Sequence[tuple[float | None, int | None]]) -> float | None:
    """Mean of averages, weighted by their calls."""
    known = [(value, calls) for value, calls in pairs if value is not None and calls]
    if not known:
        return None
    return sum(value * calls for value, calls in known) / sum(calls for _, calls in known)


def _extreme(choose: Callable[[list[int]], int], values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None
