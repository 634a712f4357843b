"""What runs in a worker: it writes down batches, what calls took, and at which statements it was."""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Final

import msgspec

try:
    import resource
except ImportError:  # Windows, where workers are not looked into
    resource = None  # type: ignore[assignment]
from torch.utils.data import get_worker_info

from lightning_modelprof.measure.resources.cpu import cpu_wait_ns
from lightning_modelprof.measure.sampling.sampler import MIN_INTERVAL_NS, Sampler
from lightning_modelprof.measure.sampling.stack_look import StackLook
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers.ring import (
    BATCH_COLUMNS,
    CALL_HEAD,
    NUM_BATCHES,
    NUM_KEPT,
    Head,
    SlotWriter,
    Sum,
    claim_slot,
    open_memory,
)
from lightning_modelprof.measure.workers.stand_ins import InPlaceOf, drop_frame, itself
from lightning_modelprof.measure.workers.timed_calls import OUTSIDE, TimedCalls
from lightning_modelprof.run.stacks import StackSamples, merge_stacks

_WORKERS: Final[dict[str, Worker]] = {}
"""Of this process, by the key that its ``worker_init_fn`` and its collate function share."""

_SYSTEM_EVERY_NS: Final = 250_000_000
_TEXT_EVERY_NS: Final = 1_000_000_000
_FIRST_TEXT_NS: Final = 100_000_000
"""What was seen is written down after so long, then after twice as long each time, up to the above."""

_CALL_COST_NS: Final = 900
_SAMPLE_COST_NS: Final = 1_200
"""What a timed call, and a timed sample, take at most. Source: benchmarks/worker_cost.py."""

_MAIN_THREAD: Final = Path("/proc/self/schedstat")

_OURS: Final = "lightning_modelprof.measure.workers."
"""Frames of these modules are in no stack."""

_MOST_COST: Final = 0.01
"""Of the time of samples: where timing all would take more, one batch in several is timed."""


class WorkerStart(InPlaceOf):
    """A ``worker_init_fn`` that begins to measure and calls the user's own.

    Args:
        original: the user's; ``None`` without.
        key: that the collate function has, too.
        fd, path: where the shared memory is, in a child that inherits and in one that does not.
        name: of the shared memory.
        num_slots: of the shared memory.
        own: folders of packages that are the user's wherever they are.
        sampling: whether statements are looked at.

    Attributes:
        is_over: whether the loop has ended, and only the user's own is called.
    """

    __slots__ = ("_arguments", "_pid", "is_over")

    def __init__(
        self,
        original: Callable[[int], Any] | None,
        *,
        key: str,
        fd: int,
        path: str,
        name: str,
        num_slots: int,
        own: tuple[str, ...] = (),
        sampling: bool = True,
    ) -> None:
        arguments = (key, fd, path, name, num_slots, own, sampling)
        super().__init__(original, _arguments=arguments, _pid=os.getpid(), is_over=False)

    def end(self) -> None:
        """From now on only the user's own is called."""
        object.__setattr__(self, "is_over", True)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy that is not for a worker is the user's own function."""
        if get_spawning_popen() is None or self.is_over:
            return itself(self.original)
        key, _, path, name, num_slots, own, sampling = self._arguments
        return _make_start, (self.original, (key, path, name, num_slots, own, sampling))

    def __call__(self, worker_id: int) -> None:
        """As of ``worker_init_fn``."""
        worker = None
        key, fd, path, name, num_slots, own, sampling = self._arguments
        is_child = os.getpid() != self._pid or fd < 0  # and not a loader without workers
        if is_child and not self.is_over:
            with suppress(Exception):  # it works without us
                found = open_memory(path, name) if fd < 0 else fd
                slot = None if found is None else claim_slot(found, name, num_slots, worker_id)
                worker = None if slot is None else Worker(slot, UserCode(roots=own), sampling=sampling)
        if self.original is not None:
            try:
                self.original(worker_id)
            except BaseException as error:
                drop_frame(error)
                raise
        info = get_worker_info()
        if worker is not None and info is not None:
            _WORKERS[key] = worker
            try:
                worker.begin(info.dataset)
            except Exception:  # as without us
                with suppress(Exception):
                    worker.end()


