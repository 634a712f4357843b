"""A session for each loop: begun and ended with the other ranks, its errors held back from the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.engine.process_loops import (
    PROCESS_LOOPS,
    ShortLoop,
    end_with_process,
    is_worker,
    short_loop,
)
from lightning_modelprof.engine.session import Session
from lightning_modelprof.errors import ConfigError, describe_error, traceback_text, warn
from lightning_modelprof.lightning.phases import OutsideLoopClock, check_names
from lightning_modelprof.lightning.rank_store import TOO_SHORT, RankStore, StepAnnouncements, steps_until_stop
from lightning_modelprof.lightning.trainer_loop import TrainerLoop
from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.measure.steps.batch_sizes import NothingCounted, SampleCounter, make_counter
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.loops import FIT, LoopKind
from lightning_modelprof.run.records import Run
from lightning_modelprof.signals import children_later, raised_by_signal

_T = TypeVar("_T")

_OF_THE_MODULE: Final = ("log", "log_dict")
"""What Lightning puts on a callback: methods of the module, which holds the trainer and everything."""

_MAKERS_OF_HOOKS: Final = ("lightning", "pytorch_lightning", "lightning_modelprof")

_OF_A_LOOP: Final = (
    "_session",
    "_ledger",
    "_evaluation",
    "_aborted",
    "_rank_store",
    "_stop_at",
    "_short",
    "_twin",
    "_trainer",
)
"""What stands for the loop that runs: ``None`` where none does."""

_FROM_SETUP: Final = (
    *("_loop_kind", "_thread", "_count", "_directory", "_why_there", "_is_cut_off", "_dataloader_idx"),
)
"""What its ``setup`` or its first hook makes anew."""

_INNER_RAN: Final = "Another loop with the same callback ran inside this one; it has its own report."
_RAN_INSIDE: Final = (
    "This loop ran inside another one with the same callback. callback.report will be the outer loop's"
    " report."
)

_FAILED: Final = "an internal error stopped the profiler there"


class SessionKeeper:
    """What stays of the callback from loop to loop, and the session of the loop that runs.

    Attributes:
        report: the newest report; ``None`` before the first.
        run: the measured facts behind it; ``None`` before the first.
        is_from_environment: whether nobody wrote it down, but the environment asked for it.
        outside_clock: times actions outside of the loop that is set up next; ``None`` begins with ``setup``.
    """

    state_key: str
    is_from_environment: bool = False

    def __init__(self, config: ProfileConfig) -> None:
        super().__init__()
        self.config = config
        self.report: Report | None = None
        self.run: Run | None = None
        self.outside_clock: OutsideLoopClock | None = None
        self._clock = host_clock
        self._count: Callable[[Any], int] = SampleCounter()  # the user's own from setup on
        self._loop_kind: LoopKind = FIT
        self._directory: Path | None = None  # wanted for files
        self._why_there = ""  # and not beside the run
        self._session: Session | None = None
        self._ledger: PhaseLedger | None = None  # the session's, while it measures a fit
        self._evaluation: PhaseLedger | None = None  # the session's, while it measures an evaluation loop
        self._dataloader_idx = 0
        self._aborted: Session | None = None  # an error of ours has ended it
        self._rank_store: RankStore | None = None  # of the other ranks, who count on us to the end
        self._is_cut_off = False  # whether they could not be reached, which is said once
        self._stop_at: int | None = None  # batch of the fit at which windows end training on all ranks
        self._short: ShortLoop | None = None  # the loop that runs and gets no report
        self._twin: SessionKeeper | None = None  # measures in our place: it wants the same and comes first
        self._trainer: Any = None  # that runs the loop
        self._is_called_by_lightning = False
        self._thread = 0  # in which it does
        self._outer_loops: list[dict[str, Any]] = []  # what was above in the loops that this one runs in

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, of the callback or of its trainer measures nothing until it is set up."""
        away = dict.fromkeys(_OF_A_LOOP)
        kept = {
            name: value
            for name, value in vars(self).items()
            if name not in _OF_THE_MODULE and not _is_passed_over(name, value)
        }
        return {**kept, **away, "_outer_loops": [], "outside_clock": None, "_count": SampleCounter()}

    def _enter(self, trainer: Any, loop_kind: LoopKind) -> None:
        """A loop is set up; if it is called in one that we measure, that one goes on when it is over.

        Raises:
            ConfigError: when that one runs in another thread.
        """
        outer, thread = self._trainer, threading.get_ident()
        if outer is None or outer is trainer or outer.state.status != "running":
            self._end_missed_loop()
        elif self._thread != thread:
            raise ConfigError(
                f"ModelProfCallback: can't profile {loop_kind.subject}: this callback is profiling"
                f" {self._loop_kind.subject} in another thread. Make a new ModelProfCallback for each thread."
            )
        else:
            if self._session is not None:
                self._session.note(_INNER_RAN)
            self._outer_loops.append({name: vars(self)[name] for name in (*_OF_A_LOOP, *_FROM_SETUP)})
            vars(self).update(dict.fromkeys(_OF_A_LOOP))
        self._trainer, self._thread, self._loop_kind = trainer, thread, loop_kind

    def _is_running(self, trainer: Any) -> bool:
        """Whether it runs the loop we are in; ends loops inside that one of whose end nobody has told us."""
        while self._trainer is not trainer and any(one["_trainer"] is trainer for one in self._outer_loops):
            self._end_missed_loop()
        return self._trainer is trainer

    def _begin(self, trainer: Any) -> None:
        """Stand in for the trainer's profiler."""
        self._count = make_counter(self.config.samples_fn)
        prefix = f"[Callback]{self.state_key}."
        outside_clock, self.outside_clock = (
            self.outside_clock or OutsideLoopClock(self._clock, f"{prefix}setup"),
            None,
        )
        session = Session(
            self.config,
            TrainerLoop(trainer, self._loop_kind, prefix, outside_clock),
            clock=self._clock,
            warn=warn,
            guard=self._guard,
            samples_note=lambda: getattr(self._count, "note", ""),
        )
        self._session = session
        if self._outer_loops:
            session.note(_RAN_INSIDE)
        session.phase_source.on_error = self._step_aside
        session.ledger.on_missed_end = self._end_missed_loop
        end_with_process(self)

    def _join_ranks(self, trainer: Any) -> None:
        """Other ranks count on us from now on."""
        store = self._rank_store = RankStore(trainer)
        self._among_ranks(store.join)

    def _propose_stop(self, trainer: Any) -> None:
        num_steps, store = steps_until_stop(self.config, trainer.world_size), self._rank_store
        if num_steps is not None and store is not None:
            self._among_ranks(lambda: store.propose_stop(num_steps))

    def _agree_on_stop(self, trainer: Any) -> None:
        """Keep to the planned end if all ranks do: one that ended alone would leave the others waiting."""
        num_steps, store = steps_until_stop(self.config, trainer.world_size), self._rank_store
        self._stop_at = None
        if num_steps is None or store is None:
            return
        if self._among_ranks(lambda: store.agrees_on_stop(num_steps)):
            self._stop_at = trainer.fit_loop.total_batch_idx + num_steps
        else:
            warn(
                "stop_after_profile: not every rank has this callback with the same windows, so training"
                " won't end after them. Pass it to the Trainer on every rank"
            )

    def _arm(self, trainer: Any, pl_module: Any) -> PhaseLedger | None:
        """The loop begins; returns the session's ledger if there is something to measure."""
        if self._session is not None and self._session.is_armed:  # somebody else calls our hooks as well
            return self._session.ledger
        if self._rank_store is None:
            return None
        short = self._find_short(trainer, pl_module)
        folder, is_short = self._meet(trainer, self._rank_store, is_short=short is not None)
        if is_short:
            self._time_only(short)
            return None
        session = self._session
        if session is None:  # it has failed, and has joined the store all the same
            return None
        if isinstance(self._count, SampleCounter):
            self._count.look_at_loaders(getattr(trainer, self._loop_kind.trainer_attribute))
        why_there = self._why_there if trainer.is_global_zero else ""
        self._guard(lambda: session.arm(folder, why_there, lambda: check_names(session.phase_source)))
        return session.ledger if self._session is session else None

    def _pass_over(self, hooks: Iterable[str]) -> None:
        """Have Lightning pass over hooks in which there is nothing to do: it calls what can be called.

        A hook of the user's own stays, be it of a subclass or put on this object.
        """
        for hook in hooks if self._is_called_by_lightning else ():
            if getattr(type(self), hook).__module__.partition(".")[0] in _MAKERS_OF_HOOKS:
                vars(self).setdefault(hook, None)

    def _restore_hooks(self) -> None:
        """Have Lightning call all hooks."""
        for hook in [name for name, value in vars(self).items() if _is_passed_over(name, value)]:
            del vars(self)[hook]

    def _find_short(self, trainer: Any, pl_module: Any) -> ShortLoop | None:
        """The loop that begins, if this rank finds it too short for a report."""
        if self._session is None:
            return None
        found: list[ShortLoop | None] = []

        def look() -> None:
            found.append(
                short_loop(
                    self.config,
                    TrainerLoop(trainer, self._loop_kind),
                    model=type(pl_module).__name__,
                    wanted=self._directory,
                    now=self._clock(),
                )
            )

        self._guard(look)
        return found[0] if found else None

    def _time_only(self, short: ShortLoop | None) -> None:
        """The loop is too short for a report: the first rank takes its time, the others take nothing."""
        session, self._session = self._session, None
        if self._trainer.is_global_zero:
            self._short = short
        if session is not None:
            self._guard(session.close)

    def _end_short(self, *, failed: bool = False) -> bool:
        """The loop has ended; returns whether it was a short one."""
        short, self._short = self._short, None
        if short is not None:
            self._guard(lambda: PROCESS_LOOPS.add_short(short, self._clock(), failed=failed))
        return short is not None

    def _meet(self, trainer: Any, store: RankStore, *, is_short: bool) -> tuple[Path | None, bool]:
        """The ranks come together. The first one decides for all.

        Args:
            is_short: whether this rank finds the loop too short for a report.

        Returns:
            The folder for files, which the first rank has claimed, and whether the loop is too short.
        """
        claimed = ""
        is_first = self._among_ranks(lambda: store.is_first)
        if is_first is None:
            is_first = trainer.is_global_zero
        if is_first and is_short:
            claimed = TOO_SHORT
        elif self._directory is not None and is_first:
            try:
                claimed = str(PROCESS_LOOPS.claim(self._directory, self._loop_kind))
            except OSError as error:
                warn(
                    f"couldn't create a directory for files at {self._directory}: {describe_error(error)}."
                    " The results will be in callback.report and callback.run"
                )
            except Exception:  # the other ranks are waiting
                self._step_aside()
        agreed = self._among_ranks(lambda: store.agree_on_folder(claimed))
        if agreed == TOO_SHORT or (agreed is None and is_short):
            return None, True
        absent = (self._among_ranks(store.find_absent) or ()) if is_first else ()
        if absent:
            warn(
                f"{len(absent)} of {trainer.world_size} ranks don't profile {self._loop_kind.subject}, so the"
                " report leaves them out. Pass this callback to the Trainer on every rank; use"
                " bounds={'ranks': [0]} to choose which ranks record windows"
            )
        elif agreed is None and not is_first:
            warn("the first rank didn't say where to write files, so this rank writes none")
        if self._session is not None:
            self._session.is_first = is_first
            if store.can_talk:
                self._session.announcements = StepAnnouncements(store, is_first, self._ask_ranks)
        folder = claimed if agreed is None else agreed
        return (Path(folder) if folder else None), False

    def _end(self, trainer: Any) -> None:
        with children_later(is_failing=False):
            self._end_loop(trainer)

    def _end_loop(self, trainer: Any) -> None:
        store = self._rank_store if self._is_running(trainer) else None
        if store is None or self._end_short():
            return
        self._stop_session("finished")
        session = self._session
        messages: dict[int, bytes] = {}
        if trainer.world_size > 1:
            message = None if session is None else session.message
            self._among_ranks(lambda: store.send(message, _FAILED))
            if session is not None and session.is_first:
                messages = self._among_ranks(store.receive) or {}
        self._finish("finished", messages, store.absent)
        if session is not None:
            phase_source: Any = session.phase_source
            phase_source.outside_clock.on_end = lambda: self._add_outside_times(session)
        self._rank_store = None
        self._among_ranks(store.leave)

    def _among_ranks(self, talk: Callable[[], _T]) -> _T | None:
        """Talk to other ranks; ``None`` if that fails, as when the first one has died."""
        try:
            return talk()
        except Exception as error:  # each rank is measured for itself
            if not self._is_cut_off:
                self._is_cut_off = True
                warn(f"couldn't reach the other ranks: {describe_error(error)}")
            return None

    def _ask_ranks(self, talk: Callable[[], _T]) -> _T | None:
        """As above while a loop runs: whoever couldn't be reached once may take long to fail again."""
        return None if self._is_cut_off else self._among_ranks(talk)

    def _stop_session(self, status: str) -> None:
        session, self._ledger, self._evaluation = self._session, None, None
        if session is not None:
            self._guard(lambda: session.stop(status))

    def _finish(self, status: str, messages: Mapping[int, bytes], absent: Mapping[int, str]) -> None:
        session = self._session
        if session is not None:
            try:
                self._guard(lambda: self._report(session, status, messages, absent))
            finally:  # Ctrl-C while the report is printed does not cost the report
                self._take_results(session)

    def _report(
        self, session: Session, status: str, messages: Mapping[int, bytes], absent: Mapping[int, str]
    ) -> None:
        def is_brief() -> bool:
            return PROCESS_LOOPS.has_printed(self._loop_kind) or is_worker(
                TrainerLoop(self._trainer, self._loop_kind)
            )

        session.finish(status, messages, absent, is_brief=is_brief, on_report=PROCESS_LOOPS.add)

    def _add_outside_times(self, session: Session) -> None:
        """The trainer has done all that it does after the loop."""
        self._guard(session.add_outside_times)
        if session.run is not None and session.report is not None:
            PROCESS_LOOPS.renew(session.run, session.report)
        self._take_results(session)

    def _take_results(self, of: Session | SessionKeeper) -> None:
        self.report, self.run = of.report or self.report, of.run or self.run

    def _leave(self) -> None:
        try:
            self._leave_loop()
        finally:
            self._trainer = None
            if self._outer_loops:
                vars(self).update(self._outer_loops.pop())

    def _leave_loop(self) -> None:
        session, self._session = self._session, None
        store, self._rank_store = self._rank_store, None
        twin, self._twin = self._twin, None
        aborted, self._aborted = self._aborted, None
        self._ledger = self._evaluation = self._stop_at = None
        self._end_short(failed=True)
        self._restore_hooks()
        if aborted is not None:
            with suppress(Exception):  # it has failed before, and that was said
                aborted.save_aborted()
            self._take_results(aborted)
        if twin is not None:
            self._take_results(twin)
        if store is not None:
            self._among_ranks(store.leave)
        if session is not None:
            self._guard(session.close)
            self._guard(session.print_report)
            self._take_results(session)  # another callback's exception may have kept ours from being told

    def _forget_module(self) -> None:
        """Drop what Lightning has given us to log with: the model would live as long as the report does."""
        for name in _OF_THE_MODULE:
            vars(self).pop(name, None)

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a part of ours; if it fails, step aside for the rest of the loop and warn once."""
        try:
            work()
        except Exception as error:  # the loop must not notice
            if raised_by_signal(error):
                raise
            self._step_aside()

    def _step_aside(self) -> None:
        """Give up for the rest of the loop and warn; to be called while an error of ours is being handled."""
        session, self._session = self._session, None
        self._ledger = self._evaluation = None
        warn(
            f"an internal error stopped the profiler; {self._loop_kind.subject} continues without it."
            f" Please report this:\n{traceback_text()}"
        )
        if session is not None:
            try:
                session.abort()
            except Exception:  # what could not be undone or saved must not hurt either
                warn(f"couldn't clean up or save everything:\n{traceback_text()}")
            self._take_results(session)
            self._aborted = session

    def _meet_batch(self, ledger: PhaseLedger, batch: Any) -> None:
        """Count its samples, and take note of its size."""
        try:
            ledger.samples = self._count(batch)
        except Exception as error:  # the batch, or samples_fn, is not what it seemed to be
            self._stop_counting(error)
        session, sizes = self._session, ledger.sizes
        if session is None or sizes is None:
            return
        size = sizes(batch)
        if size != sizes.last:
            self._guard(lambda: session.meet_size(size))

    def _stop_counting(self, error: Exception) -> None:
        counter = "samples_fn" if self.config.samples_fn is not None else "counting the samples"
        reason = f"{counter} raised {describe_error(error)}"
        self._count = NothingCounted(reason)
        self._guard(lambda: warn(f"{reason}. The report won't have {self.config.unit}/s"))

    def _end_missed_loop(self, *, is_exit: bool = False) -> None:
        """The loop has ended and Lightning has not told: another callback's ``on_exception`` raised first.

        One that is not finished has no report, unless the program ends.
        """
        session = self._session
        try:
            if session is not None and (session.is_finished or (is_exit and session.is_armed)):
                self._stop_session(session.failure)
                self._finish(session.failure, {}, {})
        finally:
            self._leave()

    def end_at_exit(self) -> None:
        """The program ends: nobody will tell of the end of a loop that is over."""
        # A loop in another thread may still be running.
        while self._session is not None and self._session.thread == threading.get_ident():
            self._end_missed_loop(is_exit=True)

    def forget_session(self) -> None:
        """In a child of this process, which measures nothing and leaves the parent's files alone."""
        sessions = [self._session, *(one["_session"] for one in self._outer_loops)]
        vars(self).update(dict.fromkeys(_OF_A_LOOP))
        self._outer_loops.clear()
        for session in sessions:
            if session is not None:
                session.ledger.ranges = session.ledger.inspection = None
                session.phase_source.disarm()


def _is_passed_over(name: str, value: Any) -> bool:
    return value is None and name.startswith("on_")
