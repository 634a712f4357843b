"""Parts of a report as pieces of HTML, for pages that show some of them: the same as in report.html.

Every text is escaped, and each function gives ``""`` where there is nothing to show. A page needs
``parts.css`` for their looks and ``connectParts`` of ``parts.js`` for what can be pressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_modelprof.errors import printable
from lightning_modelprof.report.definitions import definition
from lightning_modelprof.report.model import Chart, FlameGraph, Report, Slices, Table
from lightning_modelprof.show.html.chart import chart_view
from lightning_modelprof.show.html.flame import flame_view
from lightning_modelprof.show.html.head import (
    absent_lines,
    absent_sentence,
    fact_lines,
    found_views,
    key_figures,
    note_lines,
    other_rules,
    setting_lines,
    verdict_view,
)
from lightning_modelprof.show.html.page import part_macros
from lightning_modelprof.show.html.table import table_view
from lightning_modelprof.show.step_card import card_svg


def verdict_html(report: Report) -> str:
    return str(part_macros().verdict(verdict_view(report.verdict)))


def step_card_html(report: Report) -> str:
    return str(part_macros().step_card(card_svg(report)))


def findings_html(
    report: Report, *, id_prefix: str = "", has_slices: Callable[[Slices], bool] = lambda _: False
) -> str:
    """What was found and, folded, the rules that found nothing or could not say.

    Args:
        id_prefix: put before the ids of elements, so that a page can show two reports.
        has_slices: whether the page has a timeline with such slices, so that a finding links to them.
    """
    macros = part_macros()
    found = macros.findings(found_views(report.findings, has_slices), id_prefix)
    return str(found + macros.other_rules(other_rules(report.findings)))


def figures_html(report: Report) -> str:
    return str(part_macros().figures(key_figures(report.summary)))


def facts_html(report: Report) -> str:
    return str(part_macros().facts(fact_lines(report)))


def settings_html(report: Report) -> str:
    """What the run was set to, folded."""
    return str(part_macros().settings(setting_lines(report)))


def chart_html(chart: Chart, *, id_prefix: str = "") -> str:
    """A chart; ``""`` when it has no point."""
    view = chart_view(chart)
    return "" if view is None else str(part_macros().chart(view, id_prefix))


def flame_html(flame: FlameGraph, *, id_prefix: str = "") -> str:
    """A flame graph; ``""`` when no box has a width."""
    view = flame_view(flame)
    return "" if view is None else str(part_macros().flame(view, id_prefix))


def table_html(
    table: Table, *, is_open: bool = True, id_prefix: str = "", no_slices: Iterable[str] | None = None
) -> str:
    """A table with what searches, groups and copies it; its heading and its reason when it has no rows.

    Args:
        is_open: whether it is seen at once; otherwise it is folded below its heading.
        no_slices: where rows have the names of slices of a timeline that the page has: those that have none.
    """
    macros = part_macros()
    if not table.rows:
        about = definition("table", table.id)
        reason = absent_sentence(table)
        return str(macros.empty_table(table.id, printable(table.title), about, reason, id_prefix))
    return str(macros.table(table_view(table), is_open, id_prefix, no_slices))


def absent_html(tables: Sequence[Table], *, id_prefix: str = "") -> str:
    """Which of the tables have no rows, and why.

    Args:
        tables: any tables; those with rows are not named.
    """
    return str(part_macros().absent(absent_lines(tables), id_prefix))


def notes_html(report: Report, *, id_prefix: str = "") -> str:
    """What was not measured and why; what was left out."""
    return str(part_macros().notes(note_lines(report.notes), id_prefix))
