"""One loop, from the first step to the report: its instruments put together.

Who runs the loop is a :class:`Loop`. All that is changed on a trainer or a model is undone by
:meth:`LoopSession.close`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Final

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.inspection_plan import steps_to_skip
from lightning_modelprof.engine.instrument import Instrument, record_fields, trace_metadata
from lightning_modelprof.engine.instruments import Instruments, Sampling, early_instruments, make_instruments
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.step_boundaries import Announcements, SaveTimer, StepBoundaries
from lightning_modelprof.engine.step_timing import StepTiming
from lightning_modelprof.engine.windows import why_no_window
from lightning_modelprof.errors import describe_error
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.setup.training_setup import finish_setup
from lightning_modelprof.measure.window.other_profilers import CLAIM
from lightning_modelprof.report.model import Report, Status
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.ranks import pack_rank_steps, rank_steps, side_by_side
from lightning_modelprof.run.records import OutsideLoop, RankRecord, Run, Window
from lightning_modelprof.run.steps import NOT_MEASURED
from lightning_modelprof.show.progress import show_waiting

REPORT_AFTER_NS: Final = 10_000_000_000
"""A loop that has run for less has its report when it ends, and no process is started for that alone."""


def _nothing() -> None:
    pass


class LoopSession:
    """Measures one fit, or one evaluation loop.

    Args:
        loop: who runs the loop; its phase source is in place until :meth:`close`.
        guard: runs a function of ours so that an error in it cannot reach the loop.
        on_missed_end: called when the loop has ended and Lightning won't call our callback.

    Attributes:
        thread: number of the thread in which the loop runs.
        is_armed: whether the loop has begun.
        is_finished: whether it has ended.
        is_first: whether this rank reports for all; known when the loop begins.
        announcements: of the first of several ranks; ``None`` where they cannot talk.
        failure: the status of a loop of whose end our callback is not told.
        message: to the first rank; ``None`` before the loop has ended well.
        on_trace_ready: the user's, who wants the trace of each window and the report of it.
        run: the newest facts that were saved or reported; ``None`` before the first.
        report: of the loop that has ended; ``None`` before.
    """

    def __init__(
        self,
        config: ProfileConfig,
        loop: Loop,
        *,
        clock: HostClock,
        warn: Callable[[str], None],
        guard: Callable[[Callable[[], None]], None],
        on_missed_end: Callable[[], None],
        samples_note: Callable[[], str],
    ) -> None:
        self._config = config
        self._loop = loop
        self.thread = threading.get_ident()
        self._clock = clock
        self._warn = warn
        self._samples_note = samples_note
        self._timing = StepTiming(
            config,
            loop,
            clock=clock,
            on_boundary=lambda: guard(self._on_boundary),
            on_failure=lambda: guard(self._stop_early),
            on_missed_end=on_missed_end,
        )
        self.ledger, self.phase_source, self.live = (
            self._timing.ledger,
            self._timing.phase_source,
            self._timing.live,
        )
        self._instruments: Instruments | None = None
        self._boundaries: StepBoundaries | None = None
        self._began_s = 0.0
        self._armed_ns = 0
        self._is_report_due = False  # a window has closed since the last one
        self.failure, self._waits = "failed", False
        self._notes: list[str] = []
        self._ended_ns = self._waited_ns = 0  # after the loop: when our work began, and how long it took
        self._waiting = ExitStack()
        self._saves = SaveTimer(clock)
        self._cleanup = ExitStack()
        self._cleanup.callback(self._uninstall)
        self._others = early_instruments(config, loop, self._cleanup)
        self.is_armed = self.is_finished = self._is_reported = self._is_unsaved = False
        self.is_first = loop.is_first
        self.announcements: Announcements | None = None
        self.message: bytes | None = None
        self.on_trace_ready: Callable[[Path | None, Report], None] | None = None
        self.run: Run | None = None
        self.report: Report | None = None

    # Life

    def arm(self, directory: Path | None, why_there: str = "", check: Callable[[], None] = _nothing) -> None:
        """The loop begins.

        Args:
            directory: claimed for files; ``None`` writes none.
            why_there: why it is not beside the run; ``""`` where it is.
            check: called when the first step has ended.
        """
        loop, config, timing = self._loop, self._config, self._timing
        for one in self._others:
            one.begin()
        self._began_s, self._armed_ns = time.time(), self._clock()
        timing.skip(steps_to_skip(config, loop.num_steps))
        instruments = self._instruments = make_instruments(
            config,
            loop,
            timing,
            directory=directory,
            is_first=self.is_first,
            owner=self,
            clock=self._clock,
            warn=self._warn,
            cleanup=self._cleanup,
        )
        if why_there and directory is not None:
            self._warn_and_note(f"{why_there}. Files go to {directory}")
        no_window = why_no_window(config, loop.rank, loop.world_size, self.phase_source.inner)
        if no_window and instruments.capture is None:
            self._warn_and_note(no_window)
        elif no_window:
            self._notes.append(f"{no_window}.")
        self._boundaries = StepBoundaries(
            config,
            loop,
            timing,
            instruments,
            check=check,
            saves=self._saves,
            save=self._save,
            clock=self._clock,
            announcements=self.announcements,
        )
        loop.begin(self.phase_source, self.ledger, self._cleanup)
        timing.slow.start()
        timing.ledger.cpu.start()
        self._cleanup.callback(timing.slow.stop)
        self.phase_source.arm()
        self.is_armed = True
        self._saves.save(self._save)
        if self.on_trace_ready is not None:
            instruments.results.on_trace = self._call_on_trace_ready
        if config.inspect.sampling:
            sampling = instruments.sampling = Sampling(
                self.ledger, loop.module, instruments.memory, self._clock
            )
            self._cleanup.callback(sampling.pause)
            self._others.append(sampling)
            sampling.resume()

    def note(self, sentence: str) -> None:
        """Say it in the report, once."""
        if sentence not in self._notes:
            self._notes.append(sentence)

    def note_exception(self, exception: BaseException) -> None:
        """An exception ends the loop; to be called before :meth:`stop`. Never raises."""
        if self._instruments is not None:
            self._instruments.memory.on_exception(exception, self.ledger.steps_ended)

    def stop(self, status: str) -> None:
        """The loop is over: close the window and take our parts out.

        Args:
            status: for the report: ``finished``, ``interrupted`` or ``failed``.
        """
        self._ended_ns = self._clock()
        if self.is_finished:
            return
        self.is_finished = True
        instruments = self._instruments
        if instruments is not None:
            if instruments.sampling is not None:
                instruments.sampling.pause()
            instruments.setup = finish_setup(instruments.setup, self._loop, self._began_s)
            if self.is_armed and instruments.capture is not None:
                ways = {"finished": "ended", "interrupted": "was interrupted"}
                instruments.capture.finish(f"{self._loop.kind.subject} {ways.get(status, 'failed')} first")
                self.ledger.ranges = None
        self.close()
        if self._timing.device is not None:
            if status == "finished":
                self._timing.device.finish()
            self._timing.device.close()
        self._ended_ns = self._clock()  # until here it is in the phase Profiler
        self.live.flush()
        self._timing.slow.look(self.ledger.step_end_ns)
        if instruments is not None:
            self.ledger.cpu.stop(has_workers=any(one.num_workers for one in instruments.setup.loaders))
        if self.is_armed and status == "finished" and self._loop.world_size > 1:
            self.message = pack_rank_steps(rank_steps(self._make_run(status)))

    def finish(
        self,
        status: str,
        messages: Mapping[int, bytes],
        absent: Mapping[int, str],
        *,
        is_brief: Callable[[], bool] = bool,
        on_report: Callable[[Outputs, Run, Report], None] | None = None,
    ) -> None:
        """Report, after :meth:`stop`; does nothing the second time.

        Args:
            heard: rank → its message, of the other ranks.
            absent: rank → why there is none.
            is_brief: whether a line is printed in the report's place.
            on_report: is given what was reported.
        """
        instruments = self._instruments
        if instruments is None or not self.is_armed or self._is_reported:
            return
        self._is_reported = True
        with ExitStack() as stack:
            stack.callback(instruments.results.close)
            stack.callback(self._waiting.close)
            stack.callback(self._conclude, instruments, status, (messages, absent), is_brief, on_report)
            if instruments.outputs.has_terminal:
                self._waiting.enter_context(show_waiting("lightning-modelprof: making the report"))
            instruments.results.wait()  # Ctrl-C costs what the traces say, and no more

    def _conclude(
        self,
        instruments: Instruments,
        status: str,
        others: tuple[Mapping[int, bytes], Mapping[int, str]],
        is_brief: Callable[[], bool],
        on_report: Callable[[Outputs, Run, Report], None] | None,
    ) -> None:
        run = self._make_run(status)
        if any(others):
            run = side_by_side(run, *others)
        report, step = self._report(run), self._loop.logger_step
        self._waited_ns = self._report_wait_ns()
        self._waiting.close()
        has_nothing = not self.ledger.steps_ended and not any(
            one.status is Status.FOUND for one in report.findings
        )
        instruments.outputs.show_report(
            report, step, is_brief=bool(self._config.report.terminal) and (has_nothing or is_brief())
        )
        instruments.results.write_run_profile(step)
        if self.is_first and on_report is not None:
            on_report(instruments.outputs, run, report)
        if status != "finished":
            self.print_report()
        if self._boundaries is not None:
            self._boundaries.log_last()  # last: the user's loggers may take long

    def add_outside_times(self) -> None:
        """What comes after the loop is over, too: save the run and its report with it."""
        run = self.run
        if run is not None and self._is_reported:
            record = replace(run.ranks[0], around=self._loop.outside_times(), report_wait_ns=self._waited_ns)
            self._report(replace(run, ranks=(record,)))

    def print_report(self) -> None:
        """Print what was reported, if that was not done yet."""
        if self._instruments is not None:
            self._instruments.outputs.print_report(self._loop.progress_bar)

    def close(self) -> None:
        """Undo every change made to the trainer; safe to call at any time and more than once."""
        with self._cleanup:  # whatever fails, the rest is undone
            instruments = self._instruments
            if instruments is not None and instruments.capture is not None:
                self._cleanup.callback(instruments.capture.abandon)
            if instruments is not None and instruments.inspection is not None:
                self._cleanup.callback(instruments.inspection.close)
            if self._timing.repeated is not None:
                self._cleanup.callback(self._timing.repeated.close)
            self.ledger.ranges = self.ledger.inspection = self.ledger.repeated = None

    def _uninstall(self) -> None:
        if self._waits:  # the delegate measures no more, and hears whether other callbacks raise
            self.phase_source.disarm()
        else:
            self._loop.take_out(self.phase_source)

    def _stop_early(self) -> None:
        """An exception ended the loop, and another callback hears of it first: it may end the process."""
        if self.is_finished or not self.is_armed or self._instruments is None:
            return
        # Callbacks are told while the exception is being handled.
        exception = sys.exc_info()[1]
        if exception is not None:
            self.note_exception(exception)
        self.failure = end_status(exception)
        self._waits = True
        try:
            self.stop(self.failure)
        finally:
            self._waits = False
            self._cleanup.callback(self._uninstall)
        self.run = self._make_run(self.failure)
        self._instruments.outputs.save_run(self.run)

    def abort(self) -> None:
        """Something of ours failed: undo every change and save what was measured until now."""
        self.is_finished = True
        self.close()
        if self.is_armed and self._instruments is not None:
            self._notes.append(
                f"An internal error stopped the profiler before {self._loop.kind.subject} ended."
            )
            self._is_unsaved = True
            self.save_aborted()
        if self._instruments is not None:
            self._instruments.results.close()

    def save_aborted(self) -> None:
        """After :meth:`abort`: save again if that failed, as what was missing then may be back."""
        if self._is_unsaved and self._instruments is not None:
            if self.run is None or self.run.info.status != "aborted":
                self.run = self._make_run("aborted")
            self._is_unsaved = not self._instruments.outputs.save_run(self.run)

    # While the loop runs

    def _on_boundary(self) -> None:
        if self._boundaries is not None and self._instruments is not None:
            self._instruments.results.poll()
            for one in self._others:
                one.poll()
            self._boundaries.begin_step()

    def meet_size(self, size: int) -> None:
        """The running step's batch has another size than the one before."""
        if self._boundaries is not None:
            self._boundaries.meet_size(size)

    # As the owner of windows

    @property
    def rank(self) -> int:
        return self._loop.rank

    @property
    def epoch_step(self) -> int:
        return self.ledger.epoch_step

    def trace_metadata(self, begin_ns: int, end_ns: int) -> Mapping[str, Any]:
        return trace_metadata(self._others, begin_ns, end_ns)

    def raw_path(self, window: Window) -> Path:
        assert self._instruments is not None
        return self._instruments.results.raw_path(window)

    def why_no_window(self) -> str:
        if self._config.bounds.max_overhead is None:
            return ""
        self.live.poll()
        return self._timing.budget.why_no_window(self._clock() - self.ledger.step_end_ns)

    def take_window(self, window: Window, raw_path: Path | None) -> None:
        assert self._instruments is not None
        results = self._instruments.results
        results.add(window, raw_path, self._clock)
        self._is_report_due = True
        if window.recorded_steps:
            self._timing.budget.add_window(results.windows[-1].close_ns or 0)
        if len(results.windows) == 1:
            self._saves.next_ns = 0  # at the same boundary: now there is something to look at
        if CLAIM.is_ending and not self.is_finished:
            self._save()
            CLAIM.rest()

    def _call_on_trace_ready(self, window: Window, report: Report) -> None:
        assert self._instruments is not None
        assert self.on_trace_ready is not None
        folder = self._instruments.outputs.directory
        path = folder / window.trace_file if folder is not None and window.trace_file else None
        try:
            self.on_trace_ready(path, report)
        except Exception as error:  # the user's own
            self._warn(f"on_trace_ready raised {describe_error(error)}")

    # Results

    def _warn_and_note(self, message: str) -> None:
        """Warn, and say the same in the report."""
        self._warn(message)
        self._notes.append(message[0].upper() + message[1:] + ".")

    def _make_run(self, status: str) -> Run:
        assert self._instruments is not None
        record = make_rank_record(
            self._loop.rank,
            self._timing,
            self._instruments,
            samples_note=self._samples_note(),
            notes=self._notes,
            around=self._loop.outside_times(),
            others=self._others,
        )
        if self._is_reported:
            record = replace(record, report_wait_ns=self._report_wait_ns())
        return Run(info=replace(self._instruments.info, status=status), ranks=(record,))

    def _report_wait_ns(self) -> int:
        return max(0, int(self._clock() - self._ended_ns))

    def _save(self) -> None:
        """Save what was measured until now, and ask for a report where a window has closed since the last."""
        assert self._instruments is not None
        outputs = self._instruments.outputs
        self.run = self._make_run("running")
        is_saved = outputs.save_run(self.run)
        # A program that ends while another thread trains may give it no other time.
        if is_saved and self._is_report_due and (CLAIM.is_ending or self._has_run_long):
            self._is_report_due = False
            self._instruments.results.ask_for_report(outputs.archive)

    @property
    def _has_run_long(self) -> bool:
        return self._clock() - self._armed_ns >= REPORT_AFTER_NS

    def _report(self, run: Run) -> Report:
        assert self._instruments is not None
        self.run = run
        self._instruments.outputs.save_run(run)
        self.report = self._instruments.results.make_report(run)
        return self.report


