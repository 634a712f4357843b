"""The torch.profiler window: opens, steps, closes and exports it, or refuses to.

The schedule is ours (``schedule.py``); torch's profiler (``torch_profiler.py``) does the rest, so that steps
which are neither warm-up nor active cost nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.resources.cpu import CpuReading, cpu_use_between, read_cpu
from lightning_modelprof.measure.window.other_profilers import CLAIM, ENDING, is_profiling_anywhere, watch
from lightning_modelprof.measure.window.torch_profiler import (
    CaptureOptions,
    TraceRanges,
    force_stop,
    free,
    is_out_of_memory,
    is_profiling,
    prepare,
    stop,
)
from lightning_modelprof.measure.window.window_plan import WindowPlan
from lightning_modelprof.run.archive import encode_record
from lightning_modelprof.run.phases import STEP_RANGE_PREFIX, TRACE_METADATA_KEY
from lightning_modelprof.run.records import Window, WindowStatus
from lightning_modelprof.run.steps import StepTag
from lightning_modelprof.threads import has_ended, start_thread
from lightning_modelprof.units import digits

BYTES_PER_MB: Final = 1_000_000


class WindowOwner(Protocol):
    """The owner of the windows.

    Attributes:
        rank: written into the traces.
        epoch_step: first step of the running epoch.
    """

    @property
    def rank(self) -> int: ...

    @property
    def epoch_step(self) -> int: ...

    def why_no_window(self) -> str:
        """Return why to skip the next window, ``""`` for no reason; called before each one but the first."""

    def raw_path(self, window: Window) -> Path:
        """Return where torch writes the raw trace."""

    def trace_metadata(self, begin_ns: int, end_ns: int) -> Mapping[str, Any]:
        """Return additional trace metadata for a time span, by key.

        Called in a separate thread, while the training thread waits.
        """

    def take_window(self, window: Window, raw_path: Path | None) -> None:
        """Take a closed window; ``raw_path`` is ``None`` without a raw trace."""


class Capture:
    """Opens and closes windows at step boundaries.

    Attributes:
        plan: schedules the windows.
        ranges: set while a window records; the ledger writes phases into it.
    """

    def __init__(
        self, plan: WindowPlan, options: CaptureOptions, owner: WindowOwner, clock: HostClock
    ) -> None:
        self.plan = plan
        self._options = options
        self._owner = owner
        self._clock = clock
        self._profiler: Any = None
        self._begun = -1  # the watch's count when our profiler was prepared or started
        self._cpu_at_start: CpuReading | None = None
        self._step_began_ns = 0
        self._recorded: dict[int, StepMark] = {}
        self._is_closing = False
        self._size = options.make_size()
        if plan.upcoming is not None:
            watch.begin()
        self._unwatch = weakref.finalize(self, watch.end) if plan.upcoming is not None else _do_nothing
        self.ranges: TraceRanges | None = None

    @property
    def is_open(self) -> bool:
        return self._profiler is not None

    @property
    def may_wait(self) -> bool:
        """Whether no window has started."""
        return self.plan.is_first and not self.is_open

    def begin_step(self, step: int) -> StepTag:
        """Start step number ``step`` of the plan; returns its tags."""
        return self._step_window(step) | self.plan.begin_step(step)

    def _step_window(self, step: int) -> StepTag:
        tags = StepTag(0)
        if self.ranges is not None:
            if self._records_still():
                self.ranges.close_all()
                mark = (step - 1 - self._owner.epoch_step, self._step_began_ns, self._clock())
                self._recorded[step - 1] = mark
                self._size.end_step()
            else:
                self._give_up()
                tags |= StepTag.PROFILER_STOP
        elif self._profiler is not None and self._is_replaced():
            self._give_up_warmup()
        if self.plan.upcoming is not None and step > self.plan.upcoming.last:
            self._close(WindowStatus.COMPLETE)
            tags |= StepTag.PROFILER_STOP
        elif self._profiler is not None and CLAIM.is_ending:
            self._close(WindowStatus.PARTIAL if self._recorded else WindowStatus.EMPTY, ENDING)
            tags |= StepTag.PROFILER_STOP
        elif self.ranges is not None and (reason := self._why_full()):
            self._close(WindowStatus.PARTIAL, reason)
            tags |= StepTag.PROFILER_STOP
        window = self.plan.upcoming
        if window is not None and window.first_warmup <= step <= window.last:
            if self._profiler is None:
                self._prepare()
            if step == window.first and self._profiler is not None:
                self._start()
        if self.ranges is not None:
            self.ranges.open(f"{STEP_RANGE_PREFIX}{step}")
            self._step_began_ns = self._clock()
            tags |= StepTag.PROFILED
        elif self._profiler is not None:
            tags |= StepTag.PROFILER_WARMUP
        return tags

    def _why_full(self) -> str:
        """Return why no further step can be recorded, ``""`` if there's room for one."""
        limit, expected = self._options.max_trace_mb, self._size.with_another_step()
        if limit is None or expected is None or expected <= limit * BYTES_PER_MB:
            return ""
        assert self.plan.upcoming is not None
        num_recorded, num_asked = len(self._recorded), self.plan.upcoming.last - self.plan.upcoming.first + 1
        return (
            f"it ended after {num_recorded} of {num_asked} steps, because another step would have made its"
            f' trace about {digits(expected / BYTES_PER_MB)} MB (bounds={{"max_trace_mb": {limit:g}}})'
        )

    def finish(self, reason: str) -> None:
        """Close an open window with what it has, and report one that never opened."""
        try:
            self._finish(reason)
        finally:
            self._unwatch()

    def _finish(self, reason: str) -> None:
        self.plan.end()
        if self.plan.upcoming is None:
            return
        if self._is_closing:
            status = WindowStatus.PARTIAL if self._recorded else WindowStatus.EMPTY
            window = self._record(status, f"{reason}, while its trace was being saved")
            self.abandon()
            self._owner.take_window(window, None)
            return
        is_asked_for = self.plan.is_asked_for
        if self._profiler is not None and (self._recorded or is_asked_for):
            self._close(WindowStatus.PARTIAL if self._recorded else WindowStatus.EMPTY, reason)
        elif self._profiler is not None:
            self.abandon()
        elif is_asked_for:
            self._owner.take_window(
                self._record(WindowStatus.NOT_REACHED, self.plan.why_late or reason), None
            )
        self.plan.leave_rest()

    def abandon(self) -> None:
        """Stop and discard everything; safe to call at any time."""
        profiler, ranges = self._profiler, self.ranges
        self._profiler = self.ranges = None  # first: an interruption here is safe
        self.plan.leave_rest()
        self.plan.end()
        self._unwatch()
        watch.warming = None
        try:
            if profiler is not None and not self._is_replaced():
                stop(profiler, ranges)
            elif ranges is not None:
                ranges.close_all()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._break_off()
        finally:
            if profiler is not None:
                free(profiler)
            self._let_go()

    def _prepare(self) -> None:
        reason = "" if self.plan.is_first else self._owner.why_no_window()
        if reason:
            self._owner.take_window(self._record(WindowStatus.SKIPPED, reason), None)
            self._next_window()
            return
        is_waiting = watch.is_one_waiting()
        if reason := CLAIM.take(self):
            self._refuse(reason)
            if CLAIM.is_broken:
                self.plan.leave_rest()
            return
        if is_waiting:
            self._let_go()
            self._refuse("another torch profiler was warming up when this window should have opened")
            return
        profiler: Any = None
        try:
            profiler = self._options.make_profiler()
            prepare(profiler)
        except (RuntimeError, MemoryError) as error:
            self._begun = watch.begun
            if profiler is not None:
                free(profiler)
            self._refuse_after(error, "torch.profiler couldn't be prepared")
            return
        self._begun = watch.begun
        watch.warming = (self._begun, partial(stop, profiler, None))
        self._profiler = profiler
        self._recorded = {}

    def _start(self) -> None:
        if is_profiling_anywhere():
            self._give_up_warmup()
            return
        self._cpu_at_start = read_cpu()
        self.ranges = TraceRanges()  # first: the recording is then ours, whatever interrupts its start
        watch.warming = None
        try:
            self._profiler.start_trace()
            self._begun = watch.begun
            watch.recording = self._begun, self.ranges.end
        except (RuntimeError, MemoryError) as error:
            self._begun = watch.begun
            self.ranges = None
            self._throw_away()
            self._refuse_after(error, "torch.profiler couldn't be started")
            return
        self._size.begin()

    def _refuse(self, reason: str) -> None:
        self._give_back()
        self._owner.take_window(self._record(WindowStatus.REFUSED, reason), None)
        self._next_window()

    def _refuse_after(self, error: Exception, what: str) -> None:
        """Refuse the failed window; if torch ran out of memory, this process opens no more windows."""
        if not is_out_of_memory(error):
            self._refuse(f"{what}: {error}")
            return
        self._break_off()
        self._refuse(f"{what}, because memory ran out; no more windows are recorded")
        self.plan.leave_rest()

    def _break_off(self) -> None:
        CLAIM.is_broken = True
        if not self._is_replaced():
            force_stop()

    def _is_replaced(self) -> bool:
        """Whether another profiler was prepared or started since, which ended ours."""
        return watch.begun != self._begun

    def _records_still(self) -> bool:
        return is_profiling() and not self._is_replaced()

    def _give_up_warmup(self) -> None:
        """Refuse the window: starting it, even after the other profiler ended, would crash the process."""
        self._throw_away()
        self._refuse("another torch profiler started recording during this window's warm-up")

    def _give_up(self) -> None:
        """Refuse the window: another profiler started and destroyed our recording."""
        self._throw_away()
        if self.ranges is not None:
            self.ranges.close_all()
            self.ranges = None
        self._recorded = {}  # torch's remaining data on them is unreliable, and crashes on export
        self._refuse("another torch profiler ran during this window and ended its recording")

    def _close(self, status: WindowStatus, reason: str = "") -> None:
        if self.ranges is not None and not self._records_still():
            self._give_up()
            return
        if self.ranges is None and self._is_replaced():
            self._give_up_warmup()
            return
        begin_ns = self._clock()
        profiler, ranges = self._profiler, self.ranges
        window = self._record(status, reason)
        self._is_closing = True  # an interruption leaves the profiler for abandon() to stop
        if ranges is None:
            self._profiler = None  # a warm-up must not be ended twice
        else:
            ranges.close_all()  # what follows is in no phase
            metadata = {
                "rank": self._owner.rank,
                "window": window.index,
                "recorded_steps": list(self._recorded),
                "step_marks": list(self._recorded.values()),
                **self._noted(),
            }
            # torch writes only metadata that it gets before it stops.
            profiler.add_metadata_json(TRACE_METADATA_KEY, encode_record(metadata).decode())
        path: Path | None = None
        watch.warming = None
        try:
            stop(profiler, ranges)
            if ranges is not None and self._recorded:
                path = self._export(profiler, window)
        except (RuntimeError, OSError, MemoryError) as error:
            is_place = isinstance(error, OSError)
            what = "there is no place for its trace" if is_place else "torch.profiler couldn't be stopped"
            free(profiler)
            self._let_go()
            self._refuse_after(error, what)
            return
        free(profiler)
        self._next_window()
        self._let_go()
        self._owner.take_window(replace(window, close_ns=self._clock() - begin_ns), path)

    def _let_go(self) -> None:
        self._profiler = self.ranges = None
        self._is_closing = False
        self._give_back()

    def _throw_away(self) -> None:
        """Discard our profiler, so that it isn't found waiting to start."""
        profiler, self._profiler = self._profiler, None
        watch.warming = None
        if profiler is not None:
            free(profiler)

    def _give_back(self) -> None:
        watch.leave(self._begun)
        CLAIM.give_back(self)

    def _export(self, profiler: Any, window: Window) -> Path:
        path = self._owner.raw_path(window)
        try:
            profiler.export_chrome_trace(str(path))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        with contextlib.suppress(OSError):  # readers of the trace report what is wrong with it
            self._size.learn(path.stat().st_size)
        return path

    def _noted(self) -> dict[str, Any]:
        """Return CPU times since the window's start, ``None`` if unreadable, and the owner's metadata.

        A separate thread reads them: with stacks, torch would record each of the many Python calls, but only
        in threads that existed at its start.
        """
        start, self._cpu_at_start = self._cpu_at_start, None
        noted: dict[str, Any] = {"cpu": None}
        is_late = False
        since_ns = min((begin_ns for _, begin_ns, _ in self._recorded.values()), default=None)

        def read() -> None:
            stop = read_cpu()
            if start is not None and stop is not None:
                noted["cpu"] = cpu_use_between(start, stop)
            if not is_late and since_ns is not None:
                noted.update(self._owner.trace_metadata(since_ns, self._clock()))

        with contextlib.suppress(RuntimeError):  # the system has no more threads
            is_late = not has_ended(start_thread(read, "modelprof-cpu"))
        return dict(noted)

    def _record(self, status: WindowStatus, note: str = "") -> Window:
        assert self.plan.upcoming is not None
        return Window(
            index=self.plan.upcoming.index,
            first_step=self.plan.upcoming.first,
            last_step=self.plan.upcoming.last,
            recorded_steps=tuple(self._recorded),
            status=status,
            note=note,
        )

    def _next_window(self) -> None:
        self.plan.next_window()
        self._recorded = {}


def _do_nothing() -> None: ...


StepMark = tuple[int, int, int]
"""Number of a recorded step within its epoch, and the clock right after its range in the trace opened and
right after it closed. They map that clock's times to the trace's."""
