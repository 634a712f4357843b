"""What is read of saved runs: the report of one, what is compared, the list of those below a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_modelprof.analysis.analyze import analyze as derive
from lightning_modelprof.analysis.timeline.steps import nearest_ranges, steps_asked_for
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts, analyze_trace
from lightning_modelprof.errors import ArchiveError, ConfigError, TraceError, given_path, quoted
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.compare.compared_run import ComparedRun, compared_run
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions, parse_step_range, saved_options
from lightning_modelprof.report.tables.run.all_tables import MAX_SHOWN
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.finding import find_run, runs_below, told_choice
from lightning_modelprof.run.opening import MAX_TRACE_BYTES
from lightning_modelprof.run.ranks import with_other_ranks
from lightning_modelprof.run.records import Run, Window, WindowStatus
from lightning_modelprof.show.findings import list_line
from lightning_modelprof.show.progress import show_progress, show_waiting, with_progress
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace.reader import read_trace


def read_report(
    path: str | os.PathLike[str], choose: Callable[[TableOptions], TableOptions] = lambda saved: saved
) -> Report:
    """The report of a saved run, derived anew from what was measured.

    Args:
        path: the run's folder, its run.json, or the logger's folder, of which the newest run is taken.
        choose: the options to show it with, from those it was recorded with.

    Raises:
        ArchiveError: when there is no saved run.
    """
    path = given_path(path, ArchiveError)
    run = load_run_with_ranks(path)
    try:
        options = choose(saved_options(run.info.config))
    except ValueError as error:
        raise ArchiveError(f"{find_run(path)}: the saved configuration is damaged: {error}") from None
    facts, notes = read_windows(run, find_run(path).parent)
    report = build_report(derive(run, facts, notes), options)
    choice = told_choice(path)
    return replace(report, notes=(choice, *report.notes)) if choice else report


def load_run_with_ranks(path: str | Path) -> Run:
    """A saved run, with the other ranks of its job beside it."""
    return with_other_ranks(load_run(path), find_run(path))


def read_windows(run: Run, folder: Path) -> tuple[dict[int, TraceFacts], dict[int, str]]:
    """What the newest windows' traces say, and why of some there is nothing."""
    facts: dict[int, TraceFacts] = {}
    notes: dict[int, str] = {}
    for window, trace, note in window_traces(run.ranks[0].windows[-MAX_SHOWN:], folder):
        if trace is not None:
            facts[window.index] = analyze_trace(trace)
        elif note:
            notes[window.index] = note
    return facts, notes


def read_compared(path: str, *, with_traces: bool) -> ComparedRun:
    """A saved run, to be compared.

    Args:
        path: as given.
        with_traces: read the traces of its windows too.

    Raises:
        ArchiveError: when there is no saved run.
    """
    run = load_run_with_ranks(path)
    facts, notes = read_windows(run, find_run(path).parent) if with_traces else ({}, {})
    analysis = derive(run, facts, notes)
    return compared_run(path, analysis, build_report(analysis, DEFAULT_OPTIONS))


def list_runs(folder: Path) -> Iterator[str]:
    """A line for each saved run below a folder, the newest first; the traces are not read.

    Raises:
        ArchiveError: when there is none, or the folder may not be read.
    """
    with show_waiting(f"looking for runs below {folder}"):
        files = runs_below(folder)
    if not files:
        raise ArchiveError(
            f"{folder}: expected a folder with saved runs below it, got none. Train with"
            " ModelProfCallback first, or: lightning-modelprof run train.py"
        )
    for file in with_progress(files[::-1], "reading runs"):
        place = os.path.relpath(file.parent, folder)
        try:
            report = build_report(derive(load_run_with_ranks(file), {}, {}), DEFAULT_OPTIONS)
            yield list_line(report, place)
        except ArchiveError as error:
            yield f"{place}: {error}"


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


def _check_step_range(trace: Trace, file: Path, step_range: re.Pattern[str] | None) -> None:
    if step_range is None or steps_asked_for(trace, step_range) is not None:
        return
    names = nearest_ranges(trace, step_range)
    known = f"The nearest: {', '.join(map(quoted, names))}." if names else "It has no ranges with names."
    raise TraceError(
        f"{file}: expected ranges whose names match the step range {quoted(step_range.pattern)}, got none."
        f" {known}"
    )
