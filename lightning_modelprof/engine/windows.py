"""Windows of a loop: those to record, and those that closed, with the state of their traces."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.agreement import WINDOW, RankAgreement
from lightning_modelprof.engine.budget import USUAL_OPERATORS, Budget
from lightning_modelprof.engine.inspection import Inspection
from lightning_modelprof.engine.loop import Loop, num_prefetched
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.run_folder import TRACES
from lightning_modelprof.engine.step_times import StepTimes
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.window.capture import Capture, WindowOwner
from lightning_modelprof.measure.window.torch_profiler import CaptureOptions
from lightning_modelprof.measure.window.window_plan import WindowPlan
from lightning_modelprof.run.loops import FIT, LoopKind
from lightning_modelprof.run.records import MAX_WINDOWS, Window, WindowStatus
from lightning_modelprof.run.steps import StepTag

FIRST_LISTED: Final = 16
NEWEST_LISTED: Final = 64
"""Limit on the windows that a run lists; one every hundred steps can make a hundred thousand."""


def make_capture(
    config: ProfileConfig, loop: Loop, owner: WindowOwner, clock: HostClock, theirs: Any = None
) -> Capture | None:
    """Make the windows that a configuration requests; ``None`` if it requests none.

    Args:
        theirs: the user's own Lightning profiler.
    """
    recording = recording_ranks(config, loop.world_size)
    if not config.schedule.active or not recording or _is_of_torch(theirs):
        return None
    # Without an optimizer step, ranks don't wait for each other.
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
    """Why a rank records none of the requested windows; ``""`` if it records, or none was requested."""
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
    """Check by name, as lightning and pytorch_lightning each have a PyTorchProfiler."""
    return any(kind.__name__ == "PyTorchProfiler" for kind in type(profiler).__mro__)


def recording_ranks(config: ProfileConfig, world_size: int) -> Collection[int]:
    if isinstance(config.bounds.ranks, str):
        return range(world_size)
    return [rank for rank in config.bounds.ranks if rank < world_size]


class Windows:
    """One rank's windows that closed.

    Args:
        keep: traces to keep on disk in addition to the first; ``None`` means all.

    Attributes:
        listed: the first and the newest of them, in order.
        trace_notes: why traces are missing, by window index.
        warn: called with one sentence.
    """

    def __init__(
        self,
        outputs: Outputs,
        warn: Callable[[str], None],
        loop_kind: LoopKind = FIT,
        *,
        keep: int | None = None,
    ) -> None:
        self._outputs = outputs
        self.warn = warn
        self._loop_kind = loop_kind
        self._keep = keep
        self._has_refused = False
        self._left_out: Counter[str] = Counter()
        self.listed: list[Window] = []
        self.trace_notes: dict[int, str] = {}

    def raw_path(self, window: Window) -> Path:
        """Return where torch writes the trace: next to its final place, or in the temporary folder."""
        # torch can't write to a folder whose name has a line break or isn't UTF-8.
        if self._outputs.folder.path is not None and str(self._outputs.folder.path).isprintable():
            name = Path(self._outputs.folder.trace_name(window))
            path = self._outputs.folder.path / name.with_name(f".{name.stem}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError:
                pass  # the tables still need the trace, and saving it will report the problem
            else:
                return path
        handle = tempfile.NamedTemporaryFile(suffix=".pt.trace.json", delete=False)  # noqa: SIM115
        handle.close()
        return Path(handle.name)

    def add(self, window: Window) -> None:
        if window.status is WindowStatus.REFUSED and not self._has_refused:
            self._has_refused = True
            self.warn(
                f"window {window.index} was not recorded: {window.note}."
                f" {self._loop_kind.subject.capitalize()} continues without it"
            )
        self.listed.append(window)

    def change_newest(self, **changes: Any) -> None:
        self.listed[-1] = replace(self.listed[-1], **changes)

    def note_newest(self, note: str) -> None:
        """Note why the newest window has no trace."""
        window = self.listed[-1]
        self.trace_notes[window.index] = note
        self.listed[-1] = _with_note(window, note)

    def find(self, index: int) -> Window | None:
        """Return the window with that index; ``None`` if it isn't listed."""
        return next((one for one in self.listed if one.index == index), None)

    def list_fewer(self) -> None:
        newest = min(max(NEWEST_LISTED, self._keep or 0), MAX_WINDOWS - FIRST_LISTED)
        while len(self.listed) > FIRST_LISTED + newest:
            window = self.listed.pop(FIRST_LISTED)
            self._left_out[window.status.value.replace("_", " ")] += 1
            self.trace_notes.pop(window.index, None)

    @property
    def notes(self) -> tuple[str, ...]:
        num_left_out = self._left_out.total()
        if not num_left_out:
            return ()
        counts = ", ".join(f"{count:,} {status}" for status, count in self._left_out.items())
        num_newest = len(self.listed) - FIRST_LISTED
        return (
            f"The list shows the first {FIRST_LISTED} and the newest {num_newest} of"
            f" {num_left_out + len(self.listed):,} profiler windows. The rest: {counts}.",
        )

    def keep_raw(self, index: int, raw_path: Path) -> None:
        """Keep a trace that isn't compressed, or may not be, if there's a folder for it."""
        directory = self._outputs.folder.path
        if directory is None or raw_path.parent != (directory / TRACES):
            with contextlib.suppress(OSError):
                raw_path.unlink()
        for place, window in enumerate(self.listed):
            if window.index == index and window.trace_file is not None and directory is not None:
                names = (window.trace_file, window.trace_file.removesuffix(".gz"))
                found = next((name for name in names if (directory / name).exists()), None)
                self.listed[place] = replace(window, trace_file=found)

    def remove_old_traces(self, handed_over: Collection[int]) -> None:
        """Remove all traces but the newest and the first, which later ones can be compared with.

        Args:
            handed_over: windows whose traces aren't compressed yet.
        """
        keep = self._keep
        if keep is None:
            return
        saved = [
            place
            for place, window in enumerate(self.listed)
            if window.trace_file is not None and window.index not in handed_over
        ]
        for place in saved[1:-keep]:
            window = self.listed[place]
            if window.trace_file is not None and self._outputs.remove_trace(window.trace_file):
                note = (
                    f'its trace was removed (bounds={{"keep_windows": {keep}}} keeps the first and the'
                    f" newest {keep})"
                )
                self.listed[place] = _with_note(replace(window, trace_file=None), note)


