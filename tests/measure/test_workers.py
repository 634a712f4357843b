"""Measurements in DataLoader workers match costs that the samples report themselves."""

import copy
import functools
import gc
import itertools
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_modelprof import LoopProfiler
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers import in_worker
from lightning_modelprof.measure.workers.call_samples import merge_stacks
from lightning_modelprof.measure.workers.in_worker import Worker, WorkerStart
from lightning_modelprof.measure.workers.probes import WorkerProbes
from lightning_modelprof.measure.workers.ring import (
    BATCH_COLUMNS,
    NUM_BATCHES,
    Head,
    Rings,
    claim_slot,
    open_memory,
)
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from tests.support import worker_pipelines as pipelines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="workers are looked into on Linux"),
]


@pytest.mark.parametrize(
    ("method", "num_workers", "kind"),
    [
        *itertools.product(["fork"], (1, 3), (pipelines.Map, pipelines.Iterable)),
        ("spawn", 1, pipelines.Map),
        ("spawn", 2, pipelines.Iterable),
        ("forkserver", 1, pipelines.Map),
    ],
)
def test_worker_costs_and_slow_line_are_found(method, num_workers, kind):
    """Our clocks enclose the samples' own; the statement that sleeps longest is named."""
    number = 72 * num_workers
    loader = DataLoader(
        kind(number), 6, num_workers=num_workers, collate_fn=pipelines.collate, multiprocessing_context=method
    )
    taken = []
    with LoopProfiler(active=0, report={"files": False, "terminal": False}) as profiler:
        for batch in profiler.fetch(loader):
            taken.append(batch)
            profiler.step()
    truth = torch.cat(taken).sum(0).tolist()
    (workers,) = profiler.run.ranks[0].workers
    sample, chain, *transforms, collate = workers.calls
    assert (sample.kind, chain.kind, collate.kind) == ("sample", "compose", "collate")
    assert sample.calls == number == sum(one.samples for one in workers.workers)
    assert collate.calls == len(taken) == sum(one.batches for one in workers.workers)
    assert [one.name for one in transforms] == ["Cost", "Cost #2", "Cost #3", "Cost #4", "compute"]
    assert {Path(one.file).name for one in workers.calls} == {"worker_pipelines.py"}
    assert transforms[4].line == pipelines.compute.__code__.co_firstlineno
    assert sample.total_ns == sum(one.fetch_ns for one in workers.workers) >= 1e9 * sum(truth[:6])
    assert collate.total_ns >= 1e9 * truth[7]
    assert sample.cpu_ns >= 1e9 * truth[8]
    # Of 14.6 ms per sample 0.1 ms is too little to measure, but on a busy machine it may take longer.
    assert transforms[0].total_ns is None or transforms[0].total_ns >= 0.05 * sample.total_ns
    assert sample.total_ns >= chain.total_ns > 0
    assert chain.inner_ns <= chain.total_ns
    assert len(workers.workers) == num_workers
    if num_workers == 1:
        assert workers.batches.index == tuple(range(len(taken)))
    assert sorted(workers.batches.index) == sorted({*workers.batches.index})
    (finding,) = (one for one in profiler.report.findings if one.kind == "input_bound" and one.locations)
    place = finding.locations[0]
    place = place.inner or place  # "line 63 in read, called at ..."
    assert Path(place.file).name == "worker_pipelines.py"
    # If other processes use the CPUs, computing and waking from short sleeps (on a shared line) are slow too.
    if max(sum(truth[1:5]), truth[5]) < 0.6 * truth[0]:
        assert place.line == pipelines.READ_LINE


class Computing(Dataset):
    def __getitem__(self, index):
        ends_ns = time.thread_time_ns() + 5_000_000
        while time.thread_time_ns() < ends_ns:
            pass
        return index

    def __len__(self):
        return 100


