"""Who does the work on traces: a process of its own, a thread where there can be none, or we ourselves.

The training thread hands a task over and looks for answers between steps; it waits for nothing until its
loop is over. The process is started once for a loop, has a low priority and no torch, and ends with the
program that started it: when that dies it finishes what it has begun. What it did not come to lies there as
torch wrote it, and ``lightning-modelprof report`` reads that.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, Final

from lightning_modelprof.loop.trace_work import (
    Answer,
    ReportAnswer,
    ReportTask,
    Setting,
    Task,
    TraceTask,
    TraceWork,
)
from lightning_modelprof.measure.resources.cpu import used_s
from lightning_modelprof.processes import OWN_PROCESSES, start_module
from lightning_modelprof.show.progress import show_waiting

_LENGTH: Final = 8
"""Bytes that say how many follow."""

_FEW: Final = 2**12
_MANY: Final = 2**20
_NICENESS: Final = 15
"""Beside a training that uses every CPU it has 3 to 4 % of one, and a few seconds where others use them."""

_LOOK_S: Final = 1.0
"""How often the process looks whether the training still runs, where nobody tells it."""

_POLL_S: Final = 0.005
STALLED_S: Final = 30.0
"""A process that uses no CPU time for so long is stopped, or its disk is."""

INTERRUPTED: Final = "was interrupted"
_GONE_S: Final = 2.0
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
"""A program may have set SIGPIPE so that writing to a process that is gone would end it."""


class Helper:
    """Does tasks at once, in the thread that hands them over; others do it elsewhere.

    Args:
        setting: what is the same for all tasks.

    Attributes:
        num_open: tasks without an answer.
        cpu_ns: CPU time that was taken elsewhere; ``None`` where that is unknown, or nothing was.
        problem: why no more answers come; ``""`` while they do.
    """

    def __init__(self, setting: Setting) -> None:
        self._work = TraceWork(setting)
        self._answers: deque[Answer] = deque()
        self.num_open = 0
        self.cpu_ns: int | None = None
        self.problem = ""

    def send(self, task: Task) -> None:
        """Hand a task over."""
        self.num_open += 1
        try:
            self._answers.append(self._work.do(task))
        except BaseException:  # Ctrl-C
            self.give_up(INTERRUPTED)
            raise

    def answers(self) -> list[Answer]:
        """Those that have come since; waits for nothing."""
        come = []
        while self._answers:
            come.append(self._answers.popleft())
        self.num_open -= len(come)
        return come

    def look(self) -> None:
        """Wait a little for an answer."""
        time.sleep(_POLL_S)

    def give_up(self, problem: str) -> None:
        """Expect nothing more of it.

        Args:
            problem: what is wrong, after the name of who does the work.
        """
        self.problem = self.problem or problem
        self.num_open = 0

    def close(self) -> None:
        """Nothing more will be asked."""


class ThreadHelper(Helper):
    """Does tasks in a thread, whose work the training thread feels."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        threading.Thread(target=self._run, name="modelprof-traces", daemon=True).start()

    def send(self, task: Task) -> None:
        """Hand a task over."""
        self.num_open += 1
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            begin_ns = time.thread_time_ns()
            answer = _answer_to(task, self._work, self._tasks.qsize())
            self.cpu_ns = (self.cpu_ns or 0) + time.thread_time_ns() - begin_ns
            self._answers.append(answer)

    def close(self) -> None:
        """Nothing more will be asked."""
        self._tasks.put(None)


