"""The loader's queue model, compared with torch's own code in simulated time."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from inspect import signature

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_modelprof.analysis.steps.loader_queue import ASSUMED_HANDOVER_NS, WITHIN, loader_queue
from lightning_modelprof.analysis.steps.simulated_loader import simulate_loader
from lightning_modelprof.run.workers import WorkerBatches
from tests.support.diagnosed import MS
from tests.support.facts import why_not


class SimulatedLoader(_MultiProcessingDataLoaderIter):
    """torch's own iterator, with workers that are numbers on a simulated clock."""

    def __init__(self, service_ns, workers, factor, handover_ns, in_order):
        self._num_workers, self._prefetch_factor, self._in_order = workers, factor, in_order
        self._dataset_kind, self._persistent_workers, self._shutdown = _DatasetKind.Map, False, False
        self._send_idx = self._rcvd_idx = self._tasks_outstanding = 0
        self._task_info = {}
        self._workers_status = [True] * workers
        self._workers_num_tasks = [0] * workers
        self._worker_queue_idx_cycle = itertools.cycle(range(workers))
        self._index_queues = [SimulatedWorker(self, number) for number in range(workers)]
        self.service_ns, self.handover_ns, self.now_ns, self.results = service_ns, handover_ns, 0, []
        for _ in range(workers * factor):
            self._try_put_index()

    def __del__(self):
        pass

    def _next_index(self):
        if self._send_idx >= len(self.service_ns):
            raise StopIteration
        return self._send_idx

    def _get_data(self):
        ready_ns, _, index = heapq.heappop(self.results)
        self.now_ns = max(self.now_ns, ready_ns)
        return index, index

    def _process_data(self, data, *worker):  # torch passes the worker since 2.6
        self.now_ns += self.handover_ns
        return super()._process_data(data, *worker)


class SimulatedWorker:
    """Acts as the queue of a worker's indices for the loader."""

    def __init__(self, loader, number):
        self.loader, self.number, self.free_ns = loader, number, 0

    def put(self, task):
        index, _ = task
        self.free_ns = max(self.free_ns, self.loader.now_ns) + self.loader.service_ns[index]
        heapq.heappush(self.loader.results, (self.free_ns, self.number, index))


def torchs_times(service_ns, rest_ns, workers, factor, handover_ns, in_order):
    """When the loop receives each batch."""
    got_ns = []
    if workers == 0:
        now_ns = 0
        for service, rest in zip(service_ns, rest_ns, strict=False):
            got_ns.append(now_ns + service)
            now_ns = got_ns[-1] + rest
        return got_ns
    loader = SimulatedLoader(service_ns, workers, factor, handover_ns, in_order)
    for rest in rest_ns:
        loader._next_data()
        got_ns.append(loader.now_ns)
        loader.now_ns += rest
    return got_ns


TIMES = st.integers(0, 40)
SETTINGS = st.tuples(st.integers(0, 5), st.integers(1, 4))


@given(
    st.lists(st.tuples(TIMES, TIMES), min_size=22, max_size=50),
    st.lists(SETTINGS, min_size=1, max_size=4),
    st.integers(0, 5),
    st.booleans() if "in_order" in signature(DataLoader).parameters else st.just(True),  # since torch 2.6
)
@settings(max_examples=150, deadline=None)
def test_batch_times_match_torch_code(times, which, handover_ns, in_order):
    service_ns, rest_ns = zip(*times, strict=True)
    rest_ns = rest_ns[: len(rest_ns) - 20]  # this many indices are handed out in advance
    found = simulate_loader(
        np.array(service_ns)[:, None],
        np.array(rest_ns)[:, None],
        which,
        handover_ns=handover_ns,
        is_ordered=in_order,
    )
    expected = [
        torchs_times(service_ns, rest_ns, workers, factor, handover_ns, in_order) for workers, factor in which
    ]
    assert found[:, :, 0].T.tolist() == expected


