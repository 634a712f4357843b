"""A thread that looks at the training every few milliseconds, and ever less often the longer it runs."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Final, TypeAlias
from weakref import WeakSet

from lightning_modelprof.errors import describe_error
from lightning_modelprof.measure.clock import HostClock, host_clock
from lightning_modelprof.threads import PATIENCE_S, has_ended, start_thread

Probe: TypeAlias = Callable[[int], None]
"""Looks once. It is given the nanoseconds that it stands for: since the look before it, or since the thread
was started if that was later."""

MIN_INTERVAL_NS: Final = 20_000_000
"""Time between two looks at first."""
_LOOKS_PER_FOLD: Final = 200
"""Looks in the first 4 s, and in every further time that is e times as long."""
_SHORT_TURN_S: Final = 0.000_02
"""Less than the thread that computes may take between two operators that give the interpreter away for a
moment: each of them begins the turn anew, and the look would wait for one that gives it away for long. Not
less, or the sampling thread would keep a CPU busy while it waits."""
_TURN_STEP_S: Final = 0.000_001_5
"""The interpreter keeps whole microseconds, cut off: what is set is read as up to one less."""
_AHEAD_NS: Final = 6_000_000
"""How long before a look turns become short: a usual turn, 5 ms, and a little."""
_SHORT_WAIT_NS: Final = 20_000_000
"""In a wait of at most this turns are short all the time: to wake up for that alone would cost more."""


class Sampler:
    """Calls looks from a thread of its own.

    The time between two looks is ``max(20 ms, elapsed / 200)`` on average, so that the first hour has about
    1,600 looks and the next one 140. It varies by half of that either way, or steps of 20 ms would always be
    met at the same two lines.

    The thread ends for a time at :meth:`pause`, because torch's Python tracer would record it, and around
    every fork, so that no child is made while it runs. An error in a look ends that look for good; it never
    reaches the training.

    Args:
        looks: by name, which is for the notes.
        is_crowded: whether other threads want the interpreter as well: it changes hands often enough then,
            and turns stay as they are.
        interval_ns: time between two looks at first; 0 is 20 ms.
        looks_per_fold: in the first such looks, and in every further time that is e times as long.

    Attributes:
        cost_ns: CPU time of the thread so far.
        interval_ns: time between two looks now, on average.
        due_ns: when the newest look was to be.
        late_ns: how much later it was, as the thread had to wait.
        notes: why a look ended early, or never began, a sentence each.
    """

    def __init__(
        self,
        looks: Mapping[str, Probe],
        clock: HostClock = host_clock,
        is_crowded: Callable[[], bool] = lambda: False,
        *,
        interval_ns: int = 0,
        looks_per_fold: int = _LOOKS_PER_FOLD,
    ) -> None:
        self._looks = dict(looks)
        self._clock = clock
        self._is_crowded = is_crowded
        self._began_ns: int | None = None
        self._random = random.Random(0)  # of our own: the training's numbers stay what they are
        self._is_wanted = False
        self._thread: threading.Thread | None = None
        self._is_over = threading.Lock()  # held while the thread shall run
        self._changes = threading.RLock()  # the training thread pauses, and whichever thread forks
        self.cost_ns = 0
        self.interval_ns = self._first_interval_ns = interval_ns or MIN_INTERVAL_NS
        self._looks_per_fold = looks_per_fold
        self.due_ns = self.late_ns = 0
        self.notes: list[str] = []
        _SAMPLERS.add(self)

    def resume(self) -> None:
        """Begin to look, or go on after a pause; does nothing while it looks."""
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            self._end("Nothing was sampled, because this Python runs without a global interpreter lock.")
            return
        if self._began_ns is None:
            self._began_ns = self._clock()
        self._is_wanted = True
        self._start_thread()

    def pause(self) -> None:
        """Probe no more until :meth:`resume`.

        When this returns the thread has ended. One that doesn't within ``PATIENCE_S`` ends with its look, and
        none comes after it.
        """
        self._is_wanted = False
        self._end_thread()

    def _start_thread(self) -> None:
        with self._changes:
            if not self._is_wanted or self._thread is not None or not self._looks:
                return
            # A lock for each thread: what wakes one must not wake the next. Plain lock and no Event, whose
            # wait runs dozens of lines of Python with the interpreter held.
            self._is_over = threading.Lock()
            self._is_over.acquire()
            is_over = self._is_over
            try:
                thread = start_thread(lambda: self._begin(is_over), "modelprof-sampler")
            except RuntimeError as error:  # the system has no more threads, or the interpreter shuts down
                self._end(f"Sampling ended, because no thread could be started ({error}).")
                return
            except BaseException:  # Ctrl+C while this waits for the thread, which may run by now
                self._is_over.release()
                raise
            self._thread = thread

    def _end_thread(self) -> None:
        with self._changes:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._is_over.release()
                if not has_ended(thread):
                    self._end(f"Sampling ended, because its thread didn't pause within {PATIENCE_S:g} s.")
                _end_short_turns()  # the program may have set ours again since the last look

    def _forget_thread(self) -> None:
        """In a child of this process: there is no such thread in it."""
        self._is_wanted, self._thread = False, None
        self._changes = threading.RLock()

    def _end(self, note: str) -> None:
        self._looks = {}
        if note not in self.notes:
            self.notes.append(note)

    def _begin(self, is_over: threading.Lock) -> None:
        _wake_up_in_time()
        self._run(is_over)

    def _run(self, is_over: threading.Lock) -> None:
        """The thread. Threads of one sampler follow each other, so nothing in here is shared."""
        cost_before_ns = self.cost_ns
        try:
            last_ns = self._clock()
            began_ns = last_ns if self._began_ns is None else self._began_ns
            while self._looks:
                self.interval_ns = max(self._first_interval_ns, (last_ns - began_ns) // self._looks_per_fold)
                wait_ns = round(self.interval_ns * self._random.uniform(0.5, 1.5))
                due_ns = last_ns + wait_ns
                if wait_ns > _SHORT_WAIT_NS and is_over.acquire(timeout=(wait_ns - _AHEAD_NS) / 1e9):
                    break
                with nullcontext() if self._is_crowded() else _ShortTurns():
                    if is_over.acquire(timeout=max(0, due_ns - self._clock()) / 1e9):
                        break
                now_ns = self._clock()
                self.due_ns, self.late_ns = due_ns, max(0, now_ns - due_ns)
                elapsed_ns, last_ns = max(0, now_ns - last_ns), now_ns  # the clock may be put back
                for name, look in tuple(self._looks.items()):
                    self._look_with(name, look, elapsed_ns)
                self.cost_ns = max(0, cost_before_ns + time.thread_time_ns())  # likewise
        except Exception as error:  # the clock failed, or there is no memory
            self._end(f"Sampling ended early: {describe_error(error)}.")

    def _look_with(self, name: str, look: Probe, elapsed_ns: int) -> None:
        try:
            look(elapsed_ns)
        except Exception as error:
            self._looks.pop(name, None)
            self.notes.append(f"Sampling {name} ended early: {describe_error(error)}.")


class _ShortTurns:
    """Lets threads that want the interpreter have it from the one that computes at once, and not after 5 ms.

    With the usual turns a look would have to wait for the first line that gives the interpreter away by
    itself, and take that line for the one that ran: Python code of less than 5 ms would never be seen.

    Who reads the length of a turn meanwhile to set it again later sets ours: it counts as the usual one.
    """

    usual_s = sys.getswitchinterval()
    """What others have set last, for all samplers of the process."""

    def __enter__(self) -> None:
        now_s = sys.getswitchinterval()
        if abs(now_s - _SHORT_TURN_S) > _TURN_STEP_S:
            _ShortTurns.usual_s = now_s
        sys.setswitchinterval(min(_SHORT_TURN_S, _ShortTurns.usual_s))

    def __exit__(self, *_: object) -> None:
        _end_short_turns()


def _end_short_turns() -> None:
    """Restore the usual turn length, unless the program has set another one."""
    if abs(sys.getswitchinterval() - _SHORT_TURN_S) <= _TURN_STEP_S:
        sys.setswitchinterval(_ShortTurns.usual_s)


_PR_SET_TIMERSLACK: Final = 29


def _wake_up_in_time() -> None:
    """Ask Linux to end waits of this thread to the microsecond, and not up to 50 of them later.

    Source: man 2 PR_SET_TIMERSLACK.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without it: looks are a little late
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


_SAMPLERS: Final[WeakSet[Sampler]] = WeakSet()


def _pause_all() -> None:
    for sampler in tuple(_SAMPLERS):
        sampler.pause()


def _end_threads() -> None:
    for sampler in tuple(_SAMPLERS):
        sampler._end_thread()


def _start_threads() -> None:
    for sampler in tuple(_SAMPLERS):
        sampler._start_thread()


def _forget_threads() -> None:
    for sampler in tuple(_SAMPLERS):
        sampler._forget_thread()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_end_threads, after_in_parent=_start_threads, after_in_child=_forget_threads)
# The interpreter ends threads that are left in the middle of what they do, which native code may not survive.
atexit.register(_pause_all)
