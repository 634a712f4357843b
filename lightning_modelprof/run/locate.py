"""Find saved runs: a given one, and all below a directory. Reads none of them completely."""

from __future__ import annotations

import errno
import math
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.errors import ArchiveError, as_path, quoted, remedy

RUN_FILE: Final = "run.json"
DEFAULT_FOLDER: Final = "modelprof"
"""Directory name of a run, next to the logger's files."""

_NUMBERED: Final = re.compile(rf"{DEFAULT_FOLDER}(?:_([0-9]{{1,9}}))?")
_REPEAT: Final = re.compile(r"([a-z]+)_[0-9]{1,9}")
_CREATED: Final = re.compile(rb'"created"\s*:\s*"([^"]*)"')
_CREATED_WITHIN: Final = 1_000
"""Bytes at the start of an archive."""

_NO_RUNS: Final = ("__pycache__", "node_modules", "site-packages")
"""Directories with many files and no runs."""

_DEPTHS: Final = ("*/", "*/*/", "*/*/*/")
_MOST_NAMED: Final = 3


def find_run(path: str | Path) -> Path:
    """The archive for a path: a file, the directory that holds it, or the newest in a logger's directory.

    Raises:
        ArchiveError: when the directory can't be read.
    """
    path = Path(path)
    if path.is_dir():
        runs = _runs_of_a_logger(path)
        return runs[-1] if runs else path / RUN_FILE
    return path.with_name(RUN_FILE) if path.name == "report.json" else path


def choice_note(path: str | Path) -> str:
    """Note which run :func:`find_run` chose from a directory with several; ``""`` without a choice."""
    runs = _runs_of_a_logger(Path(path))
    if len(runs) < 2:
        return ""
    return (
        f"This is {runs[-1].parent}, the newest of {len(runs)} runs in {path}. To see another one, give its"
        " directory."
    )


def newest_run(path: Any) -> tuple[Path, str]:
    """The archive for a path, and a note about the choice.

    Args:
        path: a run's file or directory, or a directory with runs below it, of which the newest is taken.

    Returns:
        The archive, and a sentence that names it; ``""`` without a choice.

    Raises:
        ArchiveError: when there is none, or the directory can't be read.
    """
    given = as_path(path, ArchiveError)
    file, choice = find_run(given), choice_note(given)
    if choice or file.exists():
        repeats = [folder / RUN_FILE for folder in _repeats(file.parent)] if given.is_dir() else []
        if not repeats:
            return file, choice
        newest = max(file, *repeats, key=lambda one: (_began(one), one))
        return newest, (
            f"This is {newest.parent}, the newest of {len(repeats) + 1} runs in {file.parent}. To see another"
            f" one, give its {RUN_FILE}."
        )
    files = runs_below(given) if given.is_dir() else []
    if not files:
        raise no_run(file, given, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    newest = files[-1]
    where = "the current directory" if given == Path() else str(given)
    if len(files) == 1:
        return newest, f"This is {newest.parent}, the only run in {where}."
    return newest, (
        f"This is {newest.parent}, the newest of {len(files)} runs in {where}. To see them all, run"
        " lightning-modelprof list."
    )


def runs_below(folder: Path) -> list[Path]:
    """The archives of all runs below a directory, newest last.

    A run's directory may hold further runs of the same callback, such as the fits of a cross-validation. They
    count; its validations, tests and predictions don't.

    Raises:
        ArchiveError: when the directory can't be read.
    """
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        if error.filename == str(folder):
            raise _unreadable(folder, error)

    for place, folders, files in os.walk(folder, onerror=refuse):
        if RUN_FILE in files:
            found.append(Path(place) / RUN_FILE)
            folders[:] = [folder.name for folder in _repeats(Path(place))]
        folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in _NO_RUNS)
    return sorted(found, key=lambda file: (_began(file), file))


def _repeats(folder: Path) -> list[Path]:
    """Directories of further runs of the same loop inside a run's directory: ``fit_2``, ``fit_3``, ....

    The first of another loop has no number: next to ``test``, ``test_2`` is no repeat of the run itself.
    """
    try:
        names = {file.parent.name for file in folder.glob(f"*/{RUN_FILE}")}
    except OSError:
        return []
    matches = (_REPEAT.fullmatch(name) for name in names)
    return sorted(folder / match[0] for match in matches if match and match[1] not in names)


def _runs_of_a_logger(folder: Path) -> list[Path]:
    """The archives of ``modelprof``, ``modelprof_1``, ... in a directory that isn't itself a run.

    They are in order of their start, newest last; those without a start time come first.

    Raises:
        ArchiveError: when the directory can't be read.
    """
    try:
        if (folder / RUN_FILE).exists():
            return []
        found = [
            (_began(file), int(match[1] or 0), file)
            for file in folder.glob(f"{DEFAULT_FOLDER}*/{RUN_FILE}")
            if (match := _NUMBERED.fullmatch(file.parent.name)) and file.is_file()
        ]
    except OSError as error:
        raise _unreadable(folder, error) from None
    return [file for _, _, file in sorted(found)]


def _unreadable(folder: Path, error: OSError) -> ArchiveError:
    if isinstance(error, FileNotFoundError):
        return ArchiveError(f"no such directory: {folder}")
    return ArchiveError(f"can't read {folder}: {error.strerror or error}. {remedy(error)}")


def _began(file: Path) -> float:
    """Start time of a run in seconds since 1970, from the first bytes of its archive; -inf if unknown."""
    try:
        with file.open("rb") as opened:
            found = _CREATED.search(opened.read(_CREATED_WITHIN))
        return datetime.fromisoformat(found[1].decode()).timestamp() if found else -math.inf
    except (OSError, ValueError, OverflowError):
        return -math.inf


def _examples(path: Path) -> str:
    try:
        found = [file for depth in _DEPTHS for file in path.glob(f"{depth}{RUN_FILE}")]
        newest = sorted(found, key=lambda file: -file.stat().st_mtime)[:_MOST_NAMED]
    except (OSError, ValueError):
        found = []
    if not found:
        return "such as lightning_logs/version_0/modelprof"
    return f"such as {', '.join(str(file.parent) for file in newest)} ({len(found)} found here, newest first)"


def no_run(file: Path, given: Path, error: Exception) -> ArchiveError:
    """The error for a run that can't be read, with examples of runs nearby."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        folder = given if given.is_dir() or given.name not in {RUN_FILE, "report.json"} else given.parent
        problem = f"no such file or directory: {given}"
        if folder.is_dir():
            problem = f"no saved run in {quoted(str(folder))}"
    else:
        problem = f"can't read {file}: {getattr(error, 'strerror', None) or error}"
    return ArchiveError(f"{problem}. Give the directory that contains {RUN_FILE}, {_examples(given)}.")
