"""Edits of a source file that keep every other character.

An edit replaces a few characters and describes the change of the syntax tree. :meth:`SourceEdit.result`
parses the new text and compares the trees, so an edit that does anything else is never offered.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

_BOM: Final = b"\xef\xbb\xbf"
_SPACES: Final = "    "
_INVISIBLE: Final = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
_INVISIBLE_TOO: Final = (tokenize.INDENT, tokenize.DEDENT)
_MOST_ADDED_LINES: Final = 3

Range = tuple[int, int, int, int]
"""A node's first line, column, last line and end column, as in ast."""


class Refused(Exception):  # noqa: N818  # not a failure
    """The source doesn't allow the edit."""


class Code(str):
    """A value written verbatim, such as ``workers > 0``."""

    def __repr__(self) -> str:
        return str(self)


class _Piece(NamedTuple):
    begin: int
    end: int
    text: str


class SourceEdit:
    """A file to edit.

    Raises:
        Refused: If it isn't UTF-8 Python with line ends that git knows.
    """

    def __init__(self, data: bytes) -> None:
        if b"\r" in data.replace(b"\r\n", b""):
            raise Refused("lines end in carriage returns")
        try:
            self.text = data.decode()
            self.tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise Refused(str(error)) from error
        self._data = data
        self._newline = "\r\n" if b"\r\n" in data else "\n"
        self._starts = [0, *(at + 1 for at, byte in enumerate(data) if byte == 0x0A)]
        self._pieces: list[_Piece] = []

    def call_at(self, where: Range) -> ast.Call:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _range(node) == where:
                return node
        raise Refused("the call isn't there")

    def result(self) -> bytes:
        """Return the new text.

        Raises:
            Refused: If nothing changes, or something other than requested.
        """
        data = self._data
        for piece in sorted(self._pieces, reverse=True):
            data = data[: piece.begin] + piece.text.encode() + data[piece.end :]
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise Refused(str(error)) from error
        if not self._pieces or ast.dump(tree) != ast.dump(self.tree):
            raise Refused("the edit changes nothing, or something else")
        return data

    def set_arguments(
        self,
        call: ast.Call,
        wanted: Mapping[str, Any],
        *,
        positions: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        replaced: Sequence[str] = (),
    ) -> None:
        """Set keyword arguments of a call.

        Args:
            positions: names of its positional parameters.
            defaults: values that can be omitted.
            replaced: arguments whose value may be a call, which is replaced.

        Raises:
            Refused: If an argument is computed, or the given arguments are unknown.
        """
        if any(isinstance(one, ast.Starred) for one in call.args) or any(
            one.arg is None for one in call.keywords
        ):
            raise Refused("arguments come from a list or a dict")
        added: dict[str, str] = {}
        for name, value in wanted.items():
            written = repr(value)
            keyword = next((one for one in call.keywords if one.arg == name), None)
            at = positions.index(name) if name in positions else len(call.args)
            present = keyword.value if keyword is not None else call.args[at] if at < len(call.args) else None
            if present is None:
                if defaults is None or name not in defaults or defaults[name] != value:
                    added[name] = written
                continue
            if isinstance(present, ast.Constant):
                if (type(present.value), present.value) == (type(value), value):
                    continue
            elif not (name in replaced and isinstance(present, ast.Call)):
                raise Refused(f"{name} is computed")
            self._replace(present, written)
            new = ast.parse(written, mode="eval").body
            if keyword is not None:
                keyword.value = new
            else:
                call.args[at] = new
        if added:
            self._add(call, added)

    def drop_method(self, call: ast.Call, name: str) -> None:
        """Replace ``x.name()`` by ``x``."""
        if not isinstance(call.func, ast.Attribute) or call.func.attr != name or call.args or call.keywords:
            raise Refused(f"no call of {name}")
        begin, end = self._offsets(call)
        _, value_end = self._offsets(call.func.value)
        tail = [one for one in self._tokens(begin, end) if one.type not in (*_INVISIBLE, *_INVISIBLE_TOO)][
            -4:
        ]
        dot = begin + self._place(begin, end, tail[0].start)
        if [one.string for one in tail] != [".", name, "(", ")"] or dot < value_end:
            raise Refused("a call that is written in another way")
        dot = len(self._data[:dot].rstrip())
        self._pieces.append(_Piece(dot, end, ""))
        value = call.func.value
        for node in ast.walk(self.tree):
            for field, child in ast.iter_fields(node):
                if child is call:
                    setattr(node, field, value)
                elif isinstance(child, list):
                    child[:] = [value if one is call else one for one in child]

    def add_after(self, line: int, end_line: int, new: str) -> None:
        """Insert a statement below the assignment in these lines, with its indentation."""
        bodies = [
            body
            for node in ast.walk(self.tree)
            for name in ("body", "orelse", "finalbody")
            if isinstance(body := getattr(node, name, None), list)
        ]
        found = [
            (body, at)
            for body in bodies
            for at, one in enumerate(body)
            if (one.lineno, one.end_lineno) == (line, end_line) and isinstance(one, ast.Assign)
        ]
        if len(found) != 1:
            raise Refused("the statement isn't there")
        ((body, at),) = found
        begin, end = self._offsets(body[at])
        before = self._data[self._starts[line - 1] : begin].decode()
        after = self._data[end : self._offset_before_newline(end_line)].decode().strip()
        if before.strip("\ufeff \t") or (after and not after.startswith("#")):
            raise Refused("another statement is on its line")
        body.insert(at + 1, ast.parse(new).body[0])
        where = self._offset_before_newline(end_line)
        self._pieces.append(_Piece(where, where, f"{self._newline}{before}{new}"))

    def _add(self, call: ast.Call, added: Mapping[str, str]) -> None:
        texts = [f"{name}={value}" for name, value in added.items()]
        begin, end = self._offsets(call)
        seen = [one for one in self._tokens(begin, end) if one.type not in (*_INVISIBLE, *_INVISIBLE_TOO)]
        last, close = seen[-2], seen[-1]
        after = begin + self._place(begin, end, last.end)
        if last.string == "(" and close.start[0] == last.end[0]:
            self._pieces.append(_Piece(after, after, ", ".join(texts)))
        elif last.string != "(" and close.start[0] == last.end[0]:
            text = "".join(f" {one}," for one in texts) if last.string == "," else f", {', '.join(texts)}"
            self._pieces.append(_Piece(after, after, text))
        else:
            self._add_lines(call, texts, last, after)
        for name, value in added.items():
            call.keywords.append(ast.keyword(arg=name, value=ast.parse(value, mode="eval").body))

    def _add_lines(self, call: ast.Call, texts: Sequence[str], last: tokenize.TokenInfo, after: int) -> None:
        """Add arguments below the last one if the bracket is on its own line."""
        line_end = self._offset_before_newline(call.lineno + last.end[0] - 1)
        lines = list(texts) if len(texts) <= _MOST_ADDED_LINES else [", ".join(texts)]
        indent = self._indent(call)
        has_comma = last.string == ","
        text = ",".join(f"{self._newline}{indent}{one}" for one in lines) + ("," if has_comma else "")
        comma = "" if has_comma or last.string == "(" else ","
        if comma and after < line_end:
            self._pieces.append(_Piece(after, after, comma))
            comma = ""
        self._pieces.append(_Piece(line_end, line_end, comma + text))

    def _indent(self, call: ast.Call) -> str:
        """Copy the indentation of the last argument that starts a line, else indent one level."""
        given: list[ast.AST] = [*call.args, *call.keywords]
        for node in sorted(given, key=_range, reverse=True):
            begin, _ = self._offsets(node)
            before = self._data[self._starts[_range(node)[0] - 1] : begin].decode()
            if not before.strip():
                return before
        line = self._data[self._starts[call.lineno - 1] : self._offset_before_newline(call.lineno)].decode()
        own = line[: len(line) - len(line.lstrip())].lstrip("\ufeff")
        return own + ("\t" if own.endswith("\t") else _SPACES)

    def _replace(self, node: ast.AST, text: str) -> None:
        self._pieces.append(_Piece(*self._offsets(node), text))

    def _offsets(self, node: ast.AST) -> tuple[int, int]:
        line, column, end_line, end_column = _range(node)
        return self._offset(line, column), self._offset(end_line, end_column)

    def _offset(self, line: int, column: int) -> int:
        bom = len(_BOM) if line == 1 and self._data.startswith(_BOM) else 0
        return self._starts[line - 1] + column + bom

    def _offset_before_newline(self, line: int) -> int:
        end = self._starts[line] - 1 if line < len(self._starts) else len(self._data)
        return end - 1 if self._data[:end].endswith(b"\r") and line < len(self._starts) else end

    def _tokens(self, begin: int, end: int) -> list[tokenize.TokenInfo]:
        text = self._data[begin:end].decode()
        try:
            return list(tokenize.generate_tokens(io.StringIO(text, newline="").readline))
        except (tokenize.TokenError, SyntaxError) as error:
            raise Refused(str(error)) from error

    def _place(self, begin: int, end: int, position: tuple[int, int]) -> int:
        """Return a token's byte offset from ``begin``; token columns count characters."""
        lines = self._data[begin:end].decode().split("\n")
        row, column = position
        before = "\n".join([*lines[: row - 1], lines[row - 1][:column]])
        return len(before.encode())


def _range(node: Any) -> Range:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
