"""CPU time of this process, its descendants (DataLoader workers) and the machine in a profiler window.

Read when a window opens and when it closes, never in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from lightning_modelprof.processes import OWN_PROCESSES
from lightning_modelprof.record import Record
from lightning_modelprof.run.batches import CpuUse
from lightning_modelprof.run.phases import PHASE_INDEX

try:
    import psutil
except (ImportError, NotImplementedError):  # psutil raises the latter on an unknown platform
    psutil = None


Answer = TypeVar("Answer")


BUSY_FIELDS: Final = ("user", "nice", "system", "irq", "softirq", "steal")
"""psutil's fields of busy CPU time. Linux counts ``guest`` within ``user`` and ``guest_nice`` within
``nice``."""


NUM_ATTEMPTS: Final = 3
"""Attempts at reading the descendants; one fails if a descendant ends during it."""


ROUNDING_NS: Final = 20_000_000
"""Maximum shortfall of a process's CPU time: user and system time, each cut to 10 ms ticks."""


_CREATION_ROUNDING_S: Final = 2.0
"""How much too early a process may seem to have started: Linux knows its own start only to a second."""


_PROCESSES: Final = Path("/proc")
RANK_VARIABLE: Final = "LOCAL_RANK"


class Instant(NamedTuple):
    """What can be read within microseconds; CPU times count from an arbitrary zero, in ns.

    Attributes:
        process_ns: user and system time of this process's threads.
        system_ns: busy and waiting time summed over all CPUs; ``None`` if psutil can't read it.
    """

    clock_ns: int
    process_ns: int
    system_ns: tuple[int, int] | None


class ProcessTimes(NamedTuple):
    """CPU time in ns used by a process itself, and by its ended and awaited children."""

    own_ns: int
    reaped_ns: int


class CpuReading(Record, frozen=True, kw_only=True):
    """CPU times at one moment.

    Attributes:
        begin: read first; marks a window's end, so that the rest of the reading doesn't count.
        end: read last; marks a window's start, for the same reason.
        family: times by psutil process, for this process (without its own time: ``process_ns`` is more
            precise) and its descendants that this package hasn't started; ``None`` if psutil can't read them.
            psutil processes are equal if number and creation time are.
        num_cpus: the machine's logical CPUs; ``None`` if psutil can't read it.
    """

    begin: Instant
    end: Instant
    family: Mapping[Any, ProcessTimes] | None
    num_cpus: int | None


def read_cpu() -> CpuReading | None:
    """Read the current CPU times; never raises, and returns ``None`` without psutil."""
    if psutil is None:
        return None
    begin = read_instant()
    num_cpus = _ask(psutil.cpu_count)
    family = _ask(_read_family)
    return CpuReading(begin=begin, end=read_instant(), family=family, num_cpus=num_cpus)


def cpu_use_between(start: CpuReading, stop: CpuReading) -> dict[str, int | None]:
    """Return the CPU time used from the end of one reading to the start of a later one.

    Unreadable values are ``None``; no value is negative.

    Returns:
        ``elapsed_ns``: wall time.
        ``process_ns``: CPU time of this process's threads.
        ``workers_ns``: CPU time of all its descendants, including those that started or ended in between;
            excludes other ranks of the job, which Lightning's rank 0 starts, and their workers.
        ``system_busy_ns``: time that the machine's CPUs worked for any process, summed over CPUs.
        ``system_total_ns``: the same plus the time that they were idle or waited for a disk.
        ``num_cpus``: logical CPUs of the machine.
    """
    begin, end = start.end, stop.begin
    busy_ns = total_ns = None
    if begin.system_ns is not None and end.system_ns is not None:
        # Linux may correct idle and iowait downwards.
        busy_ns, waiting_ns = (max(0, b - a) for a, b in zip(begin.system_ns, end.system_ns, strict=True))
        total_ns = busy_ns + waiting_ns
    workers_ns = None
    if start.family is not None and stop.family is not None:
        workers_ns = _used_by_workers(start.family, stop.family)
    return {
        "elapsed_ns": max(0, end.clock_ns - begin.clock_ns),
        "process_ns": max(0, end.process_ns - begin.process_ns),
        "workers_ns": workers_ns,
        "system_busy_ns": busy_ns,
        "system_total_ns": total_ns,
        "num_cpus": stop.num_cpus,
    }


