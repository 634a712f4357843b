"""Work on traces in another process, or else in a thread or the training thread.

The training thread submits tasks and checks for answers between steps; it never waits before its loop is
over. The process starts once per loop, has a low priority and no torch, and ends with the program that
started it: if that dies, it finishes its current work. Unprocessed traces stay as torch wrote them, and
``lightning-modelprof report`` reads those.

When the loop is over, a person is waiting. A process that then lacks a CPU (only root may raise its priority)
or doesn't respond is ended, and the training thread does the rest. The process's results so far are in a file
that both have open.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, Final

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.engine.trace_work import (
    Answer,
    ReportAnswer,
    ReportTask,
    Setting,
    Task,
    TraceTask,
    TraceWork,
)
from lightning_modelprof.measure.resources.cpu import read_pace
from lightning_modelprof.processes import OWN_PROCESSES, OwnFile, start_module
from lightning_modelprof.threads import start_thread

_LENGTH: Final = 8
"""Bytes of the length before each message."""

_FEW: Final = 2**12
_MANY: Final = 2**20
_NICENESS: Final = 15
"""Leaves it 3 to 4% of a CPU next to a training that uses all of them, and a few seconds next to others."""

_LOOK_S: Final = 1.0
"""How often the process checks that the training still runs, unless it's notified."""

_POLL_S: Final = 0.005
_PACE_S: Final = 0.5
"""How long the process is watched before the training thread takes over."""

_LEAST_PACE: Final = 0.5
"""Share of a CPU; a process that gets less than it wants is slower than the training thread would be."""

STALLED_S: Final = 5.0
"""A process that gets less for this long, whatever it waits for, doesn't respond."""

INTERRUPTED: Final = "was interrupted"
_GONE_S: Final = 2.0
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
"""Prevents SIGPIPE, which would end a program that enabled it when the process is gone."""


class Helper:
    """Does tasks immediately, in the calling thread; subclasses do them elsewhere.

    Attributes:
        cpu_ns: CPU time used elsewhere; ``None`` if unknown or unused.
        problem: why no more answers come; ``""`` while they do.
    """

    def __init__(self, setting: Setting) -> None:
        self._work = TraceWork(setting)
        self._open: deque[Task] = deque()  # without a received answer
        self._answers: deque[Answer] = deque()
        self.cpu_ns: int | None = None
        self.problem = ""

    @property
    def num_open(self) -> int:
        return len(self._open)

    def send(self, task: Task) -> None:
        self._open.append(task)
        self._do_next()

    def _do_next(self) -> None:
        task, *others = list(self._open)[len(self._answers) :]
        try:
            answer = self._work.do(task, _num_windows(others))
        except BaseException:  # Ctrl-C
            self.give_up(INTERRUPTED)
            raise
        self._answers.append(answer)
        self._work.forget(task)

    def answers(self) -> list[Answer]:
        """Return the answers since the last call; doesn't wait."""
        answers: list[Answer] = []
        while self._answers and not self.problem:
            answers.append(self._answers.popleft())
            self._open.popleft()
        return answers

    def look(self) -> None:
        """Wait briefly for an answer."""
        time.sleep(_POLL_S)

    def give_up(self, problem: str) -> None:
        """Expect no more answers.

        Args:
            problem: what happened, as a predicate such as ``was interrupted``.
        """
        self.problem = self.problem or problem
        self._open.clear()
        self._answers.clear()

    def facts(self) -> Mapping[int, TraceFacts]:
        """Return the newest traces' facts by window index; to be called when the loop is over."""
        return self._work.facts

    def close(self) -> None:
        """Stop without finishing open tasks."""


