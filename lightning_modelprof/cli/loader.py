"""``lightning-modelprof loader``: what a DataLoader's batches take, without a model or a Trainer."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from lightning_modelprof.errors import ConfigError, nearest, quoted

HELP = "profile a DataLoader without a training"
DESCRIPTION = (
    "Takes batches from a DataLoader as a training would, and shows what each transform takes, at which lines"
    " workers are, and how many workers are enough."
)
EPILOG = "Example: lightning-modelprof loader train.py:make_loader --step-ms 40"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Those of ``loader``."""
    command.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a module or a file, and what it has: a DataLoader, a DataModule, or a function or class that"
        " gives one when it is called without arguments",
    )
    command.add_argument(
        "--step-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="what a step of the training takes without its batch; 0, the default, takes batches as fast as"
        " they come",
    )
    command.add_argument("--batches", type=int, metavar="N", help="take so many batches at most")
    command.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="take batches for so long at most (20)"
    )
    command.add_argument("--full", action="store_true", help="print all tables")


def run(options: argparse.Namespace) -> int:
    """Make the loader, take batches, print."""
    loader = find_loader(options.factory)
    from lightning_modelprof.loop.loader_profile import profile_loader

    profile_loader(
        loader,
        step_s=options.step_ms / 1e3,
        max_batches=options.batches,
        max_s=options.seconds,
        full=options.full,
    )
    return 0


def find_loader(text: str) -> Any:
    """The loader that ``MODULE:FACTORY`` names.

    Raises:
        ConfigError: when there is none.
    """
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"loader: expected MODULE:FACTORY, such as train.py:make_loader, got {quoted(text)}."
        )
    folder = os.getcwd()  # noqa: PTH109
    if module_name.endswith(".py"):
        file = Path(module_name)
        if not file.is_file():
            raise ConfigError(f"loader: expected a file, got {quoted(module_name)}, which is not there.")
        folder, module_name = str(file.resolve().parent), file.stem
    sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"loader: expected a module, got {quoted(module_name)}, which is not there."
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"loader: expected something in {module_name}, got {quoted(name)}, which it does not have."
                f"{nearest(part, [one for one in vars(found) if not one.startswith('_')])}"
            )
        found = getattr(found, part)
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__iter__")):
        found = found()
    if hasattr(found, "train_dataloader"):
        if hasattr(found, "setup"):
            found.prepare_data()
            found.setup("fit")
        found = found.train_dataloader()
    if not hasattr(found, "__iter__"):
        raise ConfigError(f"loader: expected {quoted(text)} to give a DataLoader, got {quoted(found)}.")
    return found
