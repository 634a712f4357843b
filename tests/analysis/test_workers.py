"""Facts derived from hand-made worker records with known answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.steps.fetch_queue import queue_of
from lightning_modelprof.analysis.steps.workers import Cause, _late, measured_workers
from lightning_modelprof.run.batches import CpuUse
from lightning_modelprof.run.steps import StepTag
from lightning_modelprof.run.workers import CallTimes, LoaderWorkers, WorkerBatches, WorkerTimes
from tests.analysis.test_loader_queue import measured
from tests.support.diagnosed import MS, SETUP, analysis_of, steps_of, with_loader
from tests.support.facts import why_not

SAMPLE = CallTimes(name="Images.__getitem__", kind="sample", calls=400, total_ns=0)


def loader(service_ms, workers, *, rest_ms=0, cpu_share=0.0, collate_share=0.0, **worker):
    """A loader whose batches of 4 take these times, and how long steps wait for them."""
    service_ns = [one * MS for one in service_ms]
    batches, waits_ns = measured(service_ns, workers, rest_ns=rest_ms * MS, cpu_share=cpu_share)
    making_ns, number = sum(service_ns), max(1, workers)
    fetch_ns = round((1 - collate_share) * making_ns)
    sample = replace(
        SAMPLE,
        calls=4 * len(service_ns),
        total_ns=fetch_ns,
        cpu_ns=round(cpu_share * fetch_ns),
    )
    times = WorkerTimes(
        worker=0,
        batches=len(service_ns) // number,
        samples=4 * len(service_ns) // number,
        fetch_ns=fetch_ns // number,
        collate_ns=(making_ns - fetch_ns) // number,
        cpu_ns=round(cpu_share * making_ns) // number,
        **worker,
    )
    record = LoaderWorkers(
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        batch_size=4,
        calls=(sample,),
        workers=tuple(replace(times, worker=each) for each in range(number)),
        batches=batches,
    )
    return record, waits_ns[:40] / MS


def facts_of(record, waits_ms, rest_ms, *, cpus=2, cpu=None, init_ms=0, **phases):
    steps = steps_of(
        40,
        [StepTag.FIRST_OF_EPOCH if number % 10 == 0 else 0 for number in range(40)],
        forward=rest_ms,
        dataloader=waits_ms,
        dataloader_init=[init_ms if number % 10 == 0 else 0 for number in range(40)],
        **phases,
    )
    setup = replace(with_loader(num_workers=record.num_workers), usable_cpus=cpus)
    found = analysis_of(steps, workers=(record,), setup=setup, cpu=cpu).read(measured_workers)
    assert len(found) == 1
    return found[0]


def test_one_busy_worker_is_too_few():
    """12 ms per batch, 4 ms of training: three workers are enough."""
    record, waits_ms = loader([12] * 100, 1, rest_ms=4)
    facts = facts_of(record, waits_ms, 4)
    assert facts.wait_ns == pytest.approx(8 * MS)
    assert facts.why is Cause.TOO_FEW_WORKERS
    left_ns = facts.queue.handover_ns  # no number of workers saves this
    assert facts.cause.saving_ns == pytest.approx(8 * MS - left_ns)
    assert facts.cause.share == pytest.approx((8 * MS - left_ns) / (12 * MS))
    assert facts.queue.advised.workers == 3
    assert facts.sample_ns == 3 * MS
    assert not facts.is_computing


def test_batches_wait_or_compute_if_no_worker_count_helps():
    record, waits_ms = loader([40] * 100, 8, rest_ms=1)
    facts = facts_of(record, waits_ms, 1)
    assert not facts.queue.helps
    assert facts.why is Cause.WAITS
    assert facts.cause.saving_ns == pytest.approx(facts.wait_ns)
    record, waits_ms = loader([40] * 100, 2, rest_ms=1, cpu_share=1.0)
    facts = facts_of(record, waits_ms, 1)
    assert facts.why is Cause.COMPUTES
    assert facts.is_computing
    assert facts.computing == 1
    assert facts.queue.needed_factor == pytest.approx(20, rel=0.15)  # relative to the measured step


def test_training_that_hardly_waits_has_no_cause():
    record, _ = loader([2] * 100, 2, rest_ms=20)
    facts = facts_of(record, 0.3, 20)
    assert (facts.why, facts.cause) == (Cause.NONE, None)


def test_dominant_collate_is_named():
    record, waits_ms = loader([40] * 100, 8, rest_ms=1, collate_share=0.75)
    facts = facts_of(record, waits_ms, 1)
    assert facts.collate == 0.75
    assert facts.why is Cause.COLLATE
    assert facts.cause.share == 0.75
    # A step waits for 4 of its 5 ms; batches of 10 ms would make it 1.25 ms.
    assert facts.cause.saving_ns == pytest.approx(0.75 * facts.step_ns)


def test_cpu_wait_is_not_blamed_on_samples():
    """One batch in twenty takes 110 ms instead of 10: a third of the time, unless workers lacked CPU then."""
    for no_cpu_ms, why in ((0, Cause.SLOW_SAMPLES), (130, Cause.WAITS)):  # of 375 ms in each worker
        record, waits_ms = loader(([10] * 19 + [110]) * 10, 8, rest_ms=1, cpu_wait_ns=no_cpu_ms * MS)
        facts = facts_of(record, waits_ms, 1)
        assert facts.cpu_wait == pytest.approx(no_cpu_ms / 375)
        found = [one.share for one in facts.causes if one.why is Cause.SLOW_SAMPLES]
        assert found == pytest.approx([1 / 3] if why is Cause.SLOW_SAMPLES else [])
    unknown, waits_ms = loader([12] * 100, 8, rest_ms=0.5)
    assert facts_of(unknown, waits_ms, 0.5).cpu_wait is None


def test_slow_batches_are_counted():
    record, waits_ms = loader(([10] * 19 + [110]) * 10, 8, rest_ms=1)
    facts = facts_of(record, waits_ms, 1)
    batch = facts.batch
    assert (batch.count, batch.p50_ns, batch.max_ns) == (200, 10 * MS, 110 * MS)
    assert batch.mean_ns == 15 * MS
    assert batch.slow == 0.05
    assert batch.slow_time == pytest.approx(110 / 300)
    slow = next(one for one in facts.causes if one.why is Cause.SLOW_SAMPLES)
    assert slow.share == pytest.approx(100 / 300)


def test_thread_count_separates_pickling_from_threads():
    busy = {"other_cpu_ns": 300 * MS}
    record, waits_ms = loader([40] * 100, 8, rest_ms=1, threads=4, **busy)  # 500 ms of batches in each worker
    facts = facts_of(record, waits_ms, 1)
    assert facts.other_cpu == pytest.approx(0.6)
    assert facts.why is Cause.PICKLING
    record, waits_ms = loader([40] * 100, 8, rest_ms=1, threads=11, **busy)
    assert facts_of(record, waits_ms, 1).why is Cause.THREADS
    roomy = facts_of(record, waits_ms, 1, cpus=72)  # enough CPUs for each thread and for more workers
    assert roomy.why is Cause.TOO_FEW_WORKERS
    assert {one.why for one in roomy.causes} >= {Cause.TOO_FEW_WORKERS, Cause.PICKLING}
    record, waits_ms = loader([40] * 100, 8, rest_ms=1, threads=11, other_cpu_ns=50 * MS)
    assert facts_of(record, waits_ms, 1).why is Cause.WAITS
    record, waits_ms = loader([40] * 100, 8, rest_ms=1)
    assert facts_of(record, waits_ms, 1).other_cpu is None


def test_epoch_start_may_be_only_cause():
    record, _ = loader([2] * 100, 2, rest_ms=20)
    facts = facts_of(record, 0.1, 20, init_ms=300)
    assert facts.why is Cause.START_UP
    assert facts.start_up_ns == pytest.approx(3 * 300 * MS / 40)  # without the run's first epoch
    assert facts.cause.share == pytest.approx(22.5 / (22.5 + 20.1))


def test_shares_for_workers_and_calls():
    record, waits_ms = loader([10] * 100, 2, rest_ms=1, wait_ns=500 * MS, collate_share=0.5)
    inner = CallTimes(
        name="Blur", kind="transform", depth=1, total_ns=400 * MS, error_ns=8 * MS, cpu_ns=100 * MS
    )
    small = CallTimes(name="Flip", kind="transform", depth=1)
    record = replace(record, calls=(replace(record.calls[0], inner_ns=400 * MS), inner, small))
    facts = facts_of(record, waits_ms, 1)
    assert facts.making_ns == 1000 * MS
    assert [one.share for one in facts.calls] == [0.1, 0.4, None]
    assert [one.computing for one in facts.calls] == [0, 0.25, None]
    assert [one.mean_ns for one in facts.calls] == [1.25 * MS, MS, None]
    assert [one.error_ns for one in facts.calls] == [None, 0.02 * MS, None]
    assert [one.waiting for one in facts.workers] == [0.5, 0.5]
    assert facts.waiting == 0.5


def test_cpus_used_by_others_are_subtracted():
    """Two of four CPUs are taken, so four computing workers are no faster than two."""
    record, waits_ms = loader([10] * 100, 1, cpu_share=1.0, rest_ms=1)
    use = CpuUse(
        num_steps=10,
        steps_ns=100 * MS,
        fetches_ns=90 * MS,
        fetches_thread_ns=0,
        rest_thread_ns=0,
        rest_process_ns=0,
        loop_ns=1000 * MS,
        process_ns=0,
        workers_ns=1000 * MS,
        busy_ns=3000 * MS,
        cpus_ns=4000 * MS,
    )
    setup = replace(SETUP, usable_cpus=4, loaders=(replace(SETUP.loaders[0], num_workers=1),))
    found = analysis_of(
        steps_of(40, forward=1, dataloader=waits_ms), workers=(record,), setup=setup, cpu=use
    ).read(measured_workers)[0]
    steps = {(one.workers, one.prefetch_factor): one.step_ns / MS for one in found.queue.predictions}
    assert found.queue.cpus == 2
    assert steps[2, 2] == pytest.approx(5, rel=0.01)
    assert steps[4, 2] == pytest.approx(5, rel=0.01)


def test_share_of_cpus_is_left_if_others_take_all():
    """One of two CPUs, as others would get the other; with eight processes in this training, an eighth."""
    record, waits_ms = loader([10] * 100, 1, cpu_share=0.1, rest_ms=1)
    use = CpuUse(
        num_steps=10,
        steps_ns=100 * MS,
        fetches_ns=90 * MS,
        fetches_thread_ns=0,
        rest_thread_ns=0,
        rest_process_ns=0,
        loop_ns=1000 * MS,
        process_ns=0,
        workers_ns=100 * MS,
        busy_ns=2000 * MS,
        cpus_ns=2000 * MS,
    )
    for ranks, expected in ((1, 1.0), (8, 0.25)):
        setup = replace(with_loader(num_workers=1), usable_cpus=2, local_world_size=ranks)
        steps = steps_of(40, forward=1, dataloader=waits_ms)
        [facts] = analysis_of(steps, workers=(record,), setup=setup, cpu=use).read(measured_workers)
        assert facts.queue.cpus == expected


def test_reason_without_workers():
    assert analysis_of(steps_of()).get(measured_workers) is None
    assert analysis_of(steps_of(), workers=()).get(measured_workers) is None
    record = LoaderWorkers(num_workers=2, prefetch_factor=2, notes=("Workers ran already.",))
    [facts] = analysis_of(steps_of(dataloader=3, forward=1), workers=(record,)).read(measured_workers)
    assert facts.queue is None
    assert (facts.batch, facts.sample_ns, facts.making_ns) == (None, None, 0)
    facts = analysis_of(steps_of(dataloader=None, forward=1), workers=(record,))
    assert facts.read(measured_workers)[0].queue is None
    assert why_not(queue_of, facts, record) == "fetches weren't measured"


def ready(*rows):
    """Batches (index, worker, time when ready), as recorded."""
    rows = sorted(rows, key=lambda one: one[2])
    zeros = (0,) * len(rows)
    return WorkerBatches(
        worker=tuple(worker for _, worker, _ in rows),
        index=tuple(index for index, _, _ in rows),
        begin_ns=zeros,
        fetched_ns=zeros,
        ready_ns=tuple(when for *_, when in rows),
        cpu_ns=zeros,
        samples=zeros,
    )


def test_slow_batch_holds_back_ready_batches():
    batches = ready((0, 0, 100), *((index, index % 4, 10 * index) for index in range(1, 8)))
    assert _late(batches, 8) == ({0: 1}, {0: 7})
    # A second epoch, in which worker 1 is late twice; batches with unknown numbers are ignored.
    second = [(0, 0, 210), (1, 1, 250), (2, 0, 220), (3, 1, 255), (4, 0, 230), (-1, 0, 231)]
    rows = zip(batches.index, batches.worker, batches.ready_ns, strict=True)
    assert _late(ready(*rows, *second), 8) == ({0: 1, 1: 2}, {0: 7, 1: 2})


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_batch_is_held_back_if_earlier_one_is_ready_later(service_ns, workers, factor):
    rows, free, got = [], [0] * workers, []
    for index, service in enumerate(service_ns):
        handed = got[index - workers * factor] if index >= workers * factor else 0
        free[index % workers] = max(free[index % workers], handed) + service
        rows.append((index, index % workers, free[index % workers]))
        got.append(max([rows[-1][2], *got[-1:]]))
    late, held = _late(ready(*rows), workers * factor)
    behind = [[front for front in rows[:place] if front[2] > row[2]] for place, row in enumerate(rows)]
    assert sum(held.values()) == sum(map(bool, behind))
    causes = {max(fronts, key=lambda one: (one[2], one[0])) for fronts in behind if fronts}
    assert late == {worker: sum(one[1] == worker for one in causes) for worker in {one[1] for one in causes}}
