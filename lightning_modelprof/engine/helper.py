"""Who does the work on traces: a process of its own, a thread where there can be none, or we ourselves.

The training thread hands a task over and looks for answers between steps; it waits for nothing until its
loop is over. The process is started once for a loop, has a low priority and no torch, and ends with the
program that started it: when that dies it finishes what it has begun. What it did not come to lies there as
torch wrote it, and ``lightning-modelprof report`` reads that.

When the loop is over, a person waits. A process that then lacks a CPU (nothing but root may raise its
priority) or does nothing is ended, and the training thread does the rest. What the process found out until
then lies in a file that both have open.
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
"""Bytes that say how many follow."""

_FEW: Final = 2**12
_MANY: Final = 2**20
_NICENESS: Final = 15
"""Beside a training that uses every CPU it has 3 to 4 % of one, and a few seconds where others use them."""

_LOOK_S: Final = 1.0
"""How often the process looks whether the training still runs, where nobody tells it."""

_POLL_S: Final = 0.005
_PACE_S: Final = 0.5
"""For so long the process is watched before the training thread takes over."""

_LEAST_PACE: Final = 0.5
"""Share of a CPU: one that gets less while it wants more is slower than the training thread would be."""

STALLED_S: Final = 5.0
"""One that gets less for so long, whatever it waits for, does not respond."""

INTERRUPTED: Final = "was interrupted"
_GONE_S: Final = 2.0
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
"""A program may have set SIGPIPE so that writing to a process that is gone would end it."""


class Helper:
    """Does tasks at once, in the thread that hands them over; others do it elsewhere.

    Attributes:
        cpu_ns: CPU time that was taken elsewhere; ``None`` where that is unknown, or nothing was.
        problem: why no more answers come; ``""`` while they do.
    """

    def __init__(self, setting: Setting) -> None:
        self._work = TraceWork(setting)
        self._open: deque[Task] = deque()  # without an answer that was heard
        self._answers: deque[Answer] = deque()
        self.cpu_ns: int | None = None
        self.problem = ""

    @property
    def num_open(self) -> int:
        """Tasks without an answer that was heard."""
        return len(self._open)

    def send(self, task: Task) -> None:
        self._open.append(task)
        self._do_next()

    def _do_next(self) -> None:
        """Do the oldest task in this thread."""
        task, *others = list(self._open)[len(self._answers) :]
        try:
            answer = self._work.do(task, _num_windows(others))
        except BaseException:  # Ctrl-C
            self.give_up(INTERRUPTED)
            raise
        self._answers.append(answer)
        self._work.forget(task)

    def answers(self) -> list[Answer]:
        """Those that have come since; waits for nothing."""
        answers: list[Answer] = []
        while self._answers and not self.problem:
            answers.append(self._answers.popleft())
            self._open.popleft()
        return answers

    def look(self) -> None:
        """Wait a little for an answer."""
        time.sleep(_POLL_S)

    def give_up(self, problem: str) -> None:
        """Expect nothing more of it.

        Args:
            problem: what is wrong, after the name of who does the work.
        """
        self.problem = self.problem or problem
        self._open.clear()
        self._answers.clear()

    def facts(self) -> Mapping[int, TraceFacts]:
        """What the newest traces say, by the number of their window; to be called when the loop is over."""
        return self._work.facts

    def close(self) -> None:
        """Nothing more will be asked; what is not done yet is not done."""


class ThreadHelper(Helper):
    """Does tasks in a thread, whose work the training thread feels."""

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
        OSError: when none can be started.
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
                # A pipe would be full before it is read. These have no name, so nothing can stay behind.
                self._answer_file = OwnFile.without_name()
                undo.callback(self._answer_file.close)
                self._facts = OwnFile.without_name()
                undo.callback(self._facts.close)
                numbers = self._answer_file.number, self._facts.number
                self._process = start_module(
                    __name__, *map(str, (os.getpid(), *numbers)), stdin=theirs, pass_fds=numbers
                )
            with contextlib.suppress(OSError):  # at once: most of its work is to import what it needs
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
            undo.pop_all()
        files = self._line, self._answer_file, self._facts
        self._end = weakref.finalize(self, _end, files, self._process, os.getpid())
        self._end.atexit = False  # it sees by itself that the program is over
        self._write(setting)

    def send(self, task: Task) -> None:
        self._open.append(task)
        self._write(task)

    def answers(self) -> list[Answer]:
        if not self._is_over:
            self._push()
            try:
                has_ended = not os.read(self._line.number, _FEW)  # a byte for each answer
            except BlockingIOError:
                return []
            except OSError:
                has_ended = True
            self._read_all()
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
        """Wait for an answer; do a task in this thread, if the process lacks a CPU or does nothing."""
        if self._is_over:
            self._do_next()
            return
        if self._pace is None:
            self._is_slow()
        try:
            poll = select.poll()  # which takes any number of open files
            poll.register(self._line.number, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        except OSError:  # the next look for answers tells
            return
        if not poll.poll(_PACE_S * 1e3) and self._is_slow():
            self._take_over()

    def _is_slow(self) -> bool:
        """Whether it has got less of a CPU than the training thread would, since this was last asked."""
        now, found = time.monotonic(), read_pace(self._process.pid)
        before, used_s = self._pace, 0.0 if found is None else found.used_s
        self._pace = now, used_s
        if before is None or used_s - before[1] >= _LEAST_PACE * (now - before[0]):
            self._stalled_at = now + STALLED_S
            return False
        return now >= self._stalled_at or (found is not None and found.wants_cpu)

    def _take_over(self) -> None:
        """From now on windows are analyzed in this thread; a report of the loop is made at its end anyway."""
        if self._pace is not None and self._pace[1]:
            self.cpu_ns = round(self._pace[1] * 1e9)
        self._end_process()
        self._open = deque(
            task
            for number, task in enumerate(self._open)
            if number < len(self._answers) or isinstance(task, TraceTask)
        )

    def _end_process(self) -> None:
        """End it, and keep what it has found out."""
        if self._is_over:
            return
        self._is_over = True
        self._process.kill()  # on a busy machine it needs a while to go: the report is made meanwhile
        self._read_all()
        begin, end = self._facts_at
        with contextlib.suppress(Exception):  # the program has closed the file
            raw = os.pread(self._facts.number, end - begin, begin)
            self._work.facts.update(pickle.loads(raw) if raw else {})  # of our own process
        for task in list(self._open)[len(self._answers) : len(self._answers) + 1]:
            self._work.clean_up(task)

    def _why_ended(self) -> str:
        try:
            code = self._line.number and self._process.wait(_GONE_S)
        except Exception:  # the program has closed the connection; TimeoutExpired: it has done so itself
            return "lost its connection"
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"

    def _write(self, what: Setting | Task) -> None:
        raw = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        self._unsent += len(raw).to_bytes(_LENGTH, "big") + raw
        self._push()

    def _push(self) -> None:
        """Send what there is room for."""
        try:
            while self._unsent:
                del self._unsent[: _send(self._line.number, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which the next look for answers tells
            self._unsent.clear()

    def _read_all(self) -> None:
        """Take the answers that are there as a whole."""
        with contextlib.suppress(OSError):
            while True:
                number, begin = self._answer_file.number, self._num_read + _LENGTH
                length = int.from_bytes(os.pread(number, _LENGTH, self._num_read), "big")
                raw = os.pread(number, length, begin)
                if not raw or len(raw) < length:
                    return
                self._num_read = begin + length
                answer, self.cpu_ns, self._facts_at = pickle.loads(raw)  # of our own process
                self._answers.append(answer)


def _send(number: int, data: bytearray) -> int:
    """Send through a socket that is open, without waiting; returns how many bytes."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=number)
    try:
        line.setblocking(False)
        return line.send(data, _NO_SIGNAL)
    finally:
        line.detach()


