"""What the workers of a DataLoader did: calls in them, batches they made, and where their time went.

All times are of one clock, ``time.perf_counter_ns``: on Linux it is the same in all processes of a machine.
"""

from __future__ import annotations

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Record
from lightning_modelprof.run.stacks import StackSamples


class CallTimes(Place, frozen=True, kw_only=True):
    """One call in the workers of a loader, all workers together: a transform, a sample, the collate function.

    Attributes:
        name: class or function, as it is written; of a data set with the method: ``Images.__getitem__``.
        kind: ``sample`` (``__getitem__``, ``__getitems__`` or ``__iter__`` of a data set), ``transform``,
            ``compose`` (a transform that has others) or ``collate``.
        depth: calls that it stands in, of those in this list: 0 for samples and collate.
        calls: how many ended: samples of the loader's data set, batches of the collate function; 0 where
            that is not known.
        total_ns: wall time in it, with what it calls; ``None`` where it was not measured, as it takes less
            than 5 % of the time of making batches or too few samples were taken.
        inner_ns: of that, in the calls of this list that it makes.
        error_ns: half of what ``total_ns`` may be off by, where that is from samples: all in the list are
            within twice their errors in 19 of 20 runs; ``None`` where a clock was read.
        cpu_ns: CPU time of the worker's thread in it; ``None`` where it was not read, as of transforms.
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
        """Wall time in it and in no other call of the list; 0 where it was not measured."""
        return max(0, (self.total_ns or 0) - self.inner_ns)


class WorkerTimes(Record, frozen=True, kw_only=True):
    """One worker of a loader, with all processes that had its number.

    Attributes:
        starts: processes that had it, one after the other.
        start_ns: from the start of such a process until its first instruction for samples, on average:
            interpreter, imports and the data set where those come anew; ``None`` where the system does not
            tell.
        fetch_ns: wall time in making samples.
        collate_ns: wall time in the collate function.
        wait_ns: wall time between two batches of an epoch: it waits for an index, as enough are ready.
        cpu_ns: CPU time of its main thread while it made batches.
        other_cpu_ns: CPU time of its other threads, such as the one that pickles batches, and of waiting;
            ``None`` where the system does not tell.
        cpu_wait_ns: for which its main thread was ready to run and had no CPU; ``None`` likewise.
        read_bytes: that it asked the system for, from files and sockets; ``None`` likewise.
        disk_bytes: of those, what had to come from a disk; ``None`` likewise.
        page_faults: for which the system had to read; ``None`` likewise.
        memory_bytes: resident at last; ``None`` likewise.
        threads: it had at most; ``None`` likewise.
        dropped: batches that are in no figure of single batches, as they came faster than they were read.
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
    """Batches of a loader, as columns, in the order in which they were ready; of a long run the newest.

    Attributes:
        index: its number in the epoch, in the order in which batches are delivered; -1 where unknown.
        begin_ns: when its first sample was begun.
        fetched_ns: when all its samples were there.
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
        loader: which one of the loop's, from 0.
        num_workers, prefetch_factor, batch_size: of it; ``None`` where it has none.
        is_ordered: whether batches are delivered in the order of their indices.
        start_method: ``fork``, ``spawn`` or ``forkserver``.
        calls: in the order in which a sample meets them, each after the one that it stands in.
        stacks: statements that the workers were at, outermost frame first; the phase of all is
            ``dataloader``; ``None`` where it was not sampled.
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
        """How long workers were ready to run and had no CPU, by the time that they made batches."""
        known = [one.cpu_wait_ns for one in self.workers if one.cpu_wait_ns is not None]
        making_ns = sum(one.fetch_ns + one.collate_ns for one in self.workers)
        if not making_ns or not known or len(known) < len(self.workers):
            return None
        return min(1.0, sum(known) / making_ns)


def worker_notes(loaders: tuple[LoaderWorkers, ...]) -> tuple[str, ...]:
    """The notes of all loaders, each with its loader."""
    return tuple(
        f"Workers of the {one.kind}{f' {one.loader}' if len(loaders) > 1 else ''}: {note}"
        for one in loaders
        for note in (*one.notes, *(() if one.stacks is None else one.stacks.notes))
    )