def end_status(exception: BaseException | None) -> str:
    """How a loop ends that an exception ends; Lightning makes SIGTERM a kind of SystemExit."""
    return "interrupted" if isinstance(exception, KeyboardInterrupt | SystemExit) else "failed"


def make_rank_record(
    rank: int,
    timing: StepTiming,
    instruments: Instruments,
    *,
    samples_note: str,
    notes: Iterable[str],
    around: OutsideLoop | None = None,
    others: Sequence[Instrument] = (),
) -> RankRecord:
    """The record of a loop that runs or has ended."""
    device, inspection = timing.device, instruments.inspection
    notes = [*notes, *instruments.results.notes]
    if device is not None:
        device.collect()
        if device.num_given_up:
            notes.append(f"{device.num_given_up} steps have no device time: it couldn't be read.")
        if device.num_unmarked:
            notes.append(
                f"{device.num_unmarked:,} of {timing.recorder.num_steps:,} steps have no device time, because"
                " timing every step would slow down training."
            )
    if timing.ledger.validation.has_given_up:
        notes.append("The device time of validation's parts couldn't be read.")
    return RankRecord(
        rank=rank,
        steps=timing.recorder.steps(),
        totals=timing.recorder.totals(),
        outside_ns={
            phase.key: int(time)
            for phase, time in zip(PHASES, timing.ledger.outside_ns, strict=True)
            if time not in (0, NOT_MEASURED) and isfinite(time)  # a clock may fail
        },
        around=around,
        validation=timing.ledger.validation.times(),
        unfinished_steps=timing.ledger.unfinished_steps,
        callbacks=timing.phase_source.callback_times(),
        windows=tuple(instruments.results.windows),
        model_cost=None if inspection is None else inspection.collect(),
        setup=instruments.setup,
        memory=instruments.memory.record(None if inspection is None else inspection.followed),
        slow=timing.slow.record(),
        cpu=timing.ledger.cpu.record(),
        repeated=None if timing.repeated is None else timing.repeated.record(),
        helper_cpu_ns=instruments.results.helper_cpu_ns,
        samples_note=samples_note,
        notes=tuple(notes),
        **record_fields(others),
    )