@given(st.lists(TIMES, min_size=40, max_size=60), TIMES, SETTINGS)
@settings(max_examples=100, deadline=None)
def test_more_resources_never_delay_batches(service_ns, rest_ns, setting):
    workers, factor = max(1, setting[0]), setting[1]
    service, rest = np.array(service_ns)[:, None], np.full((len(service_ns), 1), rest_ns)
    base, ahead, twice = np.moveaxis(
        simulate_loader(service, rest, [(workers, factor), (workers, factor + 1), (2 * workers, factor)]),
        1,
        0,
    )
    assert (ahead <= base).all()
    assert (twice <= base).all()
    assert (simulate_loader(service + 1, rest, [(workers, factor)])[:, 0] > base).all()
    assert (simulate_loader(service, rest + 1, [(workers, factor)])[:, 0] >= base).all()


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("service", "rest", "handover"), [(12, 3, 0), (12, 5, 1), (240, 60, 24), (0, 7, 2)])
def test_constant_times_have_closed_form(workers, service, rest, handover):
    got = simulate_loader(
        np.full((600, 1), service),
        np.full((600, 1), rest),
        [(0, 1), (workers, 1), (workers, 2)],
        handover_ns=handover,
    )[:, :, 0]
    inline, single, double = (got[-1] - got[239]) / 360  # a multiple of every worker count
    assert inline == service + rest
    assert single == max(rest + handover, (service + handover) / workers)
    assert double == max(rest + handover, service / workers)


def test_slow_batch_blocks_others_only_if_order_is_kept():
    service = np.array([100, *[10] * 60])[:, None]
    rest = np.zeros((20, 1), np.int64)
    ordered = simulate_loader(service, rest, [(4, 2)])[:, 0, 0]
    unordered = simulate_loader(service, rest, [(4, 2)], is_ordered=False)[:, 0, 0]
    assert ordered[:8].tolist() == [100] * 4 + [110] * 4  # three, and three behind its worker's next batch
    assert unordered[:6].tolist() == [10, 10, 10, 20, 20, 20]


