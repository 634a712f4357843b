"""One torch profiler at a time in a process: who has it, and that nobody has it when the program ends.

torch's own state is of one thread: a second thread sees no profiler there, and starting another one crashes
the process. So does ending the program while a daemon thread records: torch is torn down under its profiler.
A forked child lacks the thread that torch's profiler started, and would wait for it forever as it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import weakref
from typing import Any, Final

import torch

AT_EXIT_S: Final = 5.0
"""How long the end of a program waits for a daemon thread to come to its next step, and to stop there."""

ENDING: Final = "the program is ending"

_OTHER: Final = "another fit of this process has a profiler window open, and torch has one profiler"
_NOT_OURS: Final = "another torch profiler was recording when this window was to open"


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
    """Of the process; whoever is thrown away without having given it back does not have it any more."""

    def __init__(self) -> None:
        self._was_taken = False
        self.forget()

    def start_child(self) -> None:
        """In a forked child: nobody has it, and the child ends without torch's profiler."""
        self.forget()
        if self._was_taken:
            self._was_taken = False  # a grandchild inherits what ends the child
            _skip_teardown()

    def forget(self) -> None:
        """Nobody has it."""
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._holder: weakref.ref[Any] | None = None
        self._is_daemon = False
        self.is_ending = False

    def take(self, who: Any) -> str:
        """Take it; returns why not, ``""`` if ``who`` has it now."""
        with self._lock:
            holder = None if self._holder is None else self._holder()
            if self.is_ending:
                return ENDING
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
            if self._is_daemon:
                self._free.wait_for(lambda: self._holder is None or self._holder() is None, AT_EXIT_S)


CLAIM: Final = ProfilerClaim()
atexit.register(CLAIM.end)
if hasattr(os, "register_at_fork"):  # a child has neither the profiler's thread nor, perhaps, a free lock
    os.register_at_fork(after_in_child=CLAIM.start_child)


def is_profiling_anywhere() -> bool:
    """Whether a torch profiler records in any thread, as far as torch tells; not one that only warms up."""
    in_any_thread = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    return bool(torch.autograd._profiler_enabled() or in_any_thread)  # type: ignore[attr-defined]
