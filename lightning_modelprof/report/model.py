"""The report's records: tables, findings, charts, notes and a summary, all with raw numbers.

Nothing here is rounded, cut, escaped or given a unit suffix; ``show`` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from importlib import import_module
from typing import Any, Final, Literal

from lightning_modelprof.errors import did_you_mean, quoted
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions
from lightning_modelprof.report.summary import Summary
from lightning_modelprof.report.summary import Verdict as Verdict  # noqa: PLC0414  # re-exported for readers
from lightning_modelprof.units import Cell as Cell  # noqa: PLC0414  # re-exported for outputs
from lightning_modelprof.units import TimeUnit as TimeUnit  # noqa: PLC0414
from lightning_modelprof.units import Unit as Unit  # noqa: PLC0414


class Column(Record, frozen=True):
    """One column; columns of the same ``group`` form one packed column in Paddle's layout.

    With ``group="CPU"`` and labels Total, Avg, Max, Min, Ratio(%) a text table shows one column headed
    ``CPU Total / Avg / Max / Min / Ratio(%)`` with cells like ``138.99 / 12.64 / 17.91 / 10.65 / 100.00``.

    Attributes:
        key: stable name in files, ``snake_case``.
        label: heading.
        unit: unit of its cells.
        group: heading shared with its neighbours; ``None`` without one.
        adds_up: whether the cells of any rows (in a tree, of top-level rows) may be summed, because they
            count nothing twice. Not so for means, extremes, rates, numbers of different things, and times
            that include other rows' time. Merged rows show sums of these columns.
        change: ``bar`` for changes (after minus before), ``bound`` for bounds of changes; both show their
            signs.
        is_main: whether a page shows it initially; if no column sets this, it shows all.
    """

    key: str
    label: str
    unit: Unit = Unit.TEXT
    group: str | None = None
    adds_up: bool = False
    change: Literal["", "bar", "bound"] = ""
    is_main: bool = False


Better = Literal["", "less", "more"]
"""Whether a smaller or a larger figure is better; ``""`` if neither."""


class Table(Record, frozen=True, kw_only=True):
    """A complete, sorted, unformatted table; outputs that show fewer rows say so.

    Attributes:
        id: stable key in files, ``snake_case``.
        title: heading.
        columns: the columns; the first is the row's name.
        rows: one tuple of cells per row, one cell per column.
        depths: indentation level of each row's name; empty if all are 0.
        row_units: each row's unit in ``BY_ROW`` columns; empty without such columns.
        row_better: whether less or more of each row's figure is better; empty if no row has a preference.
        notes: sentences under the table, or under its absent reason: definitions, caveats, why a column is
            empty.
        absent_reason: why there are no rows; ``None`` if there are.
        time_unit: unit to show durations in; ``None`` lets the output choose.
        row_limit: most rows to show people, in total and below any one row; ``None`` leaves it to the output.
            Machine-readable files have all.
        is_detail: whether a page folds it initially.

    Raises:
        ValueError: If rows, depths or units don't fit the columns.
    """

    id: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    depths: tuple[int, ...] = ()
    row_units: tuple[Unit, ...] = ()
    row_better: tuple[Better, ...] = ()
    notes: tuple[str, ...] = ()
    absent_reason: str | None = None
    time_unit: TimeUnit | None = None
    row_limit: int | None = None
    is_detail: bool = False

    def __post_init__(self) -> None:
        keys = ", ".join(column.key for column in self.columns)
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.id!r}: expected {len(self.columns)} cells per row ({keys}),"
                    f" got {len(row)}: {row!r}"
                )
        by_row = {"depths": self.depths, "row_units": self.row_units, "row_better": self.row_better}
        for label, extra in by_row.items():
            if extra and len(extra) != len(self.rows):
                raise ValueError(f"table {self.id!r}: expected {len(self.rows)} {label}, got {len(extra)}")
        if self.rows and not self.row_units and any(one.unit is Unit.BY_ROW for one in self.columns):
            raise ValueError(f"table {self.id!r}: expected {len(self.rows)} row_units, got none")
        if not self.rows and self.absent_reason is None:
            raise ValueError(f"table {self.id!r}: a table without rows needs an absent_reason")

    def to_dataframe(self) -> Any:
        """Return the table as a pandas DataFrame of raw values.

        Durations are in nanoseconds, shares are fractions, and missing values are ``None``. Columns are named
        by their keys; trees also have a column ``depth``.

        Raises:
            MissingExtraError: If pandas isn't installed.
        """
        return _shown("text", "table_dataframe")(self)

    def to_csv(self) -> str:
        """Return the raw values as CSV (RFC 4180) with a header; missing values are empty."""
        return str(_shown("text", "table_csv")(self))

    def to_markdown(self) -> str:
        """Return the formatted table as GitHub Markdown."""
        return str(_shown("tensorboard.scalars", "markdown_table")(self, max_rows=len(self.rows) + 1))


def _shown(file: str, function: str) -> Callable[..., Any]:
    """Import a ``show`` function by name, since ``show`` imports ``report`` and not the reverse."""
    face: Callable[..., Any] = getattr(import_module(f"lightning_modelprof.show.{file}"), function)
    return face


def apply_options(table: Table, options: TableOptions) -> Table:
    """Return the table with the requested time unit and row limit."""
    is_asked_for = table.row_limit is None or options.row_limit != DEFAULT_OPTIONS.row_limit
    limit = options.row_limit if is_asked_for else table.row_limit
    return replace(table, time_unit=options.time_unit, row_limit=limit)


class Status(Enum):
    """A rule's outcome; every rule always has one."""

    FOUND = "found"
    CLEAN = "clean"
    NOT_EVALUATED = "not_evaluated"


