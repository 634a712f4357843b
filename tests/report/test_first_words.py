"""A finding's advice starts with the change, because short outputs show nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lightning_modelprof.report

REPORT = Path(lightning_modelprof.report.__file__).parent
FILES = sorted((*REPORT.glob("rules/*.py"), *REPORT.glob("advice/*.py")))
MAKERS = {"LoaderAdvice": 0, "Fix": 0, "fix_up_to": 0, "found": 1, "_idiom": 1}
"""Functions that take advice, and the position of that argument."""
ADVISING = (
    *("action", "advice_for", "_action", "_cheaper", "_own_workers_advice", "_line_advice", "_growing_in"),
    *("_shorter_input", "without_loop"),
)
"""Functions that return advice."""
TABLES = (
    *("_ADVICE", "_ACTION", "_EPOCH_ACTION", "_DO", "_HELP", "_USUAL_ADVICE", "_EQUAL_WORK", "_CHEAPER"),
    *("_FOR_LIGHTNING", "_FOR_VALUES", "_FOR_SIZES", "_FOR_COPIES", "_FOR_PRINTS", "_FOR_CALLS"),
    *("_FOR_OTHERS", "_FOR_EITHER", "IN_GENERAL", "FEWER_ITEMS"),
)
"""Names of constants that hold advice."""
MOST_WORDS = 12
NO_CHANGE = {
    *("a", "an", "the", "that", "this", "it", "its", "they", "there", "line", "lines", "each", "some", "few"),
    *("more", "most", "such", "in", "of", "at", "on", "by", "to", "if", "where", "when", "as", "what", "no"),
    *("decompositions", "batches", "samples", "traces", "workers", "joining", "making", "pickling"),
    *("looking", "filtering", "reading"),
}


def heads(node):
    """Constant texts that an expression may start with."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return heads(node.values[0]) if node.values else []
    if isinstance(node, ast.IfExp):
        return [*heads(node.body), *heads(node.orelse)]
    if isinstance(node, ast.BoolOp):
        return [text for one in node.values for text in heads(one)]
    if isinstance(node, ast.BinOp):
        return heads(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return heads(node.func.value)
    return []


def texts(node):
    """Texts that an expression may evaluate to, with one word per placeholder."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(one.value if isinstance(one, ast.Constant) else "X" for one in node.values)]
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    if isinstance(node, ast.BoolOp):
        return [text for one in node.values for text in texts(one)]
    if isinstance(node, ast.BinOp):
        return texts(node.left)
    if isinstance(node, ast.Dict):
        return [text for one in node.values for text in texts(one)]
    return []


def advice_in(tree, parts_of=heads):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in MAKERS and len(node.args) > MAKERS[name]:
                yield from parts_of(node.args[MAKERS[name]])
        if isinstance(node, ast.FunctionDef) and node.name in ADVISING:
            for one in ast.walk(node):
                if isinstance(one, ast.Return) and one.value is not None:
                    yield from parts_of(one.value)
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") in TABLES and node.value:
            yield from parts_of(node.value)


def first_sentence(text):
    """The first sentence without parentheses, which hold code to paste and the current value."""
    while (shorter := re.sub(r"\([^()]*\)", "", text)) != text:
        text = shorter
    return re.split(r"(?<=[.;])\s", text.strip())[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_first_sentence_has_at_most_twelve_words(file):
    advice = map(first_sentence, advice_in(ast.parse(file.read_text()), texts))
    assert [text for text in advice if len(text.split()) > MOST_WORDS] == []


def is_change(text):
    word = text.split(" ")[0].strip(",:;").lower()
    return word not in NO_CHANGE and not word[:1].isdigit()


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_advice_starts_with_change(file):
    wrong = [text for text in advice_in(ast.parse(file.read_text())) if text and not is_change(text)]
    assert not wrong


def test_reason_is_not_taken_for_change():
    tree = ast.parse("self.found('s', f'Pickling batches takes {x}.' if y else 'Set a=1.', z)")
    assert [is_change(text) for text in advice_in(tree)] == [False, True]
