"""The views of the dashboard: which parts of the reports each one shows.

A new view is one entry in ``VIEWS``; what has its place in a view says so itself. A part is a function from a
selection to HTML, empty where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Final

from lightning_modelprof.errors import printable
from lightning_modelprof.record import Record
from lightning_modelprof.report.charts.all_charts import CHARTS, FLAMES, TRACE_CHARTS
from lightning_modelprof.report.model import WARNING, Report, Table
from lightning_modelprof.report.tables.run.all_tables import KINDS, kind_of
from lightning_modelprof.show.html.parts import (
    absent_html,
    chart_html,
    facts_html,
    figures_html,
    findings_html,
    flame_html,
    notes_html,
    settings_html,
    step_card_html,
    table_html,
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
        empty: what to do when a profile has nothing for it.
        above: what stands above the charts, flame graphs and tables that have their place in it.
        below: what stands below them.
        columns: kind of the packed columns that the browser draws on top of the parts; ``""`` if none.
    """

    key: str
    title: str
    empty: str
    above: tuple[Part, ...] = ()
    below: tuple[Part, ...] = ()
    columns: str = ""


def render(view: View, selection: Selection) -> str:
    """The parts of a view as HTML; ``""`` when there is nothing to show."""
    above, below = ("".join(part(selection) for part in parts) for parts in (view.above, view.below))
    return above + _placed(selection, view.key) + below


def render_comparison(report: Report) -> str:
    """A comparison as HTML: what it says and every table."""
    title = escape(printable(report.title))
    tables = _tables_html(list(report.tables))
    warnings = [
        f'<p class="problem" role="status">{escape(printable(text))}</p>'
        for label, text in report.facts
        if label == WARNING
    ]
    rest = replace(report, facts=tuple(fact for fact in report.facts if fact[0] != WARNING))
    parts = (f"<h2>{title}</h2>", *warnings, facts_html(rest), tables, notes_html(report))
    return f'<section class="comparison">{"".join(parts)}</section>'


def _head(selection: Selection) -> str:
    """Verdict, key figures, findings and what ran."""
    report = selection.main_report
    above, below = (verdict_html, step_card_html, figures_html), (facts_html, settings_html)
    found = findings_html(report, has_slices=selection.has_slices)
    return "".join((*(part(report) for part in above), found, *(part(report) for part in below)))


def _figures(selection: Selection) -> str:
    """The key figures of the run, beside those of a range of its steps."""
    figures = "" if selection.run_report is None else figures_html(selection.run_report)
    return figures and f"<section><h2>Whole run</h2>{figures}</section>"


def _notes(selection: Selection) -> str:
    return notes_html(selection.main_report)


def _needs_window(selection: Selection) -> str:
    """What to do where a view shows little without a profiler window."""
    return "" if selection.window is not None else f'<p class="empty">{escape(_NO_WINDOW)}</p>'


def _other_ranks(selection: Selection) -> str:
    """How the windows of the other ranks come here, each of which keeps its own while training runs."""
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


def _placed(selection: Selection, view: str) -> str:
    """The charts, flame graphs and tables with their place in the view; tables without rows are named."""
    ids = dict.fromkeys(one.id for one in (*CHARTS, *TRACE_CHARTS) if view in one.views)
    charts = [chart for one in ids if (chart := selection.chart(one)) is not None]
    drawn = "".join(chart_html(chart) for chart in charts)
    flames = (selection.flame(one.id) for one in FLAMES if view in one.views)
    kinds = sorted((kind for kind in KINDS.values() if view in kind.views), key=lambda kind: kind.place)
    return "".join(
        (
            f'<section class="charts">{drawn}</section>' if drawn else "",
            *(flame_html(flame) for flame in flames if flame is not None),
            _tables_html(selection.tables(kind.id for kind in kinds), has_timeline=selection.has_timeline),
        )
    )


def _every_table(selection: Selection) -> str:
    """All tables of the run and of the window: those of the window where both have one."""
    ids = [
        table.id
        for report in (selection.run_report, selection.window_report)
        if report is not None
        for table in report.tables
    ]
    tables = selection.tables(dict.fromkeys(ids))
    return _tables_html(tables, is_open=False, has_timeline=selection.has_timeline)


def _tables_html(tables: list[Table], *, is_open: bool = True, has_timeline: bool = False) -> str:
    shown = "".join(
        table_html(table, is_open=is_open, no_slices=_no_slices(table) if has_timeline else None)
        for table in tables
        if table.rows
    )
    return shown + absent_html([table for table in tables if not table.rows])


def _no_slices(table: Table) -> tuple[str, ...] | None:
    """The rows without slices of a table whose rows are named as slices; ``None`` for any other table."""
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
            "No DataLoader worker data: the run's DataLoader had num_workers=0, or ModelProfCallback had"
            ' inspect={"workers": False}. A trace alone doesn\'t contain it.'
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
    View(key="tables", title="All tables", empty="This run has no tables.", above=(_every_table,)),
)
"""In the order of the menu; Compare, which has two selections, is in ``report/compare/build_compare.py``."""