def _make_start(original: Any, arguments: tuple[str, str, str, int, tuple[str, ...], bool]) -> WorkerStart:
    """In a child that inherits nothing."""
    key, path, name, num_slots, own, sampling = arguments
    return WorkerStart(
        original, key=key, fd=-1, path=path, name=name, num_slots=num_slots, own=own, sampling=sampling
    )


class Collate(InPlaceOf):
    """The user's collate function, timed in a worker that measures.

    Args:
        original: the user's.
        key: that the ``worker_init_fn`` has, too.
    """

    __slots__ = ("_key",)

    def __init__(self, original: Callable[..., Any], key: str) -> None:
        super().__init__(original, _key=key)

    def __reduce__(self) -> tuple[Any, ...]:
        """As of WorkerStart."""
        if get_spawning_popen() is None:
            return itself(self.original)
        return Collate, (self.original, self._key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the user's; torch calls it with the samples alone."""
        worker = _WORKERS.get(self._key)
        try:
            if worker is None or len(args) != 1 or kwargs:
                return self.original(*args, **kwargs)
            return worker.collate(self.original, *args)
        except BaseException as error:
            drop_frame(error)
            raise


class Worker:
    """Measures in one worker.

    Args:
        slot: where it writes.
        user_code: whose code is whose.
        sampling: whether statements are looked at.
    """

    def __init__(self, slot: SlotWriter, user_code: UserCode, *, sampling: bool) -> None:
        self._slot, self._head = slot, slot.head
        self._calls = TimedCalls(slot, user_code)
        self._is_timing = True
        self._until_end = self._until_timed = 0
        self._random = random.Random(0)  # of our own: the data's numbers stay what they are
        self._timed_cost_ns = self._timed_ns = 0
        self._collate_words: memoryview | None = None
        self._last_ready_ns, self._last_index = 0, -1
        self._system_ns = 0
        self._system: tuple[int, ...] | None = None
        self._look: StackLook | None = StackLook(self._calls.state, user_code) if sampling else None
        self._sampler: Sampler | None = None
        self._cpu_wait_ns: int | None = None
        self._before = slot.text()
        self._since_text_ns, self._text_after_ns = 0, _FIRST_TEXT_NS
        self._sampler_cost_ns = 0

    # Life

    def begin(self, dataset: Any) -> None:
        """Measure from now on.

        Args:
            dataset: the worker's.
        """
        head = self._head
        head[Head.STARTS] += 1
        start_ns = _age_ns()
        if start_ns is not None:
            head[Head.STARTS_NS] += start_ns
            head[Head.STARTS_TIMED] += 1
        self._calls.begin(dataset)
        self._read_system(time.perf_counter_ns())
        if self._look is not None:
            looks = {"statements": self._look.look, "what was seen": self._save_sometimes}
            self._sampler = Sampler(looks, is_crowded=lambda: _is_crowded(self._look))
            self._sampler.resume()
        util.Finalize(None, self.end, exitpriority=100)

    def end(self) -> None:
        """Measure no more, and leave everything as it was."""
        self._calls.switch(None)
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.pause()
            self._write_text(sampler)
        self._read_system(time.perf_counter_ns())
        for key in [key for key, worker in _WORKERS.items() if worker is self]:
            del _WORKERS[key]

    def collate(self, original: Callable[[Any], Any], data: Any) -> Any:
        """Collate, and write down the batch."""
        fetched_ns, fetched_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        self._calls.inner[0] = 0
        try:
            return original(data)
        except BaseException as error:
            drop_frame(error)
            raise
        finally:
            ready_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            self._calls.state.inspection = OUTSIDE
            with suppress(Exception):
                self._end_batch(original, data, (fetched_ns, fetched_cpu_ns), (ready_ns, cpu_ns))

    def _end_batch(self, original: Any, data: Any, fetched: tuple[int, int], ready: tuple[int, int]) -> None:
        """Write down a batch.

        Args:
            original: the user's collate function.
            data: that it was given.
            fetched: the clock, and that of CPU time, when it was called.
            ready: the same when it returned.
        """
        (fetched_ns, fetched_cpu_ns), (ready_ns, cpu_ns) = fetched, ready
        head, batch = self._head, self._calls.batch
        begin_ns, cpu_begin_ns, samples, calls = batch
        batch[:] = [0, 0, 0, 0]
        words = self._collate_words
        if words is None:
            words = self._collate_words = self._slot.call(self._calls.name("", "collate", 0, original))
        took_ns = ready_ns - fetched_ns
        if words is not None:
            number = words[Sum.CALLS]
            words[CALL_HEAD + (number & (NUM_KEPT - 1))] = took_ns
            words[Sum.CALLS] = number + 1
            words[Sum.TOTAL_NS] += took_ns
            words[Sum.INNER_NS] += self._calls.inner[0]
            words[Sum.MAX_NS] = max(words[Sum.MAX_NS], took_ns)
        if not begin_ns:  # its samples are not seen
            self._plan_next()
            return
        if self._is_timing:
            head[Head.TIMED_SAMPLES] += samples
            head[Head.TIMED_FETCH_NS] += fetched_ns - begin_ns
            sample_words = self._calls.state.sample_words
            if sample_words is not None:
                sample_words[Sum.CPU_NS] += fetched_cpu_ns - cpu_begin_ns
            self._timed_cost_ns += samples * _SAMPLE_COST_NS + calls * _CALL_COST_NS
            self._timed_ns += ready_ns - begin_ns
        else:
            samples = samples or (len(data) if isinstance(data, list | tuple) else 1)
        if words is not None:
            words[Sum.SAMPLES] += samples
        head[Head.BATCHES] += 1
        head[Head.SAMPLES] += samples
        head[Head.FETCH_NS] += fetched_ns - begin_ns
        head[Head.COLLATE_NS] += took_ns
        head[Head.CPU_NS] += cpu_ns - cpu_begin_ns
        index = _batch_number()
        if self._last_ready_ns and not 0 <= index <= self._last_index:  # no epoch has begun in between
            head[Head.WAIT_NS] += begin_ns - self._last_ready_ns
        self._last_ready_ns, self._last_index = ready_ns, index
        written = head[Head.WRITTEN]
        if written - head[Head.READ] >= NUM_BATCHES:
            head[Head.DROPPED] += 1
        else:
            at = (written & (NUM_BATCHES - 1)) * BATCH_COLUMNS
            row = (index, begin_ns, fetched_ns, ready_ns, cpu_ns - cpu_begin_ns, samples)
            for place_in_row, number in enumerate(row):
                self._slot.batches[at + place_in_row] = number
            head[Head.WRITTEN] = written + 1
        if ready_ns - self._system_ns >= _SYSTEM_EVERY_NS:
            self._read_system(ready_ns)
        self._plan_next()

    def _plan_next(self) -> None:
        """Whether calls of the next batch are timed."""
        if self._slot.silent[0]:
            self.end()
            return
        self._until_end -= 1
        if self._until_end <= 0:  # of so many batches one is timed, which one is left to chance
            share = self._timed_cost_ns / max(1, self._timed_ns)
            self._until_end = max(1, min(64, math.ceil(share / _MOST_COST)))
            self._until_timed = self._random.randrange(self._until_end)
        is_timing = self._until_timed == 0
        self._until_timed -= 1
        if is_timing != self._is_timing:
            self._is_timing = is_timing
            self._calls.switch(is_timing)

    # Now and then

    def _read_system(self, now_ns: int) -> None:
        """Add what the system knows of this process since the last time."""
        self._system_ns = now_ns
        usage = resource.getrusage(resource.RUSAGE_SELF)
        read_bytes, disk_bytes = _read_io()
        numbers = (time.process_time_ns(), read_bytes, disk_bytes, usage.ru_majflt)
        sampler_ns = 0 if self._sampler is None else self._sampler.cost_ns
        before, self._system = self._system, numbers
        head = self._head
        if before is not None:
            places = (Head.PROCESS_CPU_NS, Head.READ_BYTES, Head.DISK_BYTES, Head.PAGE_FAULTS)
            for place, number, earlier in zip(places, numbers, before, strict=True):
                head[place] += max(0, number - earlier)
            head[Head.SAMPLER_CPU_NS] += max(0, sampler_ns - self._sampler_cost_ns)
            self._sampler_cost_ns = sampler_ns
            head[Head.SYSTEM_TOLD] = 1
        wait_ns, earlier_ns = cpu_wait_ns(_MAIN_THREAD), self._cpu_wait_ns
        self._cpu_wait_ns = wait_ns
        if wait_ns is not None and earlier_ns is not None:
            head[Head.CPU_WAIT_NS] += max(0, wait_ns - earlier_ns)
            head[Head.CPU_WAIT_TOLD] = 1
        with suppress(OSError):
            with open("/proc/self/statm") as file:  # noqa: PTH123
                head[Head.MEMORY_BYTES] = int(file.read().split()[1]) * resource.getpagesize()
            head[Head.THREADS] = max(head[Head.THREADS], len(os.listdir("/proc/self/task")))  # noqa: PTH208

    def _save_sometimes(self, elapsed_ns: int) -> None:
        """A look of the sampling thread, which writes down what it has seen."""
        self._since_text_ns += elapsed_ns
        if self._since_text_ns >= self._text_after_ns and self._sampler is not None:
            self._since_text_ns, self._text_after_ns = 0, min(2 * self._text_after_ns, _TEXT_EVERY_NS)
            self._write_text(self._sampler)

    def _write_text(self, sampler: Sampler) -> None:
        if self._look is None:
            return
        seen = self._look.samples(
            first_interval_ns=MIN_INTERVAL_NS,
            last_interval_ns=sampler.interval_ns,
            cost_ns=sampler.cost_ns,
            notes=tuple(sampler.notes),
        )
        seen = merge_stacks([seen], without=_OURS)
        if self._before:
            seen = merge_stacks([msgspec.json.decode(self._before, type=StackSamples), seen])
        most = len(seen.stacks)
        while not self._slot.write_text(msgspec.json.encode(seen)) and most > 1:
            most //= 2
            seen = merge_stacks([seen], most=most)


def _batch_number() -> int:
    """The number of the batch that is collated, from torch's loop; -1 where it is not as it was."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame.f_code.co_name == "_worker_loop":
            number = frame.f_locals.get("idx")
            return number if isinstance(number, int) else -1
        if frame.f_back is None:
            break
        frame = frame.f_back
    return -1


def _age_ns() -> int | None:
    """How long ago this process was started; ``None`` where the system does not tell."""
    try:
        with open("/proc/self/stat") as file:  # noqa: PTH123
            ticks = int(file.read().rpartition(")")[2].split()[19])
        began_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - began_ns)
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _read_io() -> tuple[int, int]:
    """Bytes that this process asked for, and those of them that came from a disk."""
    try:
        with open("/proc/self/io") as file:  # noqa: PTH123
            told = dict(line.split(": ") for line in file.read().splitlines())
        return int(told["rchar"]), int(told["read_bytes"])
    except (OSError, ValueError, KeyError):
        return 0, 0


def _is_crowded(look: StackLook | None) -> bool:
    return look is not None and look.clocks.is_crowded
