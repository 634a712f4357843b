"""Questions about the user's source code; files that changed since the run started aren't read."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

_ADDS: Final = ("append", "appendleft", "extend", "insert", "add", "update", "setdefault", "clear", "pop")
"""Methods that change their object without reading all of it."""


def source_line(file: str, line: int, created: str) -> str:
    """Return a line of a file; ``""`` if the file is missing or changed since the run."""
    return linecache.getline(file, line) if _is_as_it_was(file, created) else ""


def reads_attribute(file: str, line: int, name: str, classes: Collection[str], created: str) -> bool:
    """Return whether the function at a line reads an attribute, and doesn't only add to it.

    ``self.<name>`` counts in methods of these classes, ``<other>.<name>`` anywhere.

    Args:
        file: absolute path.
        line: any line of the function.
        classes: classes with the attribute.
        created: the run's start time, ISO 8601.
    """
    tree = _tree(file, created)
    function, owner = (None, None) if tree is None else _function_and_class_at(tree, line)
    return function is not None and any(
        not _is_self(one) or owner is None or owner in classes for one in _reads(function, name)
    )


def ignores_weights(file: str, line: int, created: str) -> bool:
    """Return whether a call of an ``nn.MultiheadAttention`` at a line returns unused weights.

    That is ``out, _ = self.attention(q, k, v)`` if the second name isn't read, or
    ``self.attention(q, k, v)[0]``; not with ``need_weights``.

    Args:
        file: absolute path.
        created: the run's start time, ISO 8601.
    """
    tree = _tree(file, created)
    function = None if tree is None else _function_and_class_at(tree, line)[0]
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


def padding_lines(file: str, line: int, created: str) -> list[int]:
    """Return a function's lines that pad samples to a fixed size.

    That is ``torch.full((len(texts), 256), 0)``, ``F.pad(text, (0, self.longest - len(text)))`` or a
    tokenizer's ``padding="max_length"``; not a size that the function computes, such as by ``max``.

    Args:
        file: absolute path.
        line: any line of the function.
        created: the run's start time, ISO 8601.
    """
    tree = _tree(file, created)
    function = None if tree is None else _function_and_class_at(tree, line)[0]
    if function is None:
        return []
    own = {
        name.id: _is_length(getattr(one, "value", None))
        for one in ast.walk(function)
        if isinstance(one, ast.Assign | ast.NamedExpr | ast.For)
        for name in ast.walk(one)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }
    return sorted(
        {
            one.lineno
            for one in ast.walk(function)
            if isinstance(one, ast.Call) and (_is_to_maximum(one) or _is_of_fixed_size(one, own))
        }
    )


_SIZED: Final = {"full": 0, "new_full": 0, "pad": 1} | dict.fromkeys(
    (f"{new}{name}" for new in ("", "new_") for name in ("zeros", "ones", "empty")), None
)
"""Functions of torch and NumPy → position of the size argument; ``None`` for all arguments."""


def _is_to_maximum(call: ast.Call) -> bool:
    return any(
        one.arg == "padding" and isinstance(one.value, ast.Constant) and one.value.value == "max_length"
        for one in call.keywords
    )


def _is_of_fixed_size(call: ast.Call, own: Mapping[str, bool]) -> bool:
    """``own`` maps the function's names to whether each is a length."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in _SIZED:
        return False
    at = _SIZED[name]
    parts: list[ast.AST] = list(call.args if at is None else call.args[at : at + 1])
    is_fixed = False
    while parts:
        part = parts.pop()
        is_own = isinstance(part, ast.Name) and part.id in own
        if _is_length(part) or (isinstance(part, ast.Name) and own.get(part.id)):
            continue
        if isinstance(part, ast.Call) or is_own:
            return False
        is_fixed |= isinstance(part, ast.Name) or (
            isinstance(part, ast.Constant) and isinstance(part.value, int) and part.value > 1
        )
        parts += ast.iter_child_nodes(part)
    return is_fixed


def _is_length(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


_NEED_WEIGHTS: Final = 4
"""Position of ``need_weights`` in ``nn.MultiheadAttention.forward``."""


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


def _function_and_class_at(tree: ast.Module, line: int) -> tuple[ast.AST | None, str | None]:
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
    """Yield reads of an attribute, except to add to it or for its length."""
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
