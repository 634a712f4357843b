"""Traces of windows during which workers of a DataLoader made batches, at known times by another clock."""

from __future__ import annotations

import msgspec

from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from lightning_modelprof.run.workers import WorkerBatches
from tests.support.traces import event, make_trace

APART_NS = 7_000_000_000_000
"""By so much the training's clock is ahead of the trace's."""
STEP_US = 10_000


def batches(*rows):
    """Of (worker, index, begin, fetched, ready) in microseconds of the trace; in the order of being ready."""
    rows = sorted(rows, key=lambda row: row[4])
    worker, index, *times = zip(*rows, strict=True)
    begin, fetched, ready = (tuple(us * 1000 + APART_NS for us in one) for one in times)
    return WorkerBatches(
        worker=worker, index=index, begin_ns=begin, fetched_ns=fetched, ready_ns=ready,
        cpu_ns=(1_500_000,) * len(rows), samples=(4,) * len(rows),
    )  # fmt: skip


def loader(*rows, number=0):
    """As WorkerProbes gives them."""
    return number, batches(*rows)


def window(*loaders, first=20, in_epoch=(5, 6, 7), late_us=(3, 5), fetches=1, more=(), **changes):
    """A trace of three steps; each fetches in its first 2 ms.

    Args:
        loaders: what was noted of them.
        first: number of the first step.
        in_epoch: the numbers of the steps in their epochs.
        late_us: how long after the range was opened and closed the clock was read.
        fetches: of each step.
        more: other events.
        changes: of what was noted.
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