class Severity(Enum):
    """How much a finding matters, by its share of the step time."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Evidence(Record, frozen=True, kw_only=True):
    """One number behind a finding."""

    label: str
    value: Cell
    unit: Unit


class Slices(Record, frozen=True, kw_only=True):
    """Timeline slices with exactly this name, of this kind, or both.

    Attributes:
        name: event name; ``""`` for any.
        kind: such as ``idle: data loading``; ``""`` for any.
    """

    name: str = ""
    kind: str = ""


SAME_RESULTS: Final = "same results"
CHANGES_NUMERICS: Final = "may change results"


class CodeChange(Record, frozen=True, kw_only=True):
    """The code to write to fix a finding.

    Attributes:
        text: the line to write, with ``...`` for unchanged parts, or the key of the YAML file.
        label: ``SAME_RESULTS`` if training computes the same numbers with it, else ``CHANGES_NUMERICS``.
        diff: for ``git apply``; ``""`` if the statement is ambiguous or the file has changed.
        file, line: what the diff changes; ``None`` without a diff.
        is_yaml: whether ``text`` goes into the YAML file of LightningCLI or Hydra.
    """

    text: str
    label: str
    diff: str = ""
    file: str | None = None
    line: int | None = None
    is_yaml: bool = False

    @property
    def changed_lines(self) -> tuple[str, ...]:
        """Lines that the diff removes or adds, with their signs."""
        lines = self.diff.split("\n")[2:]
        return tuple(line.rstrip("\r") for line in lines if line.startswith(("-", "+")))

    @property
    def shown_lines(self) -> tuple[tuple[str, str], ...]:
        """Changed lines as (sign, text) pairs, without their common indentation."""
        lines = [(line[0], line[1:].expandtabs(4)) for line in self.changed_lines]
        inward = min((len(text) - len(text.lstrip()) for _, text in lines if text.strip()), default=0)
        return tuple((sign, text[inward:]) for sign, text in lines)


SavingIs = Literal["", "at least", "up to"]
"""What a saving is a bound of; ``""`` if it's exact."""


