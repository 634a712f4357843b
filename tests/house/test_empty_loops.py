"""Tests that every test asserts something outside loops, because an empty loop asserts nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
KEEP_ELEMENTS = {"enumerate", "list", "permutations", "reversed", "set", "sorted", "tuple"}
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.Tuple)
COMPREHENSIONS = (ast.DictComp, ast.GeneratorExp, ast.ListComp, ast.SetComp)


def toothless(source: str) -> list[str]:
    """Names of tests whose assertions all pass if their loops are empty."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    tests = [one for one in functions if one.name.startswith("test_")]
    helpers = {
        one.name
        for one in functions
        if one not in tests and any(isinstance(node, ast.Assert) for node in ast.walk(one))
    }
    filled = names_of_displays(tree.body)
    found = []
    for test in tests:
        sites = sites_of(test, filled, helpers)
        if sites and not any(sites):  # by what the file alone knows; few get here
            known = filled | names_of_displays(list(ast.walk(test)))
            if not any(sites_of(test, known, helpers)):
                found.append(test.name)
    return found


def sites_of(test: ast.FunctionDef, known: set[str], helpers: set[str]) -> list[bool]:
    """One entry for each assertion of a test: whether it asserts something in any case."""
    return [site for node in test.body for site in assertions(node, known, helpers)]


def names_of_displays(nodes: list[ast.AST]) -> set[str]:
    """Names bound to a non-empty display such as ``[1, 2]``."""
    return {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and is_filled(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def is_filled(value: ast.AST, known: set[str]) -> bool:
    """Whether an expression certainly has at least one element."""
    if isinstance(value, DISPLAYS):
        return bool(value.keys if isinstance(value, ast.Dict) else value.elts)
    if isinstance(value, ast.Name):
        return value.id in known
    if isinstance(value, COMPREHENSIONS):
        return all(not one.ifs and is_filled(one.iter, known) for one in value.generators)
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Attribute):
        return value.func.attr in {"items", "keys", "values"} and is_filled(value.func.value, known)
    name = value.func.id if isinstance(value.func, ast.Name) else ""
    if name == "range":
        return all(isinstance(one, ast.Constant) for one in value.args)
    if name == "product":
        return all(is_filled(one, known) for one in value.args)
    if name == "zip":  # with strict=True one argument is enough
        return any(is_filled(one, known) for one in value.args)
    return name in KEEP_ELEMENTS and any(is_filled(one, known) for one in value.args[:1])


def assertions(node: ast.AST, known: set[str], helpers: set[str], *, looped: bool = False) -> list[bool]:
    """One entry per assertion in a node: whether it always asserts something."""
    if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
        return []
    if isinstance(node, ast.Assert):
        return [not looped and not holds_for_nothing(node.test, known)]
    found = []
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in helpers or name.startswith(("assert_", "check")) or name in {"raises", "warns"}:
            found.append(not looped)
    may_be_empty = isinstance(node, ast.While) or (
        isinstance(node, ast.For) and not is_filled(node.iter, known)
    )
    for child in ast.iter_child_nodes(node):
        found += assertions(child, known, helpers, looped=looped or may_be_empty)
    return found


def holds_for_nothing(test: ast.AST, known: set[str]) -> bool:
    """Whether a condition is ``all(...)`` or ``not any(...)`` over a possibly empty iterable."""
    wanted = "all"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, "any"
    return (
        isinstance(test, ast.Call)
        and isinstance(test.func, ast.Name)
        and test.func.id == wanted
        and isinstance(test.args[0], COMPREHENSIONS)
        and not is_filled(test.args[0], known)
    )


def test_every_test_asserts_something_outside_loops():
    """If this fails, assert that the loop isn't empty, preferably with an exact count."""
    files = sorted(TESTS.rglob("test_*.py"))
    assert len(files) > 100
    found = [
        f"{file.relative_to(TESTS)}: {name}"
        for file in files
        for name in toothless(file.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "body",
    [
        "for one in found(): assert one",
        "for one in found(): check(one)",
        "for one in [x for x in (1, 2) if x > 5]: assert one",
        "while waiting(): assert one()",
        "assert all(one for one in found())",
        "assert not any(one for one in found())",
        "for one in found():\n        with pytest.raises(ValueError): one()",
    ],
)
def test_vacuous_tests_are_found(body):
    assert toothless(f"def test_it():\n    {body}\n") == ["test_it"]


@pytest.mark.parametrize(
    "body",
    [
        "values = found()\n    assert values\n    for one in values: assert one",
        "for one in (1, 2): assert one",
        "for one, other in zip(found(), [1, 2], strict=True): assert one == other",
        "for one in NAMES: assert one",
        "for number, one in enumerate(sorted(NAMES)): assert one",
        "assert all(one for one in NAMES)",
        "assert [one for one in found()] == []",
        "with pytest.raises(ValueError): found()",
        "found()",
    ],
)
def test_asserting_tests_are_not_found(body):
    assert toothless(f"NAMES = ['a']\ndef test_it():\n    {body}\n") == []
