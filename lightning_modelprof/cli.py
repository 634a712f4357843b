"""The command line: show a saved run again, analyze anybody's traces. Needs neither torch nor lightning."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from lightning_modelprof.analysis.analyze import analyze
from lightning_modelprof.cli_arguments import compared_paths, make_parser, report_options
from lightning_modelprof.errors import ArchiveError, ModelProfError, given_path, one_line
from lightning_modelprof.profile_import import import_into
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_compare import EXIT_CODES, build_comparison
from lightning_modelprof.report.compared_run import ComparedRun, compared_run
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions
from lightning_modelprof.report_reading import analyze_files, load_run_with_ranks, read_report, read_windows
from lightning_modelprof.run.archive import find_run, told_choice, write_atomically
from lightning_modelprof.show.html import render_html
from lightning_modelprof.show.json import render_json
from lightning_modelprof.show.terminal import print_report

_OF_TABLES: Final = tuple(field.name for field in fields(TableOptions))
"""Options of which each says that the tables are wanted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 1 after one line on what went wrong.

    ``compare`` has more of them: see ``build_compare.EXIT_CODES``.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    code = 0
    doing = "write the output" if options.command == "tensorboard" else "read what was given"
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
            report = read_report(options.path, lambda saved: report_options(options, saved))
        else:
            max_bytes = int(options.max_gib * 2**30)
            report = analyze_files(options.paths, report_options(options), max_bytes, options.step_range)
        doing = "write the output"
        html = getattr(options, "html", None)  # compare has none
        if html is not None:
            _write_file(html, render_html(report))
        if options.json is None:
            asked = any(getattr(options, name, None) is not None for name in _OF_TABLES)
            choice = (
                told_choice(given_path(options.path, ArchiveError)) if options.command == "report" else ""
            )
            last_words = [one_line(choice)] if choice else []
            print_report(report, full=options.full or asked, last_words=last_words)
        elif options.json == "-":
            sys.stdout.buffer.write(render_json(report))
        else:
            _write_file(options.json, render_json(report))
    except ModelProfError as error:
        print(f"lightning-modelprof: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        reason = one_line(error.strerror or str(error))
        print(f"lightning-modelprof: could not {doing}: {reason}", file=sys.stderr)
        return 1
    return code


def _import(options: argparse.Namespace) -> None:
    """Bring runs and traces into a log directory, and say how to look at them."""
    logdir = given_path(options.logdir, ArchiveError)
    paths = [given_path(path, ArchiveError) for path in options.paths]
    for choice in filter(None, map(told_choice, paths)):
        print(one_line(choice))
    for name, number in import_into(paths, logdir, int(options.max_gib * 2**30)):
        print(one_line(f"{name}: {number} profile{'' if number == 1 else 's'}"))
    print(one_line(f"Look at them in the tab Model Profile of: tensorboard --logdir {logdir}"))


def _write_file(path: str, data: bytes) -> None:
    target = given_path(path, ArchiveError)
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
        file = find_run(given_path(path, ArchiveError)).resolve()
        if file in seen:
            raise ArchiveError(
                f"{path}: expected another run, got the same as {seen[file]}. Give each run once: it says"
                " nothing about itself."
            )
        seen[file] = path
    # Tables and findings are compared between the first runs, so only their traces are read.
    runs = [[_read_compared(path, with_traces=path == side[0]) for path in side] for side in (before, after)]
    report, result = build_comparison(runs[0], runs[1], tolerance)
    choices = tuple(filter(None, map(told_choice, dict.fromkeys((*before, *after)))))
    report = replace(report, notes=(*choices, *report.notes))
    return report, EXIT_CODES[result.outcome]


def _read_compared(path: str, *, with_traces: bool) -> ComparedRun:
    run = load_run_with_ranks(path)
    facts, notes = read_windows(run, find_run(path).parent) if with_traces else ({}, {})
    analysis = analyze(run, facts, notes)
    return compared_run(path, analysis, build_report(analysis, DEFAULT_OPTIONS))


if __name__ == "__main__":
    sys.exit(main())
