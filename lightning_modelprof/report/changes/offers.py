"""What every change is made of: the statement at fault, its edit, and the line to write without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_modelprof.report.changes.diffs import diff_of
from lightning_modelprof.report.changes.edits import SourceEdit
from lightning_modelprof.report.model import CodeChange
from lightning_modelprof.run.setup import Statement, TrainingSetup


def statements_about(setup: TrainingSetup, about: str) -> list[Statement]:
    return [one for one in setup.statements if one.about == about]


def only_statement(setup: TrainingSetup, about: str, line: int | None = None) -> Statement | None:
    """The one statement of a kind, at a line if one is given; ``None`` without any, or with several."""
    found = [
        one for one in statements_about(setup, about) if line is None or one.line <= line <= one.end_line
    ]
    return found[0] if len(found) == 1 else None


def offer(
    statement: Statement | None,
    edit: Callable[[SourceEdit], None],
    text: str,
    label: str,
) -> CodeChange:
    """A change of a statement, without a diff where there is no such statement or it can't be edited."""
    diff = "" if statement is None else diff_of(statement, edit)
    if statement is None or not diff:
        return CodeChange(text=text, label=label)
    return CodeChange(text=text, label=label, diff=diff, file=statement.file, line=statement.line)


def offer_arguments(
    statement: Statement | None,
    callee: str,
    wanted: Mapping[str, Any],
    label: str,
    *,
    positions: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    replaced: Sequence[str] = (),
    check: Callable[[SourceEdit], None] = lambda _: None,
) -> CodeChange:
    """A change of arguments in all calls of a statement; arguments as of :meth:`SourceEdit.set_arguments`.

    Args:
        statement: that is at fault; ``None`` where it isn't known.
        callee: what is called, for the line to write.
        check: raises Refused where the source speaks against it.
    """

    def edit(source: SourceEdit) -> None:
        check(source)
        for where in () if statement is None else statement.calls:
            source.set_arguments(
                source.call_at(where), wanted, positions=positions, defaults=defaults, replaced=replaced
            )

    return offer(statement, edit, line_to_write(callee, wanted), label)


def line_to_write(callee: str, wanted: Mapping[str, Any]) -> str:
    """Such as ``DataLoader(..., num_workers=2)``."""
    return f"{callee}(..., {', '.join(f'{name}={value!r}' for name, value in wanted.items())})"


def yaml_key(path: str, value: Any, label: str) -> CodeChange:
    """A key in the YAML file of LightningCLI or Hydra, such as ``trainer.precision: bf16-mixed``."""
    written = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    return CodeChange(text=f"{path}: {written}", label=label, is_yaml=True)
