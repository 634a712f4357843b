"""Reads the traces that a command is given: files, folders, and the windows of a saved run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_modelprof.errors import TraceError
from lightning_modelprof.run.opening import MAX_TRACE_BYTES
from lightning_modelprof.run.records import Window, WindowStatus
from lightning_modelprof.show.progress import show_progress
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace.reader import read_trace


def read_with_progress(path: Path, max_bytes: int = MAX_TRACE_BYTES) -> Trace:
    """Read one trace, with a bar for a person who waits.

    Raises:
        TraceError: when it is none, too large, or a trace of another tool than torch.profiler.
    """
    with show_progress(f"reading {path.name}") as progress:
        trace = read_trace(path, max_bytes, progress)
    if trace.is_of_another_tool:
        raise TraceError(
            f"{path}: none of its {len(trace):,} events has a category of torch.profiler (cpu_op, kernel,"
            " ...), so another tool recorded it; give a trace that torch.profiler or ModelProfCallback wrote."
        )
    return trace


def trace_files(path: Path) -> list[Path]:
    """The traces that a path means: itself, or those in a folder and below it.

    Raises:
        TraceError: when it cannot be read, or holds none.
    """
    try:
        if not path.is_dir():
            return [path]
        files = sorted(file for file in path.rglob("*.json*") if "trace" in file.name and file.is_file())
    except OSError as error:
        raise TraceError(
            f"{path}: expected a trace file or a folder, but it cannot be read: {error.strerror}."
        ) from None
    if not files:
        raise TraceError(
            f"{path}: expected a folder with trace files (*trace*.json or *.json.gz), got none. Give the file"
            " itself, or the folder that torch.profiler wrote to."
        )
    return files


def window_traces(windows: Sequence[Window], folder: Path) -> Iterator[tuple[Window, Trace | None, str]]:
    """Each window with its trace, or with why there is none.

    A trace that cannot be read any more is a note, not an end.

    Args:
        windows: those to read.
        folder: where their run is saved.
    """
    for window in windows:
        if window.trace_file is None:
            has_trace = window.status in (WindowStatus.COMPLETE, WindowStatus.PARTIAL)
            is_said = any(
                words in window.note for words in ("trace was removed", "could not write the trace")
            )
            yield window, None, "its trace was not saved" if has_trace and not is_said else ""
            continue
        path = folder / window.trace_file
        if path.exists() and not path.is_file():  # a pipe, say, which would keep us waiting
            yield window, None, f"{window.trace_file} is no regular file"
            continue
        try:
            # Under the name that it had when the run was live.
            yield window, replace(read_with_progress(path), source=window.trace_file), ""
        except TraceError as error:
            yield window, None, str(error).replace(str(path), window.trace_file)
