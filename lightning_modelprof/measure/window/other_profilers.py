"""Other torch profilers in this process.

torch has one profiler at a time but doesn't enforce it: preparing or starting one ends another's recording.
Starting such an ended profiler, or exporting it, crashes the process. While windows may open, the functions
that prepare, start and stop every torch profiler are therefore watched.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.autograd import profiler as torch_profiler

from lightning_modelprof.measure.window.torch_profiler import is_profiling

_REFERENCES: Final = sys.getrefcount(torch_profiler.profile)
_WATCHED: Final = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")


class ProfilerWatch:
    """Tracks this process's torch profilers.

    Attributes:
        begun: how often one was prepared or started.
        is_waiting: whether one was prepared since and hasn't started, which torch doesn't report.
        recording: ``begun`` when one of our windows started to record, and a function that ends its ranges;
            ``None`` while none records.
        warming: ``begun`` when one of our windows started to warm up, and a function that ends that; ``None``
            while none does, and while it is being ended or started.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self._originals: dict[str, Callable[..., Any]] = {}
        self.begun = 0
        self.is_waiting = False
        self.recording: tuple[int, Callable[[], None]] | None = None
        self.warming: tuple[int, Callable[[], None]] | None = None
        self._none_waited = False  # none created before the watch started was waiting

    def begin(self) -> None:
        """Start watching; each call needs an :meth:`end`."""
        with self._lock:
            self._users += 1
            if self._users > 1 or not all(hasattr(torch_profiler, name) for name in _WATCHED):
                return
            self.is_waiting = self._none_waited = False
            for name, before in zip(_WATCHED, (self._on_prepare, self._on_start, self._on_stop), strict=True):
                self._originals[name] = original = getattr(torch_profiler, name)
                setattr(torch_profiler, name, _after(before, original))

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for name, original in self._originals.items():
                    setattr(torch_profiler, name, original)
                self._originals = {}

    def is_one_waiting(self) -> bool:
        """Whether a profiler is prepared and hasn't started.

        If there may be a profiler, this takes 20 ms, as it searches all objects, until it has returned False
        once. After that, newly prepared ones are seen.
        """
        if self.is_waiting or self._none_waited:
            return self.is_waiting
        is_waiting = _is_one_waiting()
        self._none_waited = bool(self._originals) and not is_waiting and not is_profiling()
        return is_waiting

    def leave(self, begun: int) -> None:
        """Note that the ``begun``-th profiler won't be started, if it still waits."""
        if begun == self.begun:
            self.is_waiting = False

    def start_child(self) -> None:
        """Replace the lock in a forked child, where its holder may not exist."""
        self._lock = threading.RLock()

    def _on_prepare(self) -> None:
        self._make_way()
        self.begun += 1
        self.is_waiting = True

    def _on_start(self) -> None:
        self._make_way()
        self.begun += 1
        self.is_waiting = False

    def _on_stop(self) -> None:
        self.is_waiting = False

    def _make_way(self) -> None:
        """End our window's recording or warm-up, as some profilers refuse to start alongside it.

        The user's profiler has priority. While ours warms up, torch 2.11 refuses to prepare another.
        """
        warming, self.warming = self.warming, None
        if warming is not None and warming[0] == self.begun and self.is_waiting:
            with contextlib.suppress(RuntimeError):
                warming[1]()
        recording = self.recording
        if recording is not None and recording[0] == self.begun and is_profiling():
            self.recording = None
            for end in (recording[1], self._originals["_disable_profiler"]):
                with contextlib.suppress(RuntimeError):
                    end()


