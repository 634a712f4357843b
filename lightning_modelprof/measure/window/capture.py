"""The torch.profiler window: open, step, close, export, and what is refused.

The schedule is ours (``schedule.py``); torch's profiler (``torch_profiler.py``) does the rest, so that steps
which are neither warm-up nor active cost nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.resources.cpu import CpuReading, cpu_use_between, read_cpu
from lightning_modelprof.measure.window.other_profilers import CLAIM, ENDING, is_profiling_anywhere, watch
from lightning_modelprof.measure.window.schedule import Schedule
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
from lightning_modelprof.run.archive import encode_record
from lightning_modelprof.run.phases import STEP_RANGE_PREFIX, TRACE_METADATA_KEY
from lightning_modelprof.run.records import Window, WindowStatus
from lightning_modelprof.run.steps import StepTag
from lightning_modelprof.threads import has_ended, start_thread
from lightning_modelprof.units import digits

BYTES_PER_MB: Final = 1_000_000


def nothing_known(_begin_ns: int, _end_ns: int) -> Mapping[str, Any]:
    """What a trace is to say of this time, where nobody else measures."""
    return {}


class Capture:
    """Opens and closes the windows of a schedule at step boundaries.

    Args:
        export_path: gives the path that torch writes the raw trace of a window to.
        on_close: called with the window and the raw trace's path (``None`` if there is none) when it closes.
        rank: written into the trace.
        records: whether this rank opens windows; if not, it only tags the steps in which others do.
        max_trace_mb: a window ends early when another step would make its trace larger than this.
        scheduled: tags the steps of the windows of other ranks; ``None`` when there are no others.
        why_not: asked before each window but the first; the reason to leave it out, ``""`` if there is none.
        epoch_step: gives the number of the step that the running epoch began with.
        metadata: what else a trace is to say of a stretch of time, by key; called in a thread of its own,
            while the training thread waits.

    Attributes:
        ranges: set while a window records; the ledger writes phases into it.
        next_step: the next step number at whose start :meth:`begin_step` must be called.
    """

    def __init__(
        self,
        schedule: Schedule,
        options: CaptureOptions,
        *,
        export_path: Callable[[Window], Path],
        on_close: Callable[[Window, Path | None], None],
        clock: HostClock,
        rank: int = 0,
        records: bool = True,
        max_trace_mb: float | None = None,
        scheduled: ScheduledSteps | None = None,
        why_not: Callable[[], str] = str,
        epoch_step: Callable[[], int] = int,
        metadata: Callable[[int, int], Mapping[str, Any]] = nothing_known,
    ) -> None:
        self._schedule = schedule
        self._why_not = why_not
        self._epoch_step = epoch_step
        self._metadata = metadata
        self._options = options
        self._export_path = export_path
        self._on_close = on_close
        self._clock = clock
        self._rank = rank
        self._profiler: Any = None
        self._begun = -1  # what the watch said when ours was prepared or started
        self._cpu_at_start: CpuReading | None = None
        self._step_began_ns = 0
        self._recorded: dict[int, StepMark] = {}
        self._is_closing = False
        self._max_trace_mb = max_trace_mb
        self._size = options.make_size()
        self._scheduled = scheduled
        self._why_late = ""
        self._upcoming = schedule.window(0) if records else None
        if self._upcoming is not None:
            watch.begin()
        self._unwatch = weakref.finalize(self, watch.end) if self._upcoming is not None else _do_nothing
        self.ranges: TraceRanges | None = None
        self.next_step = self._upcoming.first_warmup if self._upcoming else NEVER
        if scheduled is not None:
            self.next_step = sooner(self.next_step, scheduled.next_step)

    @property
    def is_done(self) -> bool:
        """Whether no window is open and none will come, which every rank says at the same step."""
        return self._upcoming is None and (self._scheduled is None or self._scheduled.is_done)

    @property
    def is_open(self) -> bool:
        """Whether a window warms up or records."""
        return self._profiler is not None

    @property
    def may_wait(self) -> bool:
        """Whether no window has begun."""
        upcoming = self._upcoming
        return upcoming is not None and upcoming.index == 0 and not self.is_open

    def postpone(self, steps: int, why: str) -> None:
        """All windows come so many steps later, if the loop lasts; to be called while :attr:`may_wait`.

        Args:
            steps: how many, the same on all ranks.
            why: a clause that says so, for the report of a loop that does not.
        """
        self._why_late = why
        self._schedule = replace(self._schedule, skip_first=self._schedule.skip_first + steps)
        self._upcoming = self._schedule.window(0)
        self.next_step = NEVER if self._upcoming is None else self._upcoming.first_warmup
        if self._scheduled is not None:
            self._scheduled = ScheduledSteps(self._schedule, self._scheduled.lag)
            self.next_step = sooner(self.next_step, self._scheduled.next_step)

    def begin_step(self, step: int) -> StepTag:
        """Step number ``step`` begins; returns the tags that this gives it."""
        tags = self._step_window(step)
        window, scheduled = self._upcoming, self._scheduled
        self.next_step = NEVER if window is None else max(step + 1, window.first_warmup)
        if scheduled is not None:
            if step >= scheduled.next_step != NEVER:
                tags |= scheduled.begin_step(step)
            self.next_step = sooner(self.next_step, scheduled.next_step)
        return tags

    def _step_window(self, step: int) -> StepTag:
        """Open, step or close the window of this rank."""
        tags = StepTag(0)
        if self.ranges is not None:
            if self._records_still():
                self.ranges.close_all()
                mark = (step - 1 - self._epoch_step(), self._step_began_ns, self._clock())
                self._recorded[step - 1] = mark
                self._size.end_step()
            else:
                self._give_up()
                tags |= StepTag.PROFILER_STOP
        elif self._profiler is not None and self._is_replaced():
            self._give_up_warmup()
        if self._upcoming is not None and step > self._upcoming.last:
            self._close(WindowStatus.COMPLETE)
            tags |= StepTag.PROFILER_STOP
        elif self._profiler is not None and CLAIM.is_ending:
            self._close(WindowStatus.PARTIAL if self._recorded else WindowStatus.EMPTY, ENDING)
            tags |= StepTag.PROFILER_STOP
        elif self.ranges is not None and (reason := self._why_full()):
            self._close(WindowStatus.PARTIAL, reason)
            tags |= StepTag.PROFILER_STOP
        window = self._upcoming
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
        """Why not another step is to be recorded, ``""`` if there is room for one."""
        limit, expected = self._max_trace_mb, self._size.with_another_step()
        if limit is None or expected is None or expected <= limit * BYTES_PER_MB:
            return ""
        assert self._upcoming is not None
        num_recorded, num_asked = len(self._recorded), self._upcoming.last - self._upcoming.first + 1
        return (
            f"it ended after {num_recorded} of {num_asked} steps, because another step would have made its"
            f' trace about {digits(expected / BYTES_PER_MB)} MB (bounds={{"max_trace_mb": {limit:g}}})'
        )

    def finish(self, reason: str) -> None:
        """No more steps come: what is open is closed with what it has, what never opened is said so."""
        try:
            self._finish(reason)
        finally:
            self._unwatch()

    def _finish(self, reason: str) -> None:
        self.next_step = NEVER
        if self._upcoming is None:
            return
        if self._is_closing:
            status = WindowStatus.PARTIAL if self._recorded else WindowStatus.EMPTY
            window = self._record(status, f"{reason}, while its trace was being saved")
            self.abandon()
            self._on_close(window, None)
            return
        # With repeat=0 there is always one more window; that it did not come to anything is no news.
        is_asked_for = bool(self._upcoming.index == 0 or self._schedule.repeat)
        if self._profiler is not None and (self._recorded or is_asked_for):
            self._close(WindowStatus.PARTIAL if self._recorded else WindowStatus.EMPTY, reason)
        elif self._profiler is not None:
            self.abandon()
        elif is_asked_for:
            self._on_close(self._record(WindowStatus.NOT_REACHED, self._why_late or reason), None)
        self._upcoming = None

    def abandon(self) -> None:
        """Stop and keep nothing; safe to call at any time."""
        profiler, ranges = self._profiler, self.ranges
        self._profiler = self.ranges = None  # first: it is safe to be interrupted here
        self._upcoming = None
        self.next_step = NEVER
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
        assert self._upcoming is not None
        reason = self._why_not() if self._upcoming.index else ""
        if reason:
            self._on_close(self._record(WindowStatus.SKIPPED, reason), None)
            self._next_window()
            return
        is_waiting = watch.is_one_waiting()
        if reason := CLAIM.take(self):
            self._refuse(reason)
            if CLAIM.is_broken:
                self._upcoming = None
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
        self.ranges = TraceRanges()  # first: what records is ours then, whatever interrupts its start
        watch.warming = None
        try:
            self._profiler.start_trace()
            self._begun = watch.recording = watch.begun
        except (RuntimeError, MemoryError) as error:
            self._begun = watch.begun
            self.ranges = None
            self._throw_away()
            self._refuse_after(error, "torch.profiler couldn't be started")
            return
        self._size.begin()

    def _refuse(self, reason: str) -> None:
        self._give_back()
        self._on_close(self._record(WindowStatus.REFUSED, reason), None)
        self._next_window()

    def _refuse_after(self, error: Exception, what: str) -> None:
        """Refuse the window that failed. If torch ran out of memory, no other one comes in this process."""
        if not is_out_of_memory(error):
            self._refuse(f"{what}: {error}")
            return
        self._break_off()
        self._refuse(f"{what}, because memory ran out; no more windows are recorded")
        self._upcoming = None

    def _break_off(self) -> None:
        CLAIM.is_broken = True
        if not self._is_replaced():
            force_stop()

    def _is_replaced(self) -> bool:
        """Whether another profiler was prepared or started since ours was, which ended ours."""
        return watch.begun != self._begun

    def _records_still(self) -> bool:
        return is_profiling() and not self._is_replaced()

    def _give_up_warmup(self) -> None:
        """Starting ours as well, even where the other one has gone again, would crash the process."""
        self._throw_away()
        self._refuse("another torch profiler started recording during this window's warm-up")

    def _give_up(self) -> None:
        """Another profiler came while ours recorded, and took our recording with it."""
        self._throw_away()
        if self.ranges is not None:
            self.ranges.close_all()
            self.ranges = None
        self._recorded = {}  # what torch still has of them is not to be trusted, and crashes on export
        self._refuse("another torch profiler ran during this window and ended its recording")

    def _close(self, status: WindowStatus, reason: str = "") -> None:
        """Stop, export and hand over the window that is open."""
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
            ranges.close_all()  # what follows is in nobody's phase
            metadata = {
                "rank": self._rank,
                "window": window.index,
                "recorded_steps": list(self._recorded),
                "step_marks": list(self._recorded.values()),
                **self._noted(),
            }
            # torch writes only what it is told before it stops.
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
        self._on_close(replace(window, close_ns=self._clock() - begin_ns), path)

    def _let_go(self) -> None:
        """No window is open, and none is being closed."""
        self._profiler = self.ranges = None
        self._is_closing = False
        self._give_back()

    def _throw_away(self) -> None:
        """Whoever looks for a profiler that waits to be started must not find ours."""
        profiler, self._profiler = self._profiler, None
        watch.warming = None
        if profiler is not None:
            free(profiler)

    def _give_back(self) -> None:
        watch.leave(self._begun)
        CLAIM.give_back(self)

    def _export(self, profiler: Any, window: Window) -> Path:
        """Let torch write the trace; one that is not whole is removed."""
        path = self._export_path(window)
        try:
            profiler.export_chrome_trace(str(path))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        with contextlib.suppress(OSError):  # whoever reads the trace says what is wrong with it
            self._size.learn(path.stat().st_size)
        return path

    def _noted(self) -> dict[str, Any]:
        """CPU times since the window started, ``None`` if they could not be read; what others know of it.

        Read by a thread of its own: with stacks, torch would record each of the many Python calls, but only
        in threads that there were when it started.
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
                noted.update(self._metadata(since_ns, self._clock()))

        with contextlib.suppress(RuntimeError):  # the system has no more threads
            is_late = not has_ended(start_thread(read, "modelprof-cpu"))
        return dict(noted)

    def _record(self, status: WindowStatus, note: str = "") -> Window:
        assert self._upcoming is not None
        return Window(
            index=self._upcoming.index,
            first_step=self._upcoming.first,
            last_step=self._upcoming.last,
            recorded_steps=tuple(self._recorded),
            status=status,
            note=note,
        )

    def _next_window(self) -> None:
        assert self._upcoming is not None
        self._upcoming = self._schedule.window(self._upcoming.index + 1)
        self._recorded = {}


