"""Results of a session so far: the run, which is saved, and its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from lightning_modelprof import __version__
from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.run_folder import RunFolder
from lightning_modelprof.engine.trace_work import Setting
from lightning_modelprof.engine.traces import Traces
from lightning_modelprof.engine.windows import Windows, recording_ranks
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.setup.environment import run_info
from lightning_modelprof.measure.window.other_profilers import CLAIM
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.records import RankRecord, Run, RunInfo
from lightning_modelprof.run.setup import TrainingSetup

REPORT_AFTER_NS: Final = 10_000_000_000
"""Shorter loops get their report when they end, without starting a process just for that."""


class Results:
    """The run and the report of a loop, from its start on.

    Args:
        outputs: where they go.
        traces: analyzes windows' traces and makes the report.
        info: of the run.
        measured: returns this rank's record so far.

    Attributes:
        is_report_due: whether a window has closed since the last report.
        is_reported: whether the loop has ended, and its report was or is being made.
        ended_ns: start of our work after the loop.
        run: newest data that was saved or reported; ``None`` before the first.
        report: of the finished loop; ``None`` before.
    """

    def __init__(
        self,
        loop: Loop,
        outputs: Outputs,
        traces: Traces,
        *,
        info: RunInfo,
        measured: Callable[[], RankRecord],
        clock: HostClock,
    ) -> None:
        self._loop = loop
        self.outputs = outputs
        self.traces = traces
        self._info = info
        self._measured = measured
        self._clock = clock
        self._armed_ns = clock()
        self._waited_ns = 0
        self._is_unsaved = False
        self.ended_ns = 0
        self.is_report_due = self.is_reported = False
        self.run: Run | None = None
        self.report: Report | None = None

    def make_run(self, status: str) -> Run:
        record = self._measured()
        if self.is_reported:
            record = replace(record, report_wait_ns=self._wait_ns())
        return Run(info=replace(self._info, status=status), ranks=(record,))

    def _wait_ns(self) -> int:
        return max(0, int(self._clock() - self.ended_ns))

    def save(self) -> None:
        """Save the measurements so far, and request a report if a window has closed since the last one."""
        self.run = self.make_run("running")
        is_saved = self.outputs.save_run(self.run)
        # A program that ends while another thread trains may leave no other time for it.
        if is_saved and self.is_report_due and (CLAIM.is_ending or self._has_run_long):
            self.is_report_due = False
            self.traces.ask_for_report(self.outputs.folder.archive)

    @property
    def _has_run_long(self) -> bool:
        return self._clock() - self._armed_ns >= REPORT_AFTER_NS

    def save_end(self, status: str) -> None:
        """Save a finished loop's run, without its report."""
        self.run = self.make_run(status)
        self.outputs.save_run(self.run)

    def conclude(self, run: Run) -> Report:
        """Save a finished loop's run and make its report."""
        report = self._make_report(run)
        self._waited_ns = self._wait_ns()
        return report

    def add_outside_times(self) -> None:
        """Save the run and its report again, with the times after the loop."""
        if self.run is not None and self.is_reported:
            around = self._loop.outside_times()
            record = replace(self.run.ranks[0], around=around, report_wait_ns=self._waited_ns)
            self._make_report(replace(self.run, ranks=(record,)))

    def abort(self) -> None:
        """Save the measurements so far after an internal error."""
        self._is_unsaved = True
        self.save_aborted()

    def save_aborted(self) -> None:
        """Save again after :meth:`abort` if that failed, as the cause may be gone."""
        if self._is_unsaved:
            if self.run is None or self.run.info.status != "aborted":
                self.run = self.make_run("aborted")
            self._is_unsaved = not self.outputs.save_run(self.run)

    def _make_report(self, run: Run) -> Report:
        self.run = run
        self.outputs.save_run(run)
        self.report = self.traces.make_report(run)
        return self.report


def make_info(config: ProfileConfig, loop: Loop, setup: TrainingSetup) -> RunInfo:
    """Return what is known about a run when its loop starts."""
    return run_info(
        loop,
        config=config.as_plain(),
        sample_unit=config.unit,
        version=__version__,
        libraries=setup.libraries,
    )


def make_results(
    config: ProfileConfig,
    loop: Loop,
    folder: RunFolder,
    *,
    info: RunInfo,
    measured: Callable[[], RankRecord],
    clock: HostClock,
    warn: Callable[[str], None],
) -> Results:
    outputs = Outputs(folder, list(loop.loggers) if loop.is_first else [], config.report, warn)
    has_other_windows = len(recording_ranks(config, loop.world_size)) > 1
    setting = Setting(
        folder=folder,
        loop=loop.kind.key,
        options=config.table_options,
        all_ranks_command=outputs.all_ranks_command if has_other_windows else "",
    )
    windows = Windows(outputs, warn, loop.kind, keep=config.bounds.keep_windows)
    traces = Traces(windows, outputs, setting, config.bounds.max_trace_mb)
    return Results(loop, outputs, traces, info=info, measured=measured, clock=clock)
