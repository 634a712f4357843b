"""Tests that constructors take few arguments. More means that a class does too much."""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_modelprof

PACKAGE = Path(lightning_modelprof.__file__).parent

MOST = 6

PUBLIC = {
    "ModelProfCallback": "the arguments are the configuration",
}
"""Exceptions: classes that users construct."""

RECORDS = {"Record", "Struct", "NamedTuple", "TypedDict"}
"""Base classes of plain data, which may have any number of fields."""


def is_record(node):
    """Whether a class is plain data: a record or a frozen dataclass."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    decorators = [ast.unparse(one) for one in node.decorator_list]
    return bool(bases & RECORDS) or any("dataclass" in one and "frozen=True" in one for one in decorators)


def is_dataclass(node):
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list)


def num_arguments(node):
    """Number of constructor arguments, without ``self`` and variadic ones; 0 for plain data."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            arguments = method.args
            return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
    if is_record(node) or not is_dataclass(node):
        return 0
    return sum(isinstance(field, ast.AnnAssign) and field.value is None for field in node.body)


def constructors(source):
    """Number of constructor arguments per class."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {node.name: num_arguments(node) for node in classes}


def test_constructor_arguments_are_counted():
    source = """
class Six:
    def __init__(self, a, b, /, c, d=1, *more, e, f=2, **rest): ...

@dataclass(slots=True)
class Three:
    a: int
    b: int
    c: int
    d: int = 0

@dataclass(frozen=True)
class Data:
    a: int

class Row(Record, frozen=True):
    a: int
"""
    assert constructors(source) == {"Six": 6, "Three": 3, "Data": 0, "Row": 0}


FOUND = {
    (str(path.relative_to(PACKAGE)), name): number
    for path in sorted(PACKAGE.rglob("*.py"))
    for name, number in constructors(path.read_text(encoding="utf-8")).items()
}


def test_constructors_take_at_most_six_arguments():
    assert len(FOUND) > 500
    assert {key: number for key, number in FOUND.items() if number > MOST and key[1] not in PUBLIC} == {}


def test_exceptions_exist():
    """Remove names of deleted classes from the list."""
    assert {*PUBLIC} <= {name for _, name in FOUND}