def _do_nothing() -> None:
    """There is no watch to end."""


StepMark = tuple[int, int, int]
"""Of a recorded step: its number in the epoch, and the clock just after its range in the trace was opened and
just after it was closed. So times by that clock can be told on the trace's."""


NEVER: Final = -1
"""A step number that does not come."""


def sooner(one: int, other: int) -> int:
    """The step number that comes first."""
    return max(one, other) if NEVER in (one, other) else min(one, other)


class ScheduledSteps:
    """Tags steps by a schedule, as the ranks that profile do when nothing comes between.

    Args:
        lag: steps that a rank may be ahead of one that profiles, because none of them has a collective: while
            gradients accumulate. So many steps later it may be that it waits for the closing of a window.

    Attributes:
        next_step: the next step number at whose start :meth:`begin_step` must be called.
    """

    def __init__(self, schedule: Schedule, lag: int = 0) -> None:
        self._schedule = schedule
        self.lag = lag
        self._upcoming = schedule.window(0)
        self._last_late = NEVER
        self.next_step = self._upcoming.first_warmup if self._upcoming else NEVER

    @property
    def is_done(self) -> bool:
        """Whether no window is open and none will come, on any rank."""
        return self._upcoming is None

    def begin_step(self, step: int) -> StepTag:
        tags = StepTag(0)
        if self._upcoming is not None and step > self._upcoming.last:
            self._last_late = step + self.lag
            self._upcoming = self._schedule.window(self._upcoming.index + 1)
        if step <= self._last_late:
            tags |= StepTag.PROFILER_STOP
        window = self._upcoming
        if window is not None and step >= window.first_warmup:
            tags |= StepTag.PROFILED if step >= window.first else StepTag.PROFILER_WARMUP
        self.next_step = NEVER if window is None else max(step + 1, window.first_warmup)
        if step < self._last_late:
            self.next_step = step + 1
        return tags
