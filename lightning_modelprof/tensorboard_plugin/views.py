"""The dashboard's views: which parts of the reports each one shows.

A new view is one entry in ``VIEWS``; charts and tables name the views that they're in. A part is a function
from a selection to HTML, empty if there is nothing to show; charts, flame graphs and tables are drawn in the
browser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from typing import Any, Final

from lightning_modelprof.errors import printable
from lightning_modelprof.record import Record
from lightning_modelprof.report.charts.all_charts import CHARTS, FLAMES, TRACE_CHARTS
from lightning_modelprof.report.model import WARNING, Report, Table
from lightning_modelprof.report.tables.run.all_tables import KINDS, kind_of
from lightning_modelprof.show.html.document import page_document, table_data
from lightning_modelprof.show.html.parts import (
    absent_html,
    facts_html,
    figures_html,
    findings_html,
    notes_html,
    settings_html,
    step_card_html,
    verdict_html,
)
from lightning_modelprof.show.tensorboard.profile_blob import STEPS, TIMELINE
from lightning_modelprof.tensorboard_plugin.selection import Selection

Part = Callable[[Selection], str]


_NO_WINDOW: Final = (
    "There's no torch.profiler window to show. Record one with ModelProfCallback(active=10), or add a trace:"
    " lightning-modelprof tensorboard TRACE --logdir LOGDIR."
)


class View(Record, frozen=True, kw_only=True):
    """One page of the dashboard.

    Attributes:
        key: its name in links.
        empty: what to do if a profile has nothing for it.
        above: parts above its charts, flame graphs and tables.
        below: parts below them.
        columns: kind of packed columns that the browser draws above the parts; ``""`` if none.
        has_all_tables: whether it has every table, folded.
    """

    key: str
    title: str
    empty: str
    above: tuple[Part, ...] = ()
    below: tuple[Part, ...] = ()
    columns: str = ""
    has_all_tables: bool = False


def render(view: View, selection: Selection) -> list[dict[str, Any]]:
    """Return the document of a view; none if there is nothing to show."""
    above, below = ("".join(part(selection) for part in parts) for parts in (view.above, view.below))
    tables = _every_table(selection) if view.has_all_tables else _placed_tables(selection, view.key)
    charts = dict.fromkeys(one.id for one in (*CHARTS, *TRACE_CHARTS) if view.key in one.views)
    document = page_document(
        [chart for one in charts if (chart := selection.chart(one)) is not None],
        [flame for one in FLAMES if view.key in one.views and (flame := selection.flame(one.id)) is not None],
        _filled(tables, is_folded=view.has_all_tables, has_timeline=selection.has_timeline),
    )
    document |= {"above": above, "below": absent_html(tables) + below}
    return [document] if any(document.values()) else []


def render_comparison(report: Report) -> dict[str, Any]:
    """Return the document of a comparison: its head and every table."""
    title = escape(printable(report.title))
    warnings = [
        f'<p class="problem" role="status">{escape(printable(text))}</p>'
        for label, text in report.facts
        if label == WARNING
    ]
    rest = replace(report, facts=tuple(fact for fact in report.facts if fact[0] != WARNING))
    return {
        **page_document(tables=_filled(report.tables)),
        "above": "".join((f"<h2>{title}</h2>", *warnings, facts_html(rest))),
        "below": absent_html(report.tables) + notes_html(report),
    }


def _head(selection: Selection) -> str:
    report = selection.main_report
    above, below = (verdict_html, step_card_html, figures_html), (facts_html, settings_html)
    found = findings_html(report, has_slices=selection.has_slices)
    return "".join((*(part(report) for part in above), found, *(part(report) for part in below)))


def _figures(selection: Selection) -> str:
    figures = "" if selection.run_report is None else figures_html(selection.run_report)
    return figures and f"<section><h2>Whole run</h2>{figures}</section>"


def _notes(selection: Selection) -> str:
    return notes_html(selection.main_report)


def _needs_window(selection: Selection) -> str:
    return "" if selection.window is not None else f'<p class="empty">{escape(_NO_WINDOW)}</p>'


def _other_ranks(selection: Selection) -> str:
    """Explain how to add the windows of the other ranks, which each rank keeps while training runs."""
    reports = (selection.window_report, selection.run_report)
    commands = (report.summary.all_ranks_command for report in reports if report is not None)
    command = next(filter(None, commands), None)
    if command is None:
        return ""
    return (
        '<p class="other-ranks">These windows are from the first rank. Each rank saves its own in the run\'s'
        " directory. After training, this command adds all of them to"
        f" TensorBoard:</p><pre><code>{escape(printable(command))}</code></pre>"
    )


def _placed_tables(selection: Selection, view: str) -> list[Table]:
    kinds = sorted(
        (kind for kind in KINDS.values() if view in kind.views), key=lambda kind: kind.place_in_views
    )
    return selection.tables(kind.id for kind in kinds)


def _every_table(selection: Selection) -> list[Table]:
    """Return all tables of the run and the window; if both have one, the window's."""
    ids = [
        table.id
        for report in (selection.run_report, selection.window_report)
        if report is not None
        for table in report.tables
    ]
    return selection.tables(dict.fromkeys(ids))


def _filled(
    tables: Sequence[Table], *, is_folded: bool = False, has_timeline: bool = False
) -> list[dict[str, Any]]:
    return [
        table_data(table, is_folded=is_folded, no_slices=_no_slices(table) if has_timeline else None)
        for table in tables
        if table.rows
    ]


def _no_slices(table: Table) -> tuple[str, ...] | None:
    """Return the rows without slices, for tables whose rows are named like slices; ``None`` for others."""
    kind = kind_of(table.id)
    return tuple(kind.rows) if kind is not None and kind.names_slices else None


VIEWS: Final = (
    View(
        key="overview",
        title="Overview",
        empty="This profile has no report.",
        above=(_head,),
        below=(_notes,),
    ),
    View(
        key="steps",
        title="Steps",
        empty=(
            "There are no steps to show. Measure a run with ModelProfCallback(), or add a trace recorded with"
            " profiler.step()."
        ),
        above=(_figures,),
        columns=STEPS,
    ),
    View(
        key="operators",
        title="Operators",
        empty=_NO_WINDOW,
        above=(_needs_window,),
    ),
    View(
        key="kernels",
        title="Kernels",
        empty=_NO_WINDOW,
        above=(_needs_window,),
    ),
    View(
        key="modules",
        title="Modules",
        empty=(
            "No module times were recorded. To record them, use ModelProfCallback(flops=True); a trace"
            " doesn't contain them."
        ),
    ),
    View(
        key="workers",
        title="Workers",
        empty=(
            "No DataLoader worker data: the run's DataLoader had num_workers=0, or an option turned it off. A"
            " trace alone doesn't contain it."
        ),
    ),
    View(
        key="memory",
        title="Memory",
        empty=(
            "ModelProfCallback records memory in every run. For memory by operator and by phase, use"
            " ModelProfCallback(profile_memory=True)."
        ),
    ),
    View(
        key="trace",
        title="Trace",
        empty=_NO_WINDOW,
        columns=TIMELINE,
    ),
    View(
        key="distributed",
        title="Distributed",
        empty="This run has only one rank.",
        above=(_other_ranks,),
    ),
    View(key="tables", title="All tables", empty="This run has no tables.", has_all_tables=True),
)
"""In menu order; Compare, which has two selections, is in ``report/compare/build_compare.py``."""
