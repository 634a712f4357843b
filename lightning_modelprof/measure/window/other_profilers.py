"""Other torch profilers in this process.

torch has one profiler at a time and does not say so: whoever prepares or starts one ends what another
records. Starting what another one has ended, or exporting it, crashes the process. While windows may open,
the functions by which every torch profiler is prepared, started and stopped are therefore watched.
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
    """What the torch profilers of this process do.

    Attributes:
        begun: how often one was prepared or started.
        is_waiting: whether one was prepared since, and has not started, which torch does not tell.
        recording: what ``begun`` was when a window of ours began to record, and what ends its ranges;
            ``None`` while none does.
        warming: what ``begun`` was when a window of ours began to warm up, and what ends that; ``None`` while
            none does, and while it is ended or started.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self._originals: dict[str, Callable[..., Any]] = {}
        self.begun = 0
        self.is_waiting = False
        self.recording: tuple[int, Callable[[], None]] | None = None
        self.warming: tuple[int, Callable[[], None]] | None = None
        self._none_waited = False  # when we came, of those that somebody had made before

    def begin(self) -> None:
        """Begin to watch; each call needs an :meth:`end`."""
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
        """Whether a profiler is prepared and has not started.

        Where there may be a profiler, that takes 20 ms until it once said no, as it looks at all objects.
        From then on what is prepared is seen.
        """
        if self.is_waiting or self._none_waited:
            return self.is_waiting
        is_waiting = _is_one_waiting()
        self._none_waited = bool(self._originals) and not is_waiting and not is_profiling()
        return is_waiting

    def leave(self, begun: int) -> None:
        """Nobody will start the profiler that was the ``begun``-th, if it still waits."""
        if begun == self.begun:
            self.is_waiting = False

    def start_child(self) -> None:
        """In a forked child: who held the lock may not be there."""
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
        """End what a window of ours records or warms up: some profilers refuse to start beside it.

        That would be to the user's harm. Beside one that warms up, torch 2.11 refuses to prepare another.
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
    """Whether a profiler that somebody made before we came is prepared and has not started."""
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
"""How long the end of a program waits for a daemon thread to come to its next step, and to stop there."""


_SAVING_S: Final = 2.0
"""How long it waits then until that is saved."""


ENDING: Final = "the program is ending"


_OTHER: Final = "another fit in this process has a profiler window open, and torch allows only one profiler"


_NOT_OURS: Final = "another torch profiler was recording when this window should have opened"


_BROKEN: Final = "torch.profiler ran out of memory earlier and may be in a broken state"


_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def _skip_teardown() -> None:
    """Let this process end without running the destructors of the libraries that its parent loaded.

    When Python has ended, with its ``atexit`` handlers run, C calls these two last in, first out: it flushes
    its streams and leaves with the exit status.
    """
    if _LIBC is not None and hasattr(_LIBC, "on_exit"):
        _LIBC.on_exit(_LIBC._exit, None)
        _LIBC.__cxa_atexit(_LIBC.fflush, None, None)  # of all streams


class ProfilerClaim:
    """Of the process; whoever is thrown away without having given it back does not have it any more.

    Attributes:
        is_broken: whether torch's profiler ran out of memory, so that nobody gets it any more.
    """

    def __init__(self) -> None:
        self._was_taken = self.is_broken = False
        self.forget()

    def start_child(self) -> None:
        """In a forked child: nobody has it, and the child ends without torch's profiler."""
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
        """``who`` does not need it any more; does nothing if it does not have it."""
        with self._free:
            if self._holder is not None and self._holder() in (who, None):
                self._holder = None
                self._free.notify_all()

    def end(self) -> None:
        """The program ends: a daemon thread that records is given the time to stop at its next step."""
        with self._free:
            self.is_ending = True
            was_held = self._is_daemon and self._is_held()
            if was_held and self._free.wait_for(lambda: not self._is_held(), AT_EXIT_S):
                self._free.wait_for(lambda: self._rests, _SAVING_S)

    def _is_held(self) -> bool:
        return self._holder is not None and self._holder() is not None

    def rest(self) -> None:
        """The program ends, and what a daemon thread recorded is saved: it waits here for the end.

        A thread that runs C++ when the interpreter ends may abort the process, before Python 3.14.
        """
        with self._free:
            if self.is_ending and threading.current_thread().daemon:
                self._rests = True
                self._free.notify_all()
                self._free.wait(AT_EXIT_S)


CLAIM: Final = ProfilerClaim()


atexit.register(CLAIM.end)


if hasattr(os, "register_at_fork"):  # a child has neither the profiler's thread nor, perhaps, a free lock
    os.register_at_fork(after_in_child=CLAIM.start_child)
    os.register_at_fork(after_in_child=watch.start_child)


def is_profiling_anywhere() -> bool:
    """Whether a torch profiler records in any thread, as far as torch tells; not one that only warms up."""
    in_any_thread = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    return bool(torch.autograd._profiler_enabled() or in_any_thread)  # type: ignore[attr-defined]


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """No torch profiler sees the operators that run inside, in this thread."""
    if not is_profiling_anywhere():
        yield
        return
    torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]