class ProcessHelper(Helper):
    """Does tasks in a process.

    Raises:
        OSError: when none can be started.
    """

    def __init__(self, setting: Setting) -> None:
        self.num_open, self.cpu_ns, self.problem = 0, None, ""
        self._unsent = bytearray()
        self._num_read = 0
        self._used_s: float | None = -1.0
        self._look_at, self._stalled_at = 0.0, math.inf
        with ExitStack() as undo:
            self._socket, theirs = socket.socketpair()
            undo.callback(self._socket.close)
            # A pipe would be full before it is read. This has no name, so nothing of it can stay behind.
            self._file = undo.enter_context(tempfile.TemporaryFile())
            number = self._file.fileno()
            with theirs:
                self._process = start_module(
                    __name__, str(os.getpid()), str(number), stdin=theirs, pass_fds=(number,)
                )
            with contextlib.suppress(OSError):  # at once: most of its work is to import what it needs
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
            undo.pop_all()
        self._socket.setblocking(False)
        self._end = weakref.finalize(self, _end, self._socket, self._file, self._process, os.getpid())
        self._end.atexit = False  # it sees by itself that the program is over
        self._write(setting)

    def send(self, task: Task) -> None:
        """Hand a task over."""
        self.num_open += 1
        self._used_s, self._stalled_at = -1.0, math.inf  # it may have had nothing to do for long
        self._write(task)

    def answers(self) -> list[Answer]:
        """Those that have come since; waits for nothing."""
        if self.problem:
            return []
        self._push()
        try:
            has_ended = not self._socket.recv(_FEW)  # a byte for each answer
        except BlockingIOError:
            return []
        except OSError:
            has_ended = True
        come: list[Answer] = []
        while (answer := self._read()) is not None:
            come.append(answer)
        self.num_open -= len(come)
        if has_ended and self.num_open:
            code = self._process.wait()
            self.give_up(f"ended by signal {-code}" if code < 0 else f"ended with status {code}")
        return come

    def give_up(self, problem: str) -> None:
        """Expect nothing more of it."""
        super().give_up(problem)
        self._process.kill()
        self._end()

    def close(self) -> None:
        """Nothing more will be asked; what is not done yet is not done."""
        if self.num_open:
            self._process.kill()
        self._end()

    def look(self) -> None:
        """Wait for an answer, and give up if nothing is done."""
        poll = select.poll()  # which takes any number of open files
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(_LOOK_S * 1e3)
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        used = used_s(self._process.pid)
        if used != self._used_s:
            self._used_s, self._stalled_at = used, now + STALLED_S
        elif now >= self._stalled_at:
            self.give_up(f"did nothing for {STALLED_S:g} s")

    def _write(self, what: Setting | Task) -> None:
        raw = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        self._unsent += len(raw).to_bytes(_LENGTH, "big") + raw
        self._push()

    def _push(self) -> None:
        """Send what there is room for."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent, _NO_SIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which the next look for answers tells
            self._unsent.clear()

    def _read(self) -> Answer | None:
        """The next answer; ``None`` if it has not come, or not as a whole."""
        descriptor = self._file.fileno()
        head = os.pread(descriptor, _LENGTH, self._num_read)
        length = int.from_bytes(head, "big")
        if len(head) < _LENGTH:
            return None
        raw = os.pread(descriptor, length, self._num_read + _LENGTH)
        if len(raw) < length:
            return None
        self._num_read += _LENGTH + length
        answer, self.cpu_ns = pickle.loads(raw)  # of our own process
        come: Answer = answer
        return come


def _end(ours: socket.socket, file: Any, process: Any, owner: int) -> None:
    """End the process, which has nothing to do any more; in a forked child it is the parent's."""
    ours.close()
    file.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(_GONE_S)
    except Exception:  # TimeoutExpired: it is stopped, or still at work
        process.kill()
        process.wait()
    OWN_PROCESSES.discard(process.pid)


def make_helper(setting: Setting) -> Helper:
    """A process, else a thread, else ourselves."""
    if hasattr(os, "pread"):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # the program may be ending
            return ProcessHelper(setting)
    with contextlib.suppress(RuntimeError):
        return ThreadHelper(setting)
    return Helper(setting)


def wait_for(helper: Helper, hear: Callable[[], object], what: str) -> None:
    """Wait until all tasks are answered, or no more answers come.

    Args:
        helper: who does them.
        hear: takes the answers that have come.
        what: is done meanwhile, for a person who waits.
    """
    with show_waiting(f"lightning-modelprof: {what}"):
        hear()
        while helper.num_open:
            helper.look()
            hear()


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


def main() -> None:
    """Be the process."""
    desk, answers = _Desk(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "wb")
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
            answer = _answer_to(task, work, sum(isinstance(one, TraceTask) for one in tasks))
            raw = pickle.dumps((answer, time.process_time_ns()), pickle.HIGHEST_PROTOCOL)
            answers.write(len(raw).to_bytes(_LENGTH, "big") + raw)
            answers.flush()
            with contextlib.suppress(OSError):  # nobody is there any more
                os.write(0, b"!")
    os._exit(0)  # nothing is open that would have to be closed


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
