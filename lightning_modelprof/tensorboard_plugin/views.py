"""The views of the dashboard: which parts of the reports each one shows.

A new view is one entry in ``VIEWS``; what has its place in a view says so itself. A part is a function from a
selection to HTML, empty where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import Final

from lightning_modelprof.errors import one_line
from lightning_modelprof.record import Record
from lightning_modelprof.report.charts.all_charts import CHARTS, FLAMES, TRACE_CHARTS
from lightning_modelprof.report.definitions import Section
from lightning_modelprof.report.model import Report, Table
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
    "There is no profiler window. Record one with ModelProfCallback(active=10), or bring a trace here:"
    " lightning-modelprof tensorboard TRACE --logdir LOGDIR."
)


class View(Record, frozen=True, kw_only=True):
    """One page of the dashboard.

    Attributes:
        key: its name in links.
        title: its heading.
        empty: what to do when a profile has nothing for it.
        above: what stands above the charts, flame graphs and tables that have their place in it.
        below: what stands below them.
        columns: kind of the packed columns that the browser draws on top of the parts; ``""`` if none.
        help: what the browser draws and computes, in Markdown.
    """

    key: str
    title: str
    empty: str
    above: tuple[Part, ...] = ()
    below: tuple[Part, ...] = ()
    columns: str = ""
    help: str = ""


def render(view: View, selection: Selection) -> str:
    """The parts of a view as HTML; ``""`` when there is nothing to show."""
    above, below = ("".join(part(selection) for part in parts) for parts in (view.above, view.below))
    return above + _placed(selection, view.key) + below


def render_comparison(report: Report) -> str:
    """A comparison as HTML: what it says, its flame graphs and every table."""
    title = escape(one_line(report.title))
    flames = "".join(flame_html(flame) for flame in report.flames)
    speed, rest = (_tables_html(list(tables)) for tables in (report.tables[:1], report.tables[1:]))
    parts = (f"<h2>{title}</h2>", facts_html(report), speed, flames, rest, notes_html(report))
    return f'<section class="comparison">{"".join(parts)}</section>'


def _head(selection: Selection) -> str:
    """Verdict, key figures, findings and what ran."""
    report = selection.main_report
    above, below = (verdict_html, step_card_html, figures_html), (facts_html, settings_html)
    found = findings_html(report, has_slices=selection.has_slices)
    return "".join((*(part(report) for part in above), found, *(part(report) for part in below)))


def _notes(selection: Selection) -> str:
    return notes_html(selection.main_report)


def _needs_window(selection: Selection) -> str:
    """What to do where a view shows little without a profiler window."""
    return "" if selection.window is not None else f'<p class="empty">{escape(_NO_WINDOW)}</p>'


def _other_ranks(selection: Selection) -> str:
    """How the windows of the other ranks come here, each of which keeps its own while training runs."""
    reports = (selection.window_report, selection.run_report)
    commands = (report.sections.get("all_ranks_command") for report in reports if report is not None)
    command = next((one for one in commands if isinstance(one, str) and one), None)
    if command is None:
        return ""
    return (
        '<p class="other-ranks">The windows here are of the first rank. Each rank keeps its own in the run\'s'
        " folder; when training is over, this command brings all of them into TensorBoard, side by side:</p>"
        f"<pre><code>{escape(one_line(command))}</code></pre>"
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
        empty="This profile holds no report.",
        above=(_head,),
        below=(_notes,),
    ),
    View(
        key="steps",
        title="Steps",
        empty=(
            "The steps of a whole run are here when ModelProfCallback has measured it. Traces hold only the"
            " few steps that were recorded: see Overview and Trace."
        ),
        columns=STEPS,
        help=(
            "**Phases of each step** stacks the self time of each phase. Layers and colours are those of"
            " report.html. Where there are more steps than pixels, one bar is the mean of equally many"
            " neighbouring steps (the last may have fewer), and the thin line is the slowest step of each;"
            " the caption says how many. Pale, shaded steps are left out of the benchmark, for the reason"
            " that the Perf Summary counts them under; the readout says it. A few very high points go"
            " beyond the upper edge, and the caption says how many and the largest.\n\n"
            "**Throughput** is samples over wall time of the steps of a point, steps over wall time where"
            ' the samples of any step are unknown. With "clean steps only", both charts and the slowest'
            " steps are of clean steps, and a bar without any stays empty. All that is said of clean steps"
            " is without the phase Profiler, as in the Perf Summary. Charts and slowest steps of all"
            " steps, clean or not, are with it: their layers add up to the wall time.\n\n"
            "**Figures of a range** are those of the Perf Summary over the clean steps of the range:"
            " mean, p50 and p99 of batch_cost, steps/s, samples/s and Reader Ratio. Over the whole run"
            " they are the same numbers. A dash where a clean step's samples, or its wait, are not known.\n\n"
            "**Times of clean steps** are bars as wide as the narrower of Freedman-Diaconis and Sturges"
            " says, at most 60. Where the slowest step took more than twice p99, they end at p99 and the"
            " number beyond is said.\n\n"
            "**What makes slow steps slow**: the mean of each phase over the clean steps that took longer"
            " than p90 of the range, less its mean over the other clean steps. The differences sum to that"
            " of whole steps unless a phase was not measured; *share of it* is a phase's part.\n\n"
            "**Slowest steps**: the 20 slowest of the range, clean or not; of equal ones the earlier"
            " first. *Times the median*: over the median of the range's clean steps. Phases with the most"
            " time in these steps stand first.\n\n"
            "Of a run of more than 4,096 steps those are shown that were kept, 2,048 to 4,096, spread"
            " evenly (Long runs), and a note says so."
        ),
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
            "Modules are timed in one early step of a fit, by ModelProfCallback(flops=True). A"
            " trace alone has no such times."
        ),
    ),
    View(
        key="workers",
        title="Workers",
        empty=(
            "What the workers of a DataLoader do is measured by ModelProfCallback, unless workers=False. A"
            " trace alone has no such times."
        ),
    ),
    View(
        key="memory",
        title="Memory",
        empty=(
            "Memory is followed by ModelProfCallback in every run; memory by operator and by phase needs"
            " profile_memory=True."
        ),
    ),
    View(
        key="trace",
        title="Trace",
        empty=_NO_WINDOW,
        columns=TIMELINE,
        help=(
            "Every event of the trace is one slice with its exact times. Below the critical path come each"
            " device's streams, then the host threads: that of the steps, and the others by the time in"
            " which anything is open on them; of several ranks all devices come first, then the rest rank"
            " by rank. A slice inside another is drawn below it; one that begins in"
            " another and ends after it goes one row deeper. A step lasts until the device work launched"
            " in it has ended. The view opens at the steps; *Show all* has what comes before and after"
            " them. Click a category above the lanes to hide or show it; Python functions are hidden at"
            " first. Several ranks share one time axis, on which the first step that all have begins at"
            " one time, because their clocks differ.\n\n"
            "**Idle** slices are the time in which no stream of the device works. They stand in the lane"
            " of the stream that works longest, communication aside, and add up to Idle Summary's *In the"
            " steps*. *Data loading*: nothing was queued, and the thread that launched the next work"
            " waited for its next batch. *Host*: nothing was queued, and that thread did something else."
            " *Kernel gap*: work was queued, and the gap is shorter than 30 µs. *Other stream*: work was"
            " queued for longer, and what ran before it ran on another stream; *communication* if either"
            " is communication. *Unknown*: anything else; the last three are Idle Summary's *Other*."
            " **Meanwhile** is what was innermost on that thread at most of nine moments of the slice."
            " **Busy** of a range is what is not idle from the device's first slice to its last.\n\n"
            "**Critical path** is the longest chain of work in the steps in which each piece depends on the"
            " one before it (see the table of that name): a slice is what the step waited for then, and"
            " leads to the operator or kernel that it is part of. *Unexplained* is time that no dependency"
            " explains.\n\n"
            "**DataLoader workers** have a lane each, below all others, in windows of ModelProfCallback."
            " A slice is a batch under its number in the epoch, with its samples and its collating in it;"
            " between two the worker waits. It tells the CPU time of the worker's main thread, and which"
            " step used it: an arrow leads to that step's fetch, from end to end, and **ready to end** is"
            " the time between them. Batches that were ready before the trace began are not there; what"
            " reaches out of the trace is cut. There is no arrow where a step fetches more than once; of"
            " several loaders it is at the batch that was ready last. From loaders without a length"
            " Lightning fetches one batch ahead: the fetch that got a batch is then that of the step"
            " before. The workers' clock is told on that of the trace by readings of both at each step,"
            " which must agree to 200 µs; else a note says that they do not.\n\n"
            "Rows below a lane's first hold what ran inside the event above. A pixel has the colour of"
            " the event that takes most of it and is paler the less of it is busy. Colour is the kind of"
            " event; the shade only tells neighbouring names apart. **Begin** counts from the begin of the"
            " trace, **self time** is the duration less that of the events one level inside, **launch to"
            " begin** is from the begin of the call that launched a kernel to the begin of the kernel."
            " Drag on the time axis (or anywhere with Shift) for a table of what happened in that time:"
            " durations clipped to it and added up, so what lies inside another event, or beside it in"
            " another lane, counts again. *Open in Perfetto* hands the trace to ui.perfetto.dev from tab"
            " to tab in your browser, and only when pressed; *Download* gives a Chrome trace with the same"
            " nanoseconds, which `lightning-modelprof analyze` can read. Press ? for the keys.\n\n"
            "**SM efficiency (est.)** is at each instant the smaller of 1 and the sum of the running"
            " kernels' thread blocks per multiprocessor; kernels without that number count as 0, and then"
            " **kernels running** is shown as well. **Memory allocated** begins with what the device held"
            " before the window; the CPU's counts from 0 and may be negative. A counter with more than"
            " 20,000 points keeps the lowest, highest and last of every few. A timeline above 48 MB loses"
            " its Python functions, then its shortest slices; a note says how many."
        ),
    ),
    View(
        key="distributed",
        title="Distributed",
        empty="This profile is of one process.",
        above=(_other_ranks,),
    ),
    View(key="tables", title="All tables", empty="This profile holds no table.", above=(_every_table,)),
)
"""In the order of the menu; Compare, which has two selections, is in ``report/compare/build_compare.py``."""


def view_sections() -> Iterator[Section]:
    """What the browser draws, defined."""
    yield from (Section(f"view:{one.key}", f"{one.title} (dashboard)", one.help) for one in VIEWS if one.help)
