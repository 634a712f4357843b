"""Read traces into a report; unlike ``reading``, without importing runs and their rules."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from lightning_modelprof.analysis.timeline.steps import nearest_ranges, steps_asked_for
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.errors import ConfigError, TraceError, as_path, quoted, remedy
from lightning_modelprof.processes import start_module
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions, parse_step_range
from lightning_modelprof.run.opening import MAX_TRACE_BYTES
from lightning_modelprof.run.records import Window, WindowStatus
from lightning_modelprof.show.progress import show_progress
from lightning_modelprof.trace.merged import split_processes
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace.reader import read_trace
from lightning_modelprof.trace.text import TextFile


def _check_step_range(trace: Trace, file: Path, step_range: re.Pattern[str] | None) -> None:
    if step_range is None or steps_asked_for(trace, step_range) is not None:
        return
    names = nearest_ranges(trace, step_range)
    known = f"Closest names: {', '.join(map(quoted, names))}." if names else "The trace has no named ranges."
    raise TraceError(f"{file}: no range matches {quoted(step_range.pattern)}. {known}")


def analyze(*paths: str | os.PathLike[str], step_range: str | None = None) -> Report:
    """Analyze torch.profiler traces and return their report, as ``lightning-modelprof analyze`` shows it.

    Args:
        paths: Chrome traces, compressed or not, or folders that contain some. Ranks of one job are analyzed
            together.
        step_range: Regular expression for the names of the ranges to treat as steps. By default, the ranges
            of ``profiler.step()``; if there are none, the report says which ranges it guessed.

    Raises:
        ConfigError: If ``step_range`` isn't a regular expression.
        TraceError: If a file isn't a trace, is too large or has no such range, or a directory has no trace.
    """
    try:
        wanted = None if step_range is None else parse_step_range(step_range)
    except ValueError as error:
        raise ConfigError(f"step_range: {error}") from None
    return analyze_files(paths, step_range=wanted)


def analyze_files(
    paths: Sequence[str | os.PathLike[str]],
    options: TableOptions = DEFAULT_OPTIONS,
    max_bytes: int = MAX_TRACE_BYTES,
    step_range: re.Pattern[str] | None = None,
    *,
    is_brief: bool = False,
) -> Report:
    """Analyze trace files from any source.

    Args:
        paths: torch.profiler's Chrome traces, or folders with some.
        options: how to cut and sort the tables.
        max_bytes: largest uncompressed trace to read.
        step_range: for the names of the ranges to treat as steps.
        is_brief: whether to leave out tables and charts.

    Raises:
        TraceError: when a file isn't a trace, is too large or has no such range, or a folder has no trace.
    """
    chosen: list[tuple[Path, Path]] = []  # requested path, and one of its files
    seen: set[Path] = set()
    asked = [as_path(path, TraceError) for path in paths]
    with_traces: set[Path] = set()
    for path in asked:
        for file in trace_files(path):
            # A trace counts once, whether compressed or not.
            place = file.resolve().with_suffix("") if file.suffix == ".gz" else file.resolve()
            if place in seen:
                with_traces.add(path)
            else:
                seen.add(place)
                chosen.append((path, file))
    traces: list[TraceFacts] = []
    skipped: list[str] = []
    notes: list[str] = []
    with _helpers([file for _, file in chosen], max_bytes, step_range) as facts_of:
        for path, file in chosen:
            facts = facts_of(file)
            if isinstance(facts, tuple):
                traces += facts
                with_traces.add(path)
                if len(facts) > 1:
                    notes.append(
                        f"{file.name} contains {len(facts)} processes. Each is read as one rank, with its own"
                        " ids."
                    )
            elif file == path:  # requested by name
                raise facts
            else:
                skipped.append(f"Skipped {facts}")
    for path in asked:
        if path not in with_traces:
            raise TraceError(f"no traces in {path}. {' '.join(skipped)}")
    from lightning_modelprof.report.build_trace import build_trace_report  # noqa: PLC0415  # not in helpers

    return build_trace_report(traces, options, (*skipped, *notes), is_brief=is_brief)


_FactsOfFile = tuple[TraceFacts, ...] | TraceError


def _facts_of(
    file: Path, max_bytes: int, step_range: re.Pattern[str] | None, *, is_only: bool = False
) -> _FactsOfFile:
    """Analyze each process of a file, or return the error; only a single trace stays for lazy facts."""
    try:
        trace = read_with_progress(file, max_bytes)
        _check_step_range(trace, file, step_range)
        parts = split_processes(trace)
        if is_only and len(parts) == 1:
            return (TraceFacts(parts[0], step_range),)
        # A table may bring its own fact, to compute before the trace is freed.
        import lightning_modelprof.report.tables.trace.trace_tables  # noqa: F401, PLC0415

        return tuple(TraceFacts(one, step_range).complete() for one in parts)
    except TraceError as error:
        return error


_HELPED_BYTES: Final = 2**28
"""Text of all traces per extra process; for less, starting one takes more than a tenth of the work."""

_PACKED: Final = 10
"""Minimum ratio of a compressed trace's text to its file."""


