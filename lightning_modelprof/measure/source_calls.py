"""Which lines of the user's files make what findings are about, such as a DataLoader."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterable, Iterator
from typing import Any, Final

from lightning_modelprof.measure.setup.environment import written_class
from lightning_modelprof.measure.user_code import UserCode, absolute_file
from lightning_modelprof.run.setup import CodePlace

NAMES: Final = frozenset(
    ("DataLoader", "Trainer", "ModelCheckpoint", "Embedding", "EmbeddingBag", "double", "float64")
)
"""Of functions, classes and attributes."""

_MOST_FILES: Final = 8
_MOST_CHARACTERS: Final = 500_000
_MOST_LINES: Final = 8


def class_files(*things: Any) -> frozenset[str]:
    """The files of the user with the classes of these objects; ``None`` has none."""
    found = set()
    for one in things:
        if one is None:
            continue
        try:
            found.add(absolute_file(inspect.getfile(written_class(one))))
        except (OSError, TypeError):  # built in, or made at a prompt
            continue
    user_code = UserCode(tuple(type(one) for one in things if one is not None))
    return frozenset(file for file in found if user_code.is_users_file(file))


def calls_by_name(files: Iterable[str]) -> dict[str, tuple[CodePlace, ...]]:
    """The lines of these files that call or name one of ``NAMES``, in order."""
    found: dict[str, list[CodePlace]] = {}
    for file in sorted(files)[:_MOST_FILES]:
        text = "".join(linecache.getlines(file))
        if not any(name in text for name in NAMES) or len(text) > _MOST_CHARACTERS:
            continue
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        for name, line, function in _calls(tree, ""):
            places = found.setdefault(name, [])
            if len(places) < _MOST_LINES:
                places.append(CodePlace(name=function, file=file, line=line))
    return {name: tuple(dict.fromkeys(places)) for name, places in found.items()}


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, int, str]]:
    """Name, line and function around it."""
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{child.name}" if function else child.name
        if isinstance(child, ast.Call) and (name := _last_name(child.func)) in NAMES:
            yield name, child.lineno, function
        if isinstance(child, ast.Attribute) and child.attr == "float64":
            yield child.attr, child.lineno, function
        yield from _calls(child, inner)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
