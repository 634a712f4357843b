"""Runs inside a worker: records batches, and samples of statements and transforms.

The data set and its transforms stay unchanged. We replace two calls that torch makes on its own objects in
the worker: taking the next indices from its queue, which starts a batch, and collating the samples.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import msgspec

try:
    import resource
except ImportError:  # Windows, where workers aren't inspected
    resource = None  # type: ignore[assignment]
from torch.utils.data import get_worker_info

from lightning_modelprof.measure.resources.cpu import cpu_wait_ns
from lightning_modelprof.measure.sampling.sampler import Sampler
from lightning_modelprof.measure.sampling.stack_probe import StackProbe
from lightning_modelprof.measure.stand_in import StandIn
from lightning_modelprof.measure.steps.ledger import DATALOADER
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.measure.workers.call_samples import CallProbe, CallSamples, State, merge_stacks
from lightning_modelprof.measure.workers.calls import CallName, Calls
from lightning_modelprof.measure.workers.ring import (
    BATCH_COLUMNS,
    NUM_BATCHES,
    Head,
    SharedMemory,
    SlotWriter,
)
from lightning_modelprof.run.stacks import StackSamples

_SYSTEM_EVERY_NS: Final = 250_000_000
_TEXT_EVERY_NS: Final = 1_000_000_000
_FIRST_TEXT_NS: Final = 100_000_000
"""Results are written after this time, then after twice as long each time, up to the above."""

_INTERVAL_NS: Final = 5_000_000
_LOOKS_PER_FOLD: Final = 1_000
"""More frequent than in training: transforms' shares need many samples."""

_STATEMENTS_EVERY: Final = 4
"""Of this many samples, one covers statements too."""

_MAIN_THREAD: Final = Path("/proc/self/schedstat")

_OURS: Final = "lightning_modelprof.measure.workers."
"""Stacks exclude frames of these modules."""

OUTSIDE: Final = object()
"""Replaces an inspection: a waiting worker isn't sampled."""


class WorkerText(msgspec.Struct):
    """A worker's results that it writes as text.

    Attributes:
        collate: the collate function; ``None`` if torch's loop differs from what we know.
    """

    stacks: StackSamples
    calls: CallSamples
    collate: CallName | None = None


def drop_frame(error: BaseException) -> None:
    """Remove the catching frame from an error's traceback; a bare ``raise`` must follow.

    The user then sees the same traceback as without us. Before Python 3.11 such a frame stays.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def _itself(original: Any) -> tuple[Any, ...]:
    """Return pickle data that becomes the user's object, even where this package isn't installed."""
    return cast, (None, original)


class WorkerStart(StandIn):
    """A ``worker_init_fn`` that starts measuring and calls the user's own.

    While the loop runs, it's an attribute of the user's DataLoader and equivalent to the user's function
    except for ``is`` and ``type``. Copies and pickles that aren't for a worker are that function.

    Args:
        original: the user's function; ``None`` without one.
        memory: memory that the workers write to.
        own: folders of packages that are the user's wherever they are.

    Attributes:
        is_over: whether the loop has ended, so that only the user's function is called.
    """

    __slots__ = ("__weakref__", "_memory", "_options", "_pid", "is_over")

    def __init__(
        self,
        original: Callable[[int], Any] | None,
        memory: SharedMemory,
        own: tuple[str, ...] = (),
        sampling: bool = True,
    ) -> None:
        ours = {
            "original": original,
            "_memory": memory,
            "_options": (own, sampling),
            "_pid": os.getpid(),
            "is_over": False,
        }
        for key, value in ours.items():
            object.__setattr__(self, key, value)

    def end(self) -> None:
        object.__setattr__(self, "is_over", True)

    def __call__(self, worker_id: int) -> None:
        worker = None
        own, sampling = self._options
        is_child = os.getpid() != self._pid or not self._memory.is_inherited  # not in the training process
        if is_child and not self.is_over:
            with suppress(Exception):  # the worker works without us
                slot = self._memory.claim(worker_id)
                worker = None if slot is None else Worker(slot, UserCode(roots=own), sampling=sampling)
        if self.original is not None:
            try:
                self.original(worker_id)
            except BaseException as error:
                drop_frame(error)
                raise
        info = get_worker_info()
        if worker is not None and info is not None:
            try:
                worker.begin(info.dataset, _loop_frame())
            except Exception:  # the worker works without us
                with suppress(Exception):
                    worker.end()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy as the user's own function, except for a worker."""
        if get_spawning_popen() is None or self.is_over:
            return _itself(self.original)
        return WorkerStart, (self.original, self._memory.not_inherited(), *self._options)

    # Behaves like the user's function

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.original)

    def __bool__(self) -> bool:
        return bool(self.original)

    def __eq__(self, other: object) -> bool:
        return bool(self.original == (other.original if type(other) is WorkerStart else other))

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __copy__(self) -> Any:
        return copy.copy(self.original)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "original"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)


