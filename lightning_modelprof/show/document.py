"""A report as one typed document: the contents of report.json.

All text that people read is here, exactly as pages and terminals show it, next to the raw number that it was
formatted from. So code that draws a document doesn't have to format numbers.
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
"""Version of the document, increased by incompatible changes. run.json has its own."""


class Shown(Record, frozen=True):
    """A displayed text, and the number or the whole name behind it.

    Attributes:
        text: as displayed, in the heading's unit.
        value: durations in nanoseconds, shares as fractions; ``null`` if not measured.
    """

    text: str
    value: Cell


class Row(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One row of a table.

    Attributes:
        cells: by column key.
        depth: indentation level, in trees.
        unit: unit of the cells in columns whose unit is ``by_row``.
        better: whether less or more of the row's figure is better, if the table has that.
    """

    cells: dict[str, Shown]
    depth: int | None = None
    unit: Unit | None = None
    better: Better | None = None


class ColumnHead(Record, frozen=True, kw_only=True):
    """One column.

    Attributes:
        key: stable name, ``snake_case``.
        label: heading as displayed, including the unit unless it's the table's ``time_unit``.
        unit: unit of the values.
        group: heading shared with adjacent columns.
        adds_up: whether cells of any rows (in a tree, of those at its top) can be summed.
        change: ``bar`` for changes, ``bound`` for bounds of changes; both texts have signs.
        is_main: whether a page shows it at first; if no column is main, it shows all.
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
        time_unit: unit of the durations' texts; ``null`` without durations.
        rows: empty if there's an ``absent_reason``.
        row_limit: maximum rows to show at first; ``null`` leaves it to the output.
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
        at: ``file:line`` as editors understand it, such as ``train.py:40``.
        where: such as ``in Net.training_step``.
        file, line, function, module, package, is_library, is_exact: as measured.
        inner: line that takes most of this line's time.
        call: line of the user's code that led to this library code.
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
    """A number that a finding is based on."""

    label: str
    text: str
    value: Cell
    unit: Unit


class FindingDocument(Record, frozen=True, kw_only=True):
    """One result of a rule.

    Attributes:
        kind: stable code, such as ``input_bound``.
        saving: what it could save per step; ``null`` if unknown.
        saving_is: whether that is the saving (``""``) or only a bound of it.
        share: the saving as a share of ``share_of``; ``null`` if unknown.
        share_of: ``step`` for time in each clean step, ``loop`` for time between or around them.
        phases: phases that contain the saving; empty if any may.
        locations: most expensive first.
        evidence: most telling first.
        change: what to write; ``null`` if unknown.
        slices: where a timeline shows it; use the first that exist.
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
        summary: only its sentence.
        accounted_ratio: share of the wall time in named phases; ``null`` if unknown.
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
        title: one line on what ran.
        verdict: ``null`` without a diagnosis.
        facts: the head of the report, in order.
        findings: each rule's result, found ones first.
        step_card: the mean step; ``null`` if no step was measured.
        summary: the report's raw figures.
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
    """Write all texts of a report.

    Raises:
        ValueError: if two tables or two columns have the same key, because one would silently be lost.
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

    Non-finite numbers become ``null``: JSON has no NaN, and one bad division must not cost the report of a
    run that took a day.

    Args:
        report: what to write.

    Returns:
        One JSON object and a newline.

    Raises:
        ValueError: if two tables or two columns have the same key, because one would silently be lost.
        TypeError: if the configuration has something that isn't a plain JSON value.
    """
    document = document_of(report)
    try:
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    except (UnicodeEncodeError, OverflowError):
        # An unpaired surrogate, as in some file names, has no UTF-8 form; its backslash form is valid JSON.
        # msgspec also can't write integers of more than 64 bits.
        plain = _finite(msgspec.to_builtins(document))
        text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    """Replace NaN and infinities with ``null``, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
