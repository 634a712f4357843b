"""What becomes of a profiler window when it has closed: its trace is read, summarized and packed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from lightning_modelprof.analysis.trace_facts import TraceFacts, analyze_trace
from lightning_modelprof.config import ProfileConfig
from lightning_modelprof.errors import TraceError
from lightning_modelprof.fit.outputs import Outputs, trace_name
from lightning_modelprof.measure.capture import Capture, CaptureOptions
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.report.build_profile import window_profile
from lightning_modelprof.report.options import DEFAULT_OPTIONS, ReportOptions
from lightning_modelprof.report.tables.window_summaries import MAX_SHOWN
from lightning_modelprof.run.chrome import parse_trace
from lightning_modelprof.run.loops import FIT, Loop
from lightning_modelprof.run.records import Window, WindowStatus

_FIRST_WINDOWS: Final = 16
"""All of them are for the dashboard, of later ones eight each time that their number doubles."""


def is_for_dashboard(index: int) -> bool:
    """Whether a window goes to the event file, which TensorBoard holds in memory; traces have all."""
    return index < _FIRST_WINDOWS or index % (1 << (index.bit_length() - 4)) == 0


def make_capture(
    config: ProfileConfig,
    export_path: Callable[[Window], Path],
    on_close: Callable[[Window, Path | None], None],
    *,
    clock: HostClock,
    rank: int,
) -> Capture | None:
    """The windows that a configuration asks for; ``None`` if it asks for none. Arguments as of Capture."""
    if not config.schedule.active:
        return None
    options = CaptureOptions(
        activities=config.activities,
        record_shapes=config.record_shapes,
        with_stack=config.with_stack,
        profile_memory=config.profile_memory,
    )
    return Capture(
        config.schedule, options, export_path=export_path, on_close=on_close, clock=clock, rank=rank
    )


class WindowResults:
    """The closed windows of one rank.

    Args:
        outputs: where traces are saved.
        rank: of this process.
        warn: called with one sentence.
        loop: that runs.
        options: how the tables of traces are cut and sorted.

    Attributes:
        windows: all closed windows, in order.
        facts: window index → what its trace says, for the newest of those whose trace could be read.
        trace_notes: window index → why there is nothing of it.
    """

    def __init__(
        self,
        outputs: Outputs,
        rank: int,
        warn: Callable[[str], None],
        loop: Loop = FIT,
        options: ReportOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._outputs = outputs
        self._loop = loop
        self._options = options
        self._rank = rank
        self._warn = warn
        self._has_refused = False
        self.windows: list[Window] = []
        self.facts: dict[int, TraceFacts] = {}
        self.trace_notes: dict[int, str] = {}

    def raw_path(self, window: Window) -> Path:
        """Where torch writes the trace before it is packed: beside its place, or in the temporary folder."""
        if self._outputs.directory is not None:
            name = Path(trace_name(window, self._rank))
            path = self._outputs.directory / name.with_name(f".{name.stem}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError:
                pass  # the tables need the trace all the same; saving it will say what is wrong
            else:
                return path
        handle = tempfile.NamedTemporaryFile(suffix=".pt.trace.json", delete=False)  # noqa: SIM115
        handle.close()
        return Path(handle.name)

    def add(self, window: Window, raw_path: Path | None, clock: Callable[[], int]) -> None:
        """Take over a window that closed, with its raw trace if there is one."""
        begin_ns = clock()
        if window.status is WindowStatus.REFUSED and not self._has_refused:
            self._has_refused = True
            self._warn(
                f"window {window.index} was refused: {window.note}; {self._loop.subject} goes on without it"
            )
        if raw_path is not None:
            window = self._take_trace(window, raw_path)
        if window.close_ns is not None:
            window = replace(window, close_ns=window.close_ns + clock() - begin_ns)
        self.windows.append(window)

    def _take_trace(self, window: Window, raw_path: Path) -> Window:
        """Move the raw trace to its place and analyze it."""
        try:
            raw = raw_path.read_bytes()
            raw_path.unlink()
        except OSError as error:
            reason = f"torch could not write the trace: {error.strerror or error}"
            self._warn(f"window {window.index}: {reason}")
            self.trace_notes[window.index] = reason
            return replace(window, note="; ".join(filter(None, (window.note, reason))))
        self._analyze(window, raw)
        return replace(window, trace_file=self._outputs.save_trace(window, raw))

    def _analyze(self, window: Window, raw: bytes) -> None:
        try:
            trace = parse_trace(raw, trace_name(window, self._rank))
            facts = analyze_trace(trace)
        except TraceError as error:
            self.trace_notes[window.index] = str(error)
            return
        self.facts[window.index] = facts
        while len(self.facts) > MAX_SHOWN:  # a long run has thousands of windows
            del self.facts[next(iter(self.facts))]
        if is_for_dashboard(window.index):
            loop, options = self._loop.key, self._options
            self._outputs.write_profile(
                lambda: window_profile([(trace, facts)], window=window.index, loop=loop, options=options),
                window.last_step,
            )
