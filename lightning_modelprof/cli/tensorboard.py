"""``lightning-modelprof tensorboard``: add saved runs and traces to TensorBoard."""

from __future__ import annotations

import argparse
import shlex

from lightning_modelprof.cli.arguments import add_max_gib
from lightning_modelprof.errors import ArchiveError, as_path, printable

HELP = "Add saved runs or traces to TensorBoard"
DESCRIPTION = (
    "Add saved runs and torch.profiler traces, including those recorded for torch_tb_profiler, to"
    " TensorBoard's Model Profile tab. Runs that log to TensorBoard are already there."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "paths", nargs="+", metavar="PATH", help="Run directory, trace file or a directory of either"
    )
    command.add_argument(
        "--logdir",
        required=True,
        metavar="DIR",
        help="Log directory that you pass to tensorboard --logdir",
    )
    add_max_gib(command)


def run(options: argparse.Namespace) -> int:
    from lightning_modelprof.cli.import_profiles import import_into
    from lightning_modelprof.run.locate import choice_note

    logdir = as_path(options.logdir, ArchiveError)
    paths = [as_path(path, ArchiveError) for path in options.paths]
    for choice in filter(None, map(choice_note, paths)):
        print(printable(choice))
    for name, number in import_into(paths, logdir, int(options.max_gib * 2**30)):
        print(printable(f"{name}: {number} profile{'' if number == 1 else 's'}"))
    print(printable(f"Open the Model Profile tab: tensorboard --logdir {shlex.quote(str(logdir))}"))
    return 0
