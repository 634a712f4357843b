"""A source file of the user's as a syntax tree, in which statements are found."""

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
    """A file that was read and parsed once.

    Args:
        path: absolute.

    Raises:
        SyntaxError: when it is no Python; also ValueError and RecursionError.
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
        """The file; ``None`` where it can't be read as Python in UTF-8 or is too long."""
        try:
            data = _bytes_of(path)
            return None if data is None else cls(path, data)
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None

    def function_at(self, place: Place) -> Function | None:
        """The function that starts where a place says; ``None`` where another one does, or none."""
        name = place.function.rpartition(".")[2]
        for node in self._functions:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if node.name == name and first == place.line:
                return node
        return None

    def class_named(self, qualified_name: str) -> ast.ClassDef | None:
        """The class of this name; ``None`` where there is none, or several."""
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
        """What a call calls: the last part of its name, as it was imported."""
        function = call.func
        if isinstance(function, ast.Attribute):
            return function.attr
        return self._aliases.get(function.id, function.id) if isinstance(function, ast.Name) else ""

    def calls(self, node: ast.AST, *names: str) -> list[ast.Call]:
        """The calls of these names in a part of the file, in the order of their lines."""
        found = [one for name in names for one in self._calls.get(name, ()) if _is_in(one, node)]
        return sorted(found, key=lambda one: (one.lineno, one.col_offset))

    def call_at(self, line: int, *names: str) -> ast.Call | None:
        """The innermost call of one of these names at a line; ``None`` without one."""
        covering = [
            one for one in self.calls(self.tree, *names) if one.lineno <= line <= (one.end_lineno or 0)
        ]
        return max(covering, key=lambda one: (one.lineno, one.col_offset), default=None)

    def made_by(
        self, value: ast.expr | None, within: ast.AST | None, name: str, depth: int = 0
    ) -> list[ast.Call]:
        """The calls of a name that an expression's value may come from, as far as this file says.

        Args:
            value: the expression; ``None`` stands for all that ``within`` returns.
            within: the function that it is in; ``None`` for the module.
            name: of the class whose objects are meant.
            depth: of functions that were followed.
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
                values = _assigned(self._own_nodes(scope), value.id)
                scope = self._scope_of(scope) if scope is not None else self.tree
            values = values or _assigned(self.tree.body, value.id)
        elif isinstance(value, ast.Attribute) and _is_self(value.value):
            owner = None if within is None else self.class_around(within)
            values = _assigned(ast.walk(owner) if owner is not None else (), value.attr, of_self=True)
        return [call for one in values for call in self.made_by(one, within, name, depth + 1)]

    def _callee(self, call: ast.Call, within: ast.AST | None) -> Function | None:
        """The function of this file that a call runs; ``None`` where it isn't known."""
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
        """What is in a function, without the functions and classes in it."""
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
        """The innermost function around a node; ``None`` outside of all."""
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
        """All uses of ``self.name`` in a class."""
        return [one for one in self.uses_of(name) if _is_self(one.value) and _is_in(one, owner)]

    def uses_of(self, *names: str) -> list[ast.Attribute]:
        """All attributes of these names in the file, of whatever."""
        return [one for one in self._attributes if one.attr in names]

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def statement(
        self, about: str, nodes: Sequence[ast.Call], *, at: ast.AST | None = None, module: str = ""
    ) -> Statement | None:
        """The simple statement around calls.

        Args:
            nodes: the calls that would change; all in one statement.
            at: where the statement is, for one without calls.

        Returns:
            ``None`` where they are in no simple statement, in several, or a call takes ``*args``.
        """
        around = {self._simple(one) for one in nodes} or {self._simple(at)}
        found = around.pop()
        if found is None or around or any(map(_is_starred, nodes)):
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
        # Columns count bytes; the last line is cut first, as it may be the first one, too.
        lines[-1] = lines[-1].encode()[: node.end_col_offset].decode()
        lines[0] = lines[0].encode()[node.col_offset :].decode()
        return "\n".join(lines)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_in(node: ast.expr, outer: ast.AST) -> bool:
    """Whether a node stands within another one, a module, class, function or expression."""
    if isinstance(outer, ast.Module):
        return True
    around: Any = outer
    begin, end = (around.lineno, around.col_offset), (around.end_lineno, around.end_col_offset)
    return begin <= (node.lineno, node.col_offset) and (node.end_lineno, node.end_col_offset) <= end


def _is_starred(call: ast.Call) -> bool:
    """Whether arguments are taken from a list or a dict, so that it isn't known which are given."""
    return any(isinstance(one, ast.Starred) for one in call.args) or any(
        one.arg is None for one in call.keywords
    )


def _assigned(nodes: Iterable[ast.AST], name: str, *, of_self: bool = False) -> list[ast.expr]:
    """What is assigned to a name, or to an attribute of ``self``."""
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
    """``None`` for what is no file, or a very long one."""
    info = Path(path).stat()
    if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_BYTES:
        return None
    return Path(path).read_bytes()