def _kill(process: Any) -> None:
    """End a process, and wait until it is gone; one that waits for a disk may stay for longer."""
    process.kill()
    with contextlib.suppress(Exception):  # TimeoutExpired
        process.wait(_GONE_S)


def _end(files: Iterable[OwnFile], process: Any, owner: int) -> None:
    """End the process, which has nothing to do any more; in a forked child it is the parent's."""
    for file in files:
        file.close()
    if os.getpid() == owner:
        _kill(process)
        OWN_PROCESSES.discard(process.pid)


def make_helper(setting: Setting) -> Helper:
    """A process, else a thread, else ourselves."""
    if hasattr(os, "pread"):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # the program may be ending
            return ProcessHelper(setting)
    with contextlib.suppress(RuntimeError):
        return ThreadHelper(setting)
    return Helper(setting)


class _Desk:
    """Where the process has its tasks from.

    Args:
        parent: number of the process that trains.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._unread = bytearray()
        self.came: deque[Setting | Task] = deque()
        self.is_left = False

    def look(self, wait_s: float) -> None:
        """Take what has come.

        Args:
            wait_s: for so long, if nothing has.
        """
        while not self.is_left and select.select([0], [], [], wait_s)[0]:
            more = os.read(0, _MANY)
            self.is_left, wait_s = not more, 0
            self._unread += more
        # Its other children may hold the other end open.
        self.is_left = self.is_left or os.getppid() != self._parent
        while len(self._unread) >= (end := _LENGTH + int.from_bytes(self._unread[:_LENGTH], "big")):
            self.came.append(pickle.loads(self._unread[_LENGTH:end]))  # of who started us
            del self._unread[:end]


class _KeptFacts:
    """A file in which the facts of the newest windows lie, beside those of one window less."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._known: list[int] = []
        self._place = 0, 0

    def keep(self, facts: Mapping[int, TraceFacts]) -> tuple[int, int]:
        """Write facts that were not written yet, and nothing over the newest ones; returns where they are."""
        if self._known != list(facts):
            raw = pickle.dumps(facts, pickle.HIGHEST_PROTOCOL)
            begin = 0 if len(raw) <= self._place[0] else self._place[1]
            with contextlib.suppress(OSError):  # no room: the report says which are lost
                if os.pwrite(self._number, raw, begin) == len(raw):
                    self._place, self._known = (begin, begin + len(raw)), list(facts)
        return self._place


