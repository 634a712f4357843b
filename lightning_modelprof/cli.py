"""The command line: show a saved run again, analyze anybody's traces. Needs neither torch nor lightning."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_modelprof.analysis.analyze import analyze
from lightning_modelprof.analysis.trace_facts import TraceFacts, analyze_trace
from lightning_modelprof.cli_arguments import compared_paths, make_parser, report_options
from lightning_modelprof.errors import ArchiveError, ModelProfError, TraceError
from lightning_modelprof.profile_import import import_into
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_compare import EXIT_CODES, build_comparison
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.compared_run import ComparedRun, compared_run
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, ReportOptions, saved_options
from lightning_modelprof.report.tables.window_summaries import MAX_SHOWN
from lightning_modelprof.run.archive import find_run, load_run, write_atomically
from lightning_modelprof.run.chrome import MAX_TRACE_BYTES
from lightning_modelprof.run.rank_files import with_other_ranks
from lightning_modelprof.run.records import Run
from lightning_modelprof.show.html import render_html
from lightning_modelprof.show.json import render_json
from lightning_modelprof.show.terminal import print_report
from lightning_modelprof.trace_reading import read_with_progress, trace_files, window_traces


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 1 after one line on what went wrong.

    ``compare`` has more of them: see ``build_compare.EXIT_CODES``.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    code = 0
    try:
        if options.command == "tensorboard":
            _import(options)
            return 0
        if options.command == "compare":
            try:
                sides = compared_paths(options)
            except ValueError as error:
                parser.error(str(error))
            report, code = compare_runs(*sides, options.tolerance)
        elif options.command == "report":
            report = read_report(Path(options.path), lambda saved: report_options(options, saved))
        else:
            max_bytes = int(options.max_gib * 2**30)
            report = analyze_files([Path(path) for path in options.paths], report_options(options), max_bytes)
        html = getattr(options, "html", None)  # compare has none
        if html is not None:
            _write_file(Path(html), render_html(report))
        if options.json is None:
            print_report(report)
        elif options.json == "-":
            sys.stdout.buffer.write(render_json(report))
        else:
            _write_file(Path(options.json), render_json(report))
    except ModelProfError as error:
        print(f"lightning-modelprof: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"lightning-modelprof: could not write the output: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _import(options: argparse.Namespace) -> None:
    """Bring runs and traces into a log directory, and say how to look at them."""
    logdir = Path(options.logdir)
    paths = [Path(path) for path in options.paths]
    for name, number in import_into(paths, logdir, int(options.max_gib * 2**30)):
        print(f"{name}: {number} profile{'' if number == 1 else 's'}")
    print(f"Look at them in the tab Model Profile of: tensorboard --logdir {logdir}")


def _write_file(target: Path, data: bytes) -> None:
    if not target.parent.is_dir():  # a slip of the hand is not to make folders
        raise ArchiveError(f"{target}: expected a file in a folder that exists. Make it first.")
    try:
        write_atomically(target, data)
    except OSError as error:
        raise ArchiveError(f"could not write {target}: {error.strerror}") from None


def compare_runs(before: Sequence[str], after: Sequence[str], tolerance: float) -> tuple[Report, int]:
    """The report that compares saved runs, and the exit code that says how it came out.

    Args:
        before: folders or files of one or more runs.
        after: the same.
        tolerance: change of the time, as a fraction, that does not matter.

    Raises:
        ArchiveError: when a run is not there, is given twice, or is of another loop.
    """
    seen: dict[Path, str] = {}
    for path in (*before, *after):
        file = find_run(path).resolve()
        if file in seen:
            raise ArchiveError(
                f"{path}: expected another run, got the same as {seen[file]}. Give each run once: it says"
                " nothing about itself."
            )
        seen[file] = path
    # Tables and findings are compared between the first runs, so only their traces are read.
    runs = [[_read_compared(path, with_traces=path == side[0]) for path in side] for side in (before, after)]
    report, result = build_comparison(runs[0], runs[1], tolerance)
    return report, EXIT_CODES[result.outcome]


def _read_compared(path: str, *, with_traces: bool) -> ComparedRun:
    run = _load(path)
    facts, notes = _read_windows(run, find_run(path).parent) if with_traces else ({}, {})
    analysis = analyze(run, facts, notes)
    return compared_run(path, analysis, build_report(analysis, DEFAULT_OPTIONS))


def read_report(path: Path, choose: Callable[[ReportOptions], ReportOptions] = lambda saved: saved) -> Report:
    """The report of a saved run, derived anew from what was measured.

    Args:
        path: the run's folder, its run.json, or the logger's folder.
        choose: the options to show it with, from those it was recorded with.

    Raises:
        ArchiveError: when there is no saved run.
    """
    run = _load(path)
    try:
        options = choose(saved_options(run.info.config))
    except ValueError as error:
        raise ArchiveError(f"{find_run(path)}: the saved configuration is damaged: {error}") from None
    facts, notes = _read_windows(run, find_run(path).parent)
    return build_report(analyze(run, facts, notes), options)


def analyze_files(
    paths: Sequence[Path], options: ReportOptions = DEFAULT_OPTIONS, max_bytes: int = MAX_TRACE_BYTES
) -> Report:
    """The report of trace files that anybody recorded.

    Args:
        paths: Chrome traces of torch.profiler, or folders with some.
        options: how the tables are cut and sorted.
        max_bytes: largest uncompressed trace to read.

    Raises:
        TraceError: when a file is no trace or is too large, or a folder holds none.
    """
    traces: list[TraceFacts] = []
    skipped: list[str] = []
    seen: set[Path] = set()
    for path in paths:
        found = False
        for file in trace_files(path):
            # The same trace packed and not packed counts once.
            place = file.resolve().with_suffix("") if file.suffix == ".gz" else file.resolve()
            if place in seen:
                found = True
                continue
            seen.add(place)
            try:
                traces.append(analyze_trace(read_with_progress(file, max_bytes)))
                found = True
            except TraceError as error:
                if file == path:  # it was asked for by its name
                    raise
                skipped.append(f"Skipped {error}")
        if not found:
            raise TraceError(f"{path}: expected a folder with traces, got none. {' '.join(skipped)}")
    return build_trace_report(traces, options, skipped)


def _load(path: str | Path) -> Run:
    """A saved run, with the other ranks of its job beside it."""
    return with_other_ranks(load_run(path), find_run(path))


def _read_windows(run: Run, folder: Path) -> tuple[dict[int, TraceFacts], dict[int, str]]:
    """What the newest windows' traces say, and why of some there is nothing."""
    facts: dict[int, TraceFacts] = {}
    notes: dict[int, str] = {}
    for window, trace, note in window_traces(run.ranks[0].windows[-MAX_SHOWN:], folder):
        if trace is not None:
            facts[window.index] = analyze_trace(trace)
        elif note:
            notes[window.index] = note
    return facts, notes


if __name__ == "__main__":
    sys.exit(main())
