"""A user's source file as a syntax tree, for finding statements."""

from __future__ import annotations

import ast
import hashlib
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from lightning_modelprof.place import Place
from lightning_modelprof.run.setup import Statement

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_SIMPLE: Final = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return)
_REPEATS: Final = (
    *(ast.For, ast.AsyncFor, ast.While),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_MOST_BYTES: Final = 500_000
_MOST_CHARACTERS: Final = 4_000
_DEEPEST: Final = 6


class SourceFile:
    """A file that is read and parsed once.

    Args:
        path: absolute.

    Raises:
        SyntaxError: when it isn't Python; also ValueError and RecursionError.
    """

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.tree = ast.parse(data)
        self._lines = data.decode("utf-8-sig").split("\n")
        self._digest = hashlib.sha256(data).hexdigest()
        nodes = list(ast.walk(self.tree))
        self._parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self._aliases = {
            alias.asname: alias.name.rpartition(".")[2]
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if alias.asname
        }
        self._functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
        self._attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        self._calls: dict[str, list[ast.Call]] = {}
        for node in nodes:
            if isinstance(node, ast.Call):
                self._calls.setdefault(self.name_of(node), []).append(node)

    @classmethod
    def read(cls, path: str) -> SourceFile | None:
        """Read a file; ``None`` if it isn't readable as Python in UTF-8, or too long."""
        try:
            data = _bytes_of(path)
            return None if data is None else cls(path, data)
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None

    def function_at(self, place: Place) -> Function | None:
        """Return the function that starts at a place; ``None`` if there is none, or another one."""
        name = place.function.rpartition(".")[2]
        for node in self._functions:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if node.name == name and first == place.line:
                return node
        return None

    def class_named(self, qualified_name: str) -> ast.ClassDef | None:
        """Return the class of this name; ``None`` if there is none, or several."""
        node: ast.AST = self.tree
        for name in qualified_name.split("."):
            found = [
                one
                for one in getattr(node, "body", ())
                if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name
            ]
            if name == "<locals>":
                continue
            if len(found) != 1:
                return None
            node = found[0]
        return node if isinstance(node, ast.ClassDef) else None

    def name_of(self, call: ast.Call) -> str:
        """Return the last part of the called name, as it was imported."""
        function = call.func
        if isinstance(function, ast.Attribute):
            return function.attr
        return self._aliases.get(function.id, function.id) if isinstance(function, ast.Name) else ""

    def calls(self, node: ast.AST, *names: str) -> list[ast.Call]:
        """Return the calls of these names in part of the file, in line order."""
        found = [one for name in names for one in self._calls.get(name, ()) if _is_in(one, node)]
        return sorted(found, key=lambda one: (one.lineno, one.col_offset))

    def call_at(self, line: int, *names: str) -> ast.Call | None:
        """Return the innermost call of one of these names at a line; ``None`` without one."""
        covering = [
            one for one in self.calls(self.tree, *names) if one.lineno <= line <= (one.end_lineno or 0)
        ]
        return max(covering, key=lambda one: (one.lineno, one.col_offset), default=None)

    def made_by(
        self, value: ast.expr | None, within: ast.AST | None, name: str, depth: int = 0
    ) -> list[ast.Call]:
        """Return the calls of a name that an expression's value may come from, within this file.

        Args:
            value: the expression; ``None`` means everything that ``within`` returns.
            within: the enclosing function; ``None`` for the module.
            name: class whose objects are sought.
            depth: number of functions followed so far.
        """
        if depth > _DEEPEST:
            return []
        if value is None:
            return [
                call
                for node in self._own_nodes(within)
                if isinstance(node, ast.Return) and node.value is not None
                for call in self.made_by(node.value, within, name, depth + 1)
            ]
        if isinstance(value, ast.Call):
            if self.name_of(value) == name:
                return [value]
            callee = self._callee(value, within)
            return [] if callee is None else self.made_by(None, callee, name, depth + 1)
        values: list[ast.expr] = []
        if isinstance(value, ast.Name):
            scope = within
            while not values and scope is not self.tree:
                values = _assigned_values(self._own_nodes(scope), value.id)
                scope = self._scope_of(scope) if scope is not None else self.tree
            values = values or _assigned_values(self.tree.body, value.id)
        elif isinstance(value, ast.Attribute) and _is_self(value.value):
            owner = None if within is None else self.class_around(within)
            values = _assigned_values(ast.walk(owner) if owner is not None else (), value.attr, of_self=True)
        return [call for one in values for call in self.made_by(one, within, name, depth + 1)]

    def _callee(self, call: ast.Call, within: ast.AST | None) -> Function | None:
        function = call.func
        if isinstance(function, ast.Name):
            body = self.tree.body
            name = function.id
        elif isinstance(function, ast.Attribute) and _is_self(function.value) and within is not None:
            owner = self.class_around(within)
            body = [] if owner is None else owner.body
            name = function.attr
        else:
            return None
        return next((one for one in body if isinstance(one, _FUNCTIONS) and one.name == name), None)

    def _own_nodes(self, scope: ast.AST | None) -> Iterator[ast.AST]:
        """Yield the nodes of a function, without the functions and classes in it."""
        left = list(ast.iter_child_nodes(self.tree if scope is None else scope))
        while left:
            node = left.pop()
            yield node
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
                left += ast.iter_child_nodes(node)

    def _scope_of(self, node: ast.AST) -> ast.AST:
        parent = self._parents.get(node, self.tree)
        while not isinstance(parent, (*_FUNCTIONS, ast.Module)):
            parent = self._parents[parent]
        return parent

    def function_around(self, node: ast.AST) -> ast.AST | None:
        """Return the innermost function around a node; ``None`` outside all functions."""
        scope = self._scope_of(node)
        return None if scope is self.tree else scope

    def class_around(self, node: ast.AST) -> ast.ClassDef | None:
        parent: ast.AST | None = node
        while parent is not None and not isinstance(parent, ast.ClassDef):
            parent = self._parents.get(parent)
        return parent

    def is_repeated(self, node: ast.AST) -> bool:
        """Whether it is in a loop of its function."""
        parent = self._parents.get(node)
        while parent is not None and not isinstance(parent, _FUNCTIONS):
            if isinstance(parent, _REPEATS):
                return True
            parent = self._parents.get(parent)
        return False

    def attributes(self, owner: ast.ClassDef, name: str) -> list[ast.Attribute]:
        """Return all uses of ``self.name`` in a class."""
        return [one for one in self.uses_of(name) if _is_self(one.value) and _is_in(one, owner)]

    def uses_of(self, *names: str) -> list[ast.Attribute]:
        """Return all attributes of these names in the file, on any object."""
        return [one for one in self._attributes if one.attr in names]

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def statement(
        self, about: str, nodes: Sequence[ast.Call], *, at: ast.AST | None = None, module: str = ""
    ) -> Statement | None:
        """Return the simple statement around calls.

        Args:
            nodes: the calls to change; all in one statement.
            at: place of the statement if it has no calls.

        Returns:
            ``None`` if they're in no simple statement, in several, or if a call takes ``*args``.
        """
        around = {self._simple(one) for one in nodes} or {self._simple(at)}
        found = around.pop()
        if found is None or around or any(map(_unpacks_arguments, nodes)):
            return None
        text = self._text(found)
        if len(text) > _MOST_CHARACTERS:
            return None
        return Statement(
            about=about,
            file=self.path,
            digest=self._digest,
            line=found.lineno,
            end_line=found.end_lineno or found.lineno,
            text=text,
            calls=tuple(
                (one.lineno, one.col_offset, one.end_lineno or 0, one.end_col_offset or 0) for one in nodes
            ),
            module=module,
        )

    def _simple(self, node: ast.AST | None) -> ast.stmt | None:
        while node is not None and not isinstance(node, ast.stmt):
            node = self._parents.get(node)
        return node if isinstance(node, _SIMPLE) else None

    def _text(self, node: ast.stmt) -> str:
        lines = [line.rstrip("\r") for line in self._lines[node.lineno - 1 : node.end_lineno]]
        if not lines:
            return ""
        # Columns count bytes; the last line is cut first, as it may also be the first one.
        lines[-1] = lines[-1].encode()[: node.end_col_offset].decode()
        lines[0] = lines[0].encode()[node.col_offset :].decode()
        return "\n".join(lines)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_in(node: ast.expr, outer: ast.AST) -> bool:
    if isinstance(outer, ast.Module):
        return True
    around: Any = outer
    begin, end = (around.lineno, around.col_offset), (around.end_lineno, around.end_col_offset)
    return begin <= (node.lineno, node.col_offset) and (node.end_lineno, node.end_col_offset) <= end


def _unpacks_arguments(call: ast.Call) -> bool:
    return any(isinstance(one, ast.Starred) for one in call.args) or any(
        one.arg is None for one in call.keywords
    )


def _assigned_values(nodes: Iterable[ast.AST], name: str, *, of_self: bool = False) -> list[ast.expr]:
    found = []
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            is_it = (
                isinstance(target, ast.Attribute) and target.attr == name and _is_self(target.value)
                if of_self
                else isinstance(target, ast.Name) and target.id == name
            )
            if is_it:
                found.append(node.value)
    return found


def mentions(path: str, word: str) -> bool:
    try:
        return word.encode() in (_bytes_of(path) or b"")
    except (OSError, ValueError):
        return False


def _bytes_of(path: str) -> bytes | None:
    """Return a file's bytes; ``None`` if it's no regular file, or very long."""
    info = Path(path).stat()
    if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_BYTES:
        return None
    return Path(path).read_bytes()
