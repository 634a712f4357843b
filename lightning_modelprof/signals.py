"""Signal handlers' errors belong to the program, even if they're raised in our code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from traceback import walk_tb
from types import FrameType


def raised_by_signal(error: BaseException) -> bool:
    """Whether a signal handler raised an error: torch's for a killed worker, or a timeout's.

    Args:
        error: unexpected error caught in our code.
    """
    handlers = [one for one in map(signal.getsignal, signal.valid_signals()) if callable(one)]
    codes = [
        getattr(one, "__code__", None) or getattr(type(one).__call__, "__code__", None) for one in handlers
    ]
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


@contextmanager
def children_later(*, is_failing: bool) -> Iterator[None]:
    """Run SIGCHLD handlers after the block.

    When a worker is killed, its pipe breaks first. Torch's handler would raise while that's being reported.

    Args:
        is_failing: whether an error is already propagating, which a handler's must not replace.
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
