"""Profile your own loop like one of Lightning's, in torch.profiler's terms."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import nn

from lightning_modelprof.config.checks import make_config
from lightning_modelprof.config.sources import is_switched_off
from lightning_modelprof.engine.loop import Loop, check_machine, print_switched_off
from lightning_modelprof.engine.process_loops import PROCESS_LOOPS, end_with_process, is_worker
from lightning_modelprof.engine.run_folder import check_writeable
from lightning_modelprof.engine.session import Session, end_status
from lightning_modelprof.errors import ConfigError, describe_error, did_you_mean, quoted, traceback_text, warn
from lightning_modelprof.measure.clock import host_clock
from lightning_modelprof.measure.steps.actions import (
    INHERIT,
    Action,
    BatchEndAction,
    DeviceMarkedAction,
    EpochAction,
    FetchAction,
    PhaseAction,
    TracedAction,
)
from lightning_modelprof.measure.steps.batch_sizes import NothingCounted, SampleCounter, make_counter
from lightning_modelprof.measure.steps.ledger import DATALOADER, PhaseLedger
from lightning_modelprof.measure.window.schedule import fit_schedule
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.locate import DEFAULT_FOLDER
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.records import CallbackTime, Run
from lightning_modelprof.run.steps import NOT_MEASURED
from lightning_modelprof.signals import children_later, raised_by_signal

_Batch = TypeVar("_Batch")

_WHO: Final = "LoopProfiler"

_OURS: Final = {
    "dataloader",
    "dataloader_init",
    "profiler",
    "other",
    "rank_wait",
    "user_profiler",
    "epoch_turn",
}
"""Phases that are detected, so code can't enter them by name."""

NAMES: Final = tuple(phase.key for phase in PHASES if phase.key not in _OURS)
"""Phases that :meth:`LoopProfiler.phase` accepts."""


class _PlainPhases:
    """Phases reported by the user's own code."""

    inner: Any = None

    def __init__(self, ledger: PhaseLedger) -> None:
        self.ledger = ledger
        self.is_armed = self.has_begun = False
        self.on_error: Callable[[], None] = _nothing
        self.fetch = FetchAction(ledger)
        self.epoch = EpochAction(ledger)
        self.end = BatchEndAction(ledger, INHERIT)
        self._plain = {name: self._action(PHASE_INDEX[name]) for name in NAMES}
        self._traced: dict[str, Action] = {
            name: TracedAction(ledger, action, PHASE_INDEX[name]) for name, action in self._plain.items()
        }
        self.phases = self._plain

    def _action(self, phase: int) -> Action:
        action = PhaseAction(self.ledger, phase)
        return action if self.ledger.device is None else DeviceMarkedAction(self.ledger, action)

    def arm(self) -> None:
        self.ledger.restart()
        self.is_armed = True

    def disarm(self) -> None:
        if self.is_armed:
            self.is_armed = False
            self.ledger.charge()
            self.ledger.discard()

    def choose_table(self) -> None:
        self.phases = self._plain if self.ledger.ranges is None else self._traced

    def callback_times(self) -> tuple[CallbackTime, ...]:
        return ()


class _PlainLoop(Loop):
    strategy = "plain loop"

    def __init__(
        self,
        module: nn.Module | None,
        optimizers: Sequence[Any],
        num_steps: int | None,
        loggers: Sequence[Any],
    ) -> None:
        self.module = module
        self.loggers = loggers
        self._optimizers = tuple(optimizers)
        self._num_steps = num_steps
        self._loader: Any = None
        self._iterator: Any = None
        self._watched: Any = None
        self._epochs = 0
        self._datasets: list[Callable[[], Any]] = []  # that batches came from, as weak references
        self.steps = 0
        self.wants_stop = False

    @property
    def optimizers(self) -> Sequence[Any]:
        return self._optimizers

    @property
    def num_steps(self) -> int | None:
        return self._num_steps

    @property
    def logger_step(self) -> int:
        return max(0, self.steps - 1)

    def fetches_from(self, loader: Any, iterator: Any = None) -> None:
        self._loader, self._iterator = loader, iterator

    def iterators(self) -> Sequence[Any]:
        return () if self._iterator is None else (self._iterator,)

    def loaders(self) -> Sequence[Any]:
        return () if self._loader is None else (self._loader,)

    def watch_loaders(self, watched: Any, cleanup: ExitStack) -> None:
        self._watched = watched
        cleanup.callback(setattr, self, "_watched", None)

    def tell_of(self, loader: Any) -> None:
        """Report a loader before its iterator for an epoch is made."""
        self._epochs += 1
        if self._watched is not None:
            self._watched.add(loader, self._epochs, self._position_of(loader))

    def _position_of(self, loader: Any) -> int:
        """Return a loader's number in the loop; loaders of one dataset count as one that was made again."""
        data = getattr(loader, "dataset", loader)
        for position, known in enumerate(self._datasets):
            if known() is data:
                return position
        free = [position for position, known in enumerate(self._datasets) if known() is None]
        try:
            reference: Callable[[], Any] = weakref.ref(data)
        except TypeError:  # for example a list
            reference = partial(_itself, data)
        if free:
            self._datasets[free[0]] = reference
            return free[0]
        self._datasets.append(reference)
        return len(self._datasets) - 1

    def make_phase_source(self, ledger: PhaseLedger) -> _PlainPhases:
        return _PlainPhases(ledger)

    def stop(self) -> None:
        self.wants_stop = True


