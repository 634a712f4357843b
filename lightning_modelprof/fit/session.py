"""One loop of the Trainer, from the first step to the report: the parts that measure, put together.

Made by the callback in ``setup``, thrown away in ``teardown``. Everything that it changes on the trainer
is undone by :meth:`LoopSession.close`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightning_modelprof import __version__
from lightning_modelprof.analysis.analyze import analyze
from lightning_modelprof.config import ProfileConfig
from lightning_modelprof.fit.fallback import HookFallback
from lightning_modelprof.fit.gathering import gather_rank_steps
from lightning_modelprof.fit.inspection import Inspection, make_inspection
from lightning_modelprof.fit.live import LiveFigures
from lightning_modelprof.fit.loop_memory import LoopMemory
from lightning_modelprof.fit.outputs import Outputs
from lightning_modelprof.fit.run_folder import claim_directory
from lightning_modelprof.fit.sampling import Sampling
from lightning_modelprof.fit.save_timer import SaveTimer
from lightning_modelprof.fit.windows import WindowResults, make_capture, why_no_window
from lightning_modelprof.measure.capture import Capture
from lightning_modelprof.measure.clock import HostClock, device_clock
from lightning_modelprof.measure.device_phases import DevicePhases
from lightning_modelprof.measure.environment import run_info
from lightning_modelprof.measure.ledger import PhaseLedger
from lightning_modelprof.measure.own_budget import OwnBudget
from lightning_modelprof.measure.phases import make_delegate, uninstall
from lightning_modelprof.measure.prefetch import num_prefetched
from lightning_modelprof.measure.rank_wait import time_broadcast
from lightning_modelprof.measure.recorder import Recorder
from lightning_modelprof.measure.scheduled_steps import NEVER
from lightning_modelprof.measure.slow_steps import SlowStepWatch
from lightning_modelprof.measure.training_setup import finish_setup, read_setup
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_profile import run_profile
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.rules.configure import configure_rules
from lightning_modelprof.run.loops import Loop
from lightning_modelprof.run.memory import MemoryRecord
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.rank_files import pack_rank_steps, rank_steps
from lightning_modelprof.run.records import AllRanks, RankRecord, RankSteps, Run, RunInfo, Window
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag
from lightning_modelprof.run.training_setup import TrainingSetup

_DEFAULT_CUT: Final = 50
"""Steps between two cuts when nothing is logged: as often as Lightning logs by default."""

_LOOK_EVERY: Final = 200
"""Steps after which columns are made of them, and slow ones looked for, also where nobody watches."""


class LoopSession:
    """Measures one fit, or one evaluation loop.

    Args:
        config: the checked configuration.
        loop: which loop it is.
        trainer: its profiler is replaced until :meth:`close`.
        directory: wanted folder for files; ``None`` writes none.
        own_prefix: start of the profiler actions of the callback itself.
        clock: host clock.
        warn: called with one sentence.
        guard: runs a function of ours so that an error in it cannot reach the loop.
    """

    def __init__(
        self,
        config: ProfileConfig,
        loop: Loop,
        trainer: Any,
        directory: Path | None,
        *,
        own_prefix: str,
        clock: HostClock,
        warn: Callable[[str], None],
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        configure_rules(config.rules)  # refuses what cannot be meant before anything is changed
        self._config = config
        self._loop = loop
        self._trainer = trainer
        self._wanted_directory = directory
        self._clock = clock
        self._warn = warn
        self._recorder = Recorder(config.skip_first)
        self._slow = SlowStepWatch()
        self._budget = OwnBudget(config.max_overhead)
        self.live = LiveFigures(self._recorder, config.unit, self._slow, self._budget)
        marks = device_clock(trainer.strategy.root_device) if config.device_timing else None
        self._device = None if marks is None else DevicePhases(marks, self._recorder.add_device)
        self.ledger = PhaseLedger(
            clock, self._recorder.add, lambda: guard(self._on_boundary), device=self._device
        )
        self.ledger.on_failure = lambda: guard(self._stop_early)
        self.delegate = make_delegate(trainer.profiler, self.ledger, trainer, own_prefix, loop)
        self._capture: Capture | None = None
        self._inspection: Inspection | None = None
        self._inspection_began_ns = 0
        self._sampling: Sampling | None = None
        self._memory: LoopMemory | None = None
        self._outputs: Outputs | None = None
        self._results: WindowResults | None = None
        self._info: RunInfo | None = None
        self._module: Any = None
        self._setup: TrainingSetup | None = None
        self._began_s = 0.0
        log_every = config.log_every_n_steps
        self._log_every: int = trainer.log_every_n_steps if log_every is None else log_every
        # 0 means that nothing is logged, in the Trainer's words and in ours; the progress bar still is fed.
        # The batches of an evaluation have no step number that loggers could show them at.
        self._logs_scalars = loop.is_fit and self._log_every > 0
        self._log_every = self._log_every or _DEFAULT_CUT
        self._notes: list[str] = []
        self._saves = SaveTimer(clock)
        self._armed_ns = 0
        self._cleanup = ExitStack()
        self._cleanup.callback(uninstall, trainer, self.delegate)
        self.fallback = HookFallback(
            loop, trainer, self.ledger, self.delegate, say=self._say, cleanup=self._cleanup
        )
        self.is_armed = self.is_finished = self._is_reported = False
        self._is_watched = False  # whether anybody sees the live figures
        self._message = b""  # to the other ranks
        self.run: Run | None = None
        self.report: Report | None = None
        trainer.profiler = self.delegate

    # Life

    def arm(self, pl_module: Any) -> None:
        """The loop begins. Every rank comes here."""
        trainer, config = self._trainer, self._config
        directory = self._wanted_directory
        if directory is not None:
            claimed = ""
            try:
                claimed = str(claim_directory(directory)) if trainer.is_global_zero else ""
            finally:  # whatever fails here, the other ranks are waiting
                claimed = trainer.strategy.broadcast(claimed)
            directory = Path(claimed) if claimed else None
        outputs = self._outputs = Outputs(
            directory,
            list(trainer.loggers) if trainer.is_global_zero else [],
            use_terminal=config.terminal,
            use_tensorboard=config.tensorboard,
            rank=trainer.global_rank,
            warn=self._warn,
        )
        self._results = WindowResults(
            self._outputs,
            trainer.global_rank,
            self._warn,
            self._loop,
            config.report_options,
            max_trace_mb=config.max_trace_mb,
            keep_windows=config.keep_windows,
        )
        self._info = run_info(
            trainer,
            pl_module,
            self._loop,
            config=config.as_plain(),
            sample_unit=config.unit,
            version=__version__,
        )
        self._module, self._began_s = pl_module, time.time()
        self._setup = read_setup(trainer, pl_module, self._loop)
        self._capture = make_capture(
            config,
            self._results.raw_path,
            self._on_window,
            clock=self._clock,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            accumulate=trainer.accumulate_grad_batches,
            why_not=self._why_no_window,
        )
        no_window = why_no_window(config, trainer.global_rank, trainer.world_size)
        if no_window and self._capture is None:
            self._say(no_window)
        elif no_window:
            self._notes.append(f"{no_window}.")
        self._inspection = make_inspection(
            config, self._loop, trainer, pl_module, lambda: self.ledger.samples
        )
        bar = trainer.progress_bar_callback if config.progress_bar and self._loop.is_fit else None
        if bar is not None:
            self.live.join_progress_bar(bar, self._cleanup)
        self._logs_scalars = self._logs_scalars and self._outputs.has_loggers
        self._is_watched = bar is not None or self._logs_scalars
        self._memory = LoopMemory(trainer, pl_module)
        self._armed_ns = self._clock()
        if self._loop.is_fit:
            time_broadcast(trainer, self.ledger, self._cleanup)
        self._slow.collector.start()
        self._cleanup.callback(self._slow.collector.stop)
        self.delegate.arm()
        self.is_armed = True
        self._saves.save(lambda: outputs.save_run(self._make_run("running")))
        if config.sampling:
            self._sampling = Sampling(self.ledger, pl_module, self._memory)
            self._sampling.resume()

    def note_exception(self, exception: BaseException) -> None:
        """An exception ends the loop; to be called before :meth:`stop`. Never raises."""
        if self._memory is not None:
            self._memory.on_exception(exception, self.ledger.steps_ended)

    def stop(self, status: str) -> None:
        """The loop is over: close the window and take our parts out.

        Args:
            status: for the report: ``finished``, ``interrupted`` or ``failed``.
        """
        if self.is_finished:
            return
        self.is_finished = True
        if self._sampling is not None:
            self._sampling.pause()
        if self._setup is not None:
            self._setup = finish_setup(self._setup, self._trainer, self._module, self._loop, self._began_s)
        if self.is_armed and self._capture is not None:
            ways = {"finished": "ended", "interrupted": "was interrupted"}
            self._capture.finish(f"{self._loop.subject} {ways.get(status, 'failed')} first")
            self.ledger.ranges = None
        self.close()
        self.live.cut()
        self._slow.look(self.ledger.step_end_ns)
        if self.is_armed and status == "finished" and self._trainer.world_size > 1:
            # Before the ranks vote on whether all are well: what fails later keeps the others waiting.
            self._message = pack_rank_steps(rank_steps(self._make_run(status)))

    def finish(self, status: str, *, is_safe_point: bool) -> None:
        """Report, after :meth:`stop`; does nothing the second time.

        Args:
            status: as for :meth:`stop`.
            is_safe_point: whether every rank is here, so that ranks may talk to each other.
        """
        if not self.is_armed or self._is_reported:
            return
        self._is_reported = True
        everybody: AllRanks | None = None
        ranks: tuple[RankSteps, ...] = ()
        if is_safe_point and self._trainer.world_size > 1:
            everybody, ranks = self._ask_all_ranks()
        # The first rank's file holds them for all.
        ranks = ranks if self._trainer.is_global_zero else ()
        self._report(replace(self._make_run(status, everybody), rank_steps=ranks))
        outputs, run, report = self._outputs, self.run, self.report
        assert outputs is not None
        assert run is not None
        assert report is not None
        outputs.show_report(report, self._logger_step())
        outputs.write_profile(lambda: run_profile(run, report), self._logger_step())

    def _ask_all_ranks(self) -> tuple[AllRanks | None, tuple[RankSteps, ...]]:
        """What all ranks measured; they are all here."""
        device, world_size = self._trainer.strategy.root_device, self._trainer.world_size
        try:
            everybody = self.live.metric.compute_over_ranks(device, world_size)
        finally:  # whatever fails here, the others are waiting
            ranks = gather_rank_steps(self._message, device)
        return everybody, ranks

    def close(self) -> None:
        """Undo every change made to the trainer; safe to call at any time and more than once."""
        with self._cleanup:  # whatever fails, the rest is undone
            if self._capture is not None:
                self._cleanup.callback(self._capture.abandon)
            if self._inspection is not None:
                self._cleanup.callback(self._inspection.close)
            if self._sampling is not None:
                self._cleanup.callback(self._sampling.pause)
            self.ledger.ranges = self.ledger.inspection = None

    def _stop_early(self) -> None:
        """An exception ended the loop, and another callback hears of it first: if that fails, we never do."""
        if self.is_finished or not self.is_armed or self._outputs is None:
            return
        # Callbacks are told while the exception is being handled.
        status = "interrupted" if isinstance(sys.exc_info()[1], KeyboardInterrupt) else "failed"
        self.stop(status)
        self._outputs.save_run(self._make_run(status))

    def abort(self) -> None:
        """Something of ours failed: undo every change and save what was measured until now."""
        self.is_finished = True
        self.close()
        if self.is_armed and self._outputs is not None:
            self._notes.append(
                f"An internal error stopped the measurement before {self._loop.subject} ended."
            )
            self.run = self._make_run("aborted")
            self._outputs.save_run(self.run)

    # While the loop runs

    def _on_boundary(self) -> None:
        """A step begins at which there is something to do; ``ledger.steps_ended`` is its number."""
        ledger, capture = self.ledger, self._capture
        step, end_ns = ledger.steps_ended, ledger.step_end_ns
        if step == 1:
            self.fallback.check_first_step()
        if self._sampling is None and self._memory is not None and ledger.ranges is None:
            self._memory.look(step)  # not in a window: torch's Python tracer would record it
        if capture is not None and step == capture.next_step:
            tags = self._step_window(capture, step)
            ledger.tags |= tags
            if StepTag.PROFILER_STOP in tags:
                self._recorder.drain(step, num_prefetched(self._trainer, self._loop))
            ledger.ranges = capture.ranges
            self.delegate.choose_table()
            if capture.is_done and self._config.stop_after_profile and self._loop.is_fit:
                self._trainer.should_stop = True
        if self._inspection is not None:
            self._inspect(self._inspection, step)
        if step and step % self._log_every == 0 and self._is_watched:
            self._cut()
        elif step and step % _LOOK_EVERY == 0:
            self.live.take()
        if step and step % _LOOK_EVERY == 0:
            self._slow.look(end_ns)
        if step:
            self._save_if_due(step)
        ledger.next_boundary = self._next_boundary(step)

    def _why_no_window(self) -> str:
        """Why another window would be too much."""
        self.live.take()
        return self._budget.why_not(self._clock() - self.ledger.step_end_ns)

    def _step_window(self, capture: Capture, step: int) -> StepTag:
        """Open or close a window, which the sampling thread is not to be seen in."""
        sampling = self._sampling
        if sampling is not None:
            sampling.pause()
        tags = capture.begin_step(step)
        if sampling is not None and not tags & (StepTag.PROFILER_WARMUP | StepTag.PROFILED):
            sampling.resume()
        return tags

    def _inspect(self, inspection: Inspection, step: int) -> None:
        """Close the inspection of the step that ended, and begin that of the step that begins."""
        ledger = self.ledger
        if ledger.inspection is not None:
            ledger.inspection = None
            inspection.end_step()
            ledger.tags |= StepTag.INSPECTED  # what was done just now is in the step that begins
            self.live.set_flops(inspection.cost)
            # Meanwhile the workers went on, by no more batches than steps would have fitted in.
            now = self._clock()
            per_step_ns = max(1, (now - self._armed_ns) // step)
            missed = (now - self._inspection_began_ns) // per_step_ns
            self._recorder.drain(step, min(num_prefetched(self._trainer, self._loop), missed))
        if inspection.begin_step(step):
            ledger.inspection = inspection
            ledger.tags |= StepTag.INSPECTED
            self._inspection_began_ns = self._clock()

    def _next_boundary(self, step: int) -> int:
        """The next step at whose start there is something to do."""
        upcoming = [(step // every + 1) * every for every in (self._log_every, _LOOK_EVERY)]
        if step == 0:
            upcoming.append(1)  # are all names known?
        else:
            # Slow steps: the archive is due before the next cut.
            now = self._clock()
            per_step_ns = max(1, (now - self._armed_ns) // step)
            upcoming.append(step + max(1, (self._saves.next_ns - now) // per_step_ns))
        if self._capture is not None and self._capture.next_step != NEVER:
            upcoming.append(self._capture.next_step)
        if self._inspection is not None:
            upcoming.append(step + 1 if self.ledger.inspection is not None else self._inspection.next_step)
        return min(upcoming)

    def _cut(self) -> None:
        """Show the clean steps since the last cut to those who watch."""
        self.live.cut()
        scalars = self.live.scalars()
        if scalars and self._logs_scalars and self._outputs is not None and self._memory is not None:
            self._outputs.log_scalars(scalars | self._memory.scalars(), self._logger_step())

    def _save_if_due(self, step: int) -> None:
        """Save what was measured, so that not even a kill loses it; seldom enough to cost nothing."""
        outputs = self._outputs
        begin_ns = self._clock()
        if outputs is None or begin_ns < self._saves.next_ns:
            return
        save_ns = self._saves.save(lambda: outputs.save_run(self._make_run("running")))
        self.ledger.tags |= StepTag.PROFILER_STOP  # the step that begins pays for it
        # A save is short: no more batches than steps would have fitted into it. With slow steps and a long
        # queue the next save would be due before a whole queue is used up, and no step were clean.
        per_step_ns = max(1, (begin_ns - self._armed_ns) // step)
        self._recorder.drain(step, min(num_prefetched(self._trainer, self._loop), save_ns // per_step_ns))

    def _on_window(self, window: Window, raw_path: Path | None) -> None:
        """A window closed: keep what it holds, and write the report as far as it goes."""
        assert self._results is not None
        self._results.add(window, raw_path, self._clock)
        if window.recorded_steps:
            self._budget.add_window()
        is_first = len(self._results.windows) == 1
        if not self.is_finished and (is_first or self._clock() >= self._saves.next_ns):
            self._saves.save(lambda: self._report(self._make_run("running")))

    def _logger_step(self) -> int:
        """The step that Lightning's own loggers use for the batch that ended last."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        return max(0, int(getattr(epoch_loop, "_batches_that_stepped", self._trainer.global_step)) - 1)

    # Results

    def _say(self, message: str) -> None:
        """Warn, and say the same in the report."""
        self._warn(message)
        self._notes.append(message[0].upper() + message[1:] + ".")

    def _make_run(self, status: str, everybody: AllRanks | None = None) -> Run:
        assert self._results is not None
        assert self._info is not None
        if self._device is not None:
            self._device.collect()
        notes = [*self._notes, *self._results.notes]
        if self._device is not None and self._device.num_given_up:
            notes.append(f"The device time of {self._device.num_given_up} steps could not be read.")
        record = RankRecord(
            rank=self._trainer.global_rank,
            steps=self._recorder.steps(),
            totals=self._recorder.totals(),
            outside_ns={
                phase.key: time
                for phase, time in zip(PHASES, self.ledger.outside_ns, strict=True)
                if time not in (0, NOT_MEASURED)
            },
            unfinished_steps=self.ledger.unfinished_steps,
            callbacks=self.delegate.callback_times(),
            windows=tuple(self._results.windows),
            model_cost=None if self._inspection is None else self._inspection.collect(),
            setup=self._setup,
            memory=self._memory_record(),
            slow=self._slow.record(),
            stacks=None if self._sampling is None else self._sampling.stacks(),
            notes=tuple(notes),
        )
        return Run(info=replace(self._info, status=status), ranks=(record,), all_ranks=everybody)

    def _memory_record(self) -> MemoryRecord | None:
        if self._memory is None:
            return None
        return self._memory.record(None if self._inspection is None else self._inspection.followed)

    def _report(self, run: Run) -> None:
        assert self._outputs is not None
        assert self._results is not None
        self.run = run
        self._outputs.save_run(self.run)
        analysis = analyze(self.run, self._results.facts, self._results.trace_notes)
        self.report = build_report(analysis, self._config.report_options)
        self._outputs.save_report(self.report)
