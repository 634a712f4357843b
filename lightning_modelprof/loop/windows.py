"""What becomes of a profiler window when it has closed: its trace is read, summarized and packed."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.analysis.trace.trace_facts import TraceFacts, analyze_trace
from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.errors import TraceError, told, traceback_text
from lightning_modelprof.loop.outputs import Outputs, trace_name
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.window.capture import BYTES_PER_MB, Capture, ScheduledSteps
from lightning_modelprof.measure.window.torch_profiler import CaptureOptions
from lightning_modelprof.report.build_profile import window_profile
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions
from lightning_modelprof.report.tables.run.all_tables import MAX_SHOWN
from lightning_modelprof.run.archive import MAX_WINDOWS
from lightning_modelprof.run.loops import FIT, Loop
from lightning_modelprof.run.records import Window, WindowStatus
from lightning_modelprof.trace.reader import parse_trace
from lightning_modelprof.units import digits

_FIRST_WINDOWS: Final = 16
"""All of them are for the dashboard, of later ones eight each time that their number doubles."""


def is_for_dashboard(index: int) -> bool:
    """Whether a window goes to the event file, which TensorBoard holds in memory; traces have all."""
    return index < _FIRST_WINDOWS or index % (1 << (index.bit_length() - 4)) == 0


FIRST_LISTED: Final = 16
NEWEST_LISTED: Final = 64
"""Windows that a run lists: with one every hundred steps there can be a hundred thousand."""

_READS_IT: Final = "lightning-modelprof analyze reads it"

_ANALYZED_LIMITS: Final = 2
"""A trace larger than so many times ``max_trace_mb`` is saved and not analyzed: one step made it so large."""


def make_capture(
    config: ProfileConfig,
    export_path: Callable[[Window], Path],
    on_close: Callable[[Window, Path | None], None],
    *,
    clock: HostClock,
    rank: int,
    world_size: int = 1,
    accumulate: int = 1,
    why_not: Callable[[], str] = str,
    theirs: Any = None,
) -> Capture | None:
    """The windows that a configuration asks for; ``None`` if it asks for none.

    Args:
        config: which steps, and on which ranks.
        export_path: as of Capture.
        on_close: as of Capture.
        clock: as of Capture.
        rank: of this process.
        world_size: number of ranks.
        accumulate: batches per optimizer step: without one, ranks do not wait for each other.
        why_not: as of Capture.
        theirs: the user's own profiler of Lightning's.
    """
    if not config.schedule.active or not recording_ranks(config, world_size) or _is_of_torch(theirs):
        return None
    options = CaptureOptions(
        activities=config.activities,
        record_shapes=config.record_shapes,
        with_stack=config.with_stack,
        profile_memory=config.profile_memory,
    )
    return Capture(
        config.schedule,
        options,
        export_path=export_path,
        on_close=on_close,
        clock=clock,
        rank=rank,
        records=rank in recording_ranks(config, world_size),
        max_trace_mb=config.bounds.max_trace_mb,
        scheduled=ScheduledSteps(config.schedule, lag=accumulate - 1) if world_size > 1 else None,
        why_not=why_not,
    )


def why_no_window(config: ProfileConfig, rank: int, world_size: int, theirs: Any = None) -> str:
    """Why a rank records nothing though windows were asked for; ``""`` if it records, or none was."""
    recording = recording_ranks(config, world_size)
    if config.schedule.active and _is_of_torch(theirs):
        return (
            f"no profiler window is recorded: Trainer(profiler={type(theirs).__name__}) is a torch profiler,"
            " and a process has one at a time. Phases are measured all the same"
        )
    if not config.schedule.active or rank in recording:
        return ""
    asked = config.bounds.ranks
    if not recording:
        return f"no profiler window is recorded: ranks={asked} names none of the {world_size} ranks"
    return (
        f"Rank {rank} records no profiler window (ranks={asked}). The steps of the others' windows are"
        " no clean steps here either, because ranks wait for each other"
    )


def _is_of_torch(profiler: Any) -> bool:
    """By name: lightning and pytorch_lightning each have a PyTorchProfiler of their own."""
    return any(kind.__name__ == "PyTorchProfiler" for kind in type(profiler).__mro__)


def recording_ranks(config: ProfileConfig, world_size: int) -> Collection[int]:
    """The ranks of this run that open windows."""
    if isinstance(config.bounds.ranks, str):
        return range(world_size)
    return [rank for rank in config.bounds.ranks if rank < world_size]


class WindowResults:
    """The closed windows of one rank.

    Args:
        outputs: where traces are saved.
        rank: of this process.
        warn: called with one sentence.
        loop: that runs.
        options: how the tables of traces are cut and sorted.
        max_trace_mb: traces much larger than this are not analyzed.
        keep_windows: traces that stay on disk besides the first; ``None`` means all.

    Attributes:
        windows: the closed windows, in order: the first and the newest of them.
        facts: window index → what its trace says, for the newest of those whose trace could be read.
        trace_notes: window index → why there is nothing of it.
    """

    def __init__(
        self,
        outputs: Outputs,
        rank: int,
        warn: Callable[[str], None],
        loop: Loop = FIT,
        options: TableOptions = DEFAULT_OPTIONS,
        *,
        max_trace_mb: float | None = None,
        keep_windows: int | None = None,
    ) -> None:
        self._outputs = outputs
        self._loop = loop
        self._options = options
        self._rank = rank
        self._warn = warn
        self._max_trace_mb = max_trace_mb
        self._keep_windows = keep_windows
        self._has_refused = False
        self._left_out: Counter[str] = Counter()
        self.windows: list[Window] = []
        self.facts: dict[int, TraceFacts] = {}
        self.trace_notes: dict[int, str] = {}

    def raw_path(self, window: Window) -> Path:
        """Where torch writes the trace before it is packed: beside its place, or in the temporary folder."""
        # torch cannot write to a folder whose name has a line break, or is not UTF-8.
        if self._outputs.directory is not None and str(self._outputs.directory).isprintable():
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
        self.windows.append(window)  # first: Ctrl-C while its trace is taken must not lose it
        if raw_path is not None:
            self._take_trace(window, raw_path)
        window = self.windows[-1]
        if window.close_ns is not None:
            self.windows[-1] = replace(window, close_ns=window.close_ns + clock() - begin_ns)
        self._remove_old_traces()
        self._list_fewer()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the list of windows does not tell."""
        num_left_out = self._left_out.total()
        if not num_left_out:
            return ()
        kinds = ", ".join(f"{count:,} {status}" for status, count in self._left_out.items())
        num_newest = len(self.windows) - FIRST_LISTED
        return (
            f"Of {num_left_out + len(self.windows):,} profiler windows the first {FIRST_LISTED} and the"
            f" newest {num_newest} are listed, the others are only counted: {kinds}.",
        )

    def _remove_old_traces(self) -> None:
        """The first trace stays, because later ones can be compared with it, and the newest stay."""
        keep = self._keep_windows
        if keep is None:
            return
        saved = [place for place, window in enumerate(self.windows) if window.trace_file is not None]
        for place in saved[1:-keep]:
            window = self.windows[place]
            if window.trace_file is not None and self._outputs.remove_trace(window.trace_file):
                note = f"its trace was removed (keep_windows={keep}: the first and the newest {keep} stay)"
                self.windows[place] = _with_note(replace(window, trace_file=None), note)

    def _list_fewer(self) -> None:
        newest = min(max(NEWEST_LISTED, self._keep_windows or 0), MAX_WINDOWS - FIRST_LISTED)
        while len(self.windows) > FIRST_LISTED + newest:
            window = self.windows.pop(FIRST_LISTED)
            self._left_out[window.status.value.replace("_", " ")] += 1
            self.trace_notes.pop(window.index, None)

    def _take_trace(self, window: Window, raw_path: Path) -> None:
        """Put the trace of the newest window in its place, and only then analyze it."""
        self.trace_notes[window.index] = (
            f"training was interrupted while its trace was saved; as torch wrote it, it is {raw_path.name}"
        )
        try:
            raw = raw_path.read_bytes()
        except OSError as error:
            reason = f"torch could not write the trace: {error.strerror or error}"
            self._warn(f"window {window.index}: {reason}")
            self.trace_notes[window.index] = reason
            self.windows[-1] = _with_note(window, reason)
            return
        self.windows[-1] = replace(window, trace_file=self._outputs.save_trace(window, raw))
        with contextlib.suppress(OSError):
            raw_path.unlink()
        self.trace_notes[window.index] = f"training was interrupted while its trace was analyzed; {_READS_IT}"
        reason = self._why_not_analyzed(raw) or self._analyze(window, raw)
        if reason:
            self.trace_notes[window.index] = reason
        else:
            del self.trace_notes[window.index]

    def _why_not_analyzed(self, raw: bytes) -> str:
        limit = self._max_trace_mb
        if limit is None or len(raw) <= _ANALYZED_LIMITS * limit * BYTES_PER_MB:
            return ""
        return (
            f"its trace of {digits(len(raw) / BYTES_PER_MB)} MB was not analyzed while training runs,"
            f" because that is more than {_ANALYZED_LIMITS} x max_trace_mb={limit:g}; {_READS_IT}"
        )

    def _analyze(self, window: Window, raw: bytes) -> str:
        """Keep what the trace says; returns why there is nothing, ``""`` if there is."""
        try:
            trace = parse_trace(raw, trace_name(window, self._rank))
            facts = analyze_trace(trace)
        except TraceError as error:
            return str(error)
        except Exception as error:  # an error of ours, or no memory: what is timed goes on all the same
            reason = f"its trace could not be analyzed: {told(error)}"
            self._warn(f"window {window.index}: {reason}. Please report this:\n{traceback_text()}")
            return reason
        self.facts[window.index] = facts
        while len(self.facts) > MAX_SHOWN:  # a long run has thousands of windows
            del self.facts[next(iter(self.facts))]
        if is_for_dashboard(window.index):
            loop, options = self._loop.key, self._options
            self._outputs.write_profile(
                lambda: window_profile([(trace, facts)], window=window.index, loop=loop, options=options),
                window.last_step,
            )
        return ""


def _with_note(window: Window, note: str) -> Window:
    return replace(window, note="; ".join(filter(None, (window.note, note))))