def _used_by_workers(start: Mapping[Any, ProcessTimes], stop: Mapping[Any, ProcessTimes]) -> int | None:
    """Return the descendants' CPU time between two readings; ``None`` if one was lost.

    When a process ends and its parent has waited for it, its whole time (its own and that of its awaited
    children) moves to the parent's ``reaped_ns``. So a descendant that ended in between appears there with
    its time before the first reading, which is subtracted. One that lives at both readings counts only by its
    own time, and one that both started and ended in between only in ``reaped_ns``.
    """
    nothing = ProcessTimes(0, 0)
    alive_ns = reaped_ns = 0
    for process, now in stop.items():
        before = start.get(process, nothing)
        alive_ns += max(0, now.own_ns - before.own_ns)
        reaped_ns += now.reaped_ns - before.reaped_ns
    ended_ns = reaped_ns - sum(sum(times) for process, times in start.items() if process not in stop)
    if ended_ns < -ROUNDING_NS * len(stop):
        # An ended process is missing: its parent ended first, or ignores its children's end (SIGCHLD), or the
        # system keeps no such account (macOS, Windows).
        return None
    return alive_ns + max(0, ended_ns)


def _read_family() -> dict[Any, ProcessTimes] | None:
    """Read the times of this process and its descendants; ``None`` if they kept ending during the reading."""
    for _ in range(NUM_ATTEMPTS):
        with suppress(psutil.NoSuchProcess):  # it's unknown whether its time is in its parent's account
            return _read_family_once()
    return None


def _read_family_once() -> dict[Any, ProcessTimes]:
    # Parents are read before their children. Then a child that could be read was not yet in its parent's
    # reaped time, and one that couldn't raises NoSuchProcess, so each counts exactly once.
    me = psutil.Process()
    descendants = _descendants(me)
    family = {me: ProcessTimes(0, _process_times(me).reaped_ns)}
    other_ranks = _find_other_ranks(me, descendants)
    family.update((process, _process_times(process)) for process in descendants if process not in other_ranks)
    return family


def _descendants(me: Any) -> list[Any]:
    """List the processes below this one except our own, parents before their children.

    Linux lists each thread's children; where that list is hidden, all processes are read.
    """
    if not (_PROCESSES / f"self/task/{me.pid}/children").exists():
        return [one for one in me.children(recursive=True) if one.pid not in OWN_PROCESSES]
    return [psutil.Process(number) for number in _numbers_below(me.pid) if number not in OWN_PROCESSES]


def _numbers_below(number: int) -> Iterator[int]:
    for thread in (_PROCESSES / f"{number}/task").iterdir():
        with suppress(OSError):  # the thread or process has ended
            for child in map(int, (thread / "children").read_bytes().split()):
                yield child
                yield from _numbers_below(child)


def _process_times(process: Any) -> ProcessTimes:
    times = process.cpu_times()
    return ProcessTimes(
        _to_ns(times.user + times.system), _to_ns(times.children_user + times.children_system)
    )


def _find_other_ranks(me: Any, descendants: list[Any]) -> set[Any]:
    """Return the descendants that belong to another rank of the job.

    Lightning's rank 0 starts its node's other ranks as its children, each with its own ``LOCAL_RANK``, which
    their workers inherit. Our own workers have ours, or the one this process started with.
    """
    if RANK_VARIABLE not in os.environ or not descendants:
        return set()
    ours = {None, os.environ[RANK_VARIABLE], _environment_of(me).get(RANK_VARIABLE)}
    return {process for process in descendants if _environment_of(process).get(RANK_VARIABLE) not in ours}


