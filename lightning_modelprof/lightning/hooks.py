"""Lightning's hooks: a session per loop, from ``setup`` to ``teardown``."""

from __future__ import annotations

from typing import Any, Final

from lightning_modelprof.config.sources import is_switched_off
from lightning_modelprof.errors import ConfigError, warn
from lightning_modelprof.lightning.checks import check_ignored, ignore_repeats, measuring_callback
from lightning_modelprof.lightning.phases import check_epoch
from lightning_modelprof.lightning.session_keeper import SessionKeeper
from lightning_modelprof.loop.host import check_machine, say_off
from lightning_modelprof.loop.run_folder import wanted_folder
from lightning_modelprof.loop.session import end_status
from lightning_modelprof.run.loops import FIT, LOOPS
from lightning_modelprof.run.records import IGNORED_CALLBACK
from lightning_modelprof.run.steps import StepTag
from lightning_modelprof.signals import children_later

_EMPTY_HOOKS: Final = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
_INSPECTION_HOOKS: Final = ("on_before_backward", "on_train_batch_end")
"""Hooks of every step of a fit: of no use to us, and of use in a step that is inspected."""


class ProfilingHooks(SessionKeeper):
    """What the callback does in each hook; those of a validation loop inside a fit do next to nothing."""

    # All loops, in the order in which the hooks come

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check everything that can be checked, then stand in for the trainer's profiler."""
        self._enter(trainer, LOOPS.get(stage, FIT))
        if stage not in LOOPS:
            return
        if is_switched_off():
            if trainer.is_global_zero:
                say_off()
            return
        measuring = measuring_callback(self, trainer, ProfilingHooks)
        if measuring is not self:
            self._twin = measuring
            return
        has_others = ignore_repeats(self, trainer, ProfilingHooks)
        check_machine(self.config)
        check_ignored(self.config, pl_module)
        # The first rank's counts for all.
        self._directory, self._why_there = wanted_folder(self.config, trainer)
        self._is_cut_off = False
        try:
            self._begin(trainer)
        except ConfigError:
            raise
        except Exception:  # what was refused on purpose has been refused: this is our own fault
            self._step_aside()
        if has_others and self._session is not None:
            self._session.note(IGNORED_CALLBACK)
        self._come(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Report what was measured until now; other ranks may never come, so nothing is asked of them."""
        if not self._is_running(trainer):
            return
        status, session = end_status(exception), self._session
        try:
            with children_later(is_failing=True):
                if session is not None:
                    self._guard(lambda: session.note_exception(exception))
                self._stop_session(status)
                self._finish(status, {}, {})
        finally:  # after an exception there is no teardown; Ctrl+C may come again
            self._leave()
            self._forget_module()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing behind."""
        if not self._is_running(trainer):
            return
        session, loop = self._session, self._loop
        has_no_report = session is not None and not session.is_armed and not loop.is_fit
        # Lightning skips a loop without batches, hooks and all; its tuners leave before a loop begins.
        if has_no_report and getattr(getattr(trainer, loop.trainer_attribute, None), "skip", False):
            warn(f"{loop.subject} had no batches, so it has no report")
        self._leave()
        self._forget_module()

    # A fit

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Propose to the other ranks where training ends, if windows end it: before it begins."""
        self._guard(lambda: self._propose_stop(trainer))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to measure; the trial fits of Lightning's tuners do not come here."""
        self._guard(lambda: self._agree_on_stop(trainer))
        self._ledger = self._arm(trainer, pl_module)
        # Whoever else calls our hooks, as a callback around this one does, expects them to be there.
        self._is_called_by_lightning = any(one is self for one in trainer.callbacks)
        self._pass_over((*_EMPTY_HOOKS, *_INSPECTION_HOOKS))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A batch is there: count its samples."""
        if self._stop_at is not None and trainer.fit_loop.total_batch_idx >= self._stop_at:
            trainer.should_stop = True
        ledger = self._ledger
        if ledger is None:
            return
        # Spelled out, as is done at every step: ledger.needs_batch_start
        if (ledger.batch_ended or not ledger.batch_began) and self._session is not None:
            self._guard(ledger.begin_batch)
        self._meet_batch(ledger, batch)
        if ledger.repeated is not None:
            ledger.repeated.begin_batch(batch)
            if ledger.repeated.is_over:
                ledger.repeated = None
        inspection = ledger.inspection
        if inspection is not None:
            self._hear_again()
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
        self._pass_over((*_EMPTY_HOOKS, *_INSPECTION_HOOKS))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After an epoch without a single step: Lightning does not tell us when steps end."""
        inspection = None if self._ledger is None else self._ledger.inspection
        if inspection is not None:  # on_train_batch_start returned -1, and that batch has no end
            self._guard(lambda: inspection.end_batch(failed=True))
        session = self._session
        if session is not None and session.is_armed:
            self._guard(lambda: check_epoch(session.seam, session.ledger))

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
            if self._ledger is not None:
                self._ledger.validation.begin_batch(dataloader_idx)
            return
        if ledger.needs_batch_start and self._session is not None:
            self._guard(ledger.begin_evaluation)
            self._guard(ledger.begin_batch)
        if dataloader_idx != self._dataloader_idx:
            self._dataloader_idx = dataloader_idx
            ledger.tags |= StepTag.FIRST_OF_EPOCH
            ledger.epoch_step = ledger.steps_ended
        self._meet_batch(ledger, batch)
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
