"""``lightning-modelprof report``: show a saved run's report again."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace

from lightning_modelprof.cli.arguments import (
    add_module_options,
    add_output_options,
    add_table_options,
    table_options,
)

HELP = "Show a saved run's report"
DESCRIPTION = (
    "Show a saved run's report, recomputed from its measurements. If a directory has more than one run, show"
    " the newest."
)
USAGE = "%(prog)s [options] [DIR]"
PATH_HELP = "Run directory, or a parent directory such as lightning_logs (default: the current directory)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", nargs="?", default=".", metavar="DIR", help=PATH_HELP)
    add_output_options(command)
    add_module_options(command)
    add_table_options(command)


def run(options: argparse.Namespace) -> int:
    from lightning_modelprof.run.locate import newest_run
    from lightning_modelprof.show.progress import show_waiting

    with show_waiting(f"looking for runs in {options.path}"):
        file, choice = newest_run(options.path)  # report a missing run before the slow imports
    from lightning_modelprof.cli.output import put_out
    from lightning_modelprof.errors import printable
    from lightning_modelprof.reading import read_report

    report = read_report(file, lambda saved: table_options(options, saved))
    if choice:
        report = replace(report, notes=(choice, *report.notes))
    shown = file.parent if newest_run(file.parent)[0] == file else file
    rest = printable(f"all tables: lightning-modelprof report {shlex.quote(str(shown))} --full")
    put_out(report, options, [] if options.full else [*filter(None, [choice]), rest])
    return 0