def on_one_cpu(worker):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count")
def test_workers_sharing_cpu_wait_for_it():
    """A computing worker's time is CPU time plus waiting for a CPU."""
    loader = DataLoader(
        Computing(), 4, num_workers=2, worker_init_fn=on_one_cpu, multiprocessing_context="fork"
    )
    with LoopProfiler(active=0, report={"files": False, "terminal": False}) as profiler:
        for _ in profiler.fetch(loader):
            profiler.step()
    (workers,) = profiler.run.ranks[0].workers
    assert len(workers.workers) == 2
    for one in workers.workers:
        making_ns = one.fetch_ns + one.collate_ns
        assert one.cpu_wait_ns >= 0.2 * making_ns
        assert one.cpu_ns + one.cpu_wait_ns == pytest.approx(making_ns, rel=0.2)


# Work per batch


class Doubles:
    def __call__(self, value):
        return 2 * value


class Items(Dataset):
    def __init__(self, transforms):
        self.transforms = transforms

    def __getitem__(self, index):
        for transform in self.transforms:
            index = transform(index)
        return index

    def __len__(self):
        return 100


@pytest.fixture
def slot():
    rings = Rings(2)
    yield claim_slot(rings.fd, rings.name, 2, 0)
    os.close(rings.fd)


class Queue:
    """Stands in for torch's index queue."""

    def __init__(self, messages):
        self.messages = list(messages)

    def get(self, timeout=None):
        return self.messages.pop(0)


class Fetcher:
    """Stands in for torch's dataset fetcher."""

    def __init__(self, dataset, collate_fn, auto_collation=True):
        self.dataset, self.collate_fn, self.auto_collation = dataset, collate_fn, auto_collation

    def fetch(self, indices):
        data = [self.dataset[index] for index in indices] if self.auto_collation else self.dataset[indices]
        return self.collate_fn(data)


class Resume:
    """Stands in for torch's message that another epoch starts."""


def _worker_loop(dataset, index_queue, collate_fn, start, seen, auto_collation=True):
    """Stands in for torch's function, which is found by this name."""
    start(sys._getframe())
    fetcher = Fetcher(dataset, collate_fn, auto_collation)
    while True:
        r = index_queue.get(timeout=5)
        if r is None:
            break
        if isinstance(r, Resume):
            fetcher = Fetcher(dataset, collate_fn, auto_collation)
            continue
        seen.append(fetcher.fetch(r[1]))
    return fetcher


def worker_of(slot):
    return Worker(slot, UserCode(), sampling=False)


def run_worker(slot, dataset, messages, collate_fn=list, auto_collation=True):
    """Run torch's loop in this process; return what it fetched."""
    worker, queue, seen = worker_of(slot), Queue([*messages, None]), []
    fetcher = _worker_loop(
        dataset, queue, collate_fn, lambda frame: worker.begin(dataset, frame), seen, auto_collation
    )
    assert type(fetcher.collate_fn) is functools.partial
    worker.end()
    assert "get" not in vars(queue)
    assert fetcher.collate_fn is collate_fn
    return seen


def test_torch_objects_are_restored_after_loop(slot):
    data = Items([Doubles(), abs])
    kind, transforms, attributes = type(data), list(data.transforms), dict(vars(data))
    assert run_worker(slot, data, [(0, [1, 2]), Resume(), (0, [3])]) == [[2, 4], [6]]
    assert (type(data), data.transforms, vars(data)) == (kind, transforms, attributes)
    assert (slot.head[Head.BATCHES], slot.head[Head.SAMPLES]) == (2, 3)
    assert list(slot.batches[:1]) + list(slot.batches[BATCH_COLUMNS : BATCH_COLUMNS + 1]) == [0, 0]


def test_batch_counts_as_one_sample_if_dataset_batches(slot):
    assert run_worker(slot, Items([]), [(0, [1, 2]), (1, [3])], auto_collation=False) == [[1, 2], [3]]
    assert slot.head[Head.SAMPLES] == 2


