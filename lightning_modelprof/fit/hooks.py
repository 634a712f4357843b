"""Lightning's hooks: a session per loop, from ``setup`` to ``teardown``, and what holds its errors back."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_modelprof.config import ProfileConfig
from lightning_modelprof.config_checks import check_config
from lightning_modelprof.config_sources import is_switched_off
from lightning_modelprof.errors import ConfigError
from lightning_modelprof.fit.checks import check_ignored, check_trainer
from lightning_modelprof.fit.forks import forget_in_children
from lightning_modelprof.fit.run_folder import claim_directory, wanted_folder
from lightning_modelprof.fit.session import LoopSession, end_status
from lightning_modelprof.fit.warn import warn
from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.measure.ledger import PhaseLedger
from lightning_modelprof.measure.samples import SampleCounter, make_counter
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.loops import FIT, LOOPS, Loop
from lightning_modelprof.run.records import Run
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag


class ProfilingHooks:
    """What the callback does in each hook. A validation loop inside a fit is the fit's: its hooks do nothing.

    Args:
        config: what is wanted; checked in ``setup``.

    Attributes:
        report: the newest report; ``None`` before the first.
        run: the measured facts behind it; ``None`` before the first.
    """

    state_key: str

    def __init__(self, config: ProfileConfig) -> None:
        super().__init__()
        self.config = config
        self.report: Report | None = None
        self.run: Run | None = None
        self._clock = host_clock
        self._count: Callable[[Any], int] = SampleCounter()  # the user's own from setup on
        self._loop: Loop = FIT
        self._directory: Path | None = None  # wanted for files
        self._session: LoopSession | None = None
        self._ledger: PhaseLedger | None = None  # the session's, while it measures a fit
        self._evaluation: PhaseLedger | None = None  # the session's, while it measures an evaluation loop
        self._dataloader_idx = 0
        self._is_awaited = False  # whether the other ranks count on us when the loop ends

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, of the callback or of its trainer measures nothing until it is set up."""
        away = {"_session": None, "_ledger": None, "_evaluation": None, "_is_awaited": False}
        return {**vars(self), **away}

    # All loops, in the order in which the hooks come

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check everything that can be checked, then stand in for the trainer's profiler."""
        self._leave()
        if stage not in LOOPS or is_switched_off():
            return
        self._loop = LOOPS[stage]
        check_config(self.config)
        check_trainer(self.config, trainer, ProfilingHooks)
        check_ignored(self.config, pl_module)
        self._directory = wanted_folder(self.config, trainer)  # the first rank's is broadcast
        self._is_awaited = True
        try:
            self._begin(trainer)
        except ConfigError:
            self._is_awaited = False
            raise
        except Exception:  # what was refused on purpose has been refused: this is our own fault
            self._step_aside()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Report what was measured until now; other ranks may never come, so nothing is asked of them."""
        status, session = end_status(exception), self._session
        if session is not None:
            self._guard(lambda: session.note_exception(exception))
        self._stop(status)
        self._finish(status, is_safe_point=False)
        self._leave()  # after an exception there is no teardown
        self._forget_module()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing behind."""
        session, loop = self._session, self._loop
        has_no_report = session is not None and not session.is_armed and not loop.is_fit
        # Lightning skips a loop without batches, hooks and all; its tuners leave before a loop begins.
        if has_no_report and getattr(getattr(trainer, loop.trainer_attribute, None), "skip", False):
            warn(f"{loop.subject} had no batch: there is no report of it")
        self._leave()
        self._forget_module()

    # A fit

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure; the trial fits of Lightning's tuners do not come here."""
        self._ledger = self._arm(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch is there: count its samples."""
        ledger = self._ledger
        if ledger is None:
            return
        # Spelled out, as is done at every step: ledger.needs_batch_start
        if (ledger.batch_ended or not ledger.batch_began) and self._session is not None:
            self._guard(self._session.fallback.begin_batch)
        try:
            ledger.samples = self._count(batch)
        except Exception as error:  # the batch, or samples_fn, is not what it seemed to be
            self._stop_counting(error)
        inspection = ledger.inspection
        if inspection is not None:
            self._guard(lambda: inspection.begin_batch(batch, batch_idx))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """A loss is there: in a step that is inspected, its graph is followed."""
        inspection = None if self._ledger is None else self._ledger.inspection
        if inspection is not None:
            self._guard(lambda: inspection.before_backward(loss))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch has done its work: nothing of an inspection stays on the model."""
        inspection = None if self._ledger is None else self._ledger.inspection
        if inspection is not None:
            self._guard(inspection.end_batch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After an epoch without a single step: Lightning does not tell us when steps end."""
        inspection = None if self._ledger is None else self._ledger.inspection
        if inspection is not None:  # on_train_batch_start returned -1, and that batch has no end
            self._guard(lambda: inspection.end_batch(failed=True))
        session = self._session
        if session is not None and session.is_armed:
            self._guard(session.fallback.check_epoch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report. Every rank comes here."""
        self._end(trainer)

    # Validate, test and predict

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure; the trial runs of Lightning's BatchSizeFinder are in ``on_validation_start``."""
        if not self._loop.is_fit:
            self._dataloader_idx = 0
            self._evaluation = self._arm(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A batch is there: count its samples."""
        ledger = self._evaluation
        if ledger is None:
            return
        if ledger.needs_batch_start and self._session is not None:
            self._guard(self._session.fallback.begin_batch)
        if dataloader_idx != self._dataloader_idx:
            self._dataloader_idx = dataloader_idx
            ledger.tags |= StepTag.FIRST_OF_EPOCH
        try:
            ledger.samples = self._count(batch)
        except Exception as error:  # the batch, or samples_fn, is not what it seemed to be
            self._stop_counting(error)
        inspection = ledger.inspection
        if inspection is not None:
            self._guard(lambda: inspection.begin_batch(batch, batch_idx, dataloader_idx))

    def on_validation_batch_end(  # Lightning's own signature
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The batch has done its work: nothing of an inspection stays on the model."""
        inspection = None if self._evaluation is None else self._evaluation.inspection
        if inspection is not None:
            self._guard(inspection.end_batch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Report. Every rank comes here."""
        if not self._loop.is_fit:
            self._end(trainer)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    # Ours

    def _begin(self, trainer: Any) -> None:
        """Stand in for the trainer's profiler."""
        self._count = make_counter(self.config.samples_fn)
        session = LoopSession(
            self.config,
            self._loop,
            trainer,
            self._directory,
            own_prefix=f"[Callback]{self.state_key}.",
            clock=self._clock,
            warn=warn,
            guard=self._guard,
        )
        self._session = session
        session.delegate.on_error = self._step_aside
        forget_in_children(self)

    def _arm(self, trainer: Any, pl_module: Any) -> PhaseLedger | None:
        """The loop begins; returns the session's ledger if there is something to measure."""
        session = self._session
        if session is None:
            if self._is_awaited and trainer.world_size > 1 and self._directory is not None:
                # The other ranks are about to agree on a folder with us, and would wait for ever.
                folder = str(claim_directory(self._directory)) if trainer.is_global_zero else ""
                trainer.strategy.broadcast(folder)
            return None
        self._guard(lambda: session.arm(pl_module))
        return session.ledger if self._session is session else None

    def _end(self, trainer: Any) -> None:
        """The loop is over, on every rank."""
        is_asked, self._is_awaited = self._is_awaited, False
        if not is_asked:
            return
        self._stop("finished")
        is_safe_point = trainer.world_size == 1
        if not is_safe_point:
            # A rank whose measurement has failed must say so, or the others would wait for its figures.
            try:
                has_session = self._session is not None
                is_safe_point = bool(trainer.strategy.reduce_boolean_decision(has_session, all=True))
            except Exception as error:  # a rank has died; every rank keeps what it has itself
                warn(f"could not ask the other ranks: {type(error).__name__}: {error}")
        self._finish("finished", is_safe_point=is_safe_point)

    def _stop(self, status: str) -> None:
        session, self._ledger, self._evaluation = self._session, None, None
        if session is not None:
            self._guard(lambda: session.stop(status))

    def _finish(self, status: str, *, is_safe_point: bool) -> None:
        session = self._session
        if session is not None:
            self._guard(lambda: session.finish(status, is_safe_point=is_safe_point))
            self._take_results(session)

    def _take_results(self, session: LoopSession) -> None:
        self.report, self.run = session.report or self.report, session.run or self.run

    def _leave(self) -> None:
        session, self._session = self._session, None
        self._ledger, self._evaluation, self._is_awaited = None, None, False
        if session is not None:
            self._guard(session.close)

    def _forget_module(self) -> None:
        """Drop what Lightning has given us to log with: the model would live as long as the report does."""
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a part of ours; if it fails, step aside for the rest of the loop and warn once."""
        try:
            work()
        except Exception:  # the loop must not notice
            self._step_aside()

    def _step_aside(self) -> None:
        """Give up for the rest of the loop and warn; to be called while an error of ours is being handled."""
        session, self._session = self._session, None
        self._ledger = self._evaluation = None
        warn(
            f"an internal error stopped the measurement; {self._loop.subject} goes on without it."
            f" Please report this:\n{traceback.format_exc()}"
        )
        if session is not None:
            try:
                session.abort()
            except Exception:  # what could not be undone or saved must not hurt either
                warn(f"could not undo or save everything:\n{traceback.format_exc()}")
            self._take_results(session)

    def _stop_counting(self, error: Exception) -> None:
        self._count = _count_nothing
        counter = "samples_fn" if self.config.samples_fn is not None else "the batch's size"
        self._guard(
            lambda: warn(
                f"{counter} raised {type(error).__name__}: {error}; {self.config.unit}/s will not be known"
            )
        )

    def forget_session(self) -> None:
        """In a child of this process, which measures nothing and leaves the parent's files alone."""
        session, self._session = self._session, None
        self._ledger, self._evaluation, self._is_awaited = None, None, False
        if session is not None:
            session.ledger.ranges = session.ledger.inspection = None
            session.delegate.disarm()


def _count_nothing(_: Any) -> int:
    return NOT_MEASURED
