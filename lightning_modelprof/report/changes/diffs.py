"""A statement's edit as a diff that ``git apply`` takes, as long as its file is what it was."""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from lightning_modelprof.report.changes.edits import Refused, SourceEdit
from lightning_modelprof.run.setup import Statement

_MOST_BYTES: Final = 500_000
_MOST_CHANGED: Final = 6
"""Lines that are added or removed."""


def diff_of(statement: Statement, edit: Callable[[SourceEdit], None]) -> str:
    """The unified diff of an edit; ``""`` where the file has changed, or doesn't allow it.

    Paths are relative to the root of the file's git repository, else to the working directory.
    """
    path = _path_in_diff(statement.file)
    data = _same_bytes(statement)
    if data is None or path is None:
        return ""
    try:
        source = SourceEdit(data)
        edit(source)
        changed = source.result()
    except Refused:
        return ""
    lines = list(_unified(data.decode(), changed.decode(), path))
    number = sum(line.startswith(("+", "-")) for line in lines[2:])
    return "".join(lines) if number <= _MOST_CHANGED else ""


def _same_bytes(statement: Statement) -> bytes | None:
    """The file's bytes if they are those of the run."""
    try:
        path = Path(statement.file)
        info = path.stat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_BYTES:
            return None
        data = path.read_bytes()
    except (OSError, ValueError):
        return None
    return data if hashlib.sha256(data).hexdigest() == statement.digest else None


def _path_in_diff(file: str) -> str | None:
    path = Path(file)
    if not path.is_absolute() or not file.isprintable() or '"' in file or "\\" in file.replace(os.sep, "/"):
        return None
    try:
        root = next((folder for folder in path.parents if (folder / ".git").exists()), Path.cwd())
        return path.relative_to(root).as_posix()
    except (OSError, ValueError):  # no working directory, or a file elsewhere
        return None


def _unified(before: str, after: str, path: str) -> Iterator[str]:
    """As ``difflib.unified_diff``, with git's words where a file has no newline at its end."""
    end = "\t\n" if " " in path else "\n"
    diff = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}", lineterm="\n")
    for number, line in enumerate(diff):
        if number < 2:
            yield line.rstrip("\n") + end
        else:
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """Lines that end in a newline alone, as for git: ``splitlines`` knows other ends."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
