"""Predicted worker count for a loader without workers, based on its fetches, with hand-made steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_modelprof.analysis.steps.fetch_queue import fetch_queue
from lightning_modelprof.analysis.steps.fetches import HANDOVER_NS
from lightning_modelprof.analysis.steps.workers import measured_workers
from lightning_modelprof.run.batches import CpuUse
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from lightning_modelprof.run.steps import StepTag
from tests.analysis.test_loader_queue import torchs_times
from tests.support.diagnosed import MS, SETUP, analysis_of, steps_of, with_loader
from tests.support.facts import why_not

HANDOVER = HANDOVER_NS / MS


def used(fetch_ms, rest_ms, *, computing=0.0, cpus=8, rest_cpu_ms=0.0):
    """CPU times of ten steps on this many CPUs without other users."""
    step_ns = round(10 * (fetch_ms + rest_ms) * MS)
    return CpuUse(
        num_steps=10,
        steps_ns=step_ns,
        fetches_ns=round(10 * fetch_ms * MS),
        fetches_thread_ns=round(10 * computing * fetch_ms * MS),
        rest_thread_ns=round(10 * min(rest_cpu_ms, rest_ms) * MS),
        rest_process_ns=round(10 * rest_cpu_ms * MS),
        loop_ns=step_ns,
        process_ns=round(10 * (computing * fetch_ms + rest_cpu_ms) * MS),
        workers_ns=0,
        busy_ns=round(10 * (computing * fetch_ms + rest_cpu_ms) * MS),
        cpus_ns=cpus * step_ns,
    )


def queue_of(fetch_ms, rest_ms, *, cpus=8, setup=SETUP, num_steps=40, tags=None, stacks=None, **more):
    steps = steps_of(num_steps, tags, more.pop("device_ms", None), forward=rest_ms, dataloader=fetch_ms)
    cpu = more["cpu"] if "cpu" in more else used(float(np.mean(fetch_ms)), rest_ms, cpus=cpus, **more)
    facts = analysis_of(steps, setup=replace(setup, usable_cpus=cpus), cpu=cpu, stacks=stacks)
    return facts.read(fetch_queue)


def steps_by_workers(queue):
    return {one.workers: one.step_ns / MS for one in queue.predictions if one.prefetch_factor == 2}


def test_fetches_that_wait():
    """40 ms per batch and 10 ms of rest: w workers deliver one every 40 / w, each handed over in the step."""
    queue = queue_of(40, 10, cpus=2)
    found = steps_by_workers(queue)
    assert found.pop(0) == 50
    assert found == {workers: max(10 + HANDOVER, 40 / workers) for workers in range(1, 9)}
    assert (queue.present.workers, queue.present.step_ns, queue.step_ns) == (0, 50 * MS, 50 * MS)
    assert (queue.advised.workers, queue.advised.prefetch_factor) == (4, 2)
    assert (queue.handover_ns, queue.computing, queue.ready, queue.order_cost_ns) == (HANDOVER_NS, 0, 0, None)
    assert queue.helps


@pytest.mark.parametrize(("cpus", "rest_cpu_ms"), [(2, 0), (2, 10), (2, 20), (3, 10), (8, 10)])
def test_computing_fetches_share_cpus_with_step(cpus, rest_cpu_ms):
    """A step and its batch of 40 ms share the CPU time of this many CPUs."""
    found = steps_by_workers(queue_of(40, 10, cpus=cpus, computing=1.0, rest_cpu_ms=rest_cpu_ms))
    assert found.pop(0) == 50
    assert set(found) == set(range(1, cpus + 1))
    for workers, step_ms in found.items():
        expected = max(10 + HANDOVER, 40 / workers, (40 + rest_cpu_ms) / cpus)
        # Workers and the step slow each other down if all CPUs are busy: by at most a tenth.
        assert expected * 0.99 <= step_ms <= expected * 1.1, workers


def test_busy_single_cpu_gains_nothing():
    queue = queue_of(3, 100, cpus=1, computing=1.0, rest_cpu_ms=100)
    assert steps_by_workers(queue) == {0: 103, 1: pytest.approx(103)}
    assert not queue.helps
    assert queue.advised == queue.present


def test_waiting_and_computing_are_separated_on_one_cpu():
    """10 of 20 ms compute, and the step computes 10: there's no interference, as nothing runs in parallel."""
    queue = queue_of(20, 10, cpus=1, computing=0.5, rest_cpu_ms=10)
    assert queue.computing == pytest.approx(0.5)
    assert steps_by_workers(queue)[1] >= 20, "10 + 10 ms of CPU time"
    assert queue.cpus == 1.0