def _with_note(window: Window, note: str) -> Window:
    return replace(window, note="; ".join(filter(None, (window.note, note))))


class WindowControl:
    """Opens and closes windows between steps."""

    def __init__(
        self,
        capture: Capture,
        steps: StepTimes,
        budget: Budget,
        agreement: RankAgreement,
        *,
        loop: Loop,
        config: ProfileConfig,
    ) -> None:
        self.capture = capture
        self._steps = steps
        self._budget = budget
        self._agreement = agreement
        self._loop = loop
        self._is_asked_for = config.asks_for_window
        # Several ranks instead end at the same batch, on which they agree before training.
        self._stops_loop = config.stop_after_profile and loop.kind.is_fit and loop.world_size == 1

    def must_wait(self, step: int, inspection: Inspection | None) -> bool:
        """Postpone a window that wasn't requested, if there's no time; return whether it did.

        Args:
            inspection: its count predicts the trace's size; ``None`` without.
        """
        if self._is_asked_for or not self.capture.may_wait:
            return False
        sites = None if inspection is None else inspection.cost.sites
        operators = USUAL_OPERATORS if sites is None else sum(line.calls for line in sites.lines)
        cost_ns = self._budget.window_cost_ns(operators)
        wait = self._budget.steps_to_wait(step, cost_ns)
        if inspection is not None and not inspection.steps.is_done:
            wait = max(1, inspection.steps.next_step + 1 - step)
        wait, why = self._agreement.steps_to_wait(WINDOW, step, wait, cost_ns)
        if wait:
            self.capture.plan.postpone(wait, why)
        return wait > 0

    def begin_step(self, step: int) -> StepTag:
        """Open, continue or close a window; return the tags that it gives the step that starts."""
        steps, capture = self._steps, self.capture
        if not capture.is_open:
            steps.live.poll()
            self._budget.begin_window(step)
        tags = capture.begin_step(step)
        steps.ledger.tags |= tags
        if StepTag.PROFILER_STOP in tags:
            self._budget.end_window()
            steps.recorder.drain(step, num_prefetched(self._loop))
        steps.ledger.ranges = capture.ranges
        steps.phase_source.choose_table()
        if capture.plan.is_done and self._stops_loop:
            self._loop.stop()
        return tags
