"""The windows of a loop: which there are to be, and what becomes of those that closed."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from typing import Any, Final

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.helper import INTERRUPTED, Helper, make_helper
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.run_folder import TRACES
from lightning_modelprof.engine.trace_work import (
    READS_IT,
    Answer,
    ReportTask,
    Setting,
    TraceAnswer,
    TraceTask,
    TraceWork,
)
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.window.capture import BYTES_PER_MB, Capture, WindowOwner
from lightning_modelprof.measure.window.torch_profiler import CaptureOptions
from lightning_modelprof.measure.window.window_plan import WindowPlan
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, SHOWN_WINDOWS, TableOptions
from lightning_modelprof.run.loops import FIT, LoopKind
from lightning_modelprof.run.records import MAX_WINDOWS, Run, Window, WindowStatus
from lightning_modelprof.units import digits

_FIRST_WINDOWS: Final = 16
"""All of them are for the dashboard, of later ones eight each time that their number doubles."""


def is_for_dashboard(index: int) -> bool:
    """Whether a window goes to the event file, which TensorBoard holds in memory; traces have all."""
    return index < _FIRST_WINDOWS or index % (1 << (index.bit_length() - 4)) == 0


FIRST_LISTED: Final = 16
NEWEST_LISTED: Final = 64
"""Windows that a run lists: with one every hundred steps there can be a hundred thousand."""

_ANALYZED_LIMITS: Final = 2
"""A trace larger than so many times ``max_trace_mb`` is saved and not analyzed: one step made it so large."""


_NO_ROOM_BYTES: Final = 1 << 16
"""Less free space than the smallest trace takes."""


def make_capture(
    config: ProfileConfig, loop: Loop, owner: WindowOwner, clock: HostClock, theirs: Any = None
) -> Capture | None:
    """The windows that a configuration asks for; ``None`` if it asks for none.

    Args:
        theirs: the user's own profiler of Lightning's.
    """
    recording = recording_ranks(config, loop.world_size)
    if not config.schedule.active or not recording or _is_of_torch(theirs):
        return None
    # Without an optimizer step, ranks do not wait for each other.
    lag = loop.accumulate - 1 if loop.world_size > 1 else None
    options = CaptureOptions(
        activities=config.activities,
        record_shapes=config.record_shapes,
        with_stack=config.with_stack,
        profile_memory=config.profile_memory,
        max_trace_mb=config.bounds.max_trace_mb,
    )
    plan = WindowPlan(config.schedule, records=loop.rank in recording, lag=lag)
    return Capture(plan, options, owner, clock)


def why_no_window(config: ProfileConfig, rank: int, world_size: int, theirs: Any = None) -> str:
    """Why a rank records nothing though windows were asked for; ``""`` if it records, or none was."""
    recording = recording_ranks(config, world_size)
    if config.schedule.active and _is_of_torch(theirs):
        return (
            f"no profiler window is recorded, because Trainer(profiler={type(theirs).__name__}) already uses"
            " torch.profiler and a process can run only one. Phases are still measured"
        )
    if not config.schedule.active or rank in recording:
        return ""
    asked = config.bounds.ranks
    if not recording:
        return (
            f"no profiler window is recorded, because ranks={asked} includes none of the {world_size} ranks"
        )
    return (
        f"Rank {rank} records no profiler window (ranks={asked}). Steps in other ranks' windows don't count"
        " as clean here either, because ranks wait for each other"
    )


def _is_of_torch(profiler: Any) -> bool:
    """By name: lightning and pytorch_lightning each have a PyTorchProfiler of their own."""
    return any(kind.__name__ == "PyTorchProfiler" for kind in type(profiler).__mro__)


def recording_ranks(config: ProfileConfig, world_size: int) -> Collection[int]:
    if isinstance(config.bounds.ranks, str):
        return range(world_size)
    return [rank for rank in config.bounds.ranks if rank < world_size]


class WindowResults:
    """The closed windows of one rank, and the report of its loop.

    Args:
        max_trace_mb: traces much larger than this are not analyzed.
        keep_windows: traces that stay on disk besides the first; ``None`` means all.

    Attributes:
        windows: the closed windows, in order: the first and the newest of them.
        trace_notes: window index → why there is nothing of it.
        on_trace: called with each window whose trace was analyzed, and the report of it; ``None`` if nobody
            asks for that.
    """

    def __init__(
        self,
        outputs: Outputs,
        rank: int,
        warn: Callable[[str], None],
        loop_kind: LoopKind = FIT,
        options: TableOptions = DEFAULT_OPTIONS,
        *,
        max_trace_mb: float | None = None,
        keep_windows: int | None = None,
        all_ranks_command: str = "",
    ) -> None:
        self._outputs = outputs
        self._loop_kind = loop_kind
        self._setting = Setting(
            folder=outputs.folder,
            loop=loop_kind.key,
            options=options,
            all_ranks_command=all_ranks_command,
        )
        self._rank = rank
        self._warn = warn
        self._max_trace_mb = max_trace_mb
        self._keep_windows = keep_windows
        self._has_refused = False
        self._left_out: Counter[str] = Counter()
        self._helper: Helper | None = None
        self._handed_over: dict[int, Path] = {}  # windows without an answer, and their raw traces
        self._analyzed: deque[int] = deque(maxlen=SHOWN_WINDOWS)  # the newest windows whose facts are known
        self._reporter: TraceWork | None = None  # once the loop is over
        self._run_summary: bytes | None = None  # of the newest report
        self.windows: list[Window] = []
        self.trace_notes: dict[int, str] = {}
        self.on_trace: Callable[[Window, Report], None] | None = None

    def raw_path(self, window: Window) -> Path:
        """Where torch writes the trace: beside its place, or in the temporary folder."""
        # torch cannot write to a folder whose name has a line break, or is not UTF-8.
        if self._outputs.folder.path is not None and str(self._outputs.folder.path).isprintable():
            name = Path(self._outputs.folder.trace_name(window))
            path = self._outputs.folder.path / name.with_name(f".{name.stem}")
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
                f"window {window.index} was not recorded: {window.note}."
                f" {self._loop_kind.subject.capitalize()} continues without it"
            )
        self.windows.append(window)  # first: Ctrl-C while its trace is taken must not lose it
        if raw_path is not None:
            self._hand_over(window, raw_path)
        window = self.windows[-1]
        if window.close_ns is not None:
            self.windows[-1] = replace(window, close_ns=window.close_ns + clock() - begin_ns)
        self._list_fewer()

    def _hand_over(self, window: Window, raw_path: Path) -> None:
        """Give the newest window's trace the name of one that is whole; have it packed and analyzed."""
        self.trace_notes[window.index] = (
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
            if reason not in self.trace_notes.values():
                self._warn(f"window {window.index}: {reason}")
            self.trace_notes[window.index] = reason
            self.windows[-1] = _with_note(window, reason)
            return
        if packs:
            self.windows[-1] = replace(window, trace_file=name)
        self.trace_notes[window.index] = f"training was interrupted while its trace was analyzed; {READS_IT}"
        self._handed_over[window.index] = raw_path
        if self._helper is None:
            self._helper = make_helper(self._setting)
        if self._helper.problem:
            self._leave(self._handed_over)
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
        """Take the answers that have come; waits for nothing."""
        helper = self._helper
        if helper is None or not (helper.num_open or self._handed_over):
            return
        for answer in helper.answers():
            self._warn_of(answer)
            if isinstance(answer, TraceAnswer):
                self._take_answer(answer)
        if helper.problem and self._handed_over:
            if helper.problem != INTERRUPTED:
                self._outputs.warn_once(
                    "the helper",
                    f"{self._without_helper}. {self._loop_kind.subject.capitalize()} continues without it",
                )
            self._leave(self._handed_over)

    def wait(self) -> None:
        """Wait until all windows are analyzed; Ctrl-C ends that."""
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
        """Have the report of a loop that runs written, if there is more to say of its windows."""
        if self._helper is not None and archive is not None and not self._helper.problem:
            self._helper.send(ReportTask(run=archive, trace_notes=self.trace_notes))

    def make_report(self, run: Run) -> Report:
        """The report of a loop that is over, written to its files."""
        if self._reporter is None:
            facts = {} if self._helper is None else self._helper.facts()
            self._note_lost(facts)
            self._reporter = TraceWork(self._setting, facts)
        answer = self._reporter.report(
            ReportTask(run=run, trace_notes=self.trace_notes, tag_folder=self._outputs.tag_folder)
        )
        self._warn_of(answer)
        assert answer.report is not None
        self._run_summary = answer.summary
        return answer.report

    def _note_lost(self, facts: Collection[int]) -> None:
        """What these traces say is known to nobody any more: whoever has analyzed them could not tell."""
        lost = [index for index in self._analyzed if index not in facts]
        self.trace_notes |= dict.fromkeys(lost, self._without_helper)
        if lost:
            self._outputs.warn_once("the helper", f"{self._without_helper}. The report doesn't include them")

    def write_run_profile(self, step: int) -> None:
        """Give TensorBoard what the dashboard shows of the newest report."""
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
            self.trace_notes[index] = answer.note
        else:
            self.trace_notes.pop(index, None)
            self._analyzed.append(index)
        if not answer.is_packed:
            self._keep_raw(index, raw_path)
        window = next((one for one in self.windows if one.index == index), None)
        if window is not None and answer.summary is not None:
            self._outputs.write_profile(answer.summary, window.last_step)
        if window is not None and answer.report is not None and self.on_trace is not None:
            self.on_trace(window, answer.report)
        self._remove_old_traces()

    def _leave(self, windows: dict[int, Path]) -> None:
        """Nobody analyzes them any more."""
        assert self._helper is not None
        for index, raw_path in windows.items():
            if self._helper.problem != INTERRUPTED:
                self.trace_notes[index] = self._without_helper
            self._keep_raw(index, raw_path)
        windows.clear()

    def _keep_raw(self, index: int, raw_path: Path) -> None:
        """A trace was not packed, or nobody knows: it stays as it is, where there is a folder for it."""
        directory = self._outputs.folder.path
        if directory is None or raw_path.parent != (directory / TRACES):
            with contextlib.suppress(OSError):
                raw_path.unlink()
        for place, window in enumerate(self.windows):
            if window.index == index and window.trace_file is not None and directory is not None:
                names = (window.trace_file, window.trace_file.removesuffix(".gz"))
                found = next((name for name in names if (directory / name).exists()), None)
                self.windows[place] = replace(window, trace_file=found)

    @property
    def helper_cpu_ns(self) -> int | None:
        """CPU time of who analyzed them beside the training; ``None`` if nobody did, or that is unknown."""
        return None if self._helper is None else self._helper.cpu_ns

    @property
    def notes(self) -> tuple[str, ...]:
        num_left_out = self._left_out.total()
        if not num_left_out:
            return ()
        counts = ", ".join(f"{count:,} {status}" for status, count in self._left_out.items())
        num_newest = len(self.windows) - FIRST_LISTED
        return (
            f"The list shows the first {FIRST_LISTED} and the newest {num_newest} of"
            f" {num_left_out + len(self.windows):,} profiler windows. The rest: {counts}.",
        )

    def _remove_old_traces(self) -> None:
        """The first trace stays, because later ones can be compared with it, and the newest stay."""
        keep = self._keep_windows
        if keep is None:
            return
        saved = [
            place
            for place, window in enumerate(self.windows)
            if window.trace_file is not None and window.index not in self._handed_over
        ]
        for place in saved[1:-keep]:
            window = self.windows[place]
            if window.trace_file is not None and self._outputs.remove_trace(window.trace_file):
                note = (
                    f'its trace was removed (bounds={{"keep_windows": {keep}}} keeps the first and the'
                    f" newest {keep})"
                )
                self.windows[place] = _with_note(replace(window, trace_file=None), note)

    def _list_fewer(self) -> None:
        newest = min(max(NEWEST_LISTED, self._keep_windows or 0), MAX_WINDOWS - FIRST_LISTED)
        while len(self.windows) > FIRST_LISTED + newest:
            window = self.windows.pop(FIRST_LISTED)
            self._left_out[window.status.value.replace("_", " ")] += 1
            self.trace_notes.pop(window.index, None)

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


def _with_note(window: Window, note: str) -> Window:
    return replace(window, note="; ".join(filter(None, (window.note, note))))
