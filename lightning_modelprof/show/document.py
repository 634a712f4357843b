"""A report as one typed document: what report.json holds.

Everything that a person reads is here as text, exactly as the page and the terminal show it, beside the raw
number that it was written from. So whoever draws a document needs no rule for writing numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from lightning_modelprof.errors import printable
from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Record
from lightning_modelprof.report.definitions import column_definition, definition
from lightning_modelprof.report.model import (
    Better,
    Cell,
    Chart,
    CodeChange,
    Finding,
    FlameGraph,
    Report,
    SavingIs,
    Severity,
    Slices,
    Status,
    StepCard,
    Table,
    TimeUnit,
    Unit,
    Verdict,
)
from lightning_modelprof.report.summary import Summary
from lightning_modelprof.show.findings import saving_text, verdict_line
from lightning_modelprof.show.layout import all_rows
from lightning_modelprof.units import format_amount, percent

SCHEMA_VERSION: Final[Literal[2]] = 2
"""Version of the document; raised when a reader of the old one would go wrong. run.json has its own."""


class Shown(Record, frozen=True):
    """What a reader sees, and the number or the whole name behind it.

    Attributes:
        text: as shown, in the unit that the heading says.
        value: durations in nanoseconds, shares as fractions; ``null`` where nothing was measured.
    """

    text: str
    value: Cell


class Row(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One row of a table.

    Attributes:
        cells: by column key.
        depth: indentation level, in trees.
        unit: of the cells in columns whose unit is ``by_row``.
        better: whether less or more of its figure is better, where the table says so.
    """

    cells: dict[str, Shown]
    depth: int | None = None
    unit: Unit | None = None
    better: Better | None = None


class ColumnHead(Record, frozen=True, kw_only=True):
    """One column.

    Attributes:
        key: stable name, ``snake_case``.
        label: heading as shown, which says the unit unless it's the table's ``time_unit``.
        unit: of the values.
        group: heading that it shares with its neighbours.
        adds_up: whether cells of any rows (in a tree, of those at its top) may be summed.
        change: ``bar`` for changes, ``bound`` for bounds of changes; both texts have signs.
        is_main: whether a page shows it at first; where no column says so, it shows all.
        definition: what it means.
    """

    key: str
    label: str
    unit: Unit
    group: str | None
    adds_up: bool
    change: Literal["", "bar", "bound"]
    is_main: bool
    definition: str