def test_clock_reads_per_batch(slot, monkeypatch):
    """Three reads of each clock, whatever the number of samples and transforms."""
    reads = {"wall": 0, "cpu": 0}

    class Clock:
        @staticmethod
        def perf_counter_ns():
            reads["wall"] += 1
            return time.perf_counter_ns()

        @staticmethod
        def thread_time_ns():
            reads["cpu"] += 1
            return time.thread_time_ns()

    monkeypatch.setattr(in_worker, "time", Clock)
    for name in ("process_time_ns", "clock_gettime_ns", "CLOCK_BOOTTIME"):
        monkeypatch.setattr(Clock, name, getattr(time, name), raising=False)
    monkeypatch.setattr(in_worker, "_SYSTEM_EVERY_NS", 10**18)
    counts = []
    for batches in (5, 25):
        before = dict(reads)
        run_worker(slot, Items([Doubles()] * 8), [(number, [1] * 10) for number in range(batches)])
        counts.append({name: reads[name] - before[name] for name in reads})
    assert {name: counts[1][name] - counts[0][name] for name in reads} == {"wall": 20 * 3, "cpu": 20 * 3}


def test_exception_ends_batch_and_propagates(slot):
    def fail(value):
        raise KeyError(value)

    with pytest.raises(KeyError):
        run_worker(slot, Items([fail]), [(0, [1])])
    assert slot.head[Head.BATCHES] == 0


def test_collate_fn_traceback_has_no_profiler_frame(slot):
    def fail(samples):
        raise KeyError(len(samples))

    with pytest.raises(KeyError) as caught:
        run_worker(slot, Items([]), [(0, [1])], collate_fn=fail)
    if sys.version_info >= (3, 11):
        assert "in_worker.py" not in {Path(str(one.path)).name for one in caught.traceback}


# Shared memory


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 3000), st.none()), max_size=12))
def test_full_ring_counts_dropped_batches(steps):
    """Numbers write that many batches, ``None`` reads; the result is compared with a list."""
    rings = Rings(1)
    slot = claim_slot(rings.fd, rings.name, 1, 0)
    waiting, dropped, read, written = [], 0, [], 0
    for step in [*steps, None]:
        if step is None:
            read += [int(row[0]) for _, rows in rings.new_batches() for row in rows]
            assert read[len(read) - len(waiting) :] == waiting
            waiting = []
            continue
        run_worker(slot, Items([]), [(number, [0]) for number in range(written, written + step)])
        for number in range(written, written + step):
            if len(waiting) < NUM_BATCHES:
                waiting.append(number)
            else:
                dropped += 1
        written += step
    assert slot.head[Head.DROPPED] == dropped
    assert slot.head[Head.BATCHES] == written
    os.close(rings.fd)


def test_slots_belong_to_living_processes():
    rings = Rings(2)
    child = os.fork()
    if not child:
        first = claim_slot(rings.fd, rings.name, 2, 0)
        first.head[Head.BATCHES] = 7
        signal.pause()
    while not (rings.slots() and rings.slots()[0].head[Head.BATCHES] == 7):
        time.sleep(0.01)
    second = claim_slot(rings.fd, rings.name, 2, 0)  # its own slot is taken
    assert len(rings.slots()) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    again = os.fork()
    if not again:
        third = claim_slot(rings.fd, rings.name, 2, 0)
        os._exit(0 if third is not None and third.head[Head.BATCHES] == 7 else 1)
    assert os.waitpid(again, 0)[1] == 0
    assert second.head[Head.BATCHES] == 0
    os.close(rings.fd)


def test_slot_keeps_latest_text(slot):
    for text in (b"", b"one", b"two " * 50_000, b"3"):
        assert slot.write_text(text)
        assert slot.text() == text
    assert not slot.write_text(bytes(1 << 20))
    assert slot.text() == b"3"


# Loaders


def names_in(folder):
    return [path.name for path in Path(folder).iterdir()]


def open_files():
    return len(names_in("/proc/self/fd"))


def test_loader_is_restored_and_nothing_leaks():
    files = open_files()
    loader = DataLoader(Items([Doubles()]), 4, num_workers=1, persistent_workers=True)
    collate = loader.collate_fn
    watched = WorkerProbes()
    watched.add(loader)
    assert loader.collate_fn is collate
    assert type(loader.worker_init_fn) is WorkerStart
    assert copy.deepcopy(loader).worker_init_fn is None
    assert pickle.loads(pickle.dumps(loader)).collate_fn is collate
    first = [batch.tolist() for batch in loader]
    watched.end()
    assert loader.worker_init_fn is None
    assert loader.collate_fn is collate
    (record,) = watched.record()
    assert [batch.tolist() for batch in loader] == first  # the same workers, no longer recording
    assert watched.record() == (record,)
    assert record.workers[0].samples == 100
    loader._iterator._shutdown_workers()
    del loader
    assert not [name for name in names_in("/dev/shm") if "modelprof" in name]
    ends = time.monotonic() + 10  # torch's threads close their files when they end
    while open_files() > files + 1 and time.monotonic() < ends:
        gc.collect()
        time.sleep(0.05)
    assert open_files() <= files + 1


