"""One session per loop, started and ended with the other ranks; its errors don't reach the training."""

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
"""Attributes that Lightning sets: methods of the module, which holds the trainer and everything else."""

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
"""Attributes of the running loop; ``None`` without one."""

_FROM_SETUP: Final = (
    *("_loop_kind", "_thread", "_count", "_directory", "_why_there", "_is_cut_off", "_dataloader_idx"),
)
"""Attributes that the loop's ``setup`` or first hook sets again."""

_INNER_RAN: Final = "Another loop with the same callback ran inside this one; it has its own report."
_RAN_INSIDE: Final = (
    "This loop ran inside another one with the same callback. callback.report will be the outer loop's"
    " report."
)

_FAILED: Final = "an internal error stopped the profiler there"


class SessionKeeper:
    """The callback's state from loop to loop, and the session of the running loop.

    Attributes:
        report: the newest report; ``None`` before the first.
        run: the measurements behind it; ``None`` before the first.
        is_from_environment: whether the environment requested it, rather than the program.
        outside_clock: times actions outside the loop that is set up next; ``None`` starts in ``setup``.
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
        self._why_there = ""  # why it isn't next to the run's files
        self._session: Session | None = None
        self._ledger: PhaseLedger | None = None  # the session's, while it measures a fit
        self._evaluation: PhaseLedger | None = None  # the session's, while it measures an evaluation loop
        self._dataloader_idx = 0
        self._aborted: Session | None = None  # ended by an internal error
        self._rank_store: RankStore | None = None  # for the other ranks, which count on us to the end
        self._is_cut_off = False  # whether they couldn't be reached, which is reported once
        self._stop_at: int | None = None  # batch of the fit at which windows end training on all ranks
        self._short: ShortLoop | None = None  # running loop without a report
        self._twin: SessionKeeper | None = None  # measures instead: it has the same arguments and comes first
        self._trainer: Any = None  # that runs the loop
        self._is_called_by_lightning = False
        self._thread = 0  # that runs the loop
        self._outer_loops: list[dict[str, Any]] = []  # values of the above for the loops around this one

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the running loop: a copy or pickle measures nothing until it's set up."""
        away = dict.fromkeys(_OF_A_LOOP)
        kept = {
            name: value
            for name, value in vars(self).items()
            if name not in _OF_THE_MODULE and not _is_passed_over(name, value)
        }
        return {**kept, **away, "_outer_loops": [], "outside_clock": None, "_count": SampleCounter()}

    def _enter(self, trainer: Any, loop_kind: LoopKind) -> None:
        """Set up a loop; if it runs inside one that we measure, that one continues afterwards.

        Raises:
            ConfigError: when the outer loop runs in another thread.
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
        """Whether ``trainer`` runs our loop; first ends loops inside it whose end wasn't reported."""
        while self._trainer is not trainer and any(one["_trainer"] is trainer for one in self._outer_loops):
            self._end_missed_loop()
        return self._trainer is trainer

    def _begin(self, trainer: Any) -> None:
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
        """Register this rank, so that others count on it."""
        store = self._rank_store = RankStore(trainer)
        self._among_ranks(store.join)

    def _propose_stop(self, trainer: Any) -> None:
        num_steps, store = steps_until_stop(self.config, trainer.world_size), self._rank_store
        if num_steps is not None and store is not None:
            self._among_ranks(lambda: store.propose_stop(num_steps))

    def _agree_on_stop(self, trainer: Any) -> None:
        """Plan to stop if all ranks do; a rank that ended alone would leave the others waiting."""
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
        """Start with the loop; return the session's ledger if there's something to measure."""
        if self._session is not None and self._session.is_armed:  # our hooks have another caller, too
            return self._session.ledger
        if self._rank_store is None:
            return None
        short = self._find_short(trainer, pl_module)
        folder, is_short = self._meet(trainer, self._rank_store, is_short=short is not None)
        if is_short:
            self._time_only(short)
            return None
        session = self._session
        if session is None:  # it failed, but has joined the store
            return None
        if isinstance(self._count, SampleCounter):
            self._count.look_at_loaders(getattr(trainer, self._loop_kind.trainer_attribute))
        why_there = self._why_there if trainer.is_global_zero else ""
        self._guard(lambda: session.arm(folder, why_there, lambda: check_names(session.phase_source)))
        return session.ledger if self._session is session else None

    def _pass_over(self, hooks: Iterable[str]) -> None:
        """Make Lightning skip hooks that have nothing to do, as it calls only callable ones.

        The user's own hooks stay, whether from a subclass or set on this object.
        """
        for hook in hooks if self._is_called_by_lightning else ():
            if getattr(type(self), hook).__module__.partition(".")[0] in _MAKERS_OF_HOOKS:
                vars(self).setdefault(hook, None)

    def _restore_hooks(self) -> None:
        for hook in [name for name, value in vars(self).items() if _is_passed_over(name, value)]:
            del vars(self)[hook]

    def _find_short(self, trainer: Any, pl_module: Any) -> ShortLoop | None:
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
        """Handle a loop too short for a report: only the first rank times it."""
        session, self._session = self._session, None
        if self._trainer.is_global_zero:
            self._short = short
        if session is not None:
            self._guard(session.close)

    def _end_short(self, *, failed: bool = False) -> bool:
        short, self._short = self._short, None
        if short is not None:
            self._guard(lambda: PROCESS_LOOPS.add_short(short, self._clock(), failed=failed))
        return short is not None

    def _meet(self, trainer: Any, store: RankStore, *, is_short: bool) -> tuple[Path | None, bool]:
        """Agree with the other ranks; the first one decides for all.

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
        """Communicate with other ranks; return ``None`` if that fails, as when the first one has died."""
        try:
            return talk()
        except Exception as error:  # ranks are measured independently
            if not self._is_cut_off:
                self._is_cut_off = True
                warn(f"couldn't reach the other ranks: {describe_error(error)}")
            return None

    def _ask_ranks(self, talk: Callable[[], _T]) -> _T | None:
        """The same while a loop runs; doesn't try again after a failure, as failing may be slow."""
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
            finally:  # Ctrl-C while the report is printed must not lose it
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
            with suppress(Exception):  # it failed before, with a warning
                aborted.save_aborted()
            self._take_results(aborted)
        if twin is not None:
            self._take_results(twin)
        if store is not None:
            self._among_ranks(store.leave)
        if session is not None:
            self._guard(session.close)
            self._guard(session.print_report)
            self._take_results(session)  # another callback's exception may have skipped ours

    def _forget_module(self) -> None:
        """Drop the module's methods, which would keep the model alive with the report."""
        for name in _OF_THE_MODULE:
            vars(self).pop(name, None)

    def _guard(self, work: Callable[[], None]) -> None:
        """Run our code; if it fails, stop profiling this loop and warn once."""
        try:
            work()
        except Exception as error:  # the loop must not notice
            if raised_by_signal(error):
                raise
            self._step_aside()

    def _step_aside(self) -> None:
        """Stop profiling this loop and warn; to be called while our error is being handled."""
        session, self._session = self._session, None
        self._ledger = self._evaluation = None
        warn(
            f"an internal error stopped the profiler; {self._loop_kind.subject} continues without it."
            f" Please report this:\n{traceback_text()}"
        )
        if session is not None:
            try:
                session.abort()
            except Exception:  # a failure to undo or save must not hurt either
                warn(f"couldn't clean up or save everything:\n{traceback_text()}")
            self._take_results(session)
            self._aborted = session

    def _meet_batch(self, ledger: PhaseLedger, batch: Any) -> None:
        try:
            ledger.samples = self._count(batch)
        except Exception as error:  # an unexpected batch, or samples_fn failed
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
        """End a loop whose end wasn't reported, as another callback's ``on_exception`` raised first.

        An unfinished loop gets no report, unless the program ends.
        """
        session = self._session
        try:
            if session is not None and (session.is_finished or (is_exit and session.is_armed)):
                self._stop_session(session.failure)
                self._finish(session.failure, {}, {})
        finally:
            self._leave()

    def end_at_exit(self) -> None:
        """End loops when the program ends, as no hook will."""
        # A loop in another thread may still be running.
        while self._session is not None and self._session.thread == threading.get_ident():
            self._end_missed_loop(is_exit=True)

    def forget_session(self) -> None:
        """Stop measuring in a child process, without touching the parent's files."""
        sessions = [self._session, *(one["_session"] for one in self._outer_loops)]
        vars(self).update(dict.fromkeys(_OF_A_LOOP))
        self._outer_loops.clear()
        for session in sessions:
            if session is not None:
                session.ledger.ranges = session.ledger.inspection = None
                session.phase_source.disarm()


def _is_passed_over(name: str, value: Any) -> bool:
    return value is None and name.startswith("on_")