def _after(before: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    return call


def _is_one_waiting() -> bool:
    """Whether a profiler created before the watch started is prepared and hasn't started."""
    # Each profiler has a reference to its class.
    if is_profiling() or sys.getrefcount(torch_profiler.profile) <= _REFERENCES:
        return False
    kind = torch_profiler.profile
    return any(
        isinstance(one, kind) and getattr(one, "entered", False) and getattr(one, "kineto_results", 1) is None
        for one in gc.get_referrers(kind)
    )


watch: Final = ProfilerWatch()


AT_EXIT_S: Final = 5.0
"""Seconds that the program's exit waits for a daemon thread to reach its next step and stop there."""


_SAVING_S: Final = 2.0
"""Seconds that it then waits until the result is saved."""


ENDING: Final = "the program is ending"


_OTHER: Final = "another fit in this process has a profiler window open, and torch allows only one profiler"


_NOT_OURS: Final = "another torch profiler was recording when this window should have opened"


_BROKEN: Final = "torch.profiler ran out of memory earlier and may be in a broken state"


_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def _skip_teardown() -> None:
    """Let this process end without running destructors of libraries that its parent loaded.

    After Python has ended and run its ``atexit`` handlers, C calls these two in reverse order: it flushes its
    streams and exits with the exit status.
    """
    if _LIBC is not None and hasattr(_LIBC, "on_exit"):
        _LIBC.on_exit(_LIBC._exit, None)
        _LIBC.__cxa_atexit(_LIBC.fflush, None, None)  # of all streams


class ProfilerClaim:
    """The process's claim to torch's profiler; a holder that is garbage-collected loses it.

    Attributes:
        is_broken: whether torch's profiler ran out of memory, so that it can't be claimed any more.
    """

    def __init__(self) -> None:
        self._was_taken = self.is_broken = False
        self.forget()

    def start_child(self) -> None:
        """Drop the claim in a forked child, and end the child without torch's profiler."""
        self.forget()
        if self._was_taken:
            self._was_taken = False  # a grandchild inherits what ends the child
            _skip_teardown()

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._holder: weakref.ref[Any] | None = None
        self._is_daemon = False
        self.is_ending = self._rests = False

    def take(self, who: Any) -> str:
        """Take it; returns why not, ``""`` if ``who`` has it now."""
        with self._lock:
            holder = None if self._holder is None else self._holder()
            if self.is_ending:
                return ENDING
            if self.is_broken:
                return _BROKEN
            if holder is not None and holder is not who:
                return _OTHER
            if is_profiling_anywhere():
                return _NOT_OURS
            self._was_taken = True
            self._holder, self._is_daemon = weakref.ref(who), threading.current_thread().daemon
            return ""

    def give_back(self, who: Any) -> None:
        """Release it; does nothing if ``who`` doesn't have it."""
        with self._free:
            if self._holder is not None and self._holder() in (who, None):
                self._holder = None
                self._free.notify_all()

    def end(self) -> None:
        """At the program's exit, give a recording daemon thread time to stop at its next step."""
        with self._free:
            self.is_ending = True
            was_held = self._is_daemon and self._is_held()
            if was_held and self._free.wait_for(lambda: not self._is_held(), AT_EXIT_S):
                self._free.wait_for(lambda: self._rests, _SAVING_S)

    def _is_held(self) -> bool:
        return self._holder is not None and self._holder() is not None

    def rest(self) -> None:
        """At the program's exit, let a daemon thread whose recording is saved wait here for the end.

        Before Python 3.14, a thread that runs C++ when the interpreter ends may abort the process.
        """
        with self._free:
            if self.is_ending and threading.current_thread().daemon:
                self._rests = True
                self._free.notify_all()
                self._free.wait(AT_EXIT_S)


CLAIM: Final = ProfilerClaim()


atexit.register(CLAIM.end)


if hasattr(os, "register_at_fork"):  # a child lacks the profiler's thread, and its lock may be held
    os.register_at_fork(after_in_child=CLAIM.start_child)
    os.register_at_fork(after_in_child=watch.start_child)


def is_profiling_anywhere() -> bool:
    """Whether a torch profiler records in any thread, as reported by torch; warm-ups aren't seen."""
    in_any_thread = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    return bool(torch.autograd._profiler_enabled() or in_any_thread)  # type: ignore[attr-defined]


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the operators inside, in this thread, from torch profilers."""
    if not is_profiling_anywhere():
        yield
        return
    torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]