class Worker:
    def __init__(self, slot: SlotWriter, user_code: UserCode, *, sampling: bool) -> None:
        self._slot, self._head = slot, slot.head
        self._calls = Calls(user_code)
        self.state = State(DATALOADER, OUTSIDE)
        self._queue: Any = None
        self._fetcher: Any = None
        self._has_fetcher = False
        self._message: Any = None
        self._begin = (0, 0)
        self._last_ready_ns, self._last_index = 0, -1
        self._system_ns = 0
        self._system: tuple[int, ...] | None = None
        self._sampling = sampling
        self._look: StackProbe | None = StackProbe(self.state, user_code) if sampling else None
        self._call_look: CallProbe | None = None
        self._sampler: Sampler | None = None
        self._cpu_wait_ns: int | None = None
        self._before = _decoded(slot.text())
        self._collate_name: CallName | None = None
        self._since_text_ns, self._text_after_ns = 0, _FIRST_TEXT_NS
        self._sampler_cost_ns = 0

    # Lifecycle

    def begin(self, dataset: Any, loop: FrameType | None) -> None:
        """Start measuring.

        Args:
            loop: frame of torch's loop, which makes the batches; ``None`` if it differs from what we know.
        """
        head = self._head
        head[Head.STARTS] += 1
        start_ns = _age_ns()
        if start_ns is not None:
            head[Head.STARTS_NS] += start_ns
            head[Head.STARTS_TIMED] += 1
        with suppress(Exception):  # the table is shorter then
            self._calls.find(dataset)
        queue, collate = _locals(loop, "index_queue", "collate_fn")
        if collate is not None:
            self._collate_name = self._calls.collate_name(collate)
        self._read_system(time.perf_counter_ns())
        self._call_look = CallProbe(
            self.state, self._calls, None if self._before is None else self._before.calls
        )
        self._write_text(None)
        if self._look is not None:
            looks = {
                "statements": _one_in(_STATEMENTS_EVERY, self._look.look),
                "transforms": self._call_look.look,
                "what was seen": self._save_sometimes,
            }
            self._sampler = Sampler(
                looks,
                is_crowded=lambda: _is_crowded(self._look),
                interval_ns=_INTERVAL_NS,
                looks_per_fold=_LOOKS_PER_FOLD,
            )
            self._call_look.sampler = self._sampler
            self._sampler.resume()
        util.Finalize(None, self.end, exitpriority=100)
        if queue is not None:
            queue.get = functools.partial(self.take, queue.get)
            self._queue = queue

    def end(self) -> None:
        """Stop measuring and restore torch's objects."""
        queue, self._queue = self._queue, None
        if queue is not None:
            with suppress(AttributeError):
                del queue.get
        self._wrap(None)
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.pause()
        self._write_text(sampler)
        self._read_system(time.perf_counter_ns())

    def take(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wait for the next indices; a batch starts when they arrive."""
        state = self.state
        state.fetch_ns, state.inspection, self._begin = 0, OUTSIDE, (0, 0)
        if not self._has_fetcher:
            with suppress(Exception):
                self._wrap(*_locals(_loop_frame(), "fetcher"))
        message = original(*args, **kwargs)
        if type(message) is tuple:
            self._message = message
            state.batch += 1
            self._begin = time.perf_counter_ns(), time.thread_time_ns()
            state.fetch_ns, state.inspection = self._begin[0], None
        else:  # the end, or another epoch, for which torch creates another fetcher
            self._has_fetcher = False
        return message

    def _wrap(self, fetcher: Any) -> None:
        """Make torch's fetcher call us to collate samples, and restore the previous fetcher."""
        before, self._fetcher = self._fetcher, None
        if before is not None:
            before.collate_fn = before.collate_fn.args[0]
        if fetcher is not None:
            fetcher.collate_fn = functools.partial(self.collate, fetcher.collate_fn)
            self._fetcher, self._has_fetcher = fetcher, True

    def collate(self, original: Callable[[Any], Any], data: Any) -> Any:
        self.state.fetch_ns = 0
        fetched = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return original(data)
        except BaseException as error:
            drop_frame(error)
            raise
        finally:
            ready = time.perf_counter_ns(), time.thread_time_ns()
            self.state.inspection = OUTSIDE
            with suppress(Exception):
                self._end_batch(data, fetched, ready)

    def _end_batch(self, data: Any, fetched: tuple[int, int], ready: tuple[int, int]) -> None:
        """Record a batch.

        Args:
            fetched: wall and CPU clock when collating started.
            ready: the same when it returned.
        """
        (begin_ns, cpu_begin_ns), (fetched_ns, fetched_cpu_ns), (ready_ns, cpu_ns) = (
            self._begin,
            fetched,
            ready,
        )
        self._begin = (0, 0)
        if not begin_ns:  # called twice for one batch
            return
        head = self._head
        index, indices = self._message
        samples = self._number_of(data, indices)
        head[Head.BATCHES] += 1
        head[Head.SAMPLES] += samples
        head[Head.FETCH_NS] += fetched_ns - begin_ns
        head[Head.FETCH_CPU_NS] += fetched_cpu_ns - cpu_begin_ns
        head[Head.COLLATE_NS] += ready_ns - fetched_ns
        head[Head.CPU_NS] += cpu_ns - cpu_begin_ns
        if self._last_ready_ns and not 0 <= index <= self._last_index:  # no epoch started in between
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
        if self._slot.silent[0]:
            self.end()

    def _number_of(self, data: Any, indices: Any) -> int:
        """Count a batch's samples, using only torch's own objects."""
        if not self._fetcher.auto_collation:
            return 1
        return next((len(one) for one in (data, indices) if type(one) is list or type(one) is tuple), 1)

    # Periodic work

    def _read_system(self, now_ns: int) -> None:
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
            head[Head.SYSTEM_KNOWN] = 1
        wait_ns, earlier_ns = cpu_wait_ns(_MAIN_THREAD), self._cpu_wait_ns
        self._cpu_wait_ns = wait_ns
        if wait_ns is not None and earlier_ns is not None:
            head[Head.CPU_WAIT_NS] += max(0, wait_ns - earlier_ns)
            head[Head.CPU_WAIT_KNOWN] = 1
        with suppress(OSError):
            with open("/proc/self/statm") as file:  # noqa: PTH123
                head[Head.MEMORY_BYTES] = int(file.read().split()[1]) * resource.getpagesize()
            head[Head.THREADS] = max(head[Head.THREADS], len(os.listdir("/proc/self/task")))  # noqa: PTH208

    def _save_sometimes(self, elapsed_ns: int) -> None:
        """Write the results periodically; runs in the sampling thread."""
        self._since_text_ns += elapsed_ns
        if self._since_text_ns >= self._text_after_ns and self._sampler is not None:
            self._since_text_ns, self._text_after_ns = 0, min(2 * self._text_after_ns, _TEXT_EVERY_NS)
            self._write_text(self._sampler)

    def _write_text(self, sampler: Sampler | None) -> None:
        look, call_look = self._look, self._call_look
        if call_look is None:
            return
        seen = StackSamples()
        if look is not None and sampler is not None:
            seen = look.samples(
                first_interval_ns=_STATEMENTS_EVERY * _INTERVAL_NS,
                last_interval_ns=_STATEMENTS_EVERY * sampler.interval_ns,
                cost_ns=sampler.cost_ns,
                notes=tuple(sampler.notes),
            )
            seen = merge_stacks([seen], without=_OURS)
        if self._before is not None:
            seen = merge_stacks([self._before.stacks, seen])
        text = WorkerText(seen, call_look.samples(), self._collate_name)
        most = len(seen.stacks)
        while not self._slot.write_text(msgspec.json.encode(text)) and most > 1:
            most //= 2
            text.stacks = merge_stacks([seen], most=most)


def _one_in(number: int, look: Callable[[int], None]) -> Callable[[int], None]:
    """Call ``look`` once in ``number`` times, with the time of all."""
    passed = [0, 0]

    def sometimes(elapsed_ns: int) -> None:
        passed[0] += 1
        passed[1] += elapsed_ns
        if passed[0] == number:
            time_ns = passed[1]
            passed[:] = [0, 0]
            look(time_ns)

    return sometimes


def _decoded(text: bytes) -> WorkerText | None:
    return msgspec.json.decode(text, type=WorkerText) if text else None


def _loop_frame() -> FrameType | None:
    """Return the frame of torch's loop that calls us; ``None`` if it differs from what we know."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None or frame.f_code.co_name == "_worker_loop":
            return frame
        frame = frame.f_back
    return None


def _locals(frame: FrameType | None, *names: str) -> list[Any]:
    """Return local variables of torch's loop; ``None`` for missing ones."""
    if frame is None:
        return [None] * len(names)
    found = frame.f_locals
    values = [found.get(name) for name in names]
    if sys.version_info < (3, 13):  # a copy, which would keep alive what torch drops
        found.clear()
    return values


def _age_ns() -> int | None:
    try:
        with open("/proc/self/stat") as file:  # noqa: PTH123
            ticks = int(file.read().rpartition(")")[2].split()[19])
        began_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - began_ns)
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _read_io() -> tuple[int, int]:
    """Return the bytes that this process read, and those of them that came from a disk."""
    try:
        with open("/proc/self/io") as file:  # noqa: PTH123
            counters = dict(line.split(": ") for line in file.read().splitlines())
        return int(counters["rchar"]), int(counters["read_bytes"])
    except (OSError, ValueError, KeyError):
        return 0, 0


def _is_crowded(look: StackProbe | None) -> bool:
    return look is not None and look.clocks.is_crowded
