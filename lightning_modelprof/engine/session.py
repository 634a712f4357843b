"""One loop from its first step to its report, with all its instruments.

A :class:`Loop` represents the loop. :meth:`Session.close` undoes all changes to a trainer or a model.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.agreement import Announcements, RankAgreement
from lightning_modelprof.engine.budget import Budget
from lightning_modelprof.engine.inspection_control import InspectionControl, make_inspection
from lightning_modelprof.engine.instrument import record_fields, trace_metadata
from lightning_modelprof.engine.instruments import Sampling, early_instruments
from lightning_modelprof.engine.live_figures import ShownFigures
from lightning_modelprof.engine.loop import Loop
from lightning_modelprof.engine.memory import LoopMemory
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.plan import Plan, steps_to_skip
from lightning_modelprof.engine.results import Results, make_info, make_results
from lightning_modelprof.engine.run_folder import RunFolder
from lightning_modelprof.engine.step_times import StepTimes
from lightning_modelprof.engine.windows import WindowControl, make_capture, why_no_window
from lightning_modelprof.errors import describe_error
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.setup.training_setup import finish_setup, read_setup
from lightning_modelprof.measure.window.other_profilers import CLAIM
from lightning_modelprof.report.model import Report, Status
from lightning_modelprof.run.ranks import pack_rank_steps, rank_steps, side_by_side
from lightning_modelprof.run.records import RankRecord, Run, Window
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.run.steps import StepTag
from lightning_modelprof.show.progress import show_waiting


def _nothing() -> None:
    pass


class Session:
    """Measures one fit or evaluation loop.

    Args:
        loop: its phase source is in place until :meth:`close`.
        guard: runs our code such that its errors can't reach the loop.

    Attributes:
        thread: ID of the thread that runs the loop.
        is_armed: whether the loop has started.
        is_finished: whether it has ended.
        is_first: whether this rank reports for all; known when the loop starts.
        announcements: from the first of several ranks; ``None`` if they can't communicate.
        failure: status of a loop whose end our callback misses.
        message: for the first rank; ``None`` before the loop has ended well.
        on_trace_ready: the user's function for each window's trace and report.
    """

    def __init__(
        self,
        config: ProfileConfig,
        loop: Loop,
        *,
        clock: HostClock,
        warn: Callable[[str], None],
        guard: Callable[[Callable[[], None]], None],
        samples_note: Callable[[], str],
    ) -> None:
        self._config = config
        self._loop = loop
        self.thread = threading.get_ident()
        self._clock = clock
        self._warn = warn
        self._samples_note = samples_note
        self._budget = Budget(clock, config, is_alone=loop.world_size == 1)
        steps = self._steps = StepTimes(config, loop, clock, self._budget, lambda: guard(self._on_boundary))
        self.ledger, self.phase_source, self.live = steps.ledger, steps.phase_source, steps.live
        self.ledger.on_failure = lambda: guard(self._stop_early)
        self._began_s = 0.0
        self._setup: TrainingSetup | None = None  # set by arm(), like all that follow
        self._results: Results | None = None
        self._memory: LoopMemory | None = None
        self._plan: Plan | None = None
        self._figures: ShownFigures | None = None
        self._windows: WindowControl | None = None
        self._inspecting: InspectionControl | None = None
        self._sampling: Sampling | None = None
        self._check: Callable[[], None] = _nothing
        self.failure, self._waits = "failed", False
        self._notes: list[str] = []
        self._waiting = ExitStack()
        self._cleanup = ExitStack()
        self._cleanup.callback(self._uninstall)
        try:
            self._others = early_instruments(config, loop, self._cleanup)
        except BaseException:  # nothing else holds this session
            self._cleanup.close()
            raise
        self.is_armed = self.is_finished = False
        self.is_first = loop.is_first
        self.announcements: Announcements | None = None
        self.message: bytes | None = None
        self.on_trace_ready: Callable[[Path | None, Report], None] | None = None

    @property
    def run(self) -> Run | None:
        return None if self._results is None else self._results.run

    @property
    def report(self) -> Report | None:
        return None if self._results is None else self._results.report

    # Lifecycle

    def arm(self, directory: Path | None, why_there: str = "", check: Callable[[], None] = _nothing) -> None:
        """Start with the loop.

        Args:
            directory: claimed for files; ``None`` writes none.
            why_there: why it isn't next to the run's files; ``""`` if it is.
            check: called at the end of the first step.
        """
        loop, config, steps = self._loop, self._config, self._steps
        for one in self._others:
            one.begin()
        self._began_s, self._check = time.time(), check
        steps.skip(steps_to_skip(config, loop.num_steps))
        setup = self._setup = read_setup(loop)
        info = make_info(config, loop, setup)
        folder = RunFolder.claimed_now(
            directory, created=info.created, rank=loop.rank, is_first=self.is_first
        )
        results = self._results = make_results(
            config, loop, folder, info=info, measured=self._measured, clock=self._clock, warn=self._warn
        )
        capture = make_capture(config, loop, self, self._clock, self.phase_source.inner)
        has_bar = bool(config.report.progress_bar) and loop.kind.is_fit and loop.progress_bar is not None
        if has_bar:
            loop.join_progress_bar(self.live, self._cleanup)
        inspection = make_inspection(config, loop, steps, self._clock)
        memory = self._memory = LoopMemory(loop)
        agreement = RankAgreement(loop, self._budget, self.announcements)
        if capture is not None:
            self._windows = WindowControl(capture, steps, self._budget, agreement, loop=loop, config=config)
        if inspection is not None:
            self._inspecting = InspectionControl(
                inspection, steps, self._budget, agreement, loop=loop, config=config
            )
        if why_there and directory is not None:
            self._warn_and_note(f"{why_there}. Files go to {directory}")
        no_window = why_no_window(config, loop.rank, loop.world_size, self.phase_source.inner)
        if no_window and capture is None:
            self._warn_and_note(no_window)
        elif no_window:
            self._notes.append(f"{no_window}.")
        self._budget.begin_loop()
        self._plan = Plan(
            config,
            loop,
            windows=None if capture is None else capture.plan,
            inspected=None if inspection is None else inspection.steps,
            has_loggers=results.outputs.has_loggers,
            has_bar=has_bar,
        )
        self._figures = ShownFigures(
            self.live, self._plan, self._budget, outputs=results.outputs, memory=memory, loop=loop
        )
        loop.begin(self.phase_source, self.ledger, self._cleanup)
        steps.begin()
        self._cleanup.callback(steps.slow.stop)
        self.phase_source.arm()
        self.is_armed = True
        self._save()
        if self.on_trace_ready is not None:
            results.traces.on_trace = self._call_on_trace_ready
        if config.inspect.sampling:
            sampling = self._sampling = Sampling(self.ledger, loop.module, self._memory, self._clock)
            self._cleanup.callback(sampling.pause)
            self._others.append(sampling)
            sampling.resume()

    def note(self, sentence: str) -> None:
        """Add a sentence to the report, once."""
        if sentence not in self._notes:
            self._notes.append(sentence)

    def note_exception(self, exception: BaseException) -> None:
        """Record an exception that ends the loop; to be called before :meth:`stop`. Never raises."""
        if self._memory is not None:
            self._memory.on_exception(exception, self.ledger.steps_ended)

    def stop(self, status: str) -> None:
        """End with the loop: close the window and remove our parts.

        Args:
            status: for the report: ``finished``, ``interrupted`` or ``failed``.
        """
        ended_ns = self._clock()
        if self._results is not None:
            self._results.ended_ns = ended_ns
        if self.is_finished:
            return
        self.is_finished = True
        if self._sampling is not None:
            self._sampling.pause()
        if self._setup is not None:
            self._setup = finish_setup(self._setup, self._loop, self._began_s)
        if self.is_armed and self._windows is not None:
            ways = {"finished": "ended", "interrupted": "was interrupted"}
            self._windows.capture.finish(f"{self._loop.kind.subject} {ways.get(status, 'failed')} first")
            self.ledger.ranges = None
        self.close()
        self._steps.close_device(has_finished=status == "finished")
        ended_ns = self._clock()  # the phase Profiler ends here
        if self._results is not None:
            self._results.ended_ns = ended_ns
        self.live.flush()
        self._steps.slow.look(self.ledger.step_end_ns)
        if self._setup is not None:
            self.ledger.cpu.stop(has_workers=any(one.num_workers for one in self._setup.loaders))
        if self.is_armed and self._results is not None and status == "finished" and self._loop.world_size > 1:
            self.message = pack_rank_steps(rank_steps(self._results.make_run(status)))

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
            messages: other ranks' messages, by rank.
            absent: reasons for missing messages, by rank.
            is_brief: whether to print one line instead of the report.
            on_report: called with what was reported.
        """
        results = self._results
        if results is None or not self.is_armed or results.is_reported:
            return
        results.is_reported = True
        with ExitStack() as stack:
            stack.callback(results.traces.close)
            stack.callback(self._waiting.close)
            stack.callback(self._conclude, results, status, (messages, absent), is_brief, on_report)
            if results.outputs.has_terminal:
                self._waiting.enter_context(show_waiting("lightning-modelprof: making the report"))
            results.traces.wait()  # Ctrl-C loses only results from traces

    def _conclude(
        self,
        results: Results,
        status: str,
        others: tuple[Mapping[int, bytes], Mapping[int, str]],
        is_brief: Callable[[], bool],
        on_report: Callable[[Outputs, Run, Report], None] | None,
    ) -> None:
        run, outputs = results.make_run(status), results.outputs
        if any(others):
            run = side_by_side(run, *others)
        report, step = results.conclude(run), self._loop.logger_step
        self._waiting.close()
        has_nothing = not self.ledger.steps_ended and not any(
            one.status is Status.FOUND for one in report.findings
        )
        outputs.show_report(
            report, step, is_brief=bool(self._config.report.terminal) and (has_nothing or is_brief())
        )
        results.traces.write_run_profile(step)
        if self.is_first and on_report is not None:
            on_report(outputs, run, report)
        if status != "finished":
            self.print_report()
        if self._figures is not None:
            self._figures.log_last()  # last, as the user's loggers may be slow

    def add_outside_times(self) -> None:
        if self._results is not None:
            self._results.add_outside_times()

    def print_report(self) -> None:
        """Print the report, if that wasn't done before."""
        if self._results is not None:
            self._results.outputs.print_report(self._loop.progress_bar)

    def close(self) -> None:
        """Undo every change to the trainer; safe to call at any time and repeatedly."""
        with self._cleanup:  # if anything fails, the rest is still undone
            if self._windows is not None:
                self._cleanup.callback(self._windows.capture.abandon)
            if self._inspecting is not None:
                self._cleanup.callback(self._inspecting.inspection.close)
            self._cleanup.callback(self._steps.close_watches)
            self.ledger.ranges = self.ledger.inspection = self.ledger.repeated = None

    def _uninstall(self) -> None:
        if self._waits:  # the delegate stops measuring, but still sees whether other callbacks raise
            self.phase_source.disarm()
        else:
            self._loop.take_out(self.phase_source)

    def _stop_early(self) -> None:
        """Handle an exception that ended the loop before other callbacks do, as they may end the process."""
        if self.is_finished or not self.is_armed or self._results is None:
            return
        # Callbacks run while the exception is being handled.
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
        self._results.save_end(self.failure)

    def abort(self) -> None:
        """Undo every change and save the measurements so far, after an internal error."""
        self.is_finished = True
        self.close()
        if self._results is None:
            return
        if self.is_armed:
            self._notes.append(
                f"An internal error stopped the profiler before {self._loop.kind.subject} ended."
            )
            self._results.abort()
        self._results.traces.close()

    def save_aborted(self) -> None:
        if self._results is not None:
            self._results.save_aborted()

    # While the loop runs

    def _on_boundary(self) -> None:
        plan, memory, figures = self._plan, self._memory, self._figures
        if plan is not None and memory is not None and figures is not None and self._results is not None:
            self._results.traces.poll()
            for one in self._others:
                one.poll()
            self._begin_step(plan, memory, figures)

    def _begin_step(self, plan: Plan, memory: LoopMemory, figures: ShownFigures) -> None:
        """Do what is due at the start of a step; its number is ``ledger.steps_ended``."""
        steps, ledger, budget = self._steps, self.ledger, self._budget
        step, end_ns = ledger.steps_ended, ledger.step_end_ns
        now = budget.begin()
        if budget.is_step_slowed:
            is_inspected = ledger.inspection is not None
            budget.end_slowed_step(now, steps.recorder.newest_tags, is_inspected=is_inspected)
        if step == 1:
            budget.end_first_step()
            self._check()
        memory.growth.look(step)
        if self._sampling is None and ledger.ranges is None:
            memory.look(step)  # not in a window, as torch's Python tracer would record it
        windows, inspecting = self._windows, self._inspecting
        if windows is not None and plan.is_window_due(step):
            with budget.asked_for(by_name=self._config.asks_for_window):
                self._step_window(windows, step)
        if inspecting is not None:
            with budget.asked_for(by_name=self._config.asks_for_inspection):
                inspecting.begin_step(step)
        if plan.is_cut_due(step):
            figures.cut_if_affordable(step)
        elif plan.is_look_due(step):
            self.live.poll()
        if plan.is_look_due(step):
            steps.slow.look(end_ns)
        if step:
            self._save_if_due(plan, step)
        ledger.next_boundary = self._next_due(plan, memory, step)
        is_slowed = ledger.inspection is not None or (windows is not None and windows.capture.is_open)
        budget.end(slows_step=is_slowed)

    def _step_window(self, windows: WindowControl, step: int) -> None:
        """Open or close a window, from which the sampling thread must be absent."""
        sampling = self._sampling
        if windows.must_wait(step, None if self._inspecting is None else self._inspecting.inspection):
            return
        if sampling is not None:
            sampling.pause()
        tags = windows.begin_step(step)
        if sampling is not None and not tags & (StepTag.PROFILER_WARMUP | StepTag.PROFILED):
            sampling.resume()

    def _next_due(self, plan: Plan, memory: LoopMemory, step: int) -> int:
        upcoming = [max(step + 1, memory.growth.next_step)]
        if step:
            now = self._clock()
            upcoming.append(plan.save_step(step, now, self._budget.step_ns(now, step)))
        if self._inspecting is not None:
            upcoming += self._inspecting.next_due(step)
        return plan.next_due(step, upcoming)

    def _save_if_due(self, plan: Plan, step: int) -> None:
        """Save often enough that a kill loses little, and rarely enough to cost nothing."""
        if self._clock() < plan.next_save_ns:
            return
        save_ns = self._save()
        self.ledger.tags |= StepTag.PROFILER_STOP  # the step that starts pays for it
        # With slow steps and a long queue, the next save would be due before the queue is used up, and no
        # step would be clean; but a save is short.
        self._steps.stand_still(step, save_ns)

    def _save(self) -> int:
        """Return its duration in ns."""
        assert self._results is not None
        assert self._plan is not None
        begin_ns = self._clock()
        self._results.save()
        return self._plan.save(begin_ns, self._clock())

    def meet_size(self, size: int) -> None:
        """Handle a running step whose batch size differs from the one before."""
        step, sizes = self.ledger.steps_ended, self._steps.sizes
        if self._plan is None or sizes is None:
            return
        sizes.begin(step, size)
        if self._inspecting is not None:
            self._inspecting.meet_size(step, size)

    # Owner of windows

    @property
    def rank(self) -> int:
        return self._loop.rank

    @property
    def epoch_step(self) -> int:
        return self.ledger.epoch_step

    def trace_metadata(self, begin_ns: int, end_ns: int) -> Mapping[str, Any]:
        return trace_metadata(self._others, begin_ns, end_ns)

    def raw_path(self, window: Window) -> Path:
        assert self._results is not None
        return self._results.traces.windows.raw_path(window)

    def why_no_window(self) -> str:
        if self._config.bounds.max_overhead is None:
            return ""
        self.live.poll()
        return self._budget.why_no_window(self._clock() - self.ledger.step_end_ns)

    def take_window(self, window: Window, raw_path: Path | None) -> None:
        assert self._results is not None
        assert self._plan is not None
        traces = self._results.traces
        traces.add(window, raw_path, self._clock)
        listed = traces.windows.listed
        self._results.is_report_due = True
        if window.recorded_steps:
            self._budget.add_window(listed[-1].close_ns or 0)
        if len(listed) == 1:
            self._plan.next_save_ns = 0  # save at this boundary, as there's a first window to see
        if CLAIM.is_ending and not self.is_finished:
            self._results.save()
            CLAIM.rest()

    def _call_on_trace_ready(self, window: Window, report: Report) -> None:
        assert self._results is not None
        assert self.on_trace_ready is not None
        folder = self._results.outputs.folder.path
        path = folder / window.trace_file if folder is not None and window.trace_file else None
        try:
            self.on_trace_ready(path, report)
        except Exception as error:  # the user's function failed
            self._warn(f"on_trace_ready raised {describe_error(error)}")

    # Measurements

    def _warn_and_note(self, message: str) -> None:
        self._warn(message)
        self._notes.append(message[0].upper() + message[1:] + ".")

    def _measured(self) -> RankRecord:
        assert self._results is not None
        assert self._memory is not None
        traces, inspection = self._results.traces, None
        if self._inspecting is not None:
            inspection = self._inspecting.inspection
        samples_note, around = self._samples_note(), self._loop.outside_times()
        notes = (*self._notes, *traces.windows.notes, *self._steps.notes())
        return RankRecord(
            rank=self._loop.rank,
            around=around,
            windows=tuple(traces.windows.listed),
            model_cost=None if inspection is None else inspection.collect(),
            setup=self._setup,
            memory=self._memory.record(None if inspection is None else inspection.followed),
            helper_cpu_ns=traces.helper_cpu_ns,
            samples_note=samples_note,
            notes=notes,
            **record_fields((self._steps, *self._others)),
        )


def end_status(exception: BaseException | None) -> str:
    """Return a loop's status after an exception; Lightning makes SIGTERM a kind of SystemExit."""
    return "interrupted" if isinstance(exception, KeyboardInterrupt | SystemExit) else "failed"
