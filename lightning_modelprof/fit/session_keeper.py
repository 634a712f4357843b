"""A session for each loop: begun and ended with the other ranks, its errors held back from the training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_modelprof.config import ProfileConfig
from lightning_modelprof.errors import told
from lightning_modelprof.fit.forks import forget_in_children
from lightning_modelprof.fit.meeting import Meeting
from lightning_modelprof.fit.run_folder import claim_directory
from lightning_modelprof.fit.scheduled_stop import ScheduledStop, scheduled_stop
from lightning_modelprof.fit.session import LoopSession
from lightning_modelprof.fit.warn import traceback_text, warn
from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.measure.ledger import PhaseLedger
from lightning_modelprof.measure.samples import NothingCounted, SampleCounter, make_counter
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.loops import FIT, Loop
from lightning_modelprof.run.records import Run


class SessionKeeper:
    """What stays of the callback from loop to loop, and the session of the loop that runs.

    Args:
        config: what is wanted.

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
        self._aborted: LoopSession | None = None  # an error of ours has ended it
        self._meeting: Meeting | None = None  # with the other ranks, who count on us from setup to the end
        self._is_together = False  # whether all of them came
        self._stop: ScheduledStop | None = None  # with the other ranks, where windows end training
        self._twin: SessionKeeper | None = None  # measures in our place: it wants the same and comes first

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, of the callback or of its trainer measures nothing until it is set up."""
        away = dict.fromkeys(("_session", "_aborted", "_ledger", "_evaluation", "_meeting", "_stop", "_twin"))
        return {**vars(self), **away, "_count": SampleCounter()}

    def _begin(self, trainer: Any) -> None:
        """Stand in for the trainer's profiler."""
        self._count = make_counter(self.config.samples_fn)
        session = LoopSession(
            self.config,
            self._loop,
            trainer,
            own_prefix=f"[Callback]{self.state_key}.",
            clock=self._clock,
            warn=warn,
            guard=self._guard,
            samples_note=lambda: getattr(self._count, "note", ""),
        )
        self._session = session
        session.delegate.on_error = self._step_aside
        forget_in_children(self)

    def _plan_stop(self, trainer: Any) -> None:
        self._stop = scheduled_stop(self.config, trainer)

    def _arm(self, trainer: Any, pl_module: Any) -> PhaseLedger | None:
        """The loop begins; returns the session's ledger if there is something to measure."""
        if self._meeting is None:
            return None
        folder = self._meet(trainer, self._meeting)
        session = self._session
        if session is None:  # it has failed, and has been at the meeting all the same
            return None
        self._guard(lambda: session.arm(pl_module, folder))
        return session.ledger if self._session is session else None

    def _meet(self, trainer: Any, meeting: Meeting) -> Path | None:
        """All ranks come together; returns the folder for files, which the first one claims for all."""
        claimed = ""
        if self._directory is not None and trainer.is_global_zero:
            try:
                claimed = str(claim_directory(self._directory))
            except OSError as error:
                warn(
                    f"could not claim a folder for files, {self._directory}: {told(error)}; what is measured"
                    " will be in callback.report and callback.run"
                )
            except Exception:  # the other ranks are waiting
                self._step_aside()
        try:
            agreed = meeting.join(claimed)
        except Exception as error:  # the first rank has died, perhaps
            agreed = None
            warn(f"could not reach the other ranks: {told(error)}")
        self._is_together = agreed is not None
        if agreed is None:
            warn(
                f"not all ranks have begun {self._loop.subject} with this callback, so each is measured for"
                " itself. Give it to the Trainer on every rank; ranks=[0] chooses who records windows"
            )
        folder = claimed if agreed is None else agreed
        return Path(folder) if folder else None

    def _end(self, trainer: Any) -> None:
        """The loop is over, on every rank."""
        meeting, self._meeting = self._meeting, None
        if meeting is None:
            return
        self._stop_session("finished")
        is_safe_point = self._is_together
        if is_safe_point and trainer.world_size > 1:
            # A rank whose measurement has failed must say so, or the others would wait for its figures.
            try:
                has_session = self._session is not None
                is_safe_point = bool(trainer.strategy.reduce_boolean_decision(has_session, all=True))
            except Exception as error:  # a rank has died; every rank keeps what it has itself
                is_safe_point = False
                warn(f"could not ask the other ranks: {told(error)}")
        self._finish("finished", is_safe_point=is_safe_point)

    def _stop_session(self, status: str) -> None:
        session, self._ledger, self._evaluation = self._session, None, None
        if session is not None:
            self._guard(lambda: session.stop(status))

    def _finish(self, status: str, *, is_safe_point: bool) -> None:
        session = self._session
        if session is not None:
            try:
                self._guard(lambda: session.finish(status, is_safe_point=is_safe_point))
            finally:  # Ctrl-C while the report is printed does not cost the report
                self._take_results(session)

    def _take_results(self, of: LoopSession | SessionKeeper) -> None:
        self.report, self.run = of.report or self.report, of.run or self.run

    def _leave(self) -> None:
        session, self._session = self._session, None
        meeting, self._meeting = self._meeting, None
        twin, self._twin = self._twin, None
        aborted, self._aborted = self._aborted, None
        self._ledger = self._evaluation = None
        if aborted is not None:
            with suppress(Exception):  # it has failed before, and that was said
                aborted.save_aborted()
            self._take_results(aborted)
        if twin is not None:
            self._take_results(twin)
        if meeting is not None:
            self._guard(meeting.cancel)
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
            f" Please report this:\n{traceback_text()}"
        )
        if session is not None:
            try:
                session.abort()
            except Exception:  # what could not be undone or saved must not hurt either
                warn(f"could not undo or save everything:\n{traceback_text()}")
            self._take_results(session)
            self._aborted = session

    def _meet_size(self, size: int) -> None:
        session = self._session
        if session is not None:
            self._guard(lambda: session.meet_size(size))

    def _stop_counting(self, error: Exception) -> None:
        counter = "samples_fn" if self.config.samples_fn is not None else "the batch's size"
        reason = f"{counter} raised {told(error)}"
        self._count = NothingCounted(reason)
        self._guard(lambda: warn(f"{reason}; {self.config.unit}/s will not be known"))

    def forget_session(self) -> None:
        """In a child of this process, which measures nothing and leaves the parent's files alone."""
        session, self._session = self._session, None
        self._ledger = self._evaluation = self._meeting = self._aborted = None
        if session is not None:
            session.ledger.ranges = session.ledger.inspection = None
            session.delegate.disarm()
