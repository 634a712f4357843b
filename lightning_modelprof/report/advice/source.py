"""What the user's code says at a line; a file that has changed since the run began is not read."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

_ADDS: Final = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault", "clear", "pop")
"""Methods that do not go through what they change."""


def source_line(file: str, line: int, created: str) -> str:
    """A line of a file; ``""`` if the file has changed since the run, or is not there.

    Args:
        file: absolute.
        line: its number.
        created: when the run began, ISO 8601.
    """
    return linecache.getline(file, line) if _is_as_it_was(file, created) else ""


def reads_attribute(file: str, line: int, name: str, classes: Collection[str], created: str) -> bool:
    """Whether the function at a line goes through an attribute: it reads it, and doesn't only add to it.

    ``self.<name>`` counts in methods of these classes, ``<other>.<name>`` anywhere.

    Args:
        file: absolute.
        line: any line of the function.
        name: of the attribute.
        classes: whose objects have it.
        created: when the run began, ISO 8601.
    """
    tree = _tree(file, created)
    function, owner = (None, None) if tree is None else _function_at(tree, line)
    return function is not None and any(
        not _is_self(one) or owner is None or owner in classes for one in _reads(function, name)
    )


def ignores_weights(file: str, line: int, created: str) -> bool:
    """Whether a call of an ``nn.MultiheadAttention`` at a line makes weights that nobody uses.

    That is ``out, _ = self.attention(q, k, v)`` where the second name is not read, or
    ``self.attention(q, k, v)[0]``; not with ``need_weights``.

    Args:
        file: absolute.
        line: its number.
        created: when the run began, ISO 8601.
    """
    tree = _tree(file, created)
    function = None if tree is None else _function_at(tree, line)[0]
    if function is None:
        return False
    read = {
        one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
    }
    for node in ast.walk(function):
        call = node.value if isinstance(node, ast.Assign | ast.Subscript) else None
        if not isinstance(call, ast.Call) or not call.lineno <= line <= (call.end_lineno or line):
            continue
        if len(call.args) > _NEED_WEIGHTS or any(one.arg in (None, "need_weights") for one in call.keywords):
            continue
        if isinstance(node, ast.Subscript):
            if isinstance(node.slice, ast.Constant) and node.slice.value == 0:
                return True
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = node.targets[0].elts
            if len(names) == 2 and isinstance(names[1], ast.Name) and names[1].id not in read:
                return True
    return False


_NEED_WEIGHTS: Final = 4
"""Position of that argument in ``nn.MultiheadAttention.forward``."""


def _tree(file: str, created: str) -> ast.Module | None:
    if not _is_as_it_was(file, created):
        return None
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _is_as_it_was(file: str, created: str) -> bool:
    try:
        is_cell = file in linecache.cache and not Path(file).exists()
        return is_cell or Path(file).stat().st_mtime <= datetime.fromisoformat(created).timestamp()
    except (OSError, ValueError):
        return False


def _function_at(tree: ast.Module, line: int) -> tuple[ast.AST | None, str | None]:
    """The innermost function around a line, with the class that it is a method of."""
    found: tuple[ast.AST | None, str | None] = (None, None)
    within: list[tuple[ast.AST, str | None]] = [(tree, None)]
    while within:
        node, owner = within.pop()
        for child in ast.iter_child_nodes(node):
            if not getattr(child, "lineno", 0) <= line <= (getattr(child, "end_lineno", None) or line):
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found = (child, owner)
            within.append((child, child.name if isinstance(child, ast.ClassDef) else owner))
    return found


def _reads(function: ast.AST, name: str) -> Iterator[ast.Attribute]:
    """Where a function reads an attribute of this name, other than to add to it, or for its length."""
    passed = {
        id(part)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        for part in (
            ast.walk(call.func)
            if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDS
            else call.args
            if isinstance(call.func, ast.Name) and call.func.id == "len"
            else ()
        )
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Attribute) or node.attr != name or id(node) in passed:
            continue
        if isinstance(node.ctx, ast.Load):
            yield node


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"
