"""Places in source code, and how to print them."""

from __future__ import annotations

import re
import sys
from pathlib import PurePath
from typing import Any, Final

from lightning_modelprof.errors import printable
from lightning_modelprof.record import Count, Record

INSTALLED: Final = ("site-packages", "dist-packages")
"""Directories where packages are installed."""

_CELL: Final = re.compile(r"[/\\]ipykernel_\d+[/\\]\d+\.py$")
"""File name of a notebook cell in IPython's kernel."""


class Place(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A place in user or library code.

    Measurements of a line or a function extend it, so a finding can point at any of them.

    Attributes:
        file: Path as Python knows it; ``None`` if unknown or not Python.
        line: 1-based. For a function or class, where it starts, at its first decorator.
        function: Qualified name, such as ``Reader.__getitem__``; ``""`` if unknown.
        module: Path of the module in the model; ``""`` for the model itself and code outside it.
        package: Package it belongs to; ``""`` for user code, torch, Lightning and similar.
        is_library: Whether it's in an installed package, so users can't change it.
        is_exact: Whether ``line`` is the statement that takes the time; otherwise the function's first line.
        inner: Line of the user function, called from this line at any depth, that takes most of its time;
            ``None`` if it's this line or unknown.
        call: User line that led to this library code; ``None`` without one.
    """

    file: str | None = None
    line: Count | None = None
    function: str = ""
    module: str = ""
    package: str = ""
    is_library: bool = False
    is_exact: bool = False
    inner: Place | None = None
    call: Place | None = None

    def exact(self, **changes: Any) -> Place:
        """Return its statement alone: file, line and function.

        Args:
            **changes: Other fields to set.
        """
        fields = {"file": self.file, "line": self.line, "function": self.function, "is_exact": True}
        return Place(**(fields | changes))

    @property
    def short_file(self) -> str:
        """File below the directory it's installed in; a notebook cell's number."""
        file = self.file or ""
        if _CELL.search(file):
            return printable(_cell(file))
        for directory in INSTALLED:
            _, found, path = file.rpartition(f"{directory}/")
            if found:
                return printable(path)
        return printable(file)

    @property
    def at(self) -> str:
        """Position as editors understand it, such as ``train.py:40``; ``""`` without a file."""
        file = self.short_file
        return f"{file}:{self.line}" if file and self.line is not None else file

    @property
    def where(self) -> str:
        """Function, module and package, such as ``in Net.training_step``; ``""`` if all are unknown."""
        words = (("in", self.function), ("module", self.module), ("of", self.package))
        return ", ".join(f"{word} {printable(name)}" for word, name in words if name)

    @property
    def named(self) -> str:
        """Function and position, such as ``Reader.__getitem__ (replay/reader.py:12)``."""
        if self.file is None:
            return self.function
        parts = PurePath(self.file).parts
        installed = [at + 1 for at, part in enumerate(parts[:-1]) if part in INSTALLED]
        own = [parts.index(self.package)] if self.package in parts else []
        begin = installed[-1:] or own or [len(parts) - 1]
        return f"{self.function} ({'/'.join(parts[begin[0] :])}:{self.line})"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.at, self.where)))


def _cell(file: str) -> str:
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if hasattr(ipython, "get_ipython") else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = named(file) if named is not None else None
    return str(cell[1]) if cell else "a notebook cell"
