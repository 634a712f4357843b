"""Reasons for missing data name arguments as the constructor takes them, so they can be copied."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_modelprof
from lightning_modelprof.config.checks import make_config
from lightning_modelprof.config.options import FIELDS, GROUP_OF, GROUPS
from lightning_modelprof.errors import ConfigError

PACKAGE = Path(lightning_modelprof.__file__).parent
ROOMS = ("analysis", "engine", "inspect", "measure", "report", "run", "tensorboard_plugin")

OF_REPORT = {name for name, group in GROUP_OF.items() if group == "report"}
WORDS = {name for name in (*FIELDS, *GROUP_OF) if "_" in name} - {"log_every_n_steps", *OF_REPORT}
"""Names that can only be our arguments."""

HINT = re.compile(r"(?<![\w.])([a-z_]+)=(\{[^{}]*\}|\.\.\.|[-\w]+)")
"""An argument with its value."""

UNNAMED = re.compile(
    r"\b(?:inspect|bounds)\.[a-z_]+\b"
    r"|\b[Ss]et (?:active|wait|warmup|repeat|steps|flops|inspect|sampling|workers|fvcore)\b(?!=)"
    r"|\((?:active|wait|repeat|steps|flops|sampling|workers)[,)]"
    r"|\b(?:sampling|workers|fvcore|flops) (?:is|was|are|were) (?:off|on)\b"
)
"""Other ways of naming arguments, which can't be copied."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Strings a reader may see; no docstrings, definitions or errors."""
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return
    if isinstance(tree, ast.keyword) and tree.arg == "help":
        return
    if isinstance(tree, ast.Raise) and "NotMeasured" not in ast.dump(tree):
        return
    if isinstance(tree, ast.JoinedStr):
        yield "".join(str(one.value) if isinstance(one, ast.Constant) else "..." for one in tree.values)
    elif isinstance(tree, ast.Constant):
        if isinstance(tree.value, str):
            yield tree.value
    else:
        for child in ast.iter_child_nodes(tree):
            yield from texts(child)


def reasons() -> Iterator[tuple[str, str]]:
    """All texts of the package, each with its file."""
    for room in ROOMS:
        for file in sorted((PACKAGE / room).rglob("*.py")):
            for text in texts(ast.parse(file.read_text(encoding="utf-8"))):
                if " " in text:
                    yield str(file.relative_to(PACKAGE)), text


def wrong_hints(text: str) -> list[str]:
    """What a reader can't copy into ``ModelProfCallback(...)``."""
    wrong = [found.group() for found in UNNAMED.finditer(text)]
    left = text
    for name, value in HINT.findall(text):
        if name not in FIELDS:
            continue
        left = left.replace(f"{name}={value}", "")
        if name in GROUPS:
            keys = re.findall(r'"(\w+)": ', value)
            wrong += [key for key in keys or [value] if GROUP_OF.get(key) != name]
        try:
            if "..." not in value:
                make_config({name: ast.literal_eval(value)})
        except (ConfigError, ValueError, SyntaxError) as error:
            wrong.append(f"{name}={value}: {error}")
    return wrong + [word for word in WORDS if re.search(rf"(?<![\w.`]){word}\b(?!`)", left)]


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("not measured (set flops=True)", True),
        ('not measured (set inspect={"sampling": True})', True),
        ("set smaller skip_first=... and active=...", True),
        ("not measured (set active to its number of steps)", False),
        ("not measured (profile_memory)", False),
        ("every 100 ms, unless sampling is off", False),
        ("unless inspect.workers was off", False),
        ('set inspect={"samplings": True}', False),
        ("set flops=yes", False),
        ("set active=-1", False),
    ],
)
def test_wrong_hints_are_found(text, is_right):
    assert (wrong_hints(text) == []) is is_right


def test_reasons_name_arguments_of_constructor():
    found = list(reasons())
    wrong = {(file, text): hints for file, text in found if (hints := wrong_hints(text))}
    assert wrong == {}
    assert sum(bool(HINT.search(text)) for _, text in found) > 20
