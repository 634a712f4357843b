"""The Compare view: two runs as ``lightning-modelprof compare`` does it, and two windows row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_modelprof.report.compare.build_compare import build_comparison
from lightning_modelprof.report.compare.compared_run import compared_run_of_report
from lightning_modelprof.report.compare.row_changes import changed_rows
from lightning_modelprof.report.compare.windows import compare_windows
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.steps import StepTimings
from lightning_modelprof.tensorboard_plugin.selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison.

    Attributes:
        run_name: TensorBoard's name of the run.
        selection: the profiles that were chosen.
        read_steps: reads the steps of the chosen loop.
    """

    run_name: str
    selection: Selection
    read_steps: Callable[[], StepTimings]


def compare_sides(before: Side, after: Side) -> list[Report]:
    """The comparison of the loops and that of the windows, as far as both sides have one and they differ.

    Raises:
        ArchiveError: when the runs are of different loops, or too old to be compared.
    """
    reports = []
    old, new = before.selection, after.selection
    is_other_run = before.run_name != after.run_name
    if old.run is not None and new.run is not None and (is_other_run or old.run_tag != new.run_tag):
        reports.append(_compare_loops(before, after))
    is_other_window = is_other_run or (old.window_tag, old.rank) != (new.window_tag, new.rank)
    if old.window_report is not None and new.window_report is not None and is_other_window:
        names = (_window_name(before), _window_name(after))
        reports.append(compare_windows(old.window_report, new.window_report, names))
    return reports


def _compare_loops(before: Side, after: Side) -> Report:
    """What the command ``compare`` says, and every table of the runs row by row."""
    runs = []
    for side in (before, after):
        stored = side.selection.run
        assert stored is not None
        runs.append(compared_run_of_report(side.run_name, stored.report, side.read_steps()))
    report, _ = build_comparison(runs[:1], runs[1:])
    return replace(report, tables=(*report.tables, *changed_rows(runs[0].report, runs[1].report)))


def _window_name(side: Side) -> str:
    window = side.selection.window
    assert window is not None
    rank = "" if side.selection.rank is None else f", rank {side.selection.rank}"
    return f"{side.run_name}, window {window.head.window} ({window.head.label}{rank})"