def _environment_of(process: Any) -> dict[str, str]:
    """Return a process's initial environment; empty if hidden, as for other users' or ended processes."""
    return _ask(process.environ) or {}


def read_instant() -> Instant:
    """Read the current CPU times that need no search; never raises."""
    # The operating system's process clock is exact, while psutil's times come in 10 ms ticks.
    system_ns = None if psutil is None else _ask(_read_system)
    return Instant(time.perf_counter_ns(), time.process_time_ns(), system_ns)


def reaped_ns() -> int | None:
    """Return the CPU time of this process's ended and awaited children; ``None`` if unreadable."""
    if psutil is None:
        return None
    times = _ask(lambda: _process_times(psutil.Process()))
    return None if times is None else times.reaped_ns


class ProcessPace(NamedTuple):
    """A process's progress.

    Attributes:
        used_s: CPU seconds used so far.
        wants_cpu: whether it runs or waits for a CPU, rather than for a disk or anything else.
    """

    used_s: float
    wants_cpu: bool


def read_pace(number: int) -> ProcessPace | None:
    """Read a process's progress; ``None`` if unreadable."""
    if psutil is None:
        return None

    def read() -> ProcessPace:
        process = psutil.Process(number)
        times = process.cpu_times()
        return ProcessPace(times.user + times.system, process.status() == psutil.STATUS_RUNNING)

    return _ask(read)


def used_by_children(since_s: float, reaped_before_ns: int | None) -> int | None:
    """Return the CPU time of descendants started since a moment, including ended ones and their children.

    Args:
        since_s: the moment, in seconds since the epoch.
        reaped_before_ns: result of :func:`reaped_ns` at that moment.
    """
    if reaped_before_ns is None:
        return None

    def ask() -> int:
        # A process that ends between the two readings is in neither; at a loop's end that's little work.
        family = _read_family()
        if family is None:
            raise psutil.NoSuchProcess(os.getpid())
        alive_ns = sum(
            sum(times)
            for process, times in family.items()
            if process.pid != os.getpid() and process.create_time() >= since_s - _CREATION_ROUNDING_S
        )
        return alive_ns + sum(
            times.reaped_ns for process, times in family.items() if process.pid == os.getpid()
        )

    used_ns = _ask(ask)
    return None if used_ns is None else max(0, used_ns - reaped_before_ns)


def _read_system() -> tuple[int, int]:
    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    return _to_ns(sum(getattr(times, field, 0.0) for field in BUSY_FIELDS)), _to_ns(waiting)


def _ask(question: Callable[[], Answer]) -> Answer | None:
    """Return the answer; ``None`` whatever psutil raises, even undocumented errors (odd lines in /proc)."""
    try:
        return question()
    except Exception:
        return None


def _to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


PERIOD: Final = 13
"""Steps per reading. No divisor of usual gradient accumulation counts, so all kinds of steps are read."""


_DATALOADER: Final = PHASE_INDEX["dataloader"]


_PROFILER: Final = PHASE_INDEX["profiler"]


_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")


def cpu_wait_ns(schedstat: Path | None = None) -> int | None:
    """Return how long a thread was ready to run without a CPU; ``None`` where the system doesn't count it.

    This is the second of Linux's three numbers per thread: time on a CPU, waiting time, turns.

    Args:
        schedstat: the thread's file; defaults to the calling thread's.
    """
    try:
        _, wait_ns, turns = map(int, (schedstat or _SCHEDSTAT).read_bytes().split())
    except (OSError, ValueError):
        return None
    return wait_ns if turns else None  # the caller had a turn, so zeros mean that the kernel doesn't count


_MOST_DEPTH: Final = 64


