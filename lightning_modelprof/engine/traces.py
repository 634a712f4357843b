"""Submit windows' traces for compression and analysis, and handle the results."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from shutil import disk_usage
from typing import Final

from lightning_modelprof.engine.helper import INTERRUPTED, Helper, make_helper
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.trace_work import (
    READS_IT,
    Answer,
    ReportTask,
    Setting,
    TraceAnswer,
    TraceTask,
    TraceWork,
)
from lightning_modelprof.engine.windows import Windows
from lightning_modelprof.measure.window.capture import BYTES_PER_MB
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import SHOWN_WINDOWS
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.records import Run, Window
from lightning_modelprof.units import digits

_FIRST_WINDOWS: Final = 16
"""These all go to the dashboard; of later ones, eight each time their number doubles."""


def is_for_dashboard(index: int) -> bool:
    """Whether a window goes to TensorBoard's in-memory event file; every window keeps its trace."""
    return index < _FIRST_WINDOWS or index % (1 << (index.bit_length() - 4)) == 0


_ANALYZED_LIMITS: Final = 2
"""Traces larger than this times ``max_trace_mb``, due to a single step, are saved but not analyzed."""


_NO_ROOM_BYTES: Final = 1 << 16
"""Less free space than the smallest trace takes."""


class Traces:
    """Submits the traces of one rank, and requests its loop's report.

    Args:
        max_trace_mb: traces much larger than this aren't analyzed.

    Attributes:
        windows: those that closed.
        on_trace: called with each analyzed window and its report; ``None`` if not requested.
    """

    def __init__(
        self, windows: Windows, outputs: Outputs, setting: Setting, max_trace_mb: float | None = None
    ) -> None:
        self.windows = windows
        self._outputs = outputs
        self._setting = setting
        self._max_trace_mb = max_trace_mb
        self._helper: Helper | None = None
        self._handed_over: dict[int, Path] = {}  # raw traces of windows without an answer
        self._analyzed: deque[int] = deque(maxlen=SHOWN_WINDOWS)  # newest windows whose facts are known
        self._reporter: TraceWork | None = None  # once the loop is over
        self._run_summary: bytes | None = None  # of the newest report
        self.on_trace: Callable[[Window, Report], None] | None = None

    def add(self, window: Window, raw_path: Path | None, clock: Callable[[], int]) -> None:
        """Add a window that closed, with its raw trace if there is one."""
        begin_ns = clock()
        self.windows.add(window)  # first, so that Ctrl-C while its trace is taken doesn't lose it
        if raw_path is not None:
            self._hand_over(window, raw_path)
        if window.close_ns is not None:
            self.windows.change_newest(close_ns=window.close_ns + clock() - begin_ns)
        self.windows.list_fewer()

    def _hand_over(self, window: Window, raw_path: Path) -> None:
        """Rename the newest window's trace to mark it as complete, then submit it."""
        self.windows.trace_notes[window.index] = (
            f"training was interrupted while its trace was saved; torch's own file is {raw_path.name}"
        )
        directory, name = self._outputs.folder.path, self._outputs.folder.trace_name(window)
        try:
            num_bytes = raw_path.stat().st_size
            packs = directory is not None and self._outputs.may_write(directory / name)
            if directory is not None and packs and raw_path.parent == (directory / name).parent:
                raw_path = raw_path.replace((directory / name).with_suffix(""))
        except OSError as error:
            with contextlib.suppress(OSError):
                raw_path.with_name(f"{raw_path.name}.tmp").unlink()  # torch leaves it
            reason = f"torch couldn't write the trace: {_why_not_written(raw_path, error)}"
            if reason not in self.windows.trace_notes.values():
                self.windows.warn(f"window {window.index}: {reason}")
            self.windows.note_newest(reason)
            return
        if packs:
            self.windows.change_newest(trace_file=name)
        self.windows.trace_notes[window.index] = (
            f"training was interrupted while its trace was analyzed; {READS_IT}"
        )
        self._handed_over[window.index] = raw_path
        if self._helper is None:
            self._helper = make_helper(self._setting)
        if self._helper.problem:
            self._keep_unanalyzed(self._handed_over)
            return
        self._helper.send(
            TraceTask(
                window=window,
                raw=raw_path,
                packs=packs,
                why_not=self._why_not_analyzed(num_bytes),
                tag_folder=self._outputs.tag_folder if is_for_dashboard(window.index) else "",
                wants_report=self.on_trace is not None,
            )
        )

    @property
    def _without_helper(self) -> str:
        problem = "" if self._helper is None else self._helper.problem
        return f"the process that analyzes traces {problem or 'lost its results'}; {READS_IT}"

    def poll(self) -> None:
        """Handle the answers that have arrived; doesn't wait."""
        helper = self._helper
        if helper is None or not (helper.num_open or self._handed_over):
            return
        for answer in helper.answers():
            self._warn_of(answer)
            if isinstance(answer, TraceAnswer):
                self._take_answer(answer)
        if helper.problem and self._handed_over:
            if helper.problem != INTERRUPTED:
                subject = loop_of(self._setting.loop).subject.capitalize()
                self._outputs.warn_once(
                    "the helper", f"{self._without_helper}. {subject} continues without it"
                )
            self._keep_unanalyzed(self._handed_over)

    def wait(self) -> None:
        """Wait until all windows are analyzed, or for Ctrl-C."""
        helper = self._helper
        if helper is None:
            return
        try:
            self.poll()
            while self._handed_over:
                helper.look()
                self.poll()
        except KeyboardInterrupt:
            helper.give_up(INTERRUPTED)
            self.poll()
            raise

    def ask_for_report(self, archive: Path | None) -> None:
        """Request the report of a running loop, if a helper has its windows."""
        if self._helper is not None and archive is not None and not self._helper.problem:
            self._helper.send(ReportTask(run=archive, trace_notes=self.windows.trace_notes))

    def make_report(self, run: Run) -> Report:
        """Make the report of a finished loop and write its files."""
        if self._reporter is None:
            facts = {} if self._helper is None else self._helper.facts()
            self._note_lost(facts)
            self._reporter = TraceWork(self._setting, facts)
        answer = self._reporter.report(
            ReportTask(run=run, trace_notes=self.windows.trace_notes, tag_folder=self._outputs.tag_folder)
        )
        self._warn_of(answer)
        assert answer.report is not None
        self._run_summary = answer.summary
        return answer.report

    def _note_lost(self, facts: Collection[int]) -> None:
        lost = [index for index in self._analyzed if index not in facts]
        self.windows.trace_notes |= dict.fromkeys(lost, self._without_helper)
        if lost:
            self._outputs.warn_once("the helper", f"{self._without_helper}. The report doesn't include them")

    def write_run_profile(self, step: int) -> None:
        """Write the dashboard's entry for the newest report to TensorBoard."""
        if self._run_summary is not None:
            self._outputs.write_profile(self._run_summary, step)

    def close(self) -> None:
        if self._helper is not None:
            self._helper.close()

    def _warn_of(self, answer: Answer) -> None:
        for problem in answer.problems:
            self._outputs.warn_once(*problem)

    def _take_answer(self, answer: TraceAnswer) -> None:
        index, raw_path = answer.window, self._handed_over.pop(answer.window)
        if answer.note:
            self.windows.trace_notes[index] = answer.note
        else:
            self.windows.trace_notes.pop(index, None)
            self._analyzed.append(index)
        if not answer.is_packed:
            self.windows.keep_raw(index, raw_path)
        window = self.windows.find(index)
        if window is not None and answer.summary is not None:
            self._outputs.write_profile(answer.summary, window.last_step)
        if window is not None and answer.report is not None and self.on_trace is not None:
            self.on_trace(window, answer.report)
        self.windows.remove_old_traces(self._handed_over)

    def _keep_unanalyzed(self, windows: dict[int, Path]) -> None:
        assert self._helper is not None
        for index, raw_path in windows.items():
            if self._helper.problem != INTERRUPTED:
                self.windows.trace_notes[index] = self._without_helper
            self.windows.keep_raw(index, raw_path)
        windows.clear()

    @property
    def helper_cpu_ns(self) -> int | None:
        """CPU time of the helper; ``None`` without one, or if unknown."""
        return None if self._helper is None else self._helper.cpu_ns

    def _why_not_analyzed(self, num_bytes: int) -> str:
        limit = self._max_trace_mb
        if limit is None or num_bytes <= _ANALYZED_LIMITS * limit * BYTES_PER_MB:
            return ""
        return (
            f"its trace of {digits(num_bytes / BYTES_PER_MB)} MB wasn't analyzed during training, because"
            f' it\'s larger than {_ANALYZED_LIMITS} × bounds={{"max_trace_mb": {limit:g}}}; {READS_IT}'
        )


def _why_not_written(path: Path, error: OSError) -> str:
    with contextlib.suppress(OSError):
        if disk_usage(path.parent).free < _NO_ROOM_BYTES:
            return "the disk is full"
    return error.strerror or str(error)