def measured(service_ns, workers, *, rest_ns=0, cpu_share=0.0, turn_ns=0, factor=2, in_order=True):
    """Batches as recorded from torch's own code, and how long steps waited for them."""
    service_ns = [int(one) + turn_ns for one in service_ns]
    steps = len(service_ns) - workers * factor
    got_ns = torchs_times(service_ns, [rest_ns] * steps, workers, factor, 0, in_order)
    free_ns, begins = [0] * max(1, workers), []
    for index, service in enumerate(service_ns):
        worker, handed = index % max(1, workers), index - workers * factor
        asked_ns = (got_ns[index - 1] + rest_ns if index else 0) if workers == 0 else 0
        handed_ns = got_ns[handed] if workers and handed >= 0 else asked_ns
        begins.append(max(free_ns[worker], handed_ns))
        free_ns[worker] = begins[-1] + service
    rows = range(len(service_ns))
    ready_ns = tuple(begins[row] + service_ns[row] - turn_ns for row in rows)
    batches = WorkerBatches(
        worker=tuple(row % max(1, workers) for row in rows),
        index=tuple(rows),
        begin_ns=tuple(begins),
        fetched_ns=ready_ns,
        ready_ns=ready_ns,
        cpu_ns=tuple(int(cpu_share * (service_ns[row] - turn_ns)) for row in rows),
        samples=(1,) * len(service_ns),
    )
    return batches, (np.diff(got_ns) - rest_ns)[steps // 4 :]


def predicted(batches, waits_ns, workers, rest_ns, **more):
    found = loader_queue(
        batches,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        rests_ns=np.full(30, rest_ns),
        waits_ns=waits_ns,
        **more,
    )
    return found, {(one.workers, one.prefetch_factor): one for one in found.predictions}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_sleeping_batches_are_predicted_from_any_worker_count(workers):
    batches, waits_ns = measured([12 * MS] * 100, workers, rest_ns=2 * MS)
    found, steps = predicted(batches, waits_ns, workers, 2 * MS, cpus=2.0)
    assert steps[0, 2].step_ns == 14 * MS
    # Three workers finish together, so two of three batches were handed over immediately.
    assert found.handover_ns == (0 if workers == 3 else ASSUMED_HANDOVER_NS)
    assert [steps[each, 2].step_ns / MS for each in (1, 2, 3, 4, 5, 6, 7, 8)] == [
        *(12, 6, 4, 3, 2.4),
        *[2 + found.handover_ns / MS] * 3,
    ]
    assert max(one.workers for one in found.predictions) == 8  # they sleep, so more than the CPUs
    assert (found.advised.workers, found.advised.prefetch_factor, found.left_ns) == (6, 2, 0)
    assert found.needed_factor is None
    assert found.present.step_ns == pytest.approx(found.step_ns, rel=0.03)
    assert all(one.low_ns == one.step_ns == one.high_ns for one in found.predictions)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_computing_batches_are_limited_by_cpus(workers):
    batches, waits_ns = measured([12 * MS] * 100, workers, rest_ns=2 * MS, cpu_share=1.0)
    found, steps = predicted(batches, waits_ns, workers, 2 * MS, cpus=2.0)
    assert {one.workers for one in found.predictions} == {0, 1, 2}
    assert steps[2, 2].step_ns == pytest.approx(6 * MS, rel=0.01)
    assert found.needed_factor == pytest.approx(3, rel=0.01)  # from 6 to 2 ms
    assert found.left_ns == pytest.approx(4 * MS - found.handover_ns, rel=0.01)


def test_worker_counts_are_sparse_on_many_cpus():
    """Every worker count up to 16 is tried, then each an eighth more."""
    batches, waits_ns = measured([120 * MS] * 100, 4, rest_ns=MS, cpu_share=1.0)
    found, steps = predicted(batches, waits_ns, 4, MS, cpus=256.0)
    assert {one.workers for one in found.predictions} >= {*range(17), 256}
    assert len(found.predictions) < 130
    assert steps[16, 2].step_ns == 7.5 * MS
    assert steps[256, 2].step_ns == pytest.approx(MS + found.handover_ns)
    assert all(np.isfinite(one.step_ns) for one in found.predictions)


def test_rest_of_step_also_takes_cpus():
    """12 ms for a batch and 6 for a step on two CPUs: no step is shorter than 9 ms."""
    batches, waits_ns = measured([12 * MS] * 100, 1, rest_ns=6 * MS, cpu_share=1.0)
    _, steps = predicted(batches, waits_ns, 1, 6 * MS, cpus=2.0, rest_cpu_ns=6.0 * MS)
    assert steps[1, 2].step_ns == pytest.approx(12 * MS, rel=0.01)
    assert steps[2, 2].step_ns == pytest.approx(9 * MS, rel=0.02)


def test_measured_interference_is_removed():
    """4 workers on 2 CPUs need 24 ms for 12 ms of work; two would need 12."""
    batches, waits_ns = measured([24 * MS] * 100, 4, cpu_share=0.5)
    found, steps = predicted(batches, waits_ns, 4, 0, cpus=2.0, cpu_wait=0.5)
    assert found.computing == pytest.approx(1, rel=1e-4)
    assert steps[4, 2].step_ns == pytest.approx(6 * MS, rel=0.01)
    assert steps[2, 2].step_ns == pytest.approx(6 * MS, rel=0.01)
    assert steps[1, 2].step_ns == pytest.approx(12 * MS, rel=0.01)
    assert not found.helps
    assert found.advised.workers == 2


def test_measured_cpu_wait_is_not_sleep():
    """Batches of 36 ms compute for 12. Two workers that always had work had at most 1 CPU, not 2.

    Without that measurement, the batches seem to sleep mostly, so more workers would seem to help.
    """
    batches, waits_ns = measured([36 * MS] * 100, 2, cpu_share=1 / 3)
    guessed, _ = predicted(batches, waits_ns, 2, 0, cpus=2.0)
    assert guessed.computing == pytest.approx(1 / 3, rel=1e-3)
    assert guessed.advised.workers > 2
    found, steps = predicted(batches, waits_ns, 2, 0, cpus=2.0, cpu_wait=2 / 3)
    assert (found.computing, found.cpus) == (pytest.approx(1), pytest.approx(1, rel=1e-3))
    assert {one.workers for one in found.predictions} == {0, 1, 2}
    assert [steps[each, 2].step_ns / MS for each in (1, 2)] == pytest.approx([12, 12], rel=0.01)
    assert not found.helps
    # As fast as with dedicated CPUs, or batches that mostly sleep: the assumed number of CPUs stays.
    batches, waits_ns = measured([12 * MS] * 100, 2, cpu_share=1.0)
    assert predicted(batches, waits_ns, 2, 0, cpus=3.0, cpu_wait=0.0)[0].cpus == 3
    batches, waits_ns = measured([36 * MS] * 100, 2, cpu_share=0.1)
    found, steps = predicted(batches, waits_ns, 2, 0, cpus=3.0, cpu_wait=0.1)
    assert (found.computing, found.cpus) == (pytest.approx(1 / 9), 3)
    assert steps[2, 2].step_ns == pytest.approx(16.2 * MS, rel=0.02)


def test_wait_for_batch_without_cpu_is_not_handover():
    """Batches of 24 ms, 11 of them without a CPU: steps of 5 ms with four workers wait 4 ms per round."""
    batches, waits_ns = measured([24 * MS] * 100, 4, rest_ns=5 * MS, cpu_share=0.55)
    assert waits_ns.mean() == pytest.approx(MS, rel=0.1)
    found, _ = predicted(batches, waits_ns, 4, 5 * MS, cpus=2.0, cpu_wait=0.45)
    assert found.ready == pytest.approx(0.75, abs=0.02)
    assert found.handover_ns < 0.1 * MS


def test_interval_contains_true_mean_and_is_deterministic():
    draw = np.random.default_rng(5)
    true_ns, inside = 10 * MS / 2, 0
    for _ in range(20):
        batches, waits_ns = measured(draw.lognormal(-0.125, 0.5, 300) * 10 * MS, 2)
        found, steps = predicted(batches, waits_ns, 2, 0)
        assert predicted(batches, waits_ns, 2, 0)[0] == found
        inside += steps[2, 4].low_ns <= true_ns * 1.01 and true_ns <= steps[2, 4].high_ns
    assert inside >= 16


def test_time_between_batches_is_measured_at_epoch_start():
    batches, waits_ns = measured([2 * MS] * 100, 2, rest_ns=20 * MS, turn_ns=MS // 10)
    found, _ = predicted(batches, waits_ns, 2, 20 * MS)
    assert found.turn_ns == MS // 10
    assert found.service_ns == 2.1 * MS
    # Processes that are still starting make the gap longer, which doesn't count.
    late = {name: list(getattr(batches, name)) for name in ("begin_ns", "ready_ns")}
    for times in late.values():
        times[2] += 5 * MS
    late = replace(batches, **{name: tuple(times) for name, times in late.items()})
    assert predicted(late, waits_ns, 2, 20 * MS)[0].turn_ns == MS // 10
    later = WorkerBatches(**{name: getattr(batches, name)[10:] for name in WorkerBatches.__struct_fields__})
    assert predicted(later, waits_ns, 2, 20 * MS)[0].turn_ns == 0  # they had to wait for the next index


def test_handover_is_wait_for_ready_batches():
    batches, _ = measured([2 * MS] * 100, 2, rest_ns=20 * MS)
    found, steps = predicted(batches, np.full(30, 0.4 * MS), 2, 20 * MS)
    assert (found.ready, found.handover_ns) == (1, 0.4 * MS)
    assert steps[2, 2].step_ns == pytest.approx(20.4 * MS)
    assert not found.helps
    assert found.left_ns == pytest.approx(0)


def test_shortest_waits_are_handovers_if_some_batches_are_ready():
    """Batches of 1 and 21 ms alternate, one worker, steps of 10 ms: about every second one is ready."""
    batches, _ = measured([MS, 21 * MS] * 100, 1, rest_ns=10 * MS)
    found, _ = predicted(batches, np.array([0.3, 9] * 15) * MS, 1, 10 * MS)
    assert 0.2 < found.ready < 0.6
    expected = sorted([0.3] * 15 + [9] * 15)[: round(0.9 * 30 * found.ready)]
    assert found.handover_ns == pytest.approx(np.mean(expected) * MS)


def test_keeping_order_has_its_cost():
    draw = np.random.default_rng(7)
    slow = np.where(draw.random(400) < 0.05, 100 * MS, 5 * MS)
    batches, waits_ns = measured(slow, 4, rest_ns=MS)
    kept, _ = predicted(batches, waits_ns, 4, MS)
    assert kept.order_cost_ns > 0.1 * kept.present.step_ns
    free, _ = predicted(batches, waits_ns, 4, MS, is_ordered=False)
    assert free.order_cost_ns is None
    assert free.present.step_ns == pytest.approx(kept.present.step_ns - kept.order_cost_ns)


@given(st.integers(0, 4), st.floats(0, 1), st.integers(0, 20), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_advice_is_smallest_worker_count_within_two_percent(workers, cpu_share, rest_ms, seed):
    service_ns = np.random.default_rng(seed).lognormal(0, 0.7, 60) * 5 * MS
    batches, waits_ns = measured(service_ns, workers, rest_ns=rest_ms * MS, cpu_share=cpu_share)
    found, steps = predicted(batches, waits_ns, workers, rest_ms * MS, cpus=4.0)
    best_ns = min(one.step_ns for one in steps.values())
    assert found.best.step_ns == best_ns
    enough = [one for one in steps.values() if one.step_ns <= (1 + WITHIN) * best_ns]
    assert found.advised in enough
    assert found.advised.workers == min(one.workers for one in enough)
    assert found.present == steps[workers, 2]
    assert all(one.low_ns <= one.high_ns for one in steps.values())


def test_few_batches_give_no_prediction():
    batches, _ = measured([MS] * 19, 0)
    present = {"num_workers": 0, "prefetch_factor": None}
    reason = why_not(loader_queue, batches, **present, rests_ns=np.ones(3), waits_ns=np.ones(3))
    assert reason == "only 19 batches were timed (at least 20)"
    batches, _ = measured([MS] * 20, 0)
    assert why_not(loader_queue, batches, **present, rests_ns=np.ones(0), waits_ns=np.ones(0))