class CpuOfSteps:
    """Reads the thread's and process's clocks at both ends of a fetch and at the end of its step.

    Args:
        skip_first: number of first steps that are never read.
        made: returns whether workers have finished the next batch, and how many batches are ready; ``None``
            without workers.

    Attributes:
        left: fetches until the one whose step is read; the caller counts down.
    """

    def __init__(
        self, skip_first: int = 0, made: Callable[[], tuple[bool, int] | None] = lambda: None
    ) -> None:
        self.skip(skip_first)
        self._look = made
        self._made: tuple[bool, int] | None = None
        self._num_ready, self._depths = 0, [0]
        self.is_reading = False
        self._thread_ns = self._process_ns = self._fetch_thread_ns = 0
        self._num_steps = self._steps_ns = self._fetches_ns = 0
        self._fetches_thread_ns = self._rest_thread_ns = self._rest_process_ns = 0
        self._first: Instant | None = None
        self._last: Instant | None = None
        self._began_s = 0.0
        self._reaped_ns: int | None = None
        self._workers_ns: int | None = None

    def skip(self, skip_first: int) -> None:
        self.left = skip_first + 1

    # In the loop's thread, around fetches

    def begin_fetch(self) -> None:
        """Start a fetch and its step; call when ``left`` is used up, or while a step is being read."""
        self.is_reading = self.left <= 0  # a second fetch in a step ends the first one's reading
        if self.is_reading:
            self.left = PERIOD
            self._made = self._look()
            self._thread_ns = time.thread_time_ns()

    def end_fetch(self) -> None:
        now_ns = time.thread_time_ns()
        self._fetch_thread_ns = now_ns - self._thread_ns
        self._thread_ns, self._process_ns = now_ns, time.process_time_ns()

    def end_step(self, phases_ns: list[int], tags: int) -> None:
        """End the step that is being read; it counts if it contained nothing special."""
        self.is_reading = False
        if tags or phases_ns[_PROFILER]:
            return
        self._num_steps += 1
        if self._made is not None:
            is_ready, depth = self._made
            self._num_ready += is_ready
            depth = min(depth, _MOST_DEPTH)
            self._depths += [0] * (depth + 1 - len(self._depths))
            self._depths[depth] += 1
        self._steps_ns += sum(phases_ns)
        self._fetches_ns += phases_ns[_DATALOADER]
        self._fetches_thread_ns += self._fetch_thread_ns
        self._rest_thread_ns += time.thread_time_ns() - self._thread_ns
        self._rest_process_ns += time.process_time_ns() - self._process_ns

    # Around the loop

    def start(self) -> None:
        self._first, self._began_s, self._reaped_ns = read_instant(), time.time(), reaped_ns()

    def stop(self, *, has_workers: bool) -> None:
        """End the loop; finding the workers takes about 20 µs per process of the machine."""
        if self._num_steps and self._last is None:
            self._last = read_instant()
            self._workers_ns = used_by_children(self._began_s, self._reaped_ns) if has_workers else 0

    def record(self) -> CpuUse | None:
        """Return the record; ``None`` if no step was read, or before the loop's end."""
        first, last = self._first, self._last
        if first is None or last is None:
            return None
        busy_ns = idle_ns = None
        if first.system_ns is not None and last.system_ns is not None:
            # Linux may correct idle and iowait downwards.
            busy_ns, idle_ns = (max(0, b - a) for a, b in zip(first.system_ns, last.system_ns, strict=True))
        return CpuUse(
            num_steps=self._num_steps,
            steps_ns=self._steps_ns,
            fetches_ns=self._fetches_ns,
            fetches_thread_ns=self._fetches_thread_ns,
            rest_thread_ns=self._rest_thread_ns,
            rest_process_ns=self._rest_process_ns,
            loop_ns=last.clock_ns - first.clock_ns,
            process_ns=last.process_ns - first.process_ns,
            workers_ns=self._workers_ns,
            num_asked=sum(self._depths),
            num_ready=self._num_ready,
            depths=tuple(self._depths) if any(self._depths) else (),
            busy_ns=busy_ns,
            cpus_ns=None if busy_ns is None or idle_ns is None else busy_ns + idle_ns,
        )