def test_note_says_workers_started_earlier():
    loader = DataLoader(Items([]), 4, num_workers=1, persistent_workers=True)
    next(iter(loader))
    watched = WorkerProbes()
    watched.add(loader)
    assert "started before this loop" in watched.record()[0].notes[0]
    loader._iterator._shutdown_workers()


def test_recreated_loaders_share_record():
    watched = WorkerProbes()
    for epoch in range(3):
        loader = DataLoader(Items([]), 10, num_workers=2)
        watched.add(loader, epoch)
        assert len(list(loader)) == 10
    watched.add(DataLoader(Items([]), 10, num_workers=1), 3)
    two, one = sorted(watched.record(), key=lambda record: -record.num_workers)
    assert [worker.starts for worker in two.workers] == [3, 3]
    assert sum(worker.samples for worker in two.workers) == 300
    assert (one.num_workers, one.workers) == (1, ())
    watched.end()


# Stacks


def frames_of(names):
    return tuple(
        StackFrame(file="f", line=1, function=name, function_line=1, python_module=name, is_users=True)
        for name in names
    )


stacks = st.lists(
    st.tuples(st.lists(st.sampled_from("abcd"), max_size=3), st.integers(1, 9), st.integers(1, 99)),
    max_size=5,
)


@given(st.lists(stacks, min_size=1, max_size=3))
def test_merged_stacks_are_summed(parts):
    def samples(part):
        frames = frames_of("abcd")
        return StackSamples(
            frames=frames,
            stacks=tuple(
                SampledStack(
                    phase="dataloader",
                    frames=tuple("abcd".index(name) for name in names),
                    samples=number,
                    time_ns=ns,
                )
                for names, number, ns in part
            ),
            samples=sum(number for _, number, _ in part),
        )

    def named(one):
        sums = {}
        for stack in one.stacks:
            key = "".join(one.frames[number].function for number in stack.frames)
            assert key not in sums
            sums[key] = (stack.samples, stack.time_ns)
        return sums

    expected = {}
    for names, number, ns in (one for part in parts for one in part):
        key = "".join(name for name in names if name != "c")
        before = expected.get(key, (0, 0))
        expected[key] = (before[0] + number, before[1] + ns)
    merged = merge_stacks([samples(part) for part in parts], without="c")
    assert named(merged) == expected
    assert merged.samples == sum(number for number, _ in expected.values())
    few = merge_stacks([merged], most=1)
    assert len(few.stacks) == min(1, len(expected))
    assert few.dropped == sum(number for number, _ in expected.values()) - sum(
        stack.samples for stack in few.stacks
    )


class Numbered(Dataset):
    def __getitem__(self, index):
        time.sleep(0.002)
        return index

    def __len__(self):
        return 12


@pytest.mark.parametrize("is_persistent", [False, True])
def test_time_between_epochs_is_not_index_wait(is_persistent):
    watched = WorkerProbes()
    loader = DataLoader(Numbered(), 2, num_workers=1, persistent_workers=is_persistent)
    watched.add(loader)
    for _ in range(2):
        assert [batch.tolist() for batch in loader][5] == [10, 11]
        time.sleep(0.5)
    ((worker,),) = [one.workers for one in watched.record()]
    watched.end()
    assert worker.batches == 12
    assert worker.wait_ns < 0.5e9


class FastOnes(Dataset):
    def __len__(self):
        return 3000

    def __getitem__(self, index):
        return index