class LoopProfiler:
    """Profiles a training loop you wrote yourself.

        with LoopProfiler(model, optimizers=[optimizer]) as profiler:
            for batch in profiler.fetch(loader):
                with profiler.phase("forward"):
                    loss = compute_loss(model, batch)
                profiler.backward(loss)
                with profiler.phase("optimizer"):
                    optimizer.step()
                profiler.step()

    Without ``with``, call ``start()`` first and ``stop()`` when done. Without ``fetch``, call ``step()`` at
    the end of each batch, as with torch.profiler; the wait for data isn't measured then. Time outside all
    phases shows as Loop. If the profiler fails, it warns once and the loop continues.

    Args:
        model: Model being trained; used for FLOPs and per-module timing. ``None`` skips these.
        optimizers: The model's optimizers, for the size of their state and for findings about them.
        num_steps: Total number of steps, if you know it.
        schedule: Which steps to record, as made by torch.profiler.schedule. Replaces active, wait, warmup,
            repeat, skip_first and steps. Its windows must repeat at equal distances.
        on_trace_ready: Called with the path of each window's trace (``None`` if no files are written) and the
            window's report. The call comes between two later steps or at the end, after the trace has been
            analyzed.
        loggers: Lightning loggers, such as TensorBoardLogger, to log the scalars and tables to.
        **arguments: Arguments of ModelProfCallback. log_every_n_steps defaults to 50 and dirpath to
            ``modelprof``.

    Attributes:
        report: The newest report; ``None`` before the first.
        run: The measurements behind it; ``None`` before the first.

    Raises:
        ConfigError: Immediately, on invalid arguments.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        optimizers: Sequence[Any] = (),
        num_steps: int | None = None,
        schedule: Callable[[int], Any] | None = None,
        on_trace_ready: Callable[[Path | None, Report], None] | None = None,
        loggers: Sequence[Any] = (),
        **arguments: Any,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise ConfigError(
                f"{_WHO}: expected a torch.nn.Module as the first argument, got {quoted(model)}. Pass the"
                " model being trained, or leave it out."
            )
        if schedule is not None:
            arguments = {**arguments, **_schedule_arguments(schedule, arguments)}
        self.config = make_config(arguments, f"{_WHO}(...)")
        self.report: Report | None = None
        self.run: Run | None = None
        self._model, self._optimizers, self._num_steps = model, optimizers, num_steps
        self._loggers, self._on_trace_ready = loggers, on_trace_ready
        self._clock = host_clock
        self._count: Callable[[Any], int] = SampleCounter()
        self._loop: _PlainLoop | None = None
        self._session: Session | None = None
        self._phase_source: _PlainPhases | None = None
        self._fetches = False  # whether batches come from fetch()
        self._has_batch = False  # a batch from fetch() that hasn't ended

    # Lifecycle

    def __enter__(self) -> LoopProfiler:
        self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stop("finished" if error is None else end_status(error), error)

    def start(self) -> None:
        """Start measuring.

        Raises:
            ConfigError: If ``dirpath`` isn't writable, or the profiler is already running.
        """
        if self._session is not None:
            raise ConfigError(f"{_WHO}.start: already running. Call stop() first.")
        config = self.config
        if is_switched_off():
            print_switched_off(_WHO)
            return
        check_machine(config, _WHO)
        folder = None
        if config.report.files:
            folder = Path(config.dirpath or DEFAULT_FOLDER).expanduser()
            check_writeable(folder)
        self._count = make_counter(config.samples_fn)
        loop = self._loop = _PlainLoop(self._model, self._optimizers, self._num_steps, self._loggers)
        self._fetches = self._has_batch = False
        self._guard(lambda: self._begin(loop, folder))
        end_with_process(self)

    def _begin(self, loop: _PlainLoop, folder: Path | None) -> None:
        session = self._session = Session(
            self.config,
            loop,
            clock=self._clock,
            warn=_warn,
            guard=self._guard,
            samples_note=lambda: getattr(self._count, "note", ""),
        )
        claimed = None
        if folder is not None:
            try:
                claimed = PROCESS_LOOPS.claim(folder.absolute(), loop.kind)
            except OSError as error:
                _warn(
                    f"couldn't create a directory for files at {folder}: {describe_error(error)}."
                    " The results are in .report and .run"
                )
        phase_source: Any = session.phase_source
        phase_source.on_error = self._step_aside
        if self._on_trace_ready is not None:
            session.on_trace_ready = self._on_trace_ready
        session.arm(claimed)
        self._phase_source = phase_source

    def stop(self) -> None:
        """Stop measuring and show the report. Calling it again does nothing."""
        self._stop("finished", None)

    def _stop(self, status: str, error: BaseException | None) -> None:
        session, self._session, self._phase_source = self._session, None, None
        if session is None:
            return

        def end() -> None:
            if error is not None:
                session.note_exception(error)
            session.stop(status)
            session.finish(status, {}, {}, is_brief=self._is_brief, on_report=PROCESS_LOOPS.add)
            session.print_report()

        try:
            with children_later(is_failing=error is not None):
                self._guard(end)
        finally:
            self._take_results(session)

    def _is_brief(self) -> bool:
        loop = self._loop
        return loop is not None and (PROCESS_LOOPS.has_printed(loop.kind) or is_worker(loop))

    def _take_results(self, session: Session) -> None:
        self.report, self.run = session.report or self.report, session.run or self.run

    # Steps

    def fetch(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield one epoch's batches; the time until each arrives is the phase Dataloader."""
        phase_source, loop = self._phase_source, self._loop
        if phase_source is None or loop is None:
            yield from loader
            return
        self._fetches = True
        loop.fetches_from(loader)
        self._guard(lambda: loop.tell_of(loader))
        number = 0
        try:
            self._guard(phase_source.epoch.__enter__)
            iterator = iter(loader)
            loop.fetches_from(loader, iterator)
            while not loop.wants_stop:
                if self._has_batch:
                    self.step()
                self._guard(phase_source.fetch.__enter__)
                try:
                    batch = next(iterator)
                except StopIteration:
                    phase_source.ledger.batch_began = False  # no batch came, so none is unfinished
                    break
                finally:
                    self._guard(phase_source.fetch.__exit__)
                self._has_batch = True
                self._guard(lambda batch=batch, number=number: self._begin_batch(batch, number))  # type: ignore[misc]
                yield batch
                number += 1
        finally:
            loop.fetches_from(loader)  # workers of an interrupted epoch end with its iterator
            if self._has_batch:
                self.step()
            if self._phase_source is phase_source:
                self._guard(phase_source.epoch.__exit__)

    def _begin_batch(self, batch: Any, number: int) -> None:
        if self._session is None:
            return
        ledger = self._session.ledger
        try:
            ledger.samples = self._count(batch)
        except Exception as error:  # an unexpected batch, or samples_fn failed
            what = "samples_fn" if self.config.samples_fn else "counting the samples"
            reason = f"{what} raised {describe_error(error)}"
            self._count = NothingCounted(reason)
            _warn(f"{reason}. The report won't have {self.config.unit}/s")
        if ledger.sizes is not None and ledger.sizes(batch) != ledger.sizes.last:
            self._session.meet_size(ledger.sizes(batch))
        if ledger.repeated is not None:
            ledger.repeated.begin_batch(batch)
            if ledger.repeated.is_over:
                ledger.repeated = None
        if ledger.inspection is not None:
            ledger.inspection.begin_batch(batch, number)

    def phase(self, name: str) -> Action:
        """Return a context whose time counts as one phase, such as ``forward`` or ``optimizer``.

        Raises:
            ConfigError: If there's no such phase.
        """
        if name not in NAMES:
            raise ConfigError(
                f"{_WHO}.phase: expected one of {', '.join(NAMES)},"
                f" got {quoted(name)}.{did_you_mean(str(name), NAMES)}"
            )
        phase_source = self._phase_source
        if phase_source is None or threading.get_ident() != self._session_thread:
            return INHERIT
        self._begin_unfetched()
        if name == "backward":
            self._before_backward(None)
        return phase_source.phases[name]

    def _begin_unfetched(self) -> None:
        """Start the first step with its first phase, if batches don't come from fetch()."""
        if not self._fetches and self._phase_source is not None and not self._phase_source.has_begun:
            self._phase_source.has_begun = True
            self._guard(self._phase_source.ledger.begin_evaluation)

    @property
    def _session_thread(self) -> int:
        return -1 if self._session is None else self._session.thread

    def _before_backward(self, loss: Any) -> None:
        inspection = None if self._session is None else self._session.ledger.inspection
        if inspection is not None:
            self._guard(lambda: inspection.before_backward(loss))

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Call ``loss.backward()`` as the phase Backward; this also times each module's backward."""
        self._begin_unfetched()
        self._before_backward(loss)
        phase_source = self._phase_source
        with INHERIT if phase_source is None else phase_source.phases["backward"]:
            loss.backward(**kwargs)

    def step(self) -> None:
        """End the current step."""
        if self._phase_source is not None:
            self._guard(self._end_step)

    def _end_step(self) -> None:
        phase_source, loop, session = self._phase_source, self._loop, self._session
        if phase_source is None or loop is None or session is None:
            return
        ledger = session.ledger
        if ledger.inspection is not None:
            ledger.inspection.end_batch()
        loop.steps += 1
        if self._has_batch:
            self._has_batch = False
            phase_source.end.__exit__()
        elif not self._fetches:
            ledger.charge()
            ledger.self_ns[DATALOADER] = NOT_MEASURED
            ledger.end_step()

    def step_info(self, unit: str | None = None) -> str:
        """Average over the steps since the last call, as in ``ModelProfCallback.step_info``."""
        return "" if self._session is None else self._session.live.step_info(unit)

    # Internals

    def _guard(self, work: Callable[[], None]) -> None:
        """Run our code; if it fails, stop profiling this loop and warn once."""
        try:
            work()
        except Exception as error:  # the loop must not notice
            if raised_by_signal(error):
                raise
            self._step_aside()

    def _step_aside(self) -> None:
        session, self._session, self._phase_source = self._session, None, None
        _warn(
            "an internal error stopped the profiler; the loop continues without it. Please report this:\n"
            f"{traceback_text()}"
        )
        if session is not None:
            try:
                session.abort()
            except Exception:
                _warn(f"couldn't clean up or save everything:\n{traceback_text()}")
            self._take_results(session)

    def forget_session(self) -> None:
        """Stop measuring in a child process, without touching the parent's files."""
        session, self._session, self._phase_source = self._session, None, None
        if session is not None:
            session.ledger.ranges = session.ledger.inspection = None
            session.phase_source.disarm()

    def end_at_exit(self) -> None:
        """End the loop when the program ends without saying that it's over."""
        if self._session_thread == threading.get_ident():
            self._stop("interrupted", None)


def _schedule_arguments(schedule: Callable[[int], Any], arguments: dict[str, Any]) -> dict[str, Any]:
    names = ("timer_only", "active", "wait", "warmup", "repeat", "steps", "skip_first")
    twice = [name for name in names if arguments.get(name, False) is not False]
    if twice:
        raise ConfigError(f"{_WHO}(...): expected schedule or {twice[0]}, got both. Remove one.")
    found = fit_schedule(lambda step: getattr(schedule(step), "name", ""))
    if found is None:
        raise ConfigError(
            f"{_WHO}(...): schedule: expected windows of equal length and distance, as from"
            f" torch.profiler.schedule(...), got {quoted(schedule)}. Use wait, warmup and active instead."
        )
    return {
        "skip_first": found.skip_first,
        "wait": found.wait,
        "warmup": found.warmup,
        "active": found.active,
        "repeat": found.repeat,
    }


def _warn(message: str) -> None:
    warn(message, _WHO)


def _itself(thing: Any) -> Any:
    return thing


def _nothing() -> None:
    pass
