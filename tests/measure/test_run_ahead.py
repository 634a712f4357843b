"""Steps in which the CPU ran ahead of the GPU aren't clean: their wall time is too short."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.measure.steps.recorder import tag_steps_run_ahead
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag, StepTimings

MS = 1_000_000


def steps(host_ms: list[float], device_ms: list[float | None], tags: dict[int, StepTag] | None = None):
    """Steps whose host and device time is all in one phase; ``None`` means no device time."""
    count = len(host_ms)
    phases_ns, device_phases_ns = (np.zeros((count, len(PHASES)), np.int64) for _ in range(2))
    phases_ns[:, 2] = [round(one * MS) for one in host_ms]
    for number, one in enumerate(device_ms):
        device_phases_ns[number] = NOT_MEASURED if one is None else 0
        if one is not None:
            device_phases_ns[number, 2] = round(one * MS)
    all_tags = np.zeros(count, np.int64)
    for number, tag in (tags or {}).items():
        all_tags[number] = int(tag)
    return StepTimings(
        step=np.arange(count),
        duration_ns=phases_ns.sum(axis=1),
        phases_ns=phases_ns,
        device_phases_ns=device_phases_ns,
        samples=np.full(count, NOT_MEASURED, np.int64),
        tags=all_tags,
    )


def run_ahead(timings: StepTimings) -> list[int]:
    tag_steps_run_ahead(timings)
    return timings.step[(timings.tags & StepTag.RUN_AHEAD) != 0].tolist()


def test_steps_filling_queue_are_left_out():
    filling_then_full = steps([1.0] * 10 + [10.0] * 20, [10.0] * 30)
    assert run_ahead(filling_then_full) == list(range(10))
    assert filling_then_full.clean().duration_ns.mean() == 10 * MS


def test_queue_that_never_fills_tags_no_step():
    assert run_ahead(steps([1.0] * 20, [10.0] * 20)) == []


def test_cpu_waiting_for_each_step_is_not_ahead():
    host = [10.0, 11.0, 9.5, 10.5, 10.0, 9.0]
    assert run_ahead(steps(host, [10.1, 10.9, 9.6, 10.4, 10.1, 9.0])) == []


def test_regular_wait_for_queue_tags_no_step():
    """Every tenth step waits for the nine before it, as when logging a value, so the mean is right."""
    host = ([1.0] * 9 + [91.0]) * 4
    assert run_ahead(steps(host, [10.0] * 40)) == []


def test_clean_steps_after_validation_are_judged_separately():
    host = [10.0] * 5 + [60.0] + [1.0] * 4 + [10.0] * 10
    tagged = steps(host, [10.0] * 20, {5: StepTag.VALIDATION})
    assert run_ahead(tagged) == [6, 7, 8, 9]


def test_steps_without_device_time_keep_their_tags():
    tagged = steps([1.0] * 6, [None] * 6, {0: StepTag.SKIP_FIRST})
    assert run_ahead(tagged) == []
    assert tagged.tags.tolist() == [int(StepTag.SKIP_FIRST), 0, 0, 0, 0, 0]


def test_tags_follow_latest_data():
    """A save in the middle of a run sees a queue that is still filling; later it proves to be full."""
    early = steps([1.0] * 10 + [10.0] * 2, [10.0] * 12)
    assert run_ahead(early) == list(range(10))
    later = steps([1.0] * 10 + [10.0] * 10, [10.0] * 20)
    later.tags[:12] = early.tags
    assert run_ahead(later) == list(range(10))
    caught_up = steps([1.0] * 10 + [10.0, 100.0], [10.0] * 12)
    caught_up.tags[:] = early.tags
    assert run_ahead(caught_up) == []


@given(
    st.lists(st.floats(0.5, 40), min_size=1, max_size=60),
    st.lists(st.floats(0.5, 40), min_size=60, max_size=60),
)
def test_clean_steps_take_cpu_as_long_as_device(host, device):
    timings = steps(host, device[: len(host)])
    clean = timings.clean()
    if run_ahead(timings):
        clean = timings.clean()
        assert len(clean)
        queued = clean.device_phases_ns.sum() - clean.duration_ns.sum()
        device_ns = clean.device_phases_ns.sum()
        median_ns = np.median(timings.device_phases_ns.sum(axis=1))
        assert queued <= max(0.01 * device_ns, 0.25 * median_ns) + 1
