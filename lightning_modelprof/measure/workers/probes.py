"""Tracks the workers of a loop's DataLoaders from the training process, and reads their results."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lightning_modelprof.errors import describe_error
from lightning_modelprof.measure.workers.call_samples import LEAST_SHARE, merge_stacks, merged
from lightning_modelprof.measure.workers.in_worker import WorkerStart, WorkerText
from lightning_modelprof.measure.workers.ring import Head, ReadSlot, Rings
from lightning_modelprof.run.workers import CallTimes, LoaderWorkers, WorkerBatches, WorkerTimes

MOST_BATCHES: Final = 1_000
"""Most batches in a loader's record; the newest are kept."""

_MOST_HELD: Final = 20_000
"""Most batches held while the loop runs, for a window's timeline."""

_SLOTS_OF_ONE: Final = 2
"""Slots per worker: all of the next epoch may start before one of the previous epoch has ended."""

_MOST_ROUNDS: Final = 4
"""Rounds without being created again after which a loader is finished."""

_MOST_CLOSED: Final = 8
"""Most records of finished loaders; the newest are kept."""

_MOST_HELD_LOADERS: Final = 100
"""Per list in an object that holds loaders; a longer one may be its data."""


class _Shape(NamedTuple):
    """Identifies a loader's workers when the loader is created again."""

    position: int
    kind: str
    num_workers: int
    start_method: str
    batch_size: int | None
    prefetch_factor: int | None
    is_persistent: bool


class WorkerProbes:
    """Gets into the workers of DataLoaders before they start, and reads what they write.

    Args:
        own: folders of packages that are the user's wherever they are.
        sampling: whether workers' statements are sampled.
    """

    def __init__(self, own: tuple[str, ...] = (), *, sampling: bool = True) -> None:
        self._own, self._sampling = own, sampling
        self._watched: dict[_Shape, _Watched] = {}
        self._notes: dict[_Shape, str] = {}
        self._closed: deque[LoaderWorkers] = deque(maxlen=_MOST_CLOSED)
        self._num_closed = 0
        self._round: Any = None
        self._num_rounds = self._position = 0
        self._record: tuple[LoaderWorkers, ...] | None = None

    def add(self, loader: Any, round_number: Any = 0, position: int | None = None) -> None:
        """Watch a loader whose workers haven't started; note it if they have.

        Args:
            round_number: changes when all loaders of the loop are created again.
            position: the loader's index within the loop; ``None`` counts those of the round.
        """
        if self._round != round_number:
            self._round, self._position = round_number, 0
            self._num_rounds += 1
            self._close_old()
        for one in _loaders_in(loader):
            place = self._position if position is None else position
            self._position += 1
            if self._record is None and one.num_workers:
                self._add(one, place)

    def _add(self, loader: DataLoader[Any], position: int) -> None:
        shape = _shape(loader, position)
        watched = self._watched.get(shape)
        if type(loader.worker_init_fn) is WorkerStart:
            if watched is not None and watched.has(loader):  # the same loader again
                watched.round = self._num_rounds
                return
            _give_back(loader)  # with another number of workers, for example
        if getattr(loader, "_iterator", None) is not None:
            self._notes[shape] = "Its workers weren't measured, because they started before this loop."
            return
        try:
            if watched is None:
                watched = self._watched[shape] = _Watched(shape, loader, self._own, sampling=self._sampling)
            watched.round = self._num_rounds
            watched.enter(loader)
        except Exception as error:  # no such memory here, or a loader whose functions can't be set
            self._notes[shape] = f"Its workers couldn't be measured: {describe_error(error)}."

    def add_other(self, loader: Any) -> None:
        """Note a loader of another loop, such as a validation inside a fit: it may also be this loop's."""
        for one in _loaders_in(loader):
            for watched in self._watched.values():
                if watched.has(one):
                    watched.is_shared = True

    def begin(self, loaders: Iterable[Any]) -> None:
        """Start the loop; drops loaders watched before but not used, as in trial runs."""
        before, self._watched = self._watched, {}
        position = 0
        for one in (one for loader in loaders for one in _loaders_in(loader)):
            for shape, watched in list(before.items()):
                if watched.has(one):
                    watched.shape = shape._replace(position=position)
                    self._watched[watched.shape] = before.pop(shape)
            position += 1
        self._position = position
        for watched in before.values():
            watched.end()

    def _close_old(self) -> None:
        """Keep only the records of finished loaders, as each has memory and an open file."""
        for shape, watched in list(self._watched.items()):
            if watched.round <= self._num_rounds - _MOST_ROUNDS:
                self._num_closed += 1
                self._closed.append(watched.record())
                watched.end()
                del self._watched[shape]

    def poll(self) -> None:
        for watched in self._watched.values():
            watched.poll()

    def batches_between(self, begin_ns: int, end_ns: int) -> tuple[tuple[int, WorkerBatches], ...]:
        """Return the batches made in a time span, among those still held.

        Returns:
            Position and batches of each loader.
        """
        self.poll()
        return tuple(
            (shape.position, watched.batches(begin_ns, end_ns)) for shape, watched in self._watched.items()
        )

    def record(self) -> tuple[LoaderWorkers, ...]:
        if self._record is not None:
            return self._record
        self.poll()
        records = [*self._closed, *(watched.record() for watched in self._watched.values())]
        if self._num_closed > len(self._closed):
            gone = self._num_closed - len(self._closed)
            note = f"{gone} earlier loaders had other settings and aren't in any table."
            records[0] = msgspec.structs.replace(records[0], notes=(*records[0].notes, note))
        for shape, note in self._notes.items():
            if shape not in self._watched:
                records.append(LoaderWorkers(**_of_shape(shape), notes=(note,)))
        return tuple(sorted(records, key=lambda record: record.loader))

    def end(self) -> None:
        """Keep the results, stop measuring in surviving workers, and restore the loaders."""
        if self._record is not None:
            return
        try:
            self._record = self.record()
        finally:
            self._record = self._record or ()
            for watched in self._watched.values():
                watched.end()


