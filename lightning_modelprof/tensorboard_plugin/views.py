"""The views of the dashboard: which parts of the reports each one shows.

A new view is one line in ``VIEWS``; a part is a function from a selection to HTML, empty where there is
nothing to show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Final

from lightning_modelprof.errors import one_line
from lightning_modelprof.report.model import Report, Table
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


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One page of the dashboard.

    Attributes:
        key: its name in links.
        title: its heading.
        empty: what to do when a profile has nothing for it.
        parts: from top to bottom.
        columns: kind of the packed columns that the browser draws on top of the parts; ``""`` if none.
    """

    key: str
    title: str
    empty: str
    parts: tuple[Part, ...] = ()
    columns: str = ""


def render(view: View, selection: Selection) -> str:
    """The parts of a view as HTML; ``""`` when there is nothing to show."""
    return "".join(part(selection) for part in view.parts)


def render_comparison(report: Report) -> str:
    """A comparison as HTML: what it says, and every table."""
    title = escape(one_line(report.title))
    parts = (f"<h2>{title}</h2>", facts_html(report), _tables_html(list(report.tables)), notes_html(report))
    return f'<section class="comparison">{"".join(parts)}</section>'


def _head(selection: Selection) -> str:
    """Verdict, key figures, findings and what ran."""
    parts = (verdict_html, step_card_html, figures_html, findings_html, facts_html, settings_html)
    return "".join(part(selection.main_report) for part in parts)


def _notes(selection: Selection) -> str:
    return notes_html(selection.main_report)


def _needs_window(selection: Selection) -> str:
    """What to do where a view shows little without a profiler window."""
    return "" if selection.window is not None else f'<p class="empty">{escape(_NO_WINDOW)}</p>'


def _charts(*ids: str) -> Part:
    def part(selection: Selection) -> str:
        charts = [chart for one in ids if (chart := selection.chart(one)) is not None]
        drawn = "".join(chart_html(chart) for chart in charts)
        return f'<section class="charts">{drawn}</section>' if drawn else ""

    return part


def _flames(*ids: str) -> Part:
    def part(selection: Selection) -> str:
        return "".join(flame_html(flame) for one in ids if (flame := selection.flame(one)) is not None)

    return part


def _tables(*ids: str) -> Part:
    """Tables one below the other; those without rows are named at the end, with the reason."""

    def part(selection: Selection) -> str:
        return _tables_html(selection.tables(ids))

    return part


def _every_table(selection: Selection) -> str:
    """All tables of the run and of the window: those of the window where both have one."""
    ids = [
        table.id
        for report in (selection.run_report, selection.window_report)
        if report is not None
        for table in report.tables
    ]
    return _tables_html(selection.tables(dict.fromkeys(ids)), is_open=False)


def _tables_html(tables: list[Table], *, is_open: bool = True) -> str:
    shown = "".join(table_html(table, is_open=is_open) for table in tables if table.rows)
    return shown + absent_html([table for table in tables if not table.rows])


VIEWS: Final = (
    View(
        key="overview",
        title="Overview",
        empty="This profile holds no report.",
        parts=(
            _head,
            _charts("phase_shares", "validation_shares", "step_breakdown", "step_time", "throughput"),
            _tables("perf_summary", "device_usage", "model_summary", "step_breakdown"),
            _notes,
        ),
    ),
    View(
        key="steps",
        title="Steps",
        empty=(
            "The steps of a whole run are here when ModelProfCallback has measured it. Traces hold only the"
            " few steps that were recorded: see Overview and Trace."
        ),
        parts=(_tables("phases", "validation", "slow_steps", "worst_step", "callbacks", "dataloader"),),
        columns=STEPS,
    ),
    View(
        key="operators",
        title="Operators",
        empty=_NO_WINDOW,
        parts=(
            _needs_window,
            _charts("operator_shares"),
            _tables("operators", "operators_by_shape", "user_ranges", "source_lines"),
        ),
    ),
    View(
        key="kernels",
        title="Kernels",
        empty=_NO_WINDOW,
        parts=(
            _needs_window,
            _charts("kernel_types"),
            _tables("kernels", "copies", "idle", "host_waits", "launches", "runtime_calls"),
        ),
    ),
    View(
        key="modules",
        title="Modules",
        empty=(
            "Modules are timed in one early step of a fit, by ModelProfCallback(flops=True). A"
            " trace alone has no such times."
        ),
        parts=(
            _flames("modules", "call_stacks"),
            _tables(
                "module_tree",
                "slowest_modules",
                "top_modules",
                "flops",
                "flops_by_size",
                "flops_by_operator",
                "model_size",
                "forward_modules",
                "forward_operators",
            ),
            _charts("flops_by_phase"),
        ),
    ),
    View(
        key="memory",
        title="Memory",
        empty=(
            "Memory is followed by ModelProfCallback in every run; memory by operator and by phase needs"
            " profile_memory=True."
        ),
        parts=(_charts("memory_curve"), _tables("memory_peaks", "memory_by_phase", "memory", "model_size")),
    ),
    View(key="trace", title="Trace", empty=_NO_WINDOW, columns=TIMELINE),
    View(
        key="distributed",
        title="Distributed",
        empty="This profile is of one process.",
        parts=(
            _charts("rank_phases", "rank_shares"),
            _tables("all_ranks", "rank_phases", "rank_spread", "distributed", "rank_waits", "collectives"),
        ),
    ),
    View(key="tables", title="All tables", empty="This profile holds no table.", parts=(_every_table,)),
)
"""In the order of the menu; Compare, which has two selections, is in ``comparison.py``."""
