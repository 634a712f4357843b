"""``lightning-modelprof loader``: profile a DataLoader without a model or a Trainer."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.cli.arguments import MAX_SECONDS, checked, parse_below, parse_number
from lightning_modelprof.errors import ConfigError, ModelProfError, did_you_mean, quoted
from lightning_modelprof.report.options import parse_whole_number

HELP = "Profile a DataLoader without training"
DESCRIPTION = (
    "Load batches as training would, then report how long a batch takes, its slowest code and how many"
    " workers you need."
)
USAGE = "%(prog)s [options] MODULE:FACTORY"
EPILOG = "Example: lightning-modelprof loader train.py:make_loader --step-ms 40"

_NOT_USERS: Final = (
    str(Path(__file__).parents[1]),
    str(importlib.__file__),
    "<frozen importlib",
)
"""File name prefixes of the frames above the user's."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="Module or file, and the name of a DataLoader or DataModule in it, or of a callable that"
        " returns one when called with no arguments",
    )
    command.add_argument(
        "--step-ms",
        type=checked(lambda text: parse_number(text, 0)),
        default=0.0,
        metavar="MS",
        help="Time per training step, excluding data loading; 0 fetches batches as fast as possible"
        " (default: 0)",
    )
    command.add_argument(
        "--batches",
        type=checked(lambda text: parse_whole_number(text, 1)),
        metavar="N",
        help="Stop after N batches (default: no limit)",
    )
    command.add_argument(
        "--seconds",
        type=checked(lambda text: parse_below(text, MAX_SECONDS, "a number of seconds")),
        default=20.0,
        metavar="S",
        help="Stop after S seconds (default: %(default)g)",
    )
    command.add_argument("--full", action="store_true", help="Print all tables instead of the short report")


def run(options: argparse.Namespace) -> int:
    name = quoted(options.factory)
    loader = find_loader(options.factory)
    from lightning_modelprof.engine.loader_profile import profile_loader

    if sys.stderr is not None and sys.stderr.isatty():  # nothing else is printed until the end
        print(f"Loading batches for up to {options.seconds:g} s.", file=sys.stderr)
    with _users(f"batches from {name}"):
        profile_loader(
            loader,
            step_s=options.step_ms / 1e3,
            max_batches=options.batches,
            max_s=options.seconds,
            full=options.full,
        )
    return 0


@contextmanager
def _users(expected: str) -> Iterator[None]:
    """Run user code; on an error, print its traceback and raise a ConfigError."""
    try:
        yield
    except ModelProfError:
        raise
    except (Exception, SystemExit) as error:
        lines = error.__traceback__
        while lines is not None and lines.tb_frame.f_code.co_filename.startswith(_NOT_USERS):
            lines = lines.tb_next
        traceback.print_exception(type(error), error, lines)
        remedy = "See the traceback above."
        if isinstance(error, SystemExit):
            remedy = 'Move the code that runs on import under if __name__ == "__main__".'
        elif _is_of_dead_worker(error):
            remedy = "A worker was killed or exited. Check whether memory ran out, or try num_workers=0."
        raise ConfigError(f"loader: expected {expected}, got {type(error).__name__}. {remedy}") from None


def _is_of_dead_worker(error: BaseException) -> bool:
    """Whether torch reports a dead worker, or the connection to one broke; an error inside it names it."""
    if isinstance(error, ConnectionError | EOFError | FileNotFoundError):
        lines = traceback.extract_tb(error.__traceback__)
        return Path(lines[-1].filename).parent.name == "multiprocessing"
    return isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error)


def find_loader(text: str) -> Any:
    """Find the loader that ``MODULE:FACTORY`` names.

    Raises:
        ConfigError: when there is none.
    """
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"loader: expected MODULE:FACTORY, such as train.py:make_loader, got {quoted(text)}."
        )
    folder, file = os.getcwd(), None  # noqa: PTH109
    if module_name.endswith(".py"):
        file = Path(module_name)
        if not file.is_file():
            raise ConfigError(f"loader: no such file: {module_name}")
        folder, module_name = str(file.resolve().parent), file.stem
    sys.path.insert(0, folder)
    found = _import(module_name, file)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"loader: {module_name} has no {quoted(name)}."
                f"{did_you_mean(part, [one for one in dir(found) if not one.startswith('_')])}"
            )
        found = getattr(found, part)
    with _users(f"a DataLoader from {quoted(text)}"):
        if isinstance(found, type) or (callable(found) and not hasattr(found, "__iter__")):
            _check_arguments(found, text)
            found = found()
        if hasattr(found, "train_dataloader"):
            if hasattr(found, "prepare_data") and hasattr(found, "setup"):
                found.prepare_data()
                found.setup("fit")
            found = found.train_dataloader()
    if not hasattr(found, "__iter__"):
        raise ConfigError(
            f"loader: expected {quoted(text)} to be or return a DataLoader, got {quoted(found)}."
            " Name a function that returns one."
        )
    return found


def _import(module_name: str, file: Path | None) -> Any:
    what = module_name if file is None else str(file)
    with _users(f"to import {quoted(what)}"):
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"loader: no module named {quoted(module_name)}. Give its dotted name, or the path of its .py"
                " file."
            ) from None
    its = getattr(found, "__file__", None)
    if file is not None and (its is None or Path(its).resolve() != file.resolve()):
        raise ConfigError(
            f"loader: can't import {quoted(what)}: another module named {module_name} ({quoted(its)}) is"
            " already imported. Rename the file."
        )
    return found


def _check_arguments(factory: Any, text: str) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # C code may have no signature
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(
            f"loader: can't call {quoted(text)} without arguments: {error}. Name a function without arguments"
            " that calls it."
        ) from None