def _loaders_in(loader: Any) -> list[DataLoader[Any]]:
    """Return a DataLoader, or those held by a library's object such as webdataset's WebLoader."""
    if isinstance(loader, DataLoader):
        return [loader]
    held = getattr(loader, "__dict__", {}).values()
    several = [one for value in held for one in (value if _is_short_list(value) else [value])]
    return [one for one in several if isinstance(one, DataLoader)]


def _is_short_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= _MOST_HELD_LOADERS


def _shape(loader: DataLoader[Any], position: int) -> _Shape:
    context = loader.multiprocessing_context
    # An unset method can still be set later, but asking for it would set it.
    method = (torch.multiprocessing if context is None else context).get_start_method(allow_none=True)
    return _Shape(
        position,
        type(loader).__name__,
        loader.num_workers,
        str(method or torch.multiprocessing.get_all_start_methods()[0]),
        loader.batch_size if isinstance(loader.batch_size, int) else None,
        loader.prefetch_factor,
        bool(loader.persistent_workers),
    )


def _of_shape(shape: _Shape) -> dict[str, Any]:
    return {
        "loader": shape.position,
        **{name: value for name, value in shape._asdict().items() if name != "position"},
    }


class _Watched:
    """One loader and its later replacements.

    Attributes:
        round: newest round in which it was there.
        is_shared: whether another loop takes batches from it too.
    """

    def __init__(
        self, shape: _Shape, loader: DataLoader[Any], own: tuple[str, ...], *, sampling: bool
    ) -> None:
        self.shape = shape
        self._is_ordered = bool(getattr(loader, "in_order", True))
        self._rings = Rings(_SLOTS_OF_ONE * loader.num_workers + 1)
        self.round = 0
        self.is_shared = False
        self._starts: list[weakref.ref[WorkerStart]] = []
        self._own, self._sampling = own, sampling
        self._loaders: list[weakref.ref[Any]] = []
        self._batches: deque[NDArray[np.int64]] = deque()
        self._num_held = 0

    def enter(self, loader: DataLoader[Any]) -> None:
        """Start each worker of a loader with our function, which calls the user's own."""
        loader.worker_init_fn = start = WorkerStart(
            loader.worker_init_fn, self._rings.memory, self._own, self._sampling
        )
        self._loaders = [one for one in self._loaders if one() is not None]
        self._loaders.append(weakref.ref(loader))
        self._starts = [one for one in self._starts if one() is not None]
        self._starts.append(weakref.ref(start))

    def has(self, loader: DataLoader[Any]) -> bool:
        """Whether it is this loader, with our function still in it."""
        return type(loader.worker_init_fn) is WorkerStart and any(one() is loader for one in self._loaders)

    def poll(self) -> None:
        for worker, rows in self._rings.new_batches():
            self._batches.append(np.column_stack([np.full(len(rows), worker), rows[:, :6]]))
            self._num_held += len(rows)
        while self._batches and self._num_held - len(self._batches[0]) >= _MOST_HELD:
            self._num_held -= len(self._batches.popleft())

    def batches(self, begin_ns: int | None = None, end_ns: int | None = None) -> WorkerBatches:
        if not self._batches:
            return WorkerBatches()
        rows = np.concatenate(list(self._batches))
        rows = rows[np.argsort(rows[:, 4], kind="stable")]
        if begin_ns is None or end_ns is None:
            rows = rows[-MOST_BATCHES:]
        else:
            rows = rows[(rows[:, 4] >= begin_ns) & (rows[:, 2] <= end_ns)]
        columns = ("worker", "index", "begin_ns", "fetched_ns", "ready_ns", "cpu_ns", "samples")
        return WorkerBatches(**{name: tuple(rows[:, place].tolist()) for place, name in enumerate(columns)})

    def record(self) -> LoaderWorkers:
        slots = self._rings.slots()
        texts = [text for slot in slots if (text := _text(slot)) is not None]
        stacks = [text.stacks for text in texts if text.stacks.samples]
        notes = []
        dropped = sum(int(slot.head[Head.DROPPED]) for slot in slots)
        if dropped:
            notes.append(f"{dropped:,} batches have no times of their own, because too many came together.")
        if not slots:
            notes.append("No worker has started to measure.")
        if self._rings.num_unclaimed:
            notes.append(
                f"{self._rings.num_unclaimed} worker processes weren't measured, because too many ran"
                " together."
            )
        if self.is_shared:
            notes.append("Includes batches that validation takes from the same DataLoader.")
        return LoaderWorkers(
            **_of_shape(self.shape),
            is_ordered=self._is_ordered,
            calls=_calls(slots, texts),
            workers=_workers(slots),
            batches=self.batches(),
            stacks=merge_stacks(stacks) if stacks else None,
            notes=tuple(notes),
        )

    def end(self) -> None:
        self._rings.silence()
        for start in (one() for one in self._starts):
            if start is not None:
                start.end()
        for loader in (one() for one in self._loaders):
            if loader is not None:
                _give_back(loader)
        self._rings.close()