class Finding(Record, frozen=True, kw_only=True):
    """One result of one rule.

    Attributes:
        kind: stable code, such as ``input_bound``.
        status: found, clean or not evaluated.
        severity: ``None`` unless found.
        title: a few words.
        summary: one or two sentences: the problem, or why it wasn't evaluated.
        action: what to change, concretely; ``""`` unless found.
        saving_ns_per_step: possible saving per step, summed over all phases; a mean over the loop's steps if
            ``share_of`` is ``loop``; ``None`` if unknown.
        saving_is: ``""`` if that is the saving, or ``at least`` or ``up to`` if it's only a bound.
        share_of: ``step`` if the time is in each clean step, ``loop`` if it's between or around them.
        whole_ns: step time, or the loop's time per step, that includes the saving; ``None`` as above.
        phases: keys of the phases that the saving is in; empty if it may be in any.
        locations: most expensive first.
        evidence: the numbers behind it.
        slices: where to see it in a timeline; the first ones that exist are used.
        wants: what the action sets: pairs of argument and value, or of module and ``False`` for
            ``requires_grad_``.
        change: code to write; ``None`` if unknown.
        verdict_ns: the part of its time that counts for the verdict; ``None`` for the saving.
        passes: what changed it after its rule, by the names in ``report/rules/passes.py``.
    """

    kind: str
    status: Status
    title: str
    summary: str
    severity: Severity | None = None
    action: str = ""
    saving_ns_per_step: float | None = None
    saving_is: SavingIs = ""
    share_of: Literal["step", "loop"] = "step"
    whole_ns: float | None = None
    phases: tuple[str, ...] = ()
    locations: tuple[Place, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    slices: tuple[Slices, ...] = ()
    wants: tuple[tuple[str, Any], ...] = ()
    change: CodeChange | None = None
    verdict_ns: float | None = None
    passes: tuple[str, ...] = ()

    @property
    def share(self) -> float | None:
        """The saving as a share of ``whole_ns``; ``None`` without one."""
        is_known = self.saving_ns_per_step is not None and self.whole_ns
        return min(1.0, (self.saving_ns_per_step or 0.0) / (self.whole_ns or 1.0)) if is_known else None


WARNING: Final = "Warning"
"""Label of facts that call the figures into question."""

NOT_DONE: Final = "Not done"
"""Label of facts about requested measurements that didn't happen."""

OTHER_TRACES: Final = "Other traces"
"""Label of facts with the verdicts of older traces."""


class Series(Record, frozen=True, kw_only=True):
    """One curve or layer of a chart: a value per x, ``None`` where not measured."""

    key: str
    label: str
    values: tuple[float | None, ...]


class Chart(Record, frozen=True, kw_only=True):
    """A chart; outputs that can't draw leave it out.

    Attributes:
        id: stable key, ``snake_case``.
        title: heading.
        kind: ``stacked`` (layers that add up, such as phases per step), ``line``, or ``histogram`` (x are the
            left edges of bins of equal width).
        x_label: what x counts.
        x: the points.
        unit: unit of the values.
        series: one or more.
        notes: as under a table.
        level, level_label: value and name of a line across the chart, such as a peak.

    Raises:
        ValueError: If a series doesn't have one value per point.
    """

    id: str
    title: str
    kind: str
    x_label: str
    x: tuple[float, ...]
    unit: Unit
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    level: float | None = None
    level_label: str = ""

    def __post_init__(self) -> None:
        for one in self.series:
            if len(one.values) != len(self.x):
                raise ValueError(
                    f"chart {self.id!r}: expected {len(self.x)} values of {one.key!r}, got {len(one.values)}"
                )


class FlameFrame(Record, frozen=True, kw_only=True):
    """One box of a flame graph.

    Attributes:
        name: name of the function, module or phase.
        detail: such as ``train.py:12``; ``""`` without one.
        parent: position of the box below it in ``FlameGraph.frames``; ``None`` at the bottom.
        depth: 0 at the bottom.
        begin: left edge: sum of everything to its left, in the graph's unit.
        total: width: its own share plus that of all boxes on it.
        own: its own share.
        is_users: whether it is the user's code; ``None`` if not applicable.
        place: file and line of the function, for an editor; ``""`` without one.
    """

    name: str
    detail: str
    parent: int | None
    depth: int
    begin: float
    total: float
    own: float
    is_users: bool | None = None
    place: str = ""


class FlameGraph(Record, frozen=True, kw_only=True):
    """Stacked boxes, each as wide as its share of the time.

    Attributes:
        id: stable key, ``snake_case``.
        title: heading.
        unit: unit of begin, total and own.
        frames: each after the box below it; neighbours from left to right.
        notes: as under a table.
    """

    id: str
    title: str
    unit: Unit
    frames: tuple[FlameFrame, ...]
    notes: tuple[str, ...] = ()


class StepPart(Record, frozen=True, kw_only=True):
    """One part of a step-card lane.

    Attributes:
        key: key of the phase or device activity; it selects the colour.
        label: text for readers.
        ns: length in the mean step.
        is_idle: whether the device waits.
        location: what it waits for; ``None`` if unknown or not waiting.
    """

    key: str
    label: str
    ns: float
    is_idle: bool = False
    location: Place | None = None


class StepCard(Record, frozen=True, kw_only=True):
    """The mean step as a picture to scale.

    Attributes:
        step: such as ``mean of 87 clean steps``.
        host: what the training thread does, in phase order; sums to the step.
        device: what the device does in parallel, work first: shares of recorded steps, scaled to the length
            of ``host``; empty if no device was recorded.
        better: ``host`` without the findings' savings, at best; empty if they save nothing.
        figures: headline figures of the device: label, value, unit.
    """

    step: str
    host: tuple[StepPart, ...]
    device: tuple[StepPart, ...] = ()
    better: tuple[StepPart, ...] = ()
    figures: tuple[tuple[str, float, Unit], ...] = ()

    @property
    def wall_ns(self) -> float:
        """Step length."""
        return sum(part.ns for part in self.host)

    @property
    def better_ns(self) -> float:
        """Step length without the findings' possible savings, each counted once."""
        return sum(part.ns for part in self.better) if self.better else self.wall_ns

    @property
    def saved_ns(self) -> float:
        """Possible saving of all findings together."""
        return self.wall_ns - self.better_ns


class Report(Record, frozen=True, kw_only=True):
    """A report: verdict, findings, tables and charts, as every output shows them.

    Attributes:
        title: One line that says what ran.
        facts: Label and value pairs for the head of the report, in order.
        tables: Tables in reading order.
        notes: What wasn't measured and why, and what was left out.
        verdict: The first line; ``None`` if nothing was diagnosed.
        findings: Each rule's result, found ones first, by the time they could save.
        step_card: The mean step as a picture; ``None`` if no step was measured.
        charts: Charts, for outputs that can draw.
        flames: Flame graphs, for outputs that can draw.
        summary: The figures of the report as records, such as ``summary.run`` and ``summary.benchmark``.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    summary: Summary = Summary()
    verdict: Verdict | None = None
    findings: tuple[Finding, ...] = ()
    step_card: StepCard | None = None
    charts: tuple[Chart, ...] = ()
    flames: tuple[FlameGraph, ...] = ()

    def __repr__(self) -> str:
        found = sum(one.status is Status.FOUND for one in self.findings)
        verdict = "no verdict" if self.verdict is None else self.verdict.kind
        return f"<Report: {self.title}; {verdict}; findings {found}, tables {len(self.tables)}>"

    def _repr_html_(self) -> str:
        """Return a card for notebooks."""
        return str(_shown("notebook", "report_card")(self))

    def step_card_svg(self) -> str:
        """Return the picture of the mean step, to scale, as SVG.

        Raises:
            ValueError: If no step was measured.
        """
        if self.step_card is None or self.step_card.wall_ns <= 0:
            raise ValueError("no step was measured, so there's no step card")
        return str(_shown("step_card", "step_card_svg")(self.step_card))

    def table(self, table_id: str) -> Table:
        """Return the table with this id, such as ``phases``.

        Args:
            table_id: The table's id; docs/report.md lists them.

        Raises:
            KeyError: If the report has no such table.
        """
        for table in self.tables:
            if table.id == table_id:
                return table
        known = [table.id for table in self.tables]
        raise KeyError(
            f"no table {quoted(table_id)}.{did_you_mean(table_id, known)} This report has {', '.join(known)}."
        )
