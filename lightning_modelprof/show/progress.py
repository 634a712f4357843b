"""Progress while a large file is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

_LARGE_BYTES: Final = 5_000_000
"""Smaller files are read before a person could see a bar."""


@contextmanager
def show_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the standard error stream, if that is a terminal and the file is large.

    Args:
        label: what is done.

    Yields:
        A function to be called with the bytes that are done, and with how many there are.
    """
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(label, total=None)

    def tell(done: int, total: int) -> None:
        if console.is_terminal and total >= _LARGE_BYTES:
            bar.start()  # does nothing the second time
            bar.update(task, completed=done, total=total)

    try:
        yield tell
    finally:
        if bar.live.is_started:  # else it would print an empty line
            bar.stop()
