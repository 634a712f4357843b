"""What handlers of signals raise is the program's, wherever our code is when they come."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from traceback import walk_tb
from types import FrameType


def raised_by_signal(error: BaseException) -> bool:
    """Whether the handler of a signal raised an error: torch's where a worker was killed, or a timeout's.

    Args:
        error: that was caught in code of ours, which knows nothing of it.
    """
    handlers = [one for one in map(signal.getsignal, signal.valid_signals()) if callable(one)]
    codes = [
        getattr(one, "__code__", None) or getattr(type(one).__call__, "__code__", None) for one in handlers
    ]
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


@contextmanager
def children_later(*, is_failing: bool) -> Iterator[None]:
    """Have what others do at the end of a child process (SIGCHLD) done after what is in here.

    Where a worker is killed, a pipe to it breaks first. Torch's handler would raise while that is reported.

    Args:
        is_failing: whether an error is on its way already; then that of a handler does not take its place.
    """
    number = getattr(signal, "SIGCHLD", None)
    handler = None if number is None else signal.getsignal(number)
    if number is None or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(number, lambda *what: came.append(what))
    try:
        yield
    finally:
        signal.signal(number, handler)
    if came:
        with suppress(Exception) if is_failing else nullcontext():
            handler(*came[-1])
