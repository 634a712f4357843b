"""Reads from a line's source what it logs: the keys of ``self.log``, the metric or logger it calls."""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from types import CodeType
from typing import Any, Final, TypeAlias

from lightning_modelprof.run.stacks import LogCall

_LOGS: Final = ("log", "log_dict")
_METHODS: Final = ("forward", "update", "compute", "sync", "reset")
_COLLECTS: Final = ("append", "appendleft", "extend", "insert", "add", "put", "setdefault")
_LOGGERS: Final = {"logger", "loggers", "experiment"}
"""Attributes of trainers, modules and loggers that lead to a logger."""
_LOGGER_BASES: Final = ("lightning.fabric.loggers.logger", "lightning_fabric.loggers.logger")
_REPEATS: Final = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_OPTIONS: Final = ("prog_bar", "sync_dist")
_MOST_NAMES: Final = 50
_LONGEST: Final = 60
_Call: TypeAlias = tuple[ast.Call, bool]
_MOST_WRAPPERS: Final = 8


def log_call(file: str, line: int, callers: Iterable[tuple[str, int]] = ()) -> LogCall | None:
    """Describe the logging call at a line.

    Args:
        callers: lines that called the line's function, innermost first; they show what becomes of its result.

    Returns:
        ``None`` if the source can't be read or has no such call there.
    """
    logs, metrics, calls = _calls_at(file, line)
    loggers = [one for one in calls if not _LOGGERS.isdisjoint(_attributes(one[0].func))]
    chosen = logs or loggers[:1] or metrics[:1]
    if not chosen:
        return None
    names = [name for call, _ in logs for name in _keys(call)] or [_text(call.func) for call, _ in chosen]
    given = {
        option.arg
        for call, _ in logs
        for option in call.keywords
        if isinstance(option.value, ast.Constant) and option.value.value is True
    }
    return LogCall(
        file=file,
        line=line,
        names=tuple(dict.fromkeys(names))[:_MOST_NAMES],
        is_repeated=any(is_repeated for _, is_repeated in chosen),
        options=tuple(option for option in _OPTIONS if option in given),
        is_kept=_is_kept(((file, line), *callers)),
    )


def _calls_at(file: str, line: int) -> tuple[list[_Call], list[_Call], list[_Call]]:
    """Return the calls of ``self.log`` at a line, those that may be of a metric, and all calls."""
    calls = [one for one in _calls(file) if one[0].lineno <= line <= (one[0].end_lineno or one[0].lineno)]
    # A call may be inside another's arguments across lines; those starting at the line come first.
    logs = [one for one in calls if _method(one[0]) in _LOGS]
    metrics = [one for one in calls if _method(one[0]) in _METHODS] or [
        one for one in calls if one not in logs and not _is_builtin(one[0])
    ]
    return logs, metrics, calls


def _is_kept(lines: Iterable[tuple[str, int]]) -> bool:
    """Whether the first line's result is used by more than logging; returned results go to the next line.

    When in doubt, it is kept.
    """
    for file, line in lines:
        _, metrics, _ = _calls_at(file, line)
        given = [call for call, _ in metrics if _method(call) not in _COLLECTS]
        if not given:
            return False
        try:
            fate = _Fates(_parents(file)).of(given[0])
        except RecursionError:
            return True
        if fate is not _Fate.RETURNED:
            return fate is _Fate.KEPT
    return True


class _Fate(Enum):
    """What becomes of a value; among several, the largest counts."""

    LOGGED = 1
    RETURNED = 2
    KEPT = 3