def main() -> None:
    desk, answers = _Desk(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "wb")
    kept = _KeptFacts(int(sys.argv[3]))
    while not desk.came and not desk.is_left:
        desk.look(_LOOK_S)
    setting: Any = desk.came.popleft() if desk.came else None
    work = None if setting is None else TraceWork(setting)
    while work is not None and (desk.came or not desk.is_left):
        desk.look(0 if desk.came else _LOOK_S)
        tasks: Any = desk.came
        if desk.is_left:
            _leave_the_rest(tasks)
        if tasks:
            task = tasks.popleft()
            answer = _answer_to(task, work, _num_windows(tasks))
            place = kept.keep(work.facts)
            raw = pickle.dumps((answer, time.process_time_ns(), place), pickle.HIGHEST_PROTOCOL)
            answers.write(len(raw).to_bytes(_LENGTH, "big") + raw)
            answers.flush()
            work.forget(task)
            with contextlib.suppress(OSError):  # nobody is there any more
                os.write(0, b"!")
    os._exit(0)  # nothing is open that would have to be closed


def _num_windows(tasks: Iterable[Task]) -> int:
    return sum(isinstance(one, TraceTask) for one in tasks)


def _answer_to(task: Task, work: TraceWork, num_newer: int) -> Answer:
    """The answer; one that is empty where no report could be made, as whoever trains makes one then."""
    try:
        return work.do(task, num_newer)
    except Exception:
        return ReportAnswer(report=None)


def _leave_the_rest(tasks: deque[Task]) -> None:
    """The training is gone: one more window and the newest report are all that is still done."""
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