def test_slow_samples_match_torch_code():
    """One fetch in twenty takes 200 ms, the others 10; torch's loader runs with the same times."""
    draw = np.random.default_rng(3)
    fetch_ms = np.where(np.arange(400) % 20 == 7, 200, 10)
    draw.shuffle(fetch_ms)
    queue = queue_of(fetch_ms, 4, num_steps=400, cpus=8)
    service_ns = draw.choice(fetch_ms, 20_000) * MS
    for workers in (1, 2, 4, 8):
        got_ns = torchs_times(service_ns, [4 * MS] * 19_000, workers, 2, HANDOVER_NS, True)
        found = next(one for one in queue.predictions if (one.workers, one.prefetch_factor) == (workers, 2))
        expected_ns = (got_ns[-1] - got_ns[0]) / (len(got_ns) - 1)
        assert found.step_ns == pytest.approx(expected_ns, rel=0.06), workers
        assert found.low_ns <= expected_ns <= found.high_ns


def test_only_clean_steps_count():
    """Every fourth step, the first of its epoch, takes 500 ms."""
    tags = [StepTag.FIRST_OF_EPOCH if number % 4 == 0 else 0 for number in range(40)]
    fetch_ms = [500 if tag else 40 for tag in tags]
    queue = queue_of(fetch_ms, 10, tags=tags, cpu=used(40, 10))
    assert (queue.num_batches, queue.service_ns) == (30, 40 * MS)
    assert steps_by_workers(queue)[0] == 50


def test_fetch_time_hidden_by_device_saves_nothing():
    """The device waits for 10 of the 40 ms; steps stay at 50 without workers, and workers save those 10."""
    queue = queue_of(40, 10, device_ms={"dataloader": 10})
    found = steps_by_workers(queue)
    assert found[0] == pytest.approx(50)
    assert found[1] == pytest.approx(40 + HANDOVER)
    assert queue.service_ns == 40 * MS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_steps": 19}, "only 19 batches were timed (at least 20)"),
        ({"cpu": None}, "no step's CPU time was read"),
        ({"fetch_ms": None, "cpu": used(40, 10)}, "fetches weren't measured"),
        ({"tags": [StepTag.FIRST_OF_EPOCH] * 40}, "fetches weren't measured"),
        ({"cpu": replace(used(40, 10), fetches_ns=0)}, "no fetch's CPU time was read"),
        (
            {"setup": with_loader(num_workers=2)},
            "there isn't exactly one torch DataLoader with num_workers=0",
        ),
        ({"setup": with_loader(num_workers=None)}, "there isn't exactly one torch DataLoader"),
        ({"setup": replace(SETUP, loaders=SETUP.loaders * 2)}, "there isn't exactly one torch DataLoader"),
        ({"setup": with_loader(batch_size=1000)}, "samples are rows in memory"),
    ],
)
def test_reason_for_missing_prediction(changes, reason):
    assert why_not(queue_of, changes.pop("fetch_ms", 40), 10, **changes).startswith(reason)


def test_choosing_indices_is_not_done_by_workers():
    frame = StackFrame(
        file="dataloader.py",
        line=9,
        function="_BaseDataLoaderIter._next_index",
        function_line=8,
        python_module="torch.utils.data.dataloader",
        is_users=False,
    )
    stack = SampledStack(phase="dataloader", frames=(0,), samples=50, time_ns=900 * MS)
    stacks = StackSamples(frames=(frame,), stacks=(stack,), samples=50)
    reason = "a fetch mostly chooses indices, which always runs in the main process"
    assert why_not(queue_of, 40, 10, stacks=stacks) == reason


def test_prediction_needs_no_measured_workers():
    facts = analysis_of(steps_of(40, forward=10, dataloader=40), cpu=used(40, 10))
    assert facts.get(measured_workers) is None
    assert facts.read(fetch_queue).num_batches == 40
