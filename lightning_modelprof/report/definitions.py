"""The definitions of all figures, collected from tables, charts and rules.

Pages show them as headings' titles, and docs/report.md lists them by section.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Final, NamedTuple

from lightning_modelprof.report.charts.all_charts import CHARTS, FLAMES, TRACE_CHARTS
from lightning_modelprof.report.compare.row_changes import CHANGES
from lightning_modelprof.report.compare.stages import STAGES
from lightning_modelprof.report.compare.tables import (
    FINDING_CHANGES,
    PHASE_CHANGES,
    SETTINGS,
    SPEED,
)
from lightning_modelprof.report.compare.windows import STEP_CHANGES
from lightning_modelprof.report.model import Column
from lightning_modelprof.report.rules.all_rules import RULES
from lightning_modelprof.report.rules.rule import FLOOR_NS, Rule
from lightning_modelprof.report.specs import COMMON, WORDS, TableSpec
from lightning_modelprof.report.tables.run.all_tables import KINDS
from lightning_modelprof.report.verdict import LEAST_SHARE, VERDICTS
from lightning_modelprof.run.phases import PHASES

_COMPARISONS: Final = (
    SPEED,
    PHASE_CHANGES,
    SETTINGS,
    FINDING_CHANGES,
    STEP_CHANGES,
    CHANGES,
    STAGES,
)
_KEY_FIGURES: Final = {
    "batch_cost": "row:perf_summary:batch_cost",
    "ips": "row:perf_summary:ips",
    "reader_ratio": "row:perf_summary:reader_ratio",
    "flop_s": "column:flops:flops_per_s",
    "mfu": "column:flops:share_of_peak",
}
"""Map each headline figure of a report to the key of its definition."""


class Term(NamedTuple):
    """One definition; ``key`` is its ID, such as ``column:kernels:occupancy``."""

    key: str
    label: str
    text: str


class Section(NamedTuple):
    """Definitions that belong together.

    Attributes:
        key: ID, such as ``table:kernels``.
        heading: heading in the reference.
        text: text in addition to the terms, in Markdown.
        terms: in reading order.
        is_table: whether ``text`` has the terms in its table.
    """

    key: str
    heading: str
    text: str
    terms: tuple[Term, ...] = ()
    is_table: bool = False

    @property
    def markdown(self) -> str:
        """Everything as Markdown; terms with the same definition share an item."""
        labels: dict[str, dict[str, None]] = {}
        for term in () if self.is_table else self.terms:
            labels.setdefault(term.text, {})[f"**{term.label}**"] = None
        items = "\n".join(f"- {', '.join(names)}: {text}" for text, names in labels.items())
        return "\n\n".join(filter(None, (self.text, items)))


def key_of(label: str) -> str:
    """Turn a label into a part of a key: ``Blocks per SM`` → ``blocks_per_sm``, ``Ratio(%)`` → ``ratio``."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"\s*\(%\)", "", label.lower())).strip("_") or "percent"


def sections() -> Iterator[Section]:
    """Yield every definition, in reading order."""
    words = tuple(Term(f"word:{key_of(word)}", word, text) for word, text in WORDS.items())
    yield Section("words", "Words", "", words)
    phases = tuple(Term(f"phase:{key_of(one.label)}", one.label, one.definition) for one in PHASES)
    rows = [(f"`{one.key}`", one.label, one.definition) for one in PHASES]
    yield Section(
        "phases", "Phases of a step", _table(("key", "label", "definition"), rows), phases, is_table=True
    )
    common = tuple(Term(f"column:*:{key_of(label)}", label, text) for label, text in COMMON.items())
    yield Section(
        "columns", "Common columns", "A table's own definition of a column takes precedence.", common
    )
    yield _verdicts()
    yield _rules()
    yield from map(_of_table, (*KINDS.values(), *_COMPARISONS))
    charts = tuple(Term(f"chart:{one.id}", one.title, one.help) for one in (*CHARTS, *TRACE_CHARTS))
    yield Section("charts", "Charts (report.html)", "", charts)
    yield Section(
        "flames",
        "Flame graphs (report.html)",
        "",
        tuple(Term(f"flame:{one.id}", one.title, one.help) for one in FLAMES),
    )


