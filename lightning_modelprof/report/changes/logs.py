"""Changes of ``self.log``."""

from __future__ import annotations

import ast
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.changes.edits import Refused, SourceEdit
from lightning_modelprof.report.changes.offers import offer, offer_arguments, only_statement
from lightning_modelprof.report.model import SAME_RESULTS, CodeChange, Finding
from lightning_modelprof.run.setup import Statement

_MUCH: Final = 0.1
"""Share of the time in logging from which on a line counts."""


def with_logging_by_epoch(finding: Finding, facts: Facts) -> CodeChange | None:  # noqa: ARG001
    """Values that all ranks agree on once per epoch, where one ``self.log`` takes most of the time."""
    setup, calls = facts.setup, facts.logging_calls
    most = [one for one in calls.lines if one.share >= _MUCH * calls.share]
    if len(most) != 1 or most[0].logs is None or "sync_dist" not in most[0].logs.options:
        return None
    if most[0].package or not most[0].function.endswith("training_step"):
        return None
    statement = only_statement(setup, "log", most[0].line)
    callee = "self.log_dict" if statement is not None and ".log_dict(" in statement.text else "self.log"
    positions = ("name", "value", "prog_bar", "logger", "on_step", "on_epoch")
    return offer_arguments(
        statement,
        callee,
        {"on_step": False, "on_epoch": True},
        SAME_RESULTS,
        positions=positions if callee == "self.log" else ("dictionary", *positions[2:]),
        check=lambda source: _keeps_keys(source, statement),
    )


def _keeps_keys(source: SourceEdit, statement: Statement | None) -> None:
    """Refuse where the keys would change, or something in the file may watch the value."""
    for where in () if statement is None else statement.calls:
        call = source.call_at(where)
        given = {one.arg: one.value for one in call.keywords}
        if isinstance(given.get("on_epoch"), ast.Constant) and "on_step" not in {
            name for name, value in given.items() if isinstance(value, ast.Constant) and value.value is False
        }:
            raise Refused("the key would lose its suffix")
        first = call.args[:1] or [given[name] for name in ("name", "dictionary") if name in given]
        keys = [text for part in first for text in _texts(part)]
        others = _texts(source.tree)
        for key in keys:
            if sum(text.startswith(key) for text in others) > sum(text.startswith(key) for text in keys):
                raise Refused("something may watch the value")


def _texts(tree: ast.AST) -> list[str]:
    values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [value for value in values if isinstance(value, str) and value]


def without_item(finding: Finding, facts: Facts) -> CodeChange | None:
    """A logged tensor, where one ``self.log`` reads its value."""
    setup = facts.setup
    if len(finding.locations) != 1:
        return None
    place = finding.locations[0]
    if not place.is_exact or place.line is None:
        return None
    statement = only_statement(setup, "item", place.line)
    if statement is None or statement.file != place.file:
        return None

    def edit(source: SourceEdit) -> None:
        for where in statement.calls:
            source.drop_method(source.call_at(where), "item")

    return offer(statement, edit, "self.log(..., value), without .item()", SAME_RESULTS)
