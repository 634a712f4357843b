"""The parts of a report that are readable without a script, as HTML, the same as in report.html.

Every text is escaped, and each function returns ``""`` if there is nothing to show. A page needs
``parts.css`` for the styles and ``connectHead`` of ``document.js`` for the controls.
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
    """Write what the checks found and, folded, the other checks.

    Args:
        has_slices: whether the page's timeline has the slices, so that a finding links to them.
    """
    macros = part_macros()
    found = macros.findings(found_views(report.findings, has_slices))
    return str(found + macros.other_rules(other_rules(report.findings)))


def figures_html(report: Report) -> str:
    return str(part_macros().figures(key_figures(report.summary)))


def facts_html(report: Report) -> str:
    return str(part_macros().facts(fact_lines(report)))


def settings_html(report: Report) -> str:
    """Write the run's settings, folded."""
    return str(part_macros().settings(setting_lines(report)))


def absent_html(tables: Sequence[Table]) -> str:
    """List the tables without rows, and why they have none.

    Args:
        tables: any tables; those with rows are skipped.
    """
    return str(part_macros().absent(absent_lines(tables)))


def notes_html(report: Report) -> str:
    """List what wasn't measured or was left out, and why."""
    return str(part_macros().notes(note_lines(report.notes)))
