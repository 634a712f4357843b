"""``lightning-modelprof compare``: whether a run is faster than another, or a table of several stages."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from lightning_modelprof.cli.arguments import JSON_HELP, checked, parse_below
from lightning_modelprof.errors import ArchiveError

if TYPE_CHECKING:
    from lightning_modelprof.report.compare.compared_run import ComparedRun
    from lightning_modelprof.report.model import Report

HELP = "Compare runs, with a confidence interval"
DESCRIPTION = (
    "Compare runs to see whether AFTER is faster than BEFORE, by how much, how certain that is, and where the"
    " difference comes from. The first run is BEFORE, even if it's newer; a line then says so. For reliable"
    " results, use multiple runs per side, alternating between before and after. With three or more runs and"
    " no --before or --after, print a table that compares each run to the first."
)
EPILOG = (
    "Exit status: 0 if AFTER is faster or unchanged, or if a table is printed; 3 if it is slower by more"
    " than the tolerance; 4 if the result is CANNOT TELL; 1 on error; 2 on invalid arguments."
)

DEFAULT_TOLERANCE: Final = 0.05

_MOST_CHOICES: Final = 2
"""Maximum lines about chosen runs in the short report; the full report has all."""

USAGE = (
    "%(prog)s [options] BEFORE AFTER\n       %(prog)s [options] BASE A B C ...\n"
    "       %(prog)s [options] --before A1 A2 ... --after B1 B2 ..."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "sides",
        nargs="*",
        metavar="RUN",
        help="Two or more runs: BEFORE AFTER, or BASE A B C. Each is a run directory, a parent directory, or"
        " a run.json or report.json file.",
    )
    command.add_argument("--before", nargs="+", metavar="RUN", default=[], help="Runs before the change")
    command.add_argument("--after", nargs="+", metavar="RUN", default=[], help="Runs after the change")
    command.add_argument(
        "--tolerance",
        type=checked(lambda text: parse_below(text, 1, "a fraction", ", such as 0.05 for 5%")),
        default=DEFAULT_TOLERANCE,
        metavar="RATIO",
        help="Ignore step time changes up to this fraction (default: %(default)g)",
    )
    command.add_argument("--json", metavar="FILE", help=JSON_HELP)
    command.add_argument(
        "--markdown", action="store_true", help="Print as Markdown, for example for a pull request"
    )
    command.add_argument("--full", action="store_true", help="Print all tables instead of the short report")
    command.set_defaults(check=_check)


def _check(options: argparse.Namespace) -> None:
    if len(options.sides) < 3 or options.before or options.after:
        compared_paths(options)


def run(options: argparse.Namespace) -> int:
    """Print or write the comparison; return the decision's exit code."""
    from lightning_modelprof.cli.output import put_out
    from lightning_modelprof.show.tensorboard.scalars import markdown_report
    from lightning_modelprof.show.terminal.terminal import print_text

    is_table = len(options.sides) > 2
    if is_table:
        report, code = compare_stages(options.sides, options.tolerance), 0
    else:
        report, code = compare_runs(*compared_paths(options), options.tolerance)
    if options.markdown and options.json is None:
        print_text(markdown_report(report))
    else:
        is_short = not options.full and not is_table
        choices = _choices([*options.sides, *options.before, *options.after])[:_MOST_CHOICES]
        put_out(report, options, [*choices, "all tables: add --full"] if is_short else [])
    return code


def compared_paths(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The runs before and after, from the arguments.

    Raises:
        ValueError: for anything but two paths, or paths for both ``--before`` and ``--after``.
    """
    sides, before, after = arguments.sides, arguments.before, arguments.after
    if len(sides) == 2 and not before and not after:
        return [sides[0]], [sides[1]]
    if not sides and before and after:
        return before, after
    got = [f"{len(sides)} without an option"] if sides else []
    got += [f"{len(paths)} for {name}" for name, paths in (("--before", before), ("--after", after)) if paths]
    raise ValueError(
        f"expected two runs, or runs for both --before and --after, got {', '.join(got) or 'none'}."
    )


def compare_runs(before: Sequence[str], after: Sequence[str], tolerance: float) -> tuple[Report, int]:
    """Compare saved runs, and return the report and the result's exit code.

    Args:
        before: directories or files of one or more runs.
        tolerance: fraction of the time up to which a change doesn't matter.

    Raises:
        ArchiveError: when a run is missing, given twice, or of another loop.
    """
    from dataclasses import replace

    from lightning_modelprof.report.compare.build_compare import EXIT_CODES, build_comparison

    files = _different_runs([*before, *after])
    # Tables and findings are compared between the first runs, so only their traces are read.
    runs = _read({path: path in (before[0], after[0]) for path in files})
    sides = [[runs[path] for path in side] for side in (before, after)]
    report, result = build_comparison(sides[0], sides[1], tolerance)
    report = replace(report, notes=(*_choices(files), *report.notes))
    return report, EXIT_CODES[result.outcome]


def compare_stages(paths: Sequence[str], tolerance: float) -> Report:
    """Compare several runs, each to the first, in a table.

    Raises:
        ArchiveError: when a run is missing, given twice, or of another loop.
    """
    from dataclasses import replace

    from lightning_modelprof.report.compare.stages import build_stages

    files = _different_runs(paths)
    report = build_stages(list(_read(dict.fromkeys(files, True)).values()), tolerance)
    return replace(report, notes=(*_choices(files), *report.notes))


def _different_runs(paths: Sequence[str]) -> list[str]:
    from lightning_modelprof.run.locate import newest_run

    seen: dict[str, str] = {}
    for path in paths:
        file = os.path.realpath(newest_run(path)[0])  # a link counts as its target
        if file in seen:
            raise ArchiveError(
                f"{path}: the same run is given twice, first as {seen[file]}. Give each run once."
            )
        seen[file] = path
    return list(seen.values())


def _choices(paths: Sequence[str]) -> tuple[str, ...]:
    from lightning_modelprof.run.locate import newest_run

    return tuple(filter(None, (newest_run(path)[1] for path in paths)))


def _read(paths: dict[str, bool]) -> dict[str, ComparedRun]:
    """Read runs by path; the value says whether to read traces too."""
    from lightning_modelprof.reading import read_compared
    from lightning_modelprof.show.progress import with_progress

    return {
        path: read_compared(path, with_traces=with_traces)
        for path, with_traces in with_progress(list(paths.items()), "reading runs")
    }