@contextlib.contextmanager
def _helpers(
    files: Sequence[Path], max_bytes: int, step_range: re.Pattern[str] | None
) -> Iterator[Callable[[Path], _FactsOfFile]]:
    """Analyze shares of many large traces in other processes while this one analyzes its own.

    They get the last files, so that this process finishes its own before it waits for them. Whatever a
    process doesn't answer is done here.

    Yields:
        Function from a file to its facts or error, to be called in the order of the files.
    """
    sizes = np.array([_text_bytes(file) for file in files], np.int64)
    whole = max(int(sizes.sum()), 1)
    count = min(len(files), _num_cpus(), 1 + whole // _HELPED_BYTES)
    # Assign each file by its middle's position in the total text.
    number = ((np.cumsum(sizes) - sizes / 2) * count / whole).astype(int).tolist()
    helpers: dict[Path, _Helper] = {}
    try:
        with contextlib.suppress(OSError):  # no room for another process
            for one in range(1, count):
                share = [file for file, its in zip(files, number, strict=True) if its == one]
                share = [file for file in share if file.is_file()]  # a pipe can be read only once
                if share:
                    helpers.update(dict.fromkeys(share, _Helper(share, max_bytes, step_range)))

        def facts_of(file: Path) -> _FactsOfFile:
            answer = helpers[file].answers().get(file) if file in helpers else None
            return answer or _facts_of(file, max_bytes, step_range, is_only=len(files) == 1)

        yield facts_of
    finally:
        for helper in helpers.values():
            helper.close()


class _Helper:
    def __init__(self, files: Sequence[Path], max_bytes: int, step_range: re.Pattern[str] | None) -> None:
        import tempfile  # noqa: PLC0415  # only for large traces

        self._files = files
        self._known: dict[Path, tuple[TraceFacts, ...]] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe would fill up before it's read
        with tempfile.TemporaryFile() as task:
            pickle.dump((files, max_bytes, step_range), task)
            task.seek(0)
            try:
                self._process = start_module(__name__, stdin=task, stdout=self._output)
            except OSError:
                self._output.close()
                raise

    def answers(self) -> dict[Path, tuple[TraceFacts, ...]]:
        """Wait for its facts by file; unreadable files are left out."""
        if self._known is None:
            self._process.wait()
            self._output.seek(0)
            self._known = {}
            with contextlib.suppress(Exception):  # it may have been killed
                for file in self._files:
                    facts = pickle.load(self._output)  # from our own process
                    if isinstance(facts, tuple):
                        self._known[file] = facts
        return self._known

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()


def _text_bytes(file: Path) -> int:
    try:
        return file.stat().st_size * (_PACKED if file.suffix == ".gz" else 1)
    except OSError:
        return 0


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_helper() -> None:
    files, max_bytes, step_range = pickle.load(sys.stdin.buffer)  # from the process that started it
    for file in files:
        pickle.dump(_facts_of(file, max_bytes, step_range), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


def read_with_progress(path: Path, max_bytes: int = MAX_TRACE_BYTES) -> Trace:
    """Read one trace, showing a progress bar.

    Raises:
        TraceError: when it isn't a trace, is too large, or comes from a tool other than torch.profiler.
    """
    with show_progress(f"reading {path.name}") as progress:
        trace = read_trace(path, max_bytes, progress)
    if trace.is_of_another_tool:
        raise TraceError(
            f"{path} isn't a torch.profiler trace: none of its {len(trace):,} events has a torch.profiler"
            " category, such as cpu_op or kernel. Give a trace written by torch.profiler or"
            " ModelProfCallback."
        )
    return trace


_ARCHIVE_ENDINGS: Final = (".zip", ".tar", ".tgz", ".tar.gz")


def _members_or(path: Path) -> list[Path]:
    """Return an archive's traces as paths below it, or any other file itself."""
    return TextFile(path, MAX_TRACE_BYTES).members() or [path]


def trace_files(path: Path) -> list[Path]:
    """Return the traces at a path: itself, or those below a folder.

    Raises:
        TraceError: when it can't be read, or has no trace.
    """
    try:
        if not path.is_dir():
            return _members_or(path)
        files = [member for file in _traces_below(path) for member in _members_or(file)]
    except OSError as error:
        raise TraceError(f"can't read {path}: {error.strerror}. {remedy(error)}") from None
    if not files:
        raise TraceError(
            f"no trace files (*.json or *.json.gz) in {path}. Give a trace file, or the directory"
            " torch.profiler wrote to."
        )
    return files


def _traces_below(folder: Path) -> list[Path]:
    """Find files with ``trace`` in their names, else all JSON files that start like a trace."""
    named = sorted(
        file
        for file in folder.rglob("*trace*")
        if (".json" in file.name or file.name.endswith(_ARCHIVE_ENDINGS)) and file.is_file()
    )
    return named or sorted(
        file
        for ending in ("*.json", "*.json.gz")
        for file in folder.rglob(ending)
        if TextFile(file, MAX_TRACE_BYTES).looks_like_trace()
    )


def window_traces(windows: Sequence[Window], folder: Path) -> Iterator[tuple[Window, Trace | None, str]]:
    """Yield each window with its trace, or with the reason why there's none.

    An unreadable trace yields a reason rather than an error.

    Args:
        windows: windows to read.
        folder: where their run is saved.
    """
    for window in windows:
        if window.trace_file is None:
            has_trace = window.status in (WindowStatus.COMPLETE, WindowStatus.PARTIAL)
            is_said = any(
                words in window.note
                for words in ("trace was removed", "couldn't write the trace", "could not write the trace")
            )
            yield window, None, "its trace was not saved" if has_trace and not is_said else ""
            continue
        path = folder / window.trace_file
        if not path.exists():  # it isn't compressed yet
            path = path.with_suffix("")
        if path.exists() and not path.is_file():  # a pipe, for example, which could block
            yield window, None, f"{window.trace_file} isn't a regular file"
            continue
        try:
            # Keep the name it had during the run.
            yield window, replace(read_with_progress(path), source=window.trace_file), ""
        except TraceError as error:
            yield window, None, str(error).replace(str(path), window.trace_file)


if __name__ == "__main__":
    _run_helper()
