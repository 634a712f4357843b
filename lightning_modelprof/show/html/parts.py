"""What of a report is read without a script as pieces of HTML: the same as in report.html.

Every text is escaped, and each function gives ``""`` where there is nothing to show. A page needs
``parts.css`` for their looks and ``connectHead`` of ``document.js`` for what can be pressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_modelprof.report.model import Report, Slices, Table
from lightning_modelprof.show.html.head import (
    absent_lines,
    fact_lines,
    found_views,
    key_figures,
    note_lines,
    other_rules,
    setting_lines,
    verdict_view,
)
from lightning_modelprof.show.html.page import part_macros
from lightning_modelprof.show.step_card import card_svg


def verdict_html(report: Report) -> str:
    return str(part_macros().verdict(verdict_view(report.verdict)))


def step_card_html(report: Report) -> str:
    return str(part_macros().step_card(card_svg(report)))


def findings_html(report: Report, *, has_slices: Callable[[Slices], bool] = lambda _: False) -> str:
    """What was found and, folded, the rules that found nothing or could not say.

    Args:
        has_slices: whether the page has a timeline with such slices, so that a finding links to them.
    """
    macros = part_macros()
    found = macros.findings(found_views(report.findings, has_slices))
    return str(found + macros.other_rules(other_rules(report.findings)))


def figures_html(report: Report) -> str:
    return str(part_macros().figures(key_figures(report.summary)))


def facts_html(report: Report) -> str:
    return str(part_macros().facts(fact_lines(report)))


def settings_html(report: Report) -> str:
    """What the run was set to, folded."""
    return str(part_macros().settings(setting_lines(report)))


def absent_html(tables: Sequence[Table]) -> str:
    """Which of the tables have no rows, and why.

    Args:
        tables: any tables; those with rows are not named.
    """
    return str(part_macros().absent(absent_lines(tables)))


def notes_html(report: Report) -> str:
    """What was not measured and why; what was left out."""
    return str(part_macros().notes(note_lines(report.notes)))
