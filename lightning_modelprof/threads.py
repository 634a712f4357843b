"""Our own threads; every wait for one has a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

PATIENCE_S: Final = 5.0
"""Longest wait for a thread to start or end."""


class _Started(threading.Event):
    """Limit the wait of ``Thread.start``: a thread that runs out of memory early never sets this."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(PATIENCE_S if timeout is None else timeout)


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread, and wait for its start for at most ``PATIENCE_S``.

    Raises:
        RuntimeError: when the thread doesn't start. Then it never does its work, even if it starts later.
    """
    is_taken = threading.Lock()

    def run() -> None:
        if is_taken.acquire(blocking=False):
            work()

    thread: Any = threading.Thread(target=run, name=name, daemon=True)
    thread._started = _Started()
    try:
        thread.start()
    except MemoryError as error:
        raise _refused(thread, "out of memory") from error
    if not thread.is_alive() and is_taken.acquire(blocking=False):
        raise _refused(thread, f"it doesn't run after {PATIENCE_S:g} s")
    started: threading.Thread = thread
    return started


def has_ended(thread: threading.Thread) -> bool:
    """Whether a thread ends within ``PATIENCE_S``."""
    with suppress(RuntimeError):  # it died while starting
        thread.join(PATIENCE_S)
    return not thread.is_alive()


def _refused(thread: threading.Thread, why: str) -> RuntimeError:
    getattr(threading, "_limbo", {}).pop(thread, None)  # threading.enumerate() would list it
    return RuntimeError(f"can't start new thread: {why}")