def _give_back(loader: Any) -> None:
    ours = getattr(loader, "worker_init_fn", None)
    if type(ours) is WorkerStart:
        with suppress(Exception):
            loader.worker_init_fn = ours.original


def _text(slot: ReadSlot) -> WorkerText | None:
    try:
        return msgspec.json.decode(slot.text, type=WorkerText) if slot.text else None
    except (msgspec.DecodeError, UnicodeDecodeError):  # its worker rewrote it twice while it was read
        return None


def _calls(slots: Sequence[ReadSlot], texts: Sequence[WorkerText]) -> tuple[CallTimes, ...]:
    if not any(slot.head[Head.BATCHES] for slot in slots):
        return ()
    head = np.sum([slot.head for slot in slots], axis=0)
    fetch_ns, making_ns = int(head[Head.FETCH_NS]), int(head[Head.FETCH_NS] + head[Head.COLLATE_NS])
    cpu_ns, samples = int(head[Head.FETCH_CPU_NS]), int(head[Head.SAMPLES])
    seen = merged(text.calls for text in texts)
    is_clocked = [one.call.kind == "sample" and not one.call.depth for one in seen.calls]
    sampled = [one for one, clocked in zip(seen.calls, is_clocked, strict=True) if not clocked]
    least = LEAST_SHARE * making_ns / fetch_ns * seen.time if fetch_ns and seen.is_enough else math.inf
    known = [one for one in sampled if one.time >= least]
    calls = []
    for one, clocked in zip(seen.calls, is_clocked, strict=True):
        call, inner_ns = CallTimes(**msgspec.structs.asdict(one.call)), 0
        if seen.is_enough:
            inner_ns = round(fetch_ns * ((seen.time if clocked else one.time) - one.own) / seen.time)
        if clocked:
            call = replace(call, calls=samples, total_ns=fetch_ns, inner_ns=inner_ns, cpu_ns=cpu_ns)
        elif one in known:
            error_ns = seen.error_ns(one, len(known), fetch_ns=fetch_ns, cpu_ns=cpu_ns, samples=samples)
            total_ns = round(fetch_ns * one.time / seen.time)
            call = replace(call, total_ns=total_ns, inner_ns=inner_ns, error_ns=round(error_ns))
        calls.append(call)
    for name in [text.collate for text in texts if text.collate is not None][:1]:
        batches, took_ns = int(head[Head.BATCHES]), int(head[Head.COLLATE_NS])
        calls.append(CallTimes(**msgspec.structs.asdict(name), calls=batches, total_ns=took_ns))
    return tuple(calls)


