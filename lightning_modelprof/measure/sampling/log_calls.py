"""What a line logs, read from its source: the keys of ``self.log``, the metric or logger that it calls."""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
from functools import lru_cache
from types import CodeType
from typing import Any, Final

from lightning_modelprof.run.stacks import LogCall

_LOGS: Final = ("log", "log_dict")
_METHODS: Final = ("forward", "update", "compute", "sync", "reset")
_LOGGERS: Final = {"logger", "loggers", "experiment"}
"""Attributes of a trainer, a module and a logger through which a logger is called."""
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
_MOST_WRAPPERS: Final = 8


def log_call(file: str, line: int) -> LogCall | None:
    """What the call at a line logs.

    Returns:
        ``None`` if the source cannot be read, or shows no such call there.
    """
    calls = [one for one in _calls(file) if one[0].lineno <= line <= (one[0].end_lineno or one[0].lineno)]
    # A call may stand in another one's arguments over several lines; those at the line itself come first.
    logs = [one for one in calls if _method(one[0]) in _LOGS]
    metrics = [one for one in calls if _method(one[0]) in _METHODS] or [
        one for one in calls if one not in logs and not _is_builtin(one[0])
    ]
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
    )


def logger_codes() -> frozenset[int]:
    """Ids of the code of all methods of classes of Lightning's loggers, the user's own too."""
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
    """The code of a function in a class, without decorators: theirs is that of all functions they wrap."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    for _ in range(_MOST_WRAPPERS):
        value = getattr(value, "__wrapped__", value)
    code = getattr(value, "__code__", None)
    return code if isinstance(code, CodeType) else None


@lru_cache(maxsize=64)
def _calls(file: str) -> tuple[tuple[ast.Call, bool], ...]:
    """All calls in a file, and whether each is in a loop of its function."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found: list[tuple[ast.Call, bool]] = []
    left: list[tuple[ast.AST, bool]] = [(tree, False)]
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
    """Where it begins and ends: ``metric(x)`` comes before ``metric(x).mean()``, which begins there too."""
    return call.lineno, call.col_offset, call.end_lineno or 0, call.end_col_offset or 0


def _is_builtin(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and hasattr(builtins, call.func.id)


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _attributes(node: ast.AST) -> set[str]:
    """Names in a dotted expression, such as ``self.logger.experiment.add_scalar``."""
    found = set()
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        found |= {node.attr} if isinstance(node, ast.Attribute) else set()
        node = node.func if isinstance(node, ast.Call) else node.value
    return found | ({node.id} if isinstance(node, ast.Name) else set())


def _keys(call: ast.Call) -> list[str]:
    """The keys of one ``self.log`` or ``self.log_dict``; what is no literal as it is written."""
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
