"""Traces, from files to a report: the door beside ``reading``, which needs neither runs nor their rules."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_modelprof.analysis.timeline.steps import nearest_ranges, steps_asked_for
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts, analyze_trace
from lightning_modelprof.errors import ConfigError, TraceError, given_path, quoted
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions, parse_step_range
from lightning_modelprof.run.opening import MAX_TRACE_BYTES
from lightning_modelprof.run.records import Window, WindowStatus
from lightning_modelprof.show.progress import show_progress
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace.reader import read_trace


def _check_step_range(trace: Trace, file: Path, step_range: re.Pattern[str] | None) -> None:
    if step_range is None or steps_asked_for(trace, step_range) is not None:
        return
    names = nearest_ranges(trace, step_range)
    known = f"The nearest: {', '.join(map(quoted, names))}." if names else "It has no ranges with names."
    raise TraceError(
        f"{file}: expected ranges whose names match the step range {quoted(step_range.pattern)}, got none."
        f" {known}"
    )


def analyze(*paths: str | os.PathLike[str], step_range: str | None = None) -> Report:
    """The report of traces that anybody recorded with torch.profiler, such as a loop of Fabric's.

    What ``lightning-modelprof analyze`` shows; ``print_report`` prints it.

    Args:
        paths: Chrome traces, packed or not, or folders with some; those of several ranks go together.
        step_range: regular expression for the names of the ranges that are the steps; without it those of
            ``profiler.step()``, else a guess, which the report tells of.

    Raises:
        ConfigError: when ``step_range`` is no regular expression.
        TraceError: when a file is no trace or is too large, has no such range, or a folder holds none.
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
) -> Report:
    """The report of trace files that anybody recorded.

    Args:
        paths: Chrome traces of torch.profiler, or folders with some.
        options: how the tables are cut and sorted.
        max_bytes: largest uncompressed trace to read.
        step_range: for the names of the ranges that are the steps.

    Raises:
        TraceError: when a file is no trace or is too large, has no such range, or a folder holds none.
    """
    traces: list[TraceFacts] = []
    skipped: list[str] = []
    seen: set[Path] = set()
    for path in [given_path(path, TraceError) for path in paths]:
        found = False
        for file in trace_files(path):
            # The same trace packed and not packed counts once.
            place = file.resolve().with_suffix("") if file.suffix == ".gz" else file.resolve()
            if place in seen:
                found = True
                continue
            seen.add(place)
            try:
                trace = read_with_progress(file, max_bytes)
                _check_step_range(trace, file, step_range)
                traces.append(analyze_trace(trace, step_range))
                found = True
            except TraceError as error:
                if file == path:  # it was asked for by its name
                    raise
                skipped.append(f"Skipped {error}")
        if not found:
            raise TraceError(f"{path}: expected a folder with traces, got none. {' '.join(skipped)}")
    return build_trace_report(traces, options, skipped)


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
