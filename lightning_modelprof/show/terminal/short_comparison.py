"""A comparison in at most twenty lines: the decision, what changed, and findings new and gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lightning_modelprof.errors import printable
from lightning_modelprof.report.model import WARNING, Report, Table
from lightning_modelprof.show.layout import shorten
from lightning_modelprof.show.terminal.screen import Screen, wrap
from lightning_modelprof.show.terminal.short import MAX_LINES, shorten_end
from lightning_modelprof.units import duration_unit, signed, three_digits

_PHASES: Final = "comparison_phases"
_FINDINGS: Final = "comparison_findings"
_INDENT: Final = "  "
_MOST_LINES: Final = 2
"""Maximum lines per fact or list."""

_MOST_HEAD: Final = 12
_LEAST_PHASES: Final = 2
"""Lines that are always left for phases."""

_FIRST: Final = ("Order", "Why", "Change", "Before", "After")
"""Facts shown after the warnings; the others, one per run, only if there is room."""

_TONES: Final = {"less": "blue", "more": "yellow"}
"""As in pages: blue is better."""


def is_comparison(report: Report) -> bool:
    return any(table.id == _PHASES for table in report.tables)


def comparison_lines(report: Report, screen: Screen | None, last_words: Sequence[str] = ()) -> list[str]:
    """Build the short comparison.

    Args:
        report: a comparison of runs.
        screen: the terminal, if any.
        last_words: where the rest is.
    """
    screen = screen or Screen.plain()
    width = screen.prose_width
    tables = {table.id: _rows(table) for table in report.tables}
    first, *rest = wrap(printable(report.title), width)
    word, colon, text = first.partition(":")
    title = [screen.paint(word, "bold") + colon + text, *rest]
    facts = [(label, _cut(f"{label}: {printable(value)}", width)) for label, value in report.facts]
    first_facts = [line for wanted in _FIRST for label, lines in facts if label == wanted for line in lines]
    tail = [line for text in _finding_texts(tables[_FINDINGS]) for line in _cut(text, width)]
    tail += last_words
    most = min(_MOST_HEAD, MAX_LINES - len(tail) - _LEAST_PHASES)
    warnings = [lines for label, lines in facts if label == WARNING]
    head = [*title, *_fit(warnings, most - len(title) - len(first_facts)), *first_facts][:most]
    room = MAX_LINES - len(head) - len(tail)
    phases = [*_phase_lines(tables[_PHASES], screen, room)]
    for label, lines in facts:
        if label not in (WARNING, *_FIRST) and len(head) + len(lines) + len(phases) + len(tail) <= MAX_LINES:
            head += lines
    return [*head, *phases, *tail]


def _rows(table: Table) -> list[dict[str, Any]]:
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def _cut(text: str, width: int) -> list[str]:
    lines = wrap(text, width)
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[: _MOST_LINES - 1], shorten(shorten_end(lines[_MOST_LINES - 1], width), width)]


def _fit(warnings: Sequence[list[str]], room: int) -> list[str]:
    """Fit the warnings into ``room`` lines, or show at least their number."""
    shown = list(warnings)
    while sum(map(len, shown)) + (len(shown) < len(warnings)) > max(room, 1):
        shown.pop()
    lines = [line for one in shown for line in one]
    if hidden := len(warnings) - len(shown):
        more = "more " if shown else ""
        lines.append(f"{hidden} {more}warning{'s' if hidden > 1 else ''} in all tables")
    return lines


def _phase_lines(rows: Sequence[Mapping[str, Any]], screen: Screen, room: int) -> Iterator[str]:
    """Yield phases that changed by more than their error; the first row is the step, which the title has."""
    changed = [row for row in rows[1:] if row["direction"] in _TONES]
    if not changed:
        is_known = any(row["direction"] is not None for row in rows)
        yield "No phase changed by more than its error." if is_known else "Too few steps to compare phases."
        return
    yield "Phases that changed, per step (95% CI of the difference):"
    shown = changed if len(changed) < room else changed[: max(room - 2, 0)]
    scale, unit = duration_unit(max(max(row["before"], row["after"]) for row in changed))
    cells = [_phase_cells(row, scale, unit) for row in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row, texts in zip(shown, cells, strict=True):
        name, *numbers = texts
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        line = f"{_INDENT}{name:{widths[0]}}  {padded[0]}  "
        yield line + screen.paint(padded[1], _TONES[row["direction"]]) + f"  {padded[2]}"
    if more := len(changed) - len(shown):
        yield f"{_INDENT}{more} more in all tables"


def _phase_cells(row: Mapping[str, Any], scale: float, unit: str) -> tuple[str, ...]:
    before, after, low, high, change = (
        three_digits(row[key] / scale) for key in ("before", "after", "low", "high", "change")
    )
    return (
        printable(row["phase"]),
        f"{before} → {after} {unit}",
        f"{signed(change)} {unit}",
        f"({signed(low)} to {signed(high)})",
    )


def _finding_texts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    titles: dict[str, list[str]] = {"removed": [], "new": [], "unchanged": []}
    for row in rows:
        titles[row["state"]].append(printable(row["finding"]))
    for label, state in (("Findings gone", "removed"), ("New findings", "new")):
        if titles[state]:
            yield f"{label}: {'; '.join(titles[state])}"
    if not titles["removed"] and not titles["new"]:
        kept = len(titles["unchanged"])
        yield f"No finding is new or gone{f' ({kept} unchanged)' if kept else ''}."
