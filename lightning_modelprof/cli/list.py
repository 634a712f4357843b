"""``lightning-modelprof list``: the saved runs below a directory, one line each."""

from __future__ import annotations

import argparse

HELP = "List saved runs, one per line"
DESCRIPTION = (
    "List the saved runs in a directory and its subdirectories, newest first, with the time, model, speed,"
    " verdict and directory of each."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "path",
        nargs="?",
        default=".",
        metavar="DIR",
        help="Directory to search (default: the current directory)",
    )


def run(options: argparse.Namespace) -> int:
    from lightning_modelprof.errors import ArchiveError, as_path
    from lightning_modelprof.reading import list_runs
    from lightning_modelprof.show.terminal.terminal import print_lines

    folder = as_path(options.path, ArchiveError)
    print_lines(list_runs(folder))
    return 0
