"""Traces of windows in which DataLoader workers made batches, at known times of another clock."""

from __future__ import annotations

import msgspec

from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from lightning_modelprof.run.workers import WorkerBatches
from tests.support.traces import event, make_trace

APART_NS = 7_000_000_000_000
"""How far the training's clock is ahead of the trace's."""
STEP_US = 10_000


def batches(*rows):
    """Make batches of (worker, index, start, fetched, ready) in trace microseconds, ordered by ready."""
    rows = sorted(rows, key=lambda row: row[4])
    worker, index, *times = zip(*rows, strict=True)
    begin, fetched, ready = (tuple(us * 1000 + APART_NS for us in one) for one in times)
    return WorkerBatches(
        worker=worker, index=index, begin_ns=begin, fetched_ns=fetched, ready_ns=ready,
        cpu_ns=(1_500_000,) * len(rows), samples=(4,) * len(rows),
    )  # fmt: skip


def loader(*rows, number=0):
    """As from WorkerProbes."""
    return number, batches(*rows)


def window(*loaders, first=20, in_epoch=(5, 6, 7), late_us=(3, 5), fetches=1, more=(), **changes):
    """A trace of three steps; each fetches in its first 2 ms.

    Args:
        loaders: their recorded batches.
        first: number of the first step.
        in_epoch: step numbers within their epochs.
        late_us: delay of the clock reads after a range's start and end.
        fetches: per step.
        more: other events.
        changes: of the recorded metadata.
    """
    events, marks = [*more], []
    for place, number in enumerate(in_epoch):
        begin = place * STEP_US
        events.append(event("user_annotation", f"ProfilerStep#{first + place}", begin, begin + STEP_US))
        for fetch in range(fetches):
            at = begin + 100 + 3_000 * fetch
            events.append(event("user_annotation", "modelprof: dataloader", at, at + 2_000))
        events.append(event("cpu_op", "aten::mm", begin + 9_000, begin + 9_500))
        marks.append(
            [number, *(us * 1000 + APART_NS for us in (begin + late_us[0], begin + STEP_US + late_us[1]))]
        )
    noted = {
        "recorded_steps": [first + place for place in range(len(in_epoch))],
        "step_marks": marks,
        "workers": msgspec.to_builtins(loaders),
    }
    return make_trace(events, **{TRACE_METADATA_KEY: noted | changes})