def _verdicts() -> Section:
    names = {kind: kind.replace("_bound", "-bound").replace("_", " ").upper() for kind in VERDICTS}
    shares = {kind: f"{100 * LEAST_SHARE[kind]:g}%" if kind in LEAST_SHARE else "" for kind in VERDICTS}
    rows = [(names[kind], shares[kind], text) for kind, text in VERDICTS.items()]
    terms = (
        Term(
            f"verdict:{kind}",
            names[kind],
            f"these findings take at least {shares[kind]} of the time: {text}" if shares[kind] else text,
        )
        for kind, text in VERDICTS.items()
    )
    return Section(
        "verdicts",
        "Verdict",
        _table(("verdict", "from", "findings or condition"), rows),
        tuple(terms),
        is_table=True,
    )


def _rules() -> Section:
    head = ("rule", "criterion", "warning, critical", "where", "other thresholds")
    rows = [(f"`{rule.kind}`", rule.help, rule.levels, rule.where, _other_thresholds(rule)) for rule in RULES]
    terms = (
        Term(
            f"rule:{rule.kind}",
            "Criterion",
            "\n\n".join(
                (
                    found,
                    *(
                        f"**{name.capitalize()}**: {text}"
                        for name, text in zip(head[2:], rest, strict=True)
                        if text
                    ),
                )
            ),
        )
        for rule, (_, found, *rest) in zip(RULES, rows, strict=True)
    )
    return Section("findings", "Findings", _table(head, rows), tuple(terms), is_table=True)


def _other_thresholds(rule: Rule) -> str:
    own = {name: value for name, value in rule.limits.items() if name not in ("warning", "critical")}
    return ", ".join(
        f"`{name}={value:g}`" for name, value in own.items() if (name, value) != ("floor_ns", FLOOR_NS)
    )


def _table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *rows))


def _of_table(kind: TableSpec) -> Section:
    columns = (
        Term(f"column:{kind.id}:{column.key}", label_of(column), column.help)
        for column in kind.columns
        if column.help
    )
    rows = (Term(f"row:{kind.id}:{key_of(label)}", label, text) for label, text in kind.rows.items())
    return Section(f"table:{kind.id}", kind.heading or kind.title, kind.help, (*columns, *rows))


def label_of(column: Column) -> str:
    """Return a column's label with its group, without its unit."""
    label = column.label.removesuffix(" (%)")
    return f"{column.group} {label}" if column.group else label


def definition(kind: str, name: str) -> str:
    """Return what something on a page means, in plain text; ``""`` if undefined.

    Args:
        kind: ``table``, ``chart``, ``flame``, ``rule`` or ``verdict``, which are named by ID, or ``figure``,
            by label.
        name: name within that kind; a table's may have a window number, or be a table of changes.
    """
    return _definitions().get(f"{kind}:{_name(kind, name)}", "")


def column_definition(table: str, key: str) -> str:
    """Return what a table's column means, in plain text; ``""`` if undefined."""
    return _definitions().get(f"column:{_name('table', table)}:{key}", "")


def row_definition(table: str, label: str) -> str:
    """Return what a table's row means, in plain text; ``""`` for rows that aren't our named figures.

    Ignores words before the figure's name, such as a rank, and its unit: ``ips (steps/s)``.
    """
    known, name = _definitions(), _name("table", table)
    words = re.sub(r" \([^)]*\)$", "", label).split(" ")
    keys = (f"row:{name}:{key_of(' '.join(words[start:]))}" for start in range(len(words)))
    return next((known[key] for key in keys if key in known), "")


def _name(kind: str, name: str) -> str:
    if kind == "table" and name.endswith("_changes"):
        return "changes"
    if kind == "table":
        return re.sub(r"_\d+$", "", name)
    return key_of(name) if kind == "figure" else name


@cache
def _definitions() -> Mapping[str, str]:
    known: dict[str, str] = {}
    for section in sections():
        known[section.key] = section.text
        known |= {term.key: term.text for term in section.terms}
    for kind in (*KINDS.values(), *_COMPARISONS):
        for column in kind.columns:
            if not column.help and column.label in COMMON:
                known[f"column:{kind.id}:{column.key}"] = known[f"column:*:{key_of(column.label)}"]
        if kind.has_phases:
            names = (key_of(phase.label) for phase in PHASES)
            known |= {f"row:{kind.id}:{name}": known[f"phase:{name}"] for name in names}
    known |= {f"figure:{name}": known[key] for name, key in _KEY_FIGURES.items()}
    return {key: _plain(text) for key, text in known.items()}


_MARKUP: Final = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*|\*(\S[^*]*)\*|\[([^\]]+)\]\([^)]+\)", re.DOTALL)


def _plain(markdown: str) -> str:
    return _MARKUP.sub(lambda match: match[match.lastindex or 0], markdown)
