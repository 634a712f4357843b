"""Progress of reading large files."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from lightning_modelprof.errors import printable
from lightning_modelprof.threads import has_ended, start_thread

T = TypeVar("T")

_LARGE_BYTES: Final = 5_000_000
"""Smaller files are read before a bar would be visible."""

_LONG_S: Final = 2
"""Seconds after which people want to see progress."""

_WAIT_S: Final = 1
"""The same for work they didn't ask for."""


@contextlib.contextmanager
def show_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, if that's a terminal and the file is large.

    Shows none while another live display has the terminal, such as Lightning's RichProgressBar in a fit.
    Reading continues if the bar fails.

    Yields:
        A function to call with the number of bytes done and their total.
    """
    bar: Any = None
    is_wanted = not hasattr(sys.stderr, "rich_proxied_file")

    def show(done: int, total: int) -> None:
        nonlocal bar, is_wanted
        if not is_wanted or total < _LARGE_BYTES:
            return
        try:
            if bar is None and not sys.stderr.isatty():  # avoids importing tqdm
                is_wanted = False
                return
            bar = bar or _started_bar(label, total)
            bar.update(done - bar.n)
        except Exception:  # standard error is closed or custom
            is_wanted = False

    try:
        yield show
    finally:
        if bar is not None:
            with contextlib.suppress(Exception):
                bar.close()


def with_progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield the items, with a bar on standard error once they take longer than two seconds."""
    if len(items) < 2 or sys.stderr is None or not sys.stderr.isatty():
        yield from items
        return
    from tqdm import tqdm  # noqa: PLC0415  # where there is something to show

    yield from tqdm(
        items, desc=printable(label), delay=_LONG_S, leave=False, dynamic_ncols=True, file=sys.stderr
    )


@contextlib.contextmanager
def show_waiting(label: str) -> Iterator[None]:
    """Print a line to standard error, if that's a terminal, once something takes over a second."""
    is_over = threading.Event()

    def print_label() -> None:
        with contextlib.suppress(Exception):  # standard error is closed or custom
            if not is_over.wait(_WAIT_S):
                print(printable(f"{label} ..."), file=sys.stderr, flush=True)

    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    thread = None
    with contextlib.suppress(RuntimeError):  # the program is ending
        thread = start_thread(print_label, "modelprof-waiting")
    try:
        yield
    finally:
        is_over.set()
        if thread is not None:
            has_ended(thread)


def _started_bar(label: str, total: int) -> Any:
    """Start a bar on standard error, which shows nothing if that's not a terminal."""
    from tqdm import tqdm  # noqa: PLC0415  # where there is something to show

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no thread

    return Bar(
        total=total,
        desc=printable(label),
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        leave=False,
        disable=None,
        file=sys.stderr,
    )