def _workers(slots: Sequence[ReadSlot]) -> tuple[WorkerTimes, ...]:
    by_number: dict[int, NDArray[np.int64]] = {}
    newest = [Head.MEMORY_BYTES, Head.THREADS]
    for slot in slots:
        number = int(slot.head[Head.WORKER]) - 1
        before = by_number.get(number)
        together = slot.head.copy() if before is None else before + slot.head
        if before is not None:
            together[newest] = np.maximum(before[newest], slot.head[newest])
        by_number[number] = together
    return tuple(_worker(number, by_number[number]) for number in sorted(by_number))


def _worker(number: int, head: NDArray[np.int64]) -> WorkerTimes:
    is_known = bool(head[Head.SYSTEM_KNOWN])

    def system(value: int) -> int | None:
        return max(0, int(value)) if is_known else None

    starts = int(head[Head.STARTS_TIMED])
    return WorkerTimes(
        worker=number,
        starts=int(head[Head.STARTS]),
        start_ns=int(head[Head.STARTS_NS]) // starts if starts else None,
        batches=int(head[Head.BATCHES]),
        samples=int(head[Head.SAMPLES]),
        fetch_ns=int(head[Head.FETCH_NS]),
        collate_ns=int(head[Head.COLLATE_NS]),
        wait_ns=int(head[Head.WAIT_NS]),
        cpu_ns=int(head[Head.CPU_NS]),
        other_cpu_ns=system(head[Head.PROCESS_CPU_NS] - head[Head.CPU_NS] - head[Head.SAMPLER_CPU_NS]),
        cpu_wait_ns=int(head[Head.CPU_WAIT_NS]) if head[Head.CPU_WAIT_KNOWN] else None,
        read_bytes=system(head[Head.READ_BYTES]),
        disk_bytes=system(head[Head.DISK_BYTES]),
        page_faults=system(head[Head.PAGE_FAULTS]),
        memory_bytes=system(head[Head.MEMORY_BYTES]),
        threads=system(head[Head.THREADS]),
        dropped=int(head[Head.DROPPED]),
    )