class _Fates:
    """Follows values through their function's statements; ``parents`` are those of all nodes in the file."""

    def __init__(self, parents: Mapping[ast.AST, ast.AST]) -> None:
        self._parents = parents
        self._names: set[tuple[ast.AST, str]] = set()

    def of(self, node: ast.AST) -> _Fate:
        is_given = False
        while (parent := self._parents.get(node)) is not None:
            if isinstance(parent, ast.Call) and node is not parent.func:
                if _method(parent) in _LOGS or not _LOGGERS.isdisjoint(_attributes(parent.func)):
                    return _Fate.LOGGED
                is_given = is_given or not _is_builtin(parent)  # which may keep it
            elif isinstance(parent, ast.Expr):
                return _Fate.KEPT if is_given else _Fate.LOGGED
            elif isinstance(parent, ast.Return):
                return _Fate.RETURNED
            elif isinstance(parent, ast.Assign):
                return self._of_targets(parent.targets)
            elif isinstance(parent, ast.AnnAssign):
                return self._of_targets([parent.target])
            elif not isinstance(parent, (ast.expr, ast.keyword)) or isinstance(parent, ast.NamedExpr):
                return _Fate.KEPT
            node = parent
        return _Fate.KEPT

    def _of_targets(self, targets: Iterable[ast.expr]) -> _Fate:
        fates = [_Fate.LOGGED]
        for one in targets:
            target = one
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, (ast.Tuple, ast.List)):
                fates.append(self._of_targets(target.elts))
            else:
                fates.append(self._of_name(target) if isinstance(target, ast.Name) else _Fate.KEPT)
        return max(fates, key=lambda one: one.value)

    def _of_name(self, name: ast.Name) -> _Fate:
        function: ast.AST = name
        while not isinstance(function, (*_FUNCTIONS, ast.Module)):
            function = self._parents[function]
        if (function, name.id) in self._names:
            return _Fate.LOGGED  # for this use
        self._names.add((function, name.id))
        uses = (
            one
            for one in ast.walk(function)
            if isinstance(one, ast.Name) and one.id == name.id and isinstance(one.ctx, ast.Load)
        )
        fates = [_Fate.LOGGED, *(self.of(one) for one in uses if not self._is_written_to(one))]
        return max(fates, key=lambda one: one.value)

    def _is_written_to(self, node: ast.AST) -> bool:
        """Whether it is ``values`` in ``values["loss"] = ...``."""
        parent = self._parents.get(node)
        return isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store)


def logger_codes() -> frozenset[int]:
    """Return the ids of code objects of all methods of Lightning's and the user's loggers."""
    bases = (getattr(sys.modules.get(name), "Logger", None) for name in _LOGGER_BASES)
    left = [base for base in bases if isinstance(base, type)]
    found: dict[int, type] = {}
    while left:
        kind = left.pop()
        if id(kind) not in found:
            found[id(kind)] = kind
            left += type.__subclasses__(kind)
    codes = (_code_of(value) for kind in found.values() for value in vars(kind).values())
    return frozenset(id(code) for code in codes if code is not None)


def _code_of(value: Any) -> CodeType | None:
    """Return a method's code without decorators, which share theirs among all functions they wrap."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    for _ in range(_MOST_WRAPPERS):
        value = getattr(value, "__wrapped__", value)
    code = getattr(value, "__code__", None)
    return code if isinstance(code, CodeType) else None


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


@lru_cache(maxsize=64)
def _parents(file: str) -> Mapping[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(_tree(file)) for child in ast.iter_child_nodes(node)}


@lru_cache(maxsize=64)
def _calls(file: str) -> tuple[_Call, ...]:
    """Return all calls in a file, and whether each is in a loop of its function."""
    found: list[_Call] = []
    left: list[tuple[ast.AST, bool]] = [(_tree(file), False)]
    while left:
        node, is_repeated = left.pop()
        if isinstance(node, ast.Call):
            found.append((node, is_repeated))
        if isinstance(node, _FUNCTIONS):
            is_repeated = False
        is_repeated = is_repeated or isinstance(node, _REPEATS)
        left.extend((child, is_repeated) for child in ast.iter_child_nodes(node))
    return tuple(sorted(found, key=lambda one: _extent(one[0])))


def _extent(call: ast.Call) -> tuple[int, int, int, int]:
    """Return start and end: ``metric(x)`` comes before ``metric(x).mean()``, which starts there too."""
    return call.lineno, call.col_offset, call.end_lineno or 0, call.end_col_offset or 0


def _is_builtin(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _attributes(node: ast.AST) -> set[str]:
    """Return the names in a dotted expression such as ``self.logger.experiment.add_scalar``."""
    found = set()
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        found |= {node.attr} if isinstance(node, ast.Attribute) else set()
        node = node.func if isinstance(node, ast.Call) else node.value
    return found | ({node.id} if isinstance(node, ast.Name) else set())


def _keys(call: ast.Call) -> list[str]:
    """Return the keys of a ``self.log`` or ``self.log_dict`` call; non-literals as source text."""
    named = (option.value for option in call.keywords if option.arg in ("name", "dictionary"))
    given = call.args[0] if call.args else next(named, None)
    if isinstance(given, ast.Dict):
        return [_key(key) for key in given.keys if key is not None]
    return [] if given is None else [_key(given)]


def _key(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value[:_LONGEST]
    return _text(node)


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
