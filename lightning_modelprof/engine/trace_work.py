"""Compress, analyze and report a window's trace after torch has written it.

This needs neither torch nor the loop, so it runs in parallel with training (``engine/helper.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.engine.outputs import FILES, NOWHERE, Outputs
from lightning_modelprof.engine.run_folder import RunFolder
from lightning_modelprof.errors import TraceError, describe_error, traceback_text
from lightning_modelprof.record import Record
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_dashboard_entry import run_profile, window_profile
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.dashboard_entry import DashboardEntry
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import SHOWN_WINDOWS, TableOptions
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.opening import remove_unfinished
from lightning_modelprof.run.records import Run, Window
from lightning_modelprof.show.tensorboard.event_file import profile_summary, tag_of
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace.reader import parse_trace, read_trace

READS_IT: Final = "read it with lightning-modelprof analyze"


class Problem(NamedTuple):
    """A warning to give once per output."""

    output: str
    sentence: str


class Setting(Record, frozen=True, kw_only=True):
    """What all windows of one rank have in common.

    Attributes:
        folder: of the run.
        loop: the Trainer's method.
        all_ranks_command: adds the traces of all ranks to TensorBoard; ``""`` unless several record windows
            and this one has an event file.
    """

    folder: RunFolder
    loop: str
    options: TableOptions
    all_ranks_command: str = ""


class TraceTask(Record, frozen=True, kw_only=True):
    """A window whose trace torch has written.

    Attributes:
        raw: the trace as torch wrote it; removed once it's compressed, or answered.
        packs: whether to compress and keep it.
        why_not: why it's compressed but not analyzed; ``""`` if it is.
        tag_folder: the run's name in TensorBoard; ``""`` if that doesn't get this window.
    """

    window: Window
    raw: Path
    packs: bool
    why_not: str = ""
    tag_folder: str = ""
    wants_report: bool = False


class TraceAnswer(Record, frozen=True, kw_only=True):
    """Result of a :class:`TraceTask`.

    Attributes:
        window: its index.
        is_packed: whether the compressed trace is in place.
        note: why there are no facts; ``""`` if there are.
        summary: for TensorBoard's event file; ``None`` without.
        report: of the trace; ``None`` if it wasn't requested, or the analysis failed.
    """

    window: int
    is_packed: bool = False
    note: str = ""
    problems: tuple[Problem, ...] = ()
    summary: bytes | None = None
    report: Report | None = None


class ReportTask(Record, frozen=True, kw_only=True):
    """Request for a report of the whole loop so far.

    Attributes:
        run: measurements, or their archive.
        trace_notes: why traces are missing, by window index, for those that weren't submitted.
    """

    run: Run | Path
    trace_notes: Mapping[int, str]
    tag_folder: str = ""


class ReportAnswer(Record, frozen=True, kw_only=True):
    """Result of a :class:`ReportTask`, whose files are written.

    Attributes:
        report: ``None`` if it couldn't be made.
        summary: for TensorBoard's event file; ``None`` without.
    """

    report: Report | None
    problems: tuple[Problem, ...] = ()
    summary: bytes | None = None


Task: TypeAlias = TraceTask | ReportTask
Answer: TypeAlias = TraceAnswer | ReportAnswer


class TraceWork:
    """Does tasks, one after the other.

    Args:
        facts: found elsewhere, by window index.

    Attributes:
        facts: of the newest windows whose trace could be read.
    """

    def __init__(self, setting: Setting, facts: Mapping[int, TraceFacts] | None = None) -> None:
        self._setting = setting
        self._problems: list[Problem] = []
        self._outputs = Outputs(
            setting.folder,
            [],
            NOWHERE,
            lambda sentence: self._problems.append(Problem(FILES, sentence)),
        )
        self.facts: dict[int, TraceFacts] = dict(facts or {})
        self._notes: dict[int, str] = {}  # why there are no facts

    def do(self, task: Task, num_newer: int = 0) -> Answer:
        """Do a task; its answer reports failures with a trace.

        Args:
            num_newer: windows that wait behind it.
        """
        return self._take_trace(task, num_newer) if isinstance(task, TraceTask) else self.report(task)

    def forget(self, task: Task) -> None:
        """Remove the raw trace of an answered task, unless it's kept."""
        if isinstance(task, TraceTask) and not task.packs:
            with contextlib.suppress(OSError):
                task.raw.unlink()

    def clean_up(self, task: Task) -> None:
        """Remove the unfinished files of a process that was killed in a task."""
        folder = self._setting.folder
        paths = [folder.trace_path(task.window)] if isinstance(task, TraceTask) else folder.report_paths
        for path in filter(None, paths):
            remove_unfinished(path)

    def report(self, task: ReportTask) -> ReportAnswer:
        """Make the report of the loop and write its files."""
        self._problems.clear()
        run = load_run(task.run) if isinstance(task.run, Path) else task.run
        facts = Facts(run, self.facts, {**task.trace_notes, **self._notes})
        report = build_report(facts, self._setting.options)
        self._outputs.save_report(report)
        summary = self._summary(lambda: run_profile(run, report), task.tag_folder)
        return ReportAnswer(report=report, problems=tuple(self._problems), summary=summary)

    def _take_trace(self, task: TraceTask, num_newer: int) -> TraceAnswer:
        """Save the trace first, then analyze it."""
        self._problems.clear()
        index, is_packed, wanted = task.window.index, False, _Wanted()
        name = self._setting.folder.trace_name(task.window)
        is_shown = bool(task.tag_folder or task.wants_report or num_newer < SHOWN_WINDOWS)
        note = task.why_not or ("" if is_shown else f"newer windows replaced it during training; {READS_IT}")
        try:
            packed = self._setting.folder.trace_path(task.window)
            if task.packs and not task.raw.exists() and packed is not None and packed.exists():
                is_packed = True  # by a process that was killed afterwards
                trace = None if note else replace(read_trace(packed), source=name)
            else:
                raw = task.raw.read_bytes()
                is_packed = task.packs and self._outputs.save_trace(task.window, raw)
                if is_packed:
                    with contextlib.suppress(OSError):
                        task.raw.unlink()
                trace = None if note else parse_trace(raw, name)
            if trace is not None:
                wanted = self._analyze(task, trace)
        except TraceError as error:
            note = str(error)
        except Exception as error:  # an internal error, or no memory; timing continues anyway
            note = f"its trace couldn't be analyzed: {describe_error(error)}"
            self._problems.append(_please_report(f"window {index}: {note}"))
        if note:
            self._notes[index] = note
        return TraceAnswer(
            window=index,
            is_packed=is_packed,
            note=note,
            problems=tuple(self._problems),
            summary=wanted.summary,
            report=wanted.report,
        )

    def _analyze(self, task: TraceTask, trace: Trace) -> _Wanted:
        options, window = self._setting.options, task.window
        facts = TraceFacts(trace).complete()
        self.facts[window.index] = facts
        while len(self.facts) > SHOWN_WINDOWS:  # a long run has thousands of windows
            del self.facts[next(iter(self.facts))]
        summary = self._summary(
            lambda: window_profile(
                [(trace, facts)], window=window.index, loop=self._setting.loop, options=options
            ),
            task.tag_folder,
        )
        return _Wanted(summary, build_trace_report([facts], options) if task.wants_report else None)

    def _summary(self, make: Callable[[], DashboardEntry], tag_folder: str) -> bytes | None:
        if not tag_folder:
            return None
        try:
            profile = make()
            if self._setting.all_ranks_command:
                report = profile.report
                figures = replace(report.summary, all_ranks_command=self._setting.all_ranks_command)
                profile = replace(profile, report=replace(report, summary=figures))
            summary: bytes = profile_summary(profile, tag_of(profile, tag_folder)).SerializeToString()
        except Exception as error:  # the report can do without
            what = "the dashboard"
            self._problems.append(Problem(what, f"couldn't write to {what}: {describe_error(error)}"))
            return None
        return summary


class _Wanted(NamedTuple):
    summary: bytes | None = None
    report: Report | None = None


def _please_report(what: str) -> Problem:
    """Must be called while the error is being handled."""
    return Problem(what, f"{what}. Please report this:\n{traceback_text()}")
