"""Progress while a large file is read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_modelprof.errors import one_line

_LARGE_BYTES: Final = 5_000_000
"""Smaller files are read before a person could see a bar."""


@contextlib.contextmanager
def show_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on the standard error stream, if that is a terminal and the file is large.

    There is none where another live display has the terminal, such as Lightning's RichProgressBar in a fit.
    Reading goes on where it cannot be shown.

    Args:
        label: what is done.

    Yields:
        A function to be called with the bytes that are done, and with how many there are.
    """
    bar: Progress | None = None
    is_wanted = not hasattr(sys.stderr, "rich_proxied_file")

    def tell(done: int, total: int) -> None:
        nonlocal bar, is_wanted
        if not is_wanted or total < _LARGE_BYTES:
            return
        try:
            bar = bar or _started_bar(label)
            is_wanted = bar is not None
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done, total=total)
        except Exception:  # a standard error that is closed, or somebody's own
            is_wanted = False

    try:
        yield tell
    finally:
        if bar is not None:
            with contextlib.suppress(Exception):
                bar.stop()


def _started_bar(label: str) -> Progress | None:
    """A bar on the standard error stream, ``None`` if that is no terminal."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        return None
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    bar.add_task(one_line(label), total=None)
    bar.start()
    return bar
