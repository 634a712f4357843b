"""Activity of a DataLoader's workers: calls in them, batches they made, and where their time went.

All times are from ``time.perf_counter_ns``, which on Linux is one clock for all processes of a machine.
"""

from __future__ import annotations

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Record
from lightning_modelprof.run.stacks import StackSamples


class CallTimes(Place, frozen=True, kw_only=True):
    """One call in all workers of a loader: a transform, a sample, the collate function.

    Attributes:
        name: class or function as written; for a data set with the method: ``Images.__getitem__``.
        kind: ``sample`` (``__getitem__``, ``__getitems__`` or ``__iter__`` of a data set), ``transform``,
            ``compose`` (a transform that has others) or ``collate``.
        depth: number of calls in this list that enclose it: 0 for samples and collate.
        calls: number of finished calls: samples of the loader's data set, batches of the collate function; 0
            if unknown.
        total_ns: wall time, including what it calls; ``None`` if not measured, as it takes less than 5% of
            the time of making batches or too few samples were taken.
        inner_ns: of that, time in the calls of this list that it makes.
        error_ns: half of the possible error of ``total_ns``, if that is sampled: in 19 of 20 runs, all
            entries are within twice their errors. ``None`` if a clock was read.
        cpu_ns: CPU time of the worker's thread in it; ``None`` if not read, as for transforms.
    """

    name: str
    kind: str
    depth: Count = 0
    calls: Count = 0
    total_ns: Count | None = None
    inner_ns: Count = 0
    error_ns: Count | None = None
    cpu_ns: Count | None = None
    is_users: bool = False

    @property
    def own_ns(self) -> int:
        """Wall time in it and in no other call of the list; 0 if not measured."""
        return max(0, (self.total_ns or 0) - self.inner_ns)


class WorkerTimes(Record, frozen=True, kw_only=True):
    """One worker of a loader, over all processes that had its number.

    Attributes:
        starts: processes that had it, one after the other.
        start_ns: mean time from the start of such a process to its first instruction for samples:
            interpreter, imports and the data set, if those are loaded again; ``None`` if unknown.
        fetch_ns: wall time in making samples.
        collate_ns: wall time in the collate function.
        wait_ns: wall time between two batches of an epoch, waiting for an index because enough are ready.
        cpu_ns: CPU time of its main thread while it made batches.
        other_cpu_ns: CPU time of its other threads, such as the one that pickles batches, and of waiting;
            ``None`` if unknown.
        cpu_wait_ns: time its main thread was ready to run without a CPU; ``None`` if unknown.
        read_bytes: read through the system, from files and sockets; ``None`` if unknown.
        disk_bytes: of those, read from a disk; ``None`` if unknown.
        page_faults: those that had to read; ``None`` if unknown.
        memory_bytes: resident memory when last read; ``None`` if unknown.
        threads: maximum number; ``None`` if unknown.
        dropped: batches in no per-batch figure, as they came faster than they were read.
    """

    worker: Count
    starts: Count = 1
    start_ns: Count | None = None
    batches: Count = 0
    samples: Count = 0
    fetch_ns: Count = 0
    collate_ns: Count = 0
    wait_ns: Count = 0
    cpu_ns: Count = 0
    other_cpu_ns: Count | None = None
    cpu_wait_ns: Count | None = None
    read_bytes: Count | None = None
    disk_bytes: Count | None = None
    page_faults: Count | None = None
    memory_bytes: Count | None = None
    threads: Count | None = None
    dropped: Count = 0


class WorkerBatches(Record, frozen=True, kw_only=True):
    """Batches of a loader, as columns, in the order in which they were ready; the newest ones of a long run.

    Attributes:
        index: its number in the epoch, in order of delivery; -1 if unknown.
        begin_ns: start of its first sample.
        fetched_ns: when all its samples were ready.
        ready_ns: when it was collated.
        cpu_ns: CPU time of the worker's thread in it.
    """

    worker: tuple[Int, ...] = ()
    index: tuple[Int, ...] = ()
    begin_ns: tuple[Int, ...] = ()
    fetched_ns: tuple[Int, ...] = ()
    ready_ns: tuple[Int, ...] = ()
    cpu_ns: tuple[Int, ...] = ()
    samples: tuple[Int, ...] = ()

    def __len__(self) -> int:
        return len(self.worker)


class LoaderWorkers(Record, frozen=True, kw_only=True):
    """The workers of one DataLoader over one loop.

    Attributes:
        loader: its index in the loop, from 0.
        num_workers, prefetch_factor, batch_size: ``None`` without one.
        is_ordered: whether batches are delivered in the order of their indices.
        start_method: ``fork``, ``spawn`` or ``forkserver``.
        calls: in the order in which a sample reaches them, each after the one that encloses it.
        stacks: sampled statements of the workers, outermost frame first, all in the phase ``dataloader``;
            ``None`` if not sampled.
        notes: why there is nothing, or what is missing, a sentence each.
    """

    loader: Count = 0
    kind: str = "DataLoader"
    num_workers: Count
    prefetch_factor: Count | None = None
    batch_size: Count | None = None
    is_persistent: bool = False
    is_ordered: bool = True
    start_method: str = ""
    calls: tuple[CallTimes, ...] = ()
    workers: tuple[WorkerTimes, ...] = ()
    batches: WorkerBatches = WorkerBatches()
    stacks: StackSamples | None = None
    notes: tuple[str, ...] = ()

    @property
    def cpu_wait(self) -> float | None:
        """Time workers were ready to run without a CPU, as a share of the time they made batches."""
        known = [one.cpu_wait_ns for one in self.workers if one.cpu_wait_ns is not None]
        making_ns = sum(one.fetch_ns + one.collate_ns for one in self.workers)
        if not making_ns or not known or len(known) < len(self.workers):
            return None
        return min(1.0, sum(known) / making_ns)


def worker_notes(loaders: tuple[LoaderWorkers, ...]) -> tuple[str, ...]:
    """Notes of all loaders, each naming its loader."""
    return tuple(
        f"Workers of the {one.kind}{f' {one.loader}' if len(loaders) > 1 else ''}: {note}"
        for one in loaders
        for note in (*one.notes, *(() if one.stacks is None else one.stacks.notes))
    )