class Seven(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def test_dropped_samples_are_not_in_next_epoch():
    loader = DataLoader(Seven(), 3, num_workers=1, drop_last=True, persistent_workers=True)
    watched = WorkerProbes()
    watched.add(loader)
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [[[0, 1, 2], [3, 4, 5]]] * 2
    (record,) = watched.record()
    assert record.workers[0].samples == 12
    watched.end()


def test_foreign_file_with_same_descriptor_is_untouched(tmp_path):
    rings = Rings(1)
    fd, name, path = rings.fd, rings.name, rings.path
    rings.close()
    file = os.open(tmp_path / "theirs", os.O_CREAT | os.O_RDWR)
    if file != fd:
        os.dup2(file, fd)
        os.close(file)
    try:
        assert claim_slot(fd, name, 1, 0) is None
        assert open_memory(path, name) is None
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)


def test_loader_copy_measures_nothing_after_loop():
    loader = DataLoader(FastOnes(), 100, num_workers=1)
    watched = WorkerProbes()
    watched.add(loader)
    twin = copy.copy(loader)
    init = loader.worker_init_fn
    watched.end()
    assert init.is_over
    assert len(list(twin)) == 30
    assert watched.record()[0].workers == ()


def test_all_workers_of_all_epochs_are_measured():
    """The next epoch's workers start while the previous epoch's are still alive."""
    loader = DataLoader(FastOnes(), 100, num_workers=4)
    watched = WorkerProbes()
    watched.add(loader)
    iterators = []
    for _ in range(2):
        iterators.append(iter(loader))
        for batch in iterators[-1]:
            assert len(batch) == 100
    (record,) = watched.record()
    assert sum(worker.samples for worker in record.workers) == 6000
    assert not any("ran at once" in note for note in record.notes)
    watched.end()
    del iterators


def test_loaders_with_many_settings_are_bounded():
    watched, before = WorkerProbes(), open_files()
    for epoch in range(30):
        loader = DataLoader(FastOnes(), 10 + epoch, num_workers=1)
        watched.add(loader, epoch)
    assert open_files() - before <= 2 * 5
    record = watched.record()
    assert len(record) <= 13
    assert "had other settings" in record[0].notes[-1]
    watched.end()
    assert open_files() == before


def test_changed_num_workers_gets_own_record():
    loader = DataLoader(FastOnes(), 100, num_workers=1)
    watched = WorkerProbes()
    for epoch, number in enumerate((1, 2)):
        loader.num_workers = number
        watched.add(loader, epoch)
        assert len(list(loader)) == 30
    one, two = sorted(watched.record(), key=lambda record: record.num_workers)
    assert (one.num_workers, two.num_workers) == (1, 2)
    assert sum(worker.samples for worker in two.workers) == 3000
    watched.end()
    assert loader.worker_init_fn is None


def test_trials_are_dropped_and_shared_loaders_noted():
    watched = WorkerProbes()
    for trial in range(3):
        loader = DataLoader(FastOnes(), 2 ** (5 + trial), num_workers=1)
        watched.add(loader, (0, trial))
    watched.begin([loader])
    watched.add_other(loader)
    watched.add_other(DataLoader(FastOnes(), 8, num_workers=1))
    (record,) = watched.record()
    assert (record.loader, record.batch_size) == (0, 128)
    assert "Includes batches that validation takes from the same DataLoader" in record.notes[-1]
    watched.end()


def test_foreign_file_on_our_descriptor_stays_open(tmp_path):
    rings = Rings(1)
    slot = claim_slot(rings.fd, rings.name, 1, 0)
    slot.head[Head.BATCHES] = 5
    links = [
        (int(one.name), str(one.readlink())) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()
    ]
    numbers = [number for number, link in links if rings.name in link]
    assert numbers == [rings.fd], "the memory has no second number"
    file = os.open(tmp_path / "theirs", os.O_CREAT | os.O_RDWR)
    os.dup2(file, rings.fd)
    with pytest.raises(OSError, match="Bad file"):
        rings.fd  # noqa: B018
    assert rings.slots()[0].head[Head.BATCHES] == 5
    del slot
    gc.collect()
    rings.close()
    assert os.fstat(numbers[0]).st_ino == os.fstat(file).st_ino
    os.close(file)
    os.close(numbers[0])
