"""Building blocks of changes: the statement to fix, its edit as a diff, and the line to write instead."""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.report.changes.edits import Refused, SourceEdit
from lightning_modelprof.report.model import CodeChange
from lightning_modelprof.run.setup import Statement, TrainingSetup

_MOST_BYTES: Final = 500_000
_MOST_CHANGED: Final = 6
"""Most lines removed or added."""


def diff_of(statement: Statement, edit: Callable[[SourceEdit], None]) -> str:
    """Return an edit as a unified diff; ``""`` if the file changed or doesn't allow it.

    Paths are relative to the file's git root, else to the working directory.
    """
    path = _path_in_diff(statement.file)
    data = _unchanged_bytes(statement)
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


def _unchanged_bytes(statement: Statement) -> bytes | None:
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
    except (OSError, ValueError):  # no working directory, or the file is elsewhere
        return None


def _unified(before: str, after: str, path: str) -> Iterator[str]:
    """Diff like ``difflib.unified_diff``, with git's words for a missing final newline."""
    end = "\t\n" if " " in path else "\n"
    diff = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}", lineterm="\n")
    for number, line in enumerate(diff):
        if number < 2:
            yield line.rstrip("\n") + end
        else:
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """Split at newlines only, as git does; ``splitlines`` knows other line ends."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def statements_about(setup: TrainingSetup, about: str) -> list[Statement]:
    return [one for one in setup.statements if one.about == about]


def only_statement(setup: TrainingSetup, about: str, line: int | None = None) -> Statement | None:
    """Return the only statement of a kind, at a line if given; ``None`` if there are none or more."""
    found = [
        one for one in statements_about(setup, about) if line is None or one.line <= line <= one.end_line
    ]
    return found[0] if len(found) == 1 else None


def offer(
    statement: Statement | None,
    edit: Callable[[SourceEdit], None],
    text: str,
    label: str,
) -> CodeChange:
    """Offer a change of a statement; without a diff if it's missing or can't be edited."""
    diff = "" if statement is None else diff_of(statement, edit)
    if statement is None or not diff:
        return CodeChange(text=text, label=label)
    return CodeChange(text=text, label=label, diff=diff, file=statement.file, line=statement.line)


def offer_arguments(
    statement: Statement | None,
    callee: str,
    wanted: Mapping[str, Any],
    label: str,
    *,
    positions: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    replaced: Sequence[str] = (),
    check: Callable[[SourceEdit], None] = lambda _: None,
) -> CodeChange:
    """Offer a change of arguments in a statement's calls; arguments as in :meth:`SourceEdit.set_arguments`.

    Args:
        statement: statement to fix; ``None`` if unknown.
        callee: what it calls, for the line to write.
        check: raises Refused if the source rules it out.
    """

    def edit(source: SourceEdit) -> None:
        check(source)
        for where in () if statement is None else statement.calls:
            source.set_arguments(
                source.call_at(where), wanted, positions=positions, defaults=defaults, replaced=replaced
            )

    return offer(statement, edit, line_to_write(callee, wanted), label)


def line_to_write(callee: str, wanted: Mapping[str, Any]) -> str:
    """Return a line such as ``DataLoader(..., num_workers=2)``."""
    return f"{callee}(..., {', '.join(f'{name}={value!r}' for name, value in wanted.items())})"


def yaml_key(path: str, value: Any, label: str) -> CodeChange:
    """Offer a key for the YAML file of LightningCLI or Hydra, such as ``trainer.precision: bf16-mixed``."""
    written = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    return CodeChange(text=f"{path}: {written}", label=label, is_yaml=True)
