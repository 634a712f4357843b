"""Samples training from a thread every few milliseconds, less often the longer it runs."""

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
"""Takes one sample. The argument is the time in ns that it represents: since the previous sample, or since
the thread's start if later."""

MIN_INTERVAL_NS: Final = 20_000_000
"""Initial time between two samples."""
_LOOKS_PER_FOLD: Final = 200
"""Samples in the first 4 s, and then per e-fold growth of the elapsed time."""
_SHORT_TURN_S: Final = 0.000_02
"""Shorter than the computing thread may take between two operators that briefly release the interpreter: each
of them restarts the turn, and the sample would wait for a long release. Not shorter, or the sampling
thread would keep a CPU busy while waiting."""
_TURN_STEP_S: Final = 0.000_001_5
"""The interpreter stores whole microseconds, truncated: a value may be read back as up to one less."""
_AHEAD_NS: Final = 6_000_000
"""Time before a sample at which turns become short: a usual turn of 5 ms, and a margin."""
_SHORT_WAIT_NS: Final = 20_000_000
"""In waits up to this, turns are short throughout: waking up just to shorten them would cost more."""


class Sampler:
    """Calls probes from its own thread.

    The time between two samples is ``max(20 ms, elapsed / 200)`` on average, so that the first hour has about
    1,600 samples and the next one 140. It varies by half of that either way; otherwise steps of 20 ms would
    always be sampled at the same two lines.

    The thread stops at :meth:`pause`, because torch's Python tracer would record it, and around every fork,
    so that no child is created while it runs. A probe's error ends that probe for good and never reaches the
    training.

    Args:
        looks: probes by name; notes mention the names.
        is_crowded: whether other threads need the interpreter too: then it changes hands often enough, and
            turns keep their length.
        interval_ns: initial time between two samples; 0 means 20 ms.
        looks_per_fold: samples taken at the initial interval, and then per e-fold growth of the elapsed time.

    Attributes:
        cost_ns: the thread's CPU time so far.
        interval_ns: current mean time between two samples.
        due_ns: when the newest sample was due.
        late_ns: how much later it was taken, because the thread had to wait.
        notes: why a probe ended early or never started, one sentence each.
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
        self._random = random.Random(0)  # our own, so that the training's random numbers don't change
        self._is_wanted = False
        self._thread: threading.Thread | None = None
        self._is_over = threading.Lock()  # held while the thread should run
        self._changes = threading.RLock()  # the training thread pauses, and any thread may fork
        self.cost_ns = 0
        self.interval_ns = self._first_interval_ns = interval_ns or MIN_INTERVAL_NS
        self._looks_per_fold = looks_per_fold
        self.due_ns = self.late_ns = 0
        self.notes: list[str] = []
        _SAMPLERS.add(self)

    def resume(self) -> None:
        """Start sampling, or continue after a pause; does nothing while sampling."""
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            self._end("Nothing was sampled, because this Python runs without a global interpreter lock.")
            return
        if self._began_ns is None:
            self._began_ns = self._clock()
        self._is_wanted = True
        self._start_thread()

    def pause(self) -> None:
        """Stop sampling until :meth:`resume`.

        The thread has ended on return. One that doesn't end within ``PATIENCE_S`` ends after its current
        sample, and no other follows.
        """
        self._is_wanted = False
        self._end_thread()

    def _start_thread(self) -> None:
        with self._changes:
            if not self._is_wanted or self._thread is not None or not self._looks:
                return
            # One lock per thread: waking one must not wake the next. A plain lock instead of an Event, whose
            # wait runs dozens of Python lines while holding the interpreter.
            self._is_over = threading.Lock()
            self._is_over.acquire()
            is_over = self._is_over
            try:
                thread = start_thread(lambda: self._begin(is_over), "modelprof-sampler")
            except RuntimeError as error:  # no more threads, or the interpreter is shutting down
                self._end(f"Sampling ended, because no thread could be started ({error}).")
                return
            except BaseException:  # Ctrl+C while waiting for the thread, which may be running by now
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
        """Reset in a forked child, which has no such thread."""
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
        """Run the thread; a sampler's threads run one after the other, so nothing here is shared."""
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
                elapsed_ns, last_ns = max(0, now_ns - last_ns), now_ns  # the clock may be set back
                for name, look in tuple(self._looks.items()):
                    self._look_with(name, look, elapsed_ns)
                self.cost_ns = max(0, cost_before_ns + time.thread_time_ns())  # the clock may be set back
        except Exception as error:  # the clock failed, or memory ran out
            self._end(f"Sampling ended early: {describe_error(error)}.")

    def _look_with(self, name: str, look: Probe, elapsed_ns: int) -> None:
        try:
            look(elapsed_ns)
        except Exception as error:
            self._looks.pop(name, None)
            self.notes.append(f"Sampling {name} ended early: {describe_error(error)}.")


class _ShortTurns:
    """Makes the computing thread release the interpreter immediately on request, rather than after 5 ms.

    With the usual turns, a sample would wait for the first line that releases the interpreter and mistake it
    for the running line: Python code shorter than 5 ms would never be seen.

    Code that saves the switch interval in the meantime and restores it later sets ours; it then counts as the
    usual one.
    """

    usual_s = sys.getswitchinterval()
    """The value last set by other code, for all samplers of the process."""

    def __enter__(self) -> None:
        now_s = sys.getswitchinterval()
        if abs(now_s - _SHORT_TURN_S) > _TURN_STEP_S:
            _ShortTurns.usual_s = now_s
        sys.setswitchinterval(min(_SHORT_TURN_S, _ShortTurns.usual_s))

    def __exit__(self, *_: object) -> None:
        _end_short_turns()


def _end_short_turns() -> None:
    """Restore the usual turn length, unless the program has set another one.

    Another sampler's short turns also end, until its next wait.
    """
    if abs(sys.getswitchinterval() - _SHORT_TURN_S) <= _TURN_STEP_S:
        sys.setswitchinterval(_ShortTurns.usual_s)


_PR_SET_TIMERSLACK: Final = 29


def _wake_up_in_time() -> None:
    """Ask Linux to end this thread's waits to the microsecond rather than up to 50 µs late.

    Source: man 2 PR_SET_TIMERSLACK.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without it: samples are a little late
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


if hasattr(os, "register_at_fork"):  # not on Windows, which can't fork
    os.register_at_fork(before=_end_threads, after_in_parent=_start_threads, after_in_child=_forget_threads)
# On exit the interpreter stops remaining threads in mid-work, which native code may not survive.
atexit.register(_pause_all)