class TableDocument(Record, frozen=True, kw_only=True):
    """One table, with all its rows.

    Attributes:
        time_unit: what the texts of durations count; ``null`` without durations.
        rows: empty if ``absent_reason`` says why there are none.
        row_limit: most rows that a person is to be shown at first; ``null`` leaves it to who draws them.
        is_detail: whether a page folds it at first.
    """

    id: str
    title: str
    definition: str
    time_unit: TimeUnit | None
    columns: tuple[ColumnHead, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    absent_reason: str | None
    row_limit: int | None
    is_detail: bool


class Location(Record, frozen=True, kw_only=True):
    """A place in source code.

    Attributes:
        at: such as ``train.py:40``, as editors understand it.
        where: such as ``in Net.training_step``.
        file, line, function, module, package, is_library, is_exact: as measured.
        inner: the line at which most of this line's time is spent.
        call: the user's own line that led to this code of a library's.
    """

    at: str
    where: str
    file: str | None
    line: Count | None
    function: str
    module: str
    package: str
    is_library: bool
    is_exact: bool
    inner: Location | None
    call: Location | None


class EvidenceDocument(Record, frozen=True, kw_only=True):
    """One number that a finding rests on."""

    label: str
    text: str
    value: Cell
    unit: Unit


class FindingDocument(Record, frozen=True, kw_only=True):
    """What one rule says of one thing.

    Attributes:
        kind: stable code, such as ``input_bound``.
        saving: what it could save per step; ``null`` if that isn't known.
        saving_is: whether that is the saving (``""``) or only a bound of it.
        share: the saving as a share of what it is in; ``null`` as above.
        share_of: ``step`` where the time is in each clean step, ``loop`` where it is between or around them.
        phases: that the saving is in; empty if it may be in any.
        locations: most expensive first.
        evidence: the most telling first.
        change: what to write; ``null`` where that isn't known.
        slices: where it is seen in a timeline; the first that there are.
        passes: what changed it after its rule.
        definition: what the rule checks.
    """

    kind: str
    status: Status
    severity: Severity | None
    title: str
    summary: str
    action: str
    saving: Shown | None
    saving_is: SavingIs
    share: Shown | None
    share_of: Literal["step", "loop"]
    phases: tuple[str, ...]
    locations: tuple[Location, ...]
    evidence: tuple[EvidenceDocument, ...]
    change: CodeChange | None
    slices: tuple[Slices, ...]
    passes: tuple[str, ...]
    definition: str


class VerdictDocument(Record, frozen=True, kw_only=True):
    """What limits the speed.

    Attributes:
        kind: stable code, such as ``input_bound``.
        text: the whole line, as the terminal prints it.
        summary: its sentence alone.
        accounted_ratio: share of the wall time that is in named phases; ``null`` if that isn't known.
    """

    kind: str
    text: str
    summary: str
    accounted_ratio: float | None
    definition: str


class Fact(Record, frozen=True):
    """One line of the head."""

    label: str
    text: str


class Document(Record, frozen=True, kw_only=True):
    """A whole report.

    Attributes:
        title: one line that says what ran.
        verdict: ``null`` if nothing was diagnosed.
        facts: the head of the report, in order.
        findings: each rule's result, found ones first.
        step_card: the mean step; ``null`` if no step was measured.
        summary: the figures of the report, raw.
        tables: by id, in reading order.
        notes: what wasn't measured and why, and what was left out.
    """

    schema_version: Literal[2]
    title: str
    verdict: VerdictDocument | None
    facts: tuple[Fact, ...]
    findings: tuple[FindingDocument, ...]
    step_card: StepCard | None
    summary: Summary
    tables: dict[str, TableDocument]
    charts: tuple[Chart, ...]
    flames: tuple[FlameGraph, ...]
    notes: tuple[str, ...]


def document_of(report: Report) -> Document:
    """Write every text of a report.

    Raises:
        ValueError: when two tables or two columns have the same key: one of them would silently be lost.
    """
    _check_unique("table ids", [table.id for table in report.tables])
    return Document(
        schema_version=SCHEMA_VERSION,
        title=printable(report.title),
        verdict=None if report.verdict is None else _verdict(report.verdict),
        facts=tuple(Fact(printable(label), printable(text)) for label, text in report.facts),
        findings=tuple(map(_finding, report.findings)),
        step_card=report.step_card,
        summary=report.summary,
        tables={table.id: _table(table) for table in report.tables},
        charts=report.charts,
        flames=report.flames,
        notes=_notes(report.notes),
    )


def _notes(notes: Sequence[str]) -> tuple[str, ...]:
    return tuple(text for note in notes if (text := printable(" ".join(note.split()))))


def _verdict(verdict: Verdict) -> VerdictDocument:
    return VerdictDocument(
        kind=verdict.kind,
        text=verdict_line(verdict),
        summary=printable(verdict.summary),
        accounted_ratio=verdict.accounted_ratio,
        definition=definition("verdict", verdict.kind),
    )


def _finding(finding: Finding) -> FindingDocument:
    saving, share = finding.saving_ns_per_step, finding.share
    return FindingDocument(
        kind=finding.kind,
        status=finding.status,
        severity=finding.severity,
        title=printable(finding.title),
        summary=printable(finding.summary),
        action=printable(finding.action),
        saving=None if saving is None else Shown(saving_text(finding), saving),
        saving_is=finding.saving_is,
        share=None if share is None else Shown(percent(share), share),
        share_of=finding.share_of,
        phases=finding.phases,
        locations=tuple(map(_location, finding.locations)),
        evidence=tuple(
            EvidenceDocument(
                label=printable(one.label),
                text=format_amount(one.value, one.unit),
                value=one.value,
                unit=one.unit,
            )
            for one in finding.evidence
        ),
        change=finding.change,
        slices=finding.slices,
        passes=finding.passes,
        definition=definition("rule", finding.kind),
    )


def _location(place: Place) -> Location:
    return Location(
        at=place.at,
        where=place.where,
        file=place.file,
        line=place.line,
        function=place.function,
        module=place.module,
        package=place.package,
        is_library=place.is_library,
        is_exact=place.is_exact,
        inner=None if place.inner is None else _location(place.inner),
        call=None if place.call is None else _location(place.call),
    )


def _table(table: Table) -> TableDocument:
    keys = [column.key for column in table.columns]
    _check_unique(f"column keys of table {table.id!r}", keys)
    layout = all_rows(table)
    strips = (layout.names, *(strip for block in layout.blocks for strip in block.strips))
    texts = zip(*(strip.cells for strip in strips), strict=True)
    no_row = [None] * len(table.rows)
    return TableDocument(
        id=table.id,
        title=printable(table.title),
        definition=definition("table", table.id),
        time_unit=layout.time_unit,
        columns=tuple(
            ColumnHead(
                key=column.key,
                label=strip.label,
                unit=column.unit,
                group=None if column.group is None else printable(column.group),
                adds_up=column.adds_up,
                change=column.change,
                is_main=column.is_main,
                definition=column_definition(table.id, column.key),
            )
            for column, strip in zip(table.columns, strips, strict=True)
        ),
        rows=tuple(
            Row(
                cells=dict(zip(keys, map(Shown, row_texts, row), strict=True)),
                depth=depth,
                unit=unit,
                better=better,
            )
            for row_texts, row, depth, unit, better in zip(
                texts,
                table.rows,
                table.depths or no_row,
                table.row_units or no_row,
                table.row_better or no_row,
                strict=True,
            )
        ),
        notes=_notes(table.notes),
        absent_reason=None if table.absent_reason is None else printable(table.absent_reason),
        row_limit=table.row_limit,
        is_detail=table.is_detail,
    )


def _check_unique(what: str, keys: list[str]) -> None:
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"expected unique {what}, got {', '.join(map(repr, repeated))} more than once")


def render_json(report: Report) -> bytes:
    """Write the report's document as indented UTF-8 JSON, the same bytes for the same report.

    A number that is not finite is written as ``null``: JSON has no NaN, and one bad division must not
    cost the whole report of a run that took a day.

    Args:
        report: what to write.

    Returns:
        One JSON object and a newline.

    Raises:
        ValueError: when two tables or two columns have the same key: one of them would silently be lost.
        TypeError: when the configuration holds something that is not a plain JSON value.
    """
    document = document_of(report)
    try:
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    except (UnicodeEncodeError, OverflowError):
        # Half a surrogate pair, as in some file names, has no UTF-8; its backslash form is valid JSON.
        # Nor does msgspec write whole numbers of more than 64 bits.
        plain = _finite(msgspec.to_builtins(document))
        text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    """The same value with ``null`` in place of NaN and infinities, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
