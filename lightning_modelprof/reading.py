"""Read saved runs: one report, runs to compare, or a list of a folder's runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.errors import ArchiveError, ModelProfError, as_path, describe_error
from lightning_modelprof.reading_traces import window_traces
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.compare.compared_run import ComparedRun, compared_run
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, SHOWN_WINDOWS, TableOptions, saved_options
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.locate import choice_note, find_run, newest_run, runs_below
from lightning_modelprof.run.ranks import with_other_ranks
from lightning_modelprof.run.records import Run
from lightning_modelprof.show.findings import list_line
from lightning_modelprof.show.progress import show_waiting, with_progress


def read_report(
    path: str | os.PathLike[str], choose: Callable[[TableOptions], TableOptions] = lambda saved: saved
) -> Report:
    """Read a saved run and return its report.

    Args:
        path: The run's directory, its run.json, or a parent directory, of which the newest run is read.
        choose: Function from the options the run was recorded with to those to show it with.

    Raises:
        ArchiveError: If there's no saved run, or it can't be read.
    """
    path = as_path(path, ArchiveError)
    run, options = load_with_options(path)
    file, options = find_run(path), choose(options)
    facts, notes = read_windows(run, file.parent)
    with refuse_damaged(file):
        report = build_report(Facts(run, facts, notes), options)
    choice = choice_note(path)
    return replace(report, notes=(choice, *report.notes)) if choice else report


@contextmanager
def refuse_damaged(file: Path) -> Iterator[None]:
    """Turn any error caused by a damaged archive into one sentence.

    Raises:
        ArchiveError: when the block raises an error that isn't this package's.
    """
    try:
        yield
    except ModelProfError:
        raise
    except Exception as error:
        raise ArchiveError(
            f"{file}: expected a run to make a report of, got {describe_error(error)}."
            " The file is damaged, or lightning-modelprof has a bug."
        ) from error


def load_run_with_ranks(path: str | Path) -> Run:
    """Load a saved run with its job's other ranks."""
    run, file = load_run(path), find_run(path)
    with refuse_damaged(file):
        return with_other_ranks(run, file)


def load_with_options(path: Path) -> tuple[Run, TableOptions]:
    """Load a saved run with its job's other ranks, and the options it was recorded with.

    Raises:
        ArchiveError: when there's no saved run, or its options are damaged.
    """
    run = load_run_with_ranks(path)
    try:
        return run, saved_options(run.info.config)
    except ValueError as error:
        raise ArchiveError(f"{find_run(path)}: the saved configuration is damaged. {error}") from None


def read_windows(run: Run, folder: Path) -> tuple[dict[int, TraceFacts], dict[int, str]]:
    """Read the newest windows' traces; return facts and reasons for missing ones, by window index."""
    facts: dict[int, TraceFacts] = {}
    notes: dict[int, str] = {}
    for window, trace, note in window_traces(run.ranks[0].windows[-SHOWN_WINDOWS:], folder):
        if trace is not None:
            facts[window.index] = TraceFacts(trace).complete()  # several traces aren't kept in memory
        elif note:
            notes[window.index] = note
    return facts, notes


def read_compared(path: str, *, with_traces: bool) -> ComparedRun:
    """Read a saved run to compare.

    Args:
        path: as given; of a folder with several runs, the newest is read.
        with_traces: whether to read its windows' traces too.

    Raises:
        ArchiveError: when there's no saved run.
    """
    file, _ = newest_run(path)
    run = load_run_with_ranks(file)
    facts, notes = read_windows(run, file.parent) if with_traces else ({}, {})
    with refuse_damaged(file):
        derived = Facts(run, facts, notes)
        return compared_run(path, build_report(derived, DEFAULT_OPTIONS), derived.steps)


def list_runs(folder: Path) -> Iterator[str]:
    """Yield a line for each saved run below a folder, newest first, without reading traces.

    Raises:
        ArchiveError: when there's none, or the folder can't be read.
    """
    if not folder.is_dir():
        raise ArchiveError(
            f"not a directory: {folder}" if folder.exists() else f"no such directory: {folder}"
        )
    with show_waiting(f"looking for runs in {folder}"):
        files = runs_below(folder)
    if not files:
        raise ArchiveError(
            f"no saved runs in {folder}. Train with ModelProfCallback first, or run lightning-modelprof run"
            " train.py."
        )
    for file in with_progress(files[::-1], "reading runs"):
        place = os.path.relpath(file.parent, folder)
        try:
            with refuse_damaged(file):
                line = list_line(build_report(Facts(load_run_with_ranks(file)), DEFAULT_OPTIONS), place)
            yield line
        except ArchiveError as error:
            yield f"{place}: {error}"