class ThreadHelper(Helper):
    """Does tasks in a thread, which slows the training thread down."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        start_thread(self._run, "modelprof-traces")

    def send(self, task: Task) -> None:
        self._open.append(task)
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            begin_ns = time.thread_time_ns()
            answer = _answer_to(task, self._work, self._tasks.qsize())
            self.cpu_ns = (self.cpu_ns or 0) + time.thread_time_ns() - begin_ns
            self._answers.append(answer)
            self._work.forget(task)

    def close(self) -> None:
        self._tasks.put(None)


class ProcessHelper(Helper):
    """Does tasks in a process.

    Raises:
        OSError: when it can't start.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._unsent = bytearray()
        self._num_read = 0
        self._is_over = False
        self._facts_at = 0, 0
        self._pace: tuple[float, float] | None = None
        self._stalled_at = math.inf
        with ExitStack() as undo:
            ours, theirs = socket.socketpair()
            with theirs:
                self._line = OwnFile(ours.detach())
                undo.callback(self._line.close)
                os.set_blocking(self._line.number, False)
                # A pipe would fill up before it's read. Unnamed files can't be left behind.
                self._answer_file = OwnFile.without_name()
                undo.callback(self._answer_file.close)
                self._facts = OwnFile.without_name()
                undo.callback(self._facts.close)
                numbers = self._answer_file.number, self._facts.number
                self._process = start_module(
                    __name__, *map(str, (os.getpid(), *numbers)), stdin=theirs, pass_fds=numbers
                )
            with contextlib.suppress(OSError):  # immediately, as most of its work is importing modules
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
            undo.pop_all()
        files = self._line, self._answer_file, self._facts
        self._end = weakref.finalize(self, _end, files, self._process, os.getpid())
        self._end.atexit = False  # the process notices the program's end itself
        self._write(setting)

    def send(self, task: Task) -> None:
        self._open.append(task)
        self._write(task)

    def answers(self) -> list[Answer]:
        if not self._is_over:
            self._push()
            try:
                has_ended = not os.read(self._line.number, _FEW)  # one byte per answer
            except BlockingIOError:
                return []
            except OSError:
                has_ended = True
            self._read_complete_answers()
            if has_ended and len(self._open) > len(self._answers):
                answers = super().answers()
                self.give_up(self._why_ended())
                return answers
        return super().answers()

    def give_up(self, problem: str) -> None:
        self._end_process()
        super().give_up(problem)

    def facts(self) -> Mapping[int, TraceFacts]:
        self._end_process()
        return super().facts()

    def close(self) -> None:
        self._end_process()
        self._end()

    def look(self) -> None:
        """Wait for an answer; take over from a process that lacks a CPU or doesn't respond."""
        if self._is_over:
            self._do_next()
            return
        if self._pace is None:
            self._is_slow()
        try:
            poll = select.poll()  # unlike select, works with any number of open files
            poll.register(self._line.number, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        except OSError:  # answers() reports it next time
            return
        if not poll.poll(_PACE_S * 1e3) and self._is_slow():
            self._take_over()

    def _is_slow(self) -> bool:
        """Whether it got less CPU since the last call than the training thread would have."""
        now, found = time.monotonic(), read_pace(self._process.pid)
        before, used_s = self._pace, 0.0 if found is None else found.used_s
        self._pace = now, used_s
        if before is None or used_s - before[1] >= _LEAST_PACE * (now - before[0]):
            self._stalled_at = now + STALLED_S
            return False
        return now >= self._stalled_at or (found is not None and found.wants_cpu)

    def _take_over(self) -> None:
        """Analyze windows in this thread from now on; the loop's final report is made here anyway."""
        if self._pace is not None and self._pace[1]:
            self.cpu_ns = round(self._pace[1] * 1e9)
        self._end_process()
        self._open = deque(
            task
            for number, task in enumerate(self._open)
            if number < len(self._answers) or isinstance(task, TraceTask)
        )

    def _end_process(self) -> None:
        """End it, but keep its results."""
        if self._is_over:
            return
        self._is_over = True
        self._process.kill()  # it may take a while to exit on a busy machine, so don't wait
        self._read_complete_answers()
        begin, end = self._facts_at
        with contextlib.suppress(Exception):  # the program closed the file
            raw = os.pread(self._facts.number, end - begin, begin)
            self._work.facts.update(pickle.loads(raw) if raw else {})  # from our own process
        for task in list(self._open)[len(self._answers) : len(self._answers) + 1]:
            self._work.clean_up(task)

    def _why_ended(self) -> str:
        try:
            code = self._line.number and self._process.wait(_GONE_S)
        except Exception:  # the program closed the connection; TimeoutExpired: the process did
            return "lost its connection"
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"

    def _write(self, what: Setting | Task) -> None:
        raw = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        self._unsent += len(raw).to_bytes(_LENGTH, "big") + raw
        self._push()

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: _send(self._line.number, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which answers() reports next time
            self._unsent.clear()

    def _read_complete_answers(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                number, begin = self._answer_file.number, self._num_read + _LENGTH
                length = int.from_bytes(os.pread(number, _LENGTH, self._num_read), "big")
                raw = os.pread(number, length, begin)
                if not raw or len(raw) < length:
                    return
                self._num_read = begin + length
                answer, self.cpu_ns, self._facts_at = pickle.loads(raw)  # from our own process
                self._answers.append(answer)


def _send(number: int, data: bytearray) -> int:
    """Send through an open socket without blocking; return the number of bytes sent."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=number)
    try:
        line.setblocking(False)
        return line.send(data, _NO_SIGNAL)
    finally:
        line.detach()


def _kill(process: Any) -> None:
    """Kill a process and wait for its end, but not long, as it may be waiting for a disk."""
    process.kill()
    with contextlib.suppress(Exception):  # TimeoutExpired
        process.wait(_GONE_S)


def _end(files: Iterable[OwnFile], process: Any, owner: int) -> None:
    """End an idle process; in a forked child it belongs to the parent."""
    for file in files:
        file.close()
    if os.getpid() == owner:
        _kill(process)
        OWN_PROCESSES.discard(process.pid)


def make_helper(setting: Setting) -> Helper:
    """Make the best helper that works: a process, a thread, or the calling thread."""
    if hasattr(os, "pread"):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # the program may be ending
            return ProcessHelper(setting)
    with contextlib.suppress(RuntimeError):
        return ThreadHelper(setting)
    return Helper(setting)


class _Inbox:
    """Receives the process's tasks.

    Args:
        parent: ID of the training process.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._unread = bytearray()
        self.came: deque[Setting | Task] = deque()
        self.is_left = False

    def look(self, wait_s: float) -> None:
        """Receive new tasks, waiting at most ``wait_s`` for the first one."""
        while not self.is_left and select.select([0], [], [], wait_s)[0]:
            more = os.read(0, _MANY)
            self.is_left, wait_s = not more, 0
            self._unread += more
        # Its other children may keep the connection open.
        self.is_left = self.is_left or os.getppid() != self._parent
        while len(self._unread) >= (end := _LENGTH + int.from_bytes(self._unread[:_LENGTH], "big")):
            self.came.append(pickle.loads(self._unread[_LENGTH:end]))  # from our parent
            del self._unread[:end]


class _KeptFacts:
    """File with the facts of the newest windows, next to the version before."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._known: list[int] = []
        self._place = 0, 0

    def keep(self, facts: Mapping[int, TraceFacts]) -> tuple[int, int]:
        """Write new facts without overwriting the newest ones; return their start and end."""
        if self._known != list(facts):
            raw = pickle.dumps(facts, pickle.HIGHEST_PROTOCOL)
            begin = 0 if len(raw) <= self._place[0] else self._place[1]
            with contextlib.suppress(OSError):  # no space; the report lists the lost ones
                if os.pwrite(self._number, raw, begin) == len(raw):
                    self._place, self._known = (begin, begin + len(raw)), list(facts)
        return self._place


def main() -> None:
    inbox, answers = _Inbox(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "wb")
    kept = _KeptFacts(int(sys.argv[3]))
    while not inbox.came and not inbox.is_left:
        inbox.look(_LOOK_S)
    setting: Any = inbox.came.popleft() if inbox.came else None
    work = None if setting is None else TraceWork(setting)
    while work is not None and (inbox.came or not inbox.is_left):
        inbox.look(0 if inbox.came else _LOOK_S)
        tasks: Any = inbox.came
        if inbox.is_left:
            _leave_the_rest(tasks)
        if tasks:
            task = tasks.popleft()
            answer = _answer_to(task, work, _num_windows(tasks))
            place = kept.keep(work.facts)
            raw = pickle.dumps((answer, time.process_time_ns(), place), pickle.HIGHEST_PROTOCOL)
            answers.write(len(raw).to_bytes(_LENGTH, "big") + raw)
            answers.flush()
            work.forget(task)
            with contextlib.suppress(OSError):  # the training is gone
                os.write(0, b"!")
    os._exit(0)  # nothing open needs to be closed


def _num_windows(tasks: Iterable[Task]) -> int:
    return sum(isinstance(one, TraceTask) for one in tasks)


def _answer_to(task: Task, work: TraceWork, num_newer: int) -> Answer:
    """Answer a task; if that fails, return an empty answer, so that the training makes the report."""
    try:
        return work.do(task, num_newer)
    except Exception:
        return ReportAnswer(report=None)


def _leave_the_rest(tasks: deque[Task]) -> None:
    """Keep only one more window and the newest report, as the training is gone."""
    windows = [one for one in tasks if isinstance(one, TraceTask)]
    reports = [one for one in tasks if isinstance(one, ReportTask)]
    tasks.clear()
    tasks.extend([*windows[:1], *reports[-1:]])
    for one in windows[1:]:
        if not one.packs:
            with contextlib.suppress(OSError):
                one.raw.unlink()


if __name__ == "__main__":
    main()
