"""Delegate of ``trainer.profiler`` that turns Lightning's action names into phases, also outside the loop.

Lightning tells its profiler when every hook, fetch and step starts and ends. Its own PassThroughProfiler
makes a generator context for each of these about 24 events per step; this one returns ready-made objects,
which saves so much that its clock reads cost only a few microseconds per step overall.
``docs/architecture.md`` has the reasons, and ``tests/lightning/test_contract_lightning.py`` checks
Lightning's names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import isfinite
from typing import Any, Final

from lightning.pytorch.profilers import Profiler

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.lightning.classify import ActionTable, make_classifier
from lightning_modelprof.lightning.in_validation import PartBeginAction
from lightning_modelprof.measure.clock import HostClock
from lightning_modelprof.measure.steps.actions import (
    INHERIT,
    Action,
    BatchEndAction,
    CallbackAction,
    DeviceMarkedAction,
    FetchAction,
    PhaseAction,
    TracedAction,
)
from lightning_modelprof.measure.steps.ledger import USER_PROFILER, PhaseLedger
from lightning_modelprof.run.loops import FIT, LoopKind
from lightning_modelprof.run.records import REPORT, SANITY_CHECK, ActionTime, CallbackTime, OutsideLoop
from lightning_modelprof.signals import raised_by_signal

_UNGUARDED: Final = {Action, PhaseAction, CallbackAction}

REQUIRED_HOOKS: Final = {"run_training_epoch", "train_dataloader_next", "training_step"}
"""Without these, a fit's steps and phases can't be told apart; all occur before a trained batch ends."""


SILENT_PROFILERS: Final = ("PassThroughProfiler", "ModelProfiler")
"""Matched by name, as lightning and pytorch_lightning each have a PassThroughProfiler."""


class PhaseProfiler(Profiler):
    """Replaces ``trainer.profiler`` during a loop and forwards everything to the original.

    Args:
        trainer: its callbacks, strategy and module are the subjects of actions.
        own_prefix: start of our own callback's action names, which aren't measured.
        outside_clock: times the actions outside the loop.

    Attributes:
        thread: ID of the thread that runs the loop.
        on_error: called once when one of our actions has failed, while its error is being handled.
    """

    inner: Any
    # Lightning calls this about 24 times per step. A plain attribute that is the table's own lookup, rather
    # than a method around it, saves a Python frame each time.
    profile: Callable[[str], Action]  # type: ignore[assignment]

    def __init__(
        self,
        inner: Any,
        ledger: PhaseLedger,
        trainer: Any,
        own_prefix: str,
        loop_kind: LoopKind = FIT,
        *,
        outside_clock: OutsideLoopClock | None = None,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.outside_clock = outside_clock or OutsideLoopClock(ledger.clock)
        self.ledger = ledger
        self.thread = threading.get_ident()
        self._loop_kind = loop_kind
        classifier = make_classifier(ledger, trainer, own_prefix, loop_kind)
        self._base = classifier.actions
        self._tables = {
            "idle": self._table(lambda name: self._idle(classifier.while_idle(name), name)),
            "loop": self._table(lambda name: self._base[name]),
            "validation": self._table(classifier.in_validation),
            "traced loop": self._table(lambda name: self._traced(self._base[name])),
            "traced validation": self._table(lambda name: self._traced(classifier.in_validation(name))),
        }
        self.armed = False
        self.choose_table()
        ledger.on_validation_change = self.choose_table
        self.on_error: Callable[[], None] = _raise_again

    # Lightning's interface

    def start(self, action_name: str) -> None:
        self.profile(action_name).__enter__()

    def stop(self, action_name: str) -> None:
        self.profile(action_name).__exit__(None, None, None)

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.inner.setup(*args, **kwargs)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.inner.teardown(*args, **kwargs)

    def summary(self) -> str:
        return str(self.inner.summary())

    def describe(self) -> None:
        self.inner.describe()

    @property
    def _lightning_module(self) -> Any:
        return self.inner._lightning_module

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        # The Trainer assigns this to whatever its profiler is.
        self.inner._lightning_module = module

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or pickle of the trainer made during a loop has only the user's profiler.
        return _itself, (self.inner,)

    def __del__(self) -> None:
        # Profiler.__del__ calls teardown(), which would close the user's live profiler.
        pass

    # Our interface

    def arm(self) -> None:
        self.ledger.restart()
        self.outside_clock.loop_begins(self.ledger.last_ns)
        self.armed = True
        self.choose_table()

    def disarm(self) -> None:
        """Stop measuring after the loop. Actions still open end without effect."""
        if self.armed:
            self.armed = False
            self.choose_table()  # first, so that nothing more is measured whatever fails
            self.ledger.charge()
            self.ledger.discard()
            self.outside_clock.loop_ends(self.ledger.last_ns)

    def fail(self) -> None:
        """Report that one of our actions failed; to be called while its error is being handled."""
        on_error, self.on_error = self.on_error, _nothing
        on_error()

    def choose_table(self) -> None:
        """Use the actions for the current state: idle, loop or validation, traced or not."""
        table = "idle"
        if self.armed:
            table = "validation" if self.ledger.in_validation else "loop"
            if self.ledger.ranges is not None:
                table = f"traced {table}"
        self.profile = self._tables[table].__getitem__

    @property
    def has_trained(self) -> bool:
        """Whether a batch has been trained on since training started."""
        return "run_training_batch" in self._base

    def missing_hooks(self) -> set[str]:
        """Return the required hooks that should have occurred since the loop started but haven't."""
        seen = {name.rpartition(".")[2] for name in self._base}
        if not self._loop_kind.is_fit:
            return {self._loop_kind.fetch, self._loop_kind.step_hook} - seen
        # A batch that is None or skips its epoch is never trained on.
        expected = REQUIRED_HOOKS if "run_training_batch" in seen else REQUIRED_HOOKS - {"training_step"}
        return expected - seen

    def callback_times(self) -> tuple[CallbackTime, ...]:
        times = [
            CallbackTime(
                callback=name.removeprefix("[Callback]").rpartition(".")[0],
                hook=name.rpartition(".")[2],
                calls=action.calls,
                total_ns=action.total_ns,
            )
            for name, action in self._base.items()
            if isinstance(action, CallbackAction) and action.calls
        ]
        return tuple(sorted(times, key=lambda time: -time.total_ns))

    def _table(self, make: Callable[[str], Action]) -> ActionTable:
        return ActionTable(lambda name: self._guarded(make, name))

    def _guarded(self, make: Callable[[str], Action], name: str) -> Action:
        """Make the action of a name, whose errors don't reach the loop."""
        try:
            action = make(name)
        except Exception:  # the trainer may run user code, such as a callback's state_key
            self.fail()
            return INHERIT
        # These are most events of a step. They only read the clock and add integers, so they can't fail.
        return action if type(action) in _UNGUARDED else GuardedAction(self, action)

    def _idle(self, action: Action, name: str) -> Action:
        return OutsideLoopAction(self.outside_clock, name) if action is INHERIT else action

    def _traced(self, action: Action) -> Action:
        if isinstance(action, PartBeginAction):
            return PartBeginAction(self.ledger, action.part, self._traced(action.action))
        # Fetches and gaps write their own ranges.
        if isinstance(action, BatchEndAction) and isinstance(action.action, PhaseAction):
            inner = TracedAction(self.ledger, action.action, action.action.phase)
            return type(action)(self.ledger, inner)
        if isinstance(action, DeviceMarkedAction):
            return TracedAction(self.ledger, action, action.action.phase)
        if isinstance(action, PhaseAction) and not isinstance(action, FetchAction):
            return TracedAction(self.ledger, action, action.phase)
        return action


class ForwardingPhaseProfiler(PhaseProfiler):
    """Delegate of a profiler that does something: it forwards every action and looks like the original.

    It's a separate class because ``__getattr__`` slows every attribute access, including ``profile``.
    """

    def _table(self, make: Callable[[str], Action]) -> ActionTable:
        return ActionTable(lambda name: ForwardedAction(self, name, self._guarded(make, name)))

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look attributes up before __init__ has run
        if "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)


def make_delegate(
    inner: Any,
    ledger: PhaseLedger,
    trainer: Any,
    own_prefix: str,
    loop_kind: LoopKind = FIT,
    *,
    outside_clock: OutsideLoopClock | None = None,
) -> PhaseProfiler:
    kind = PhaseProfiler if type(inner).__name__ in SILENT_PROFILERS else ForwardingPhaseProfiler
    return kind(inner, ledger, trainer, own_prefix, loop_kind, outside_clock=outside_clock)


class GuardedAction(Action):
    """Wraps an action so that its errors end the measurement rather than the loop."""

    __slots__ = ("action", "profiler")

    def __init__(self, profiler: PhaseProfiler, action: Action) -> None:
        self.profiler = profiler
        self.action = action

    def __enter__(self) -> None:
        try:
            self.action.__enter__()
        except Exception as failed:  # Ctrl+C is the user's
            if raised_by_signal(failed):
                raise
            self.profiler.fail()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        try:
            self.action.__exit__(kind, error, trace)
        except Exception as failed:
            if raised_by_signal(failed):
                raise
            self.profiler.fail()


class ForwardedAction(Action):
    """Passes an action on to the user's own profiler, whose cost is a separate phase."""

    __slots__ = ("action", "name", "profiler")

    def __init__(self, profiler: PhaseProfiler, name: str, action: Action) -> None:
        self.profiler = profiler
        self.name = name
        self.action = action

    def __enter__(self) -> None:
        self.action.__enter__()
        self._charge()  # time that an unmeasured action left open isn't the profiler's
        self.profiler.inner.start(self.name)
        self._charge(USER_PROFILER)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self.action.__exit__(kind, error, trace)
        self._charge()
        self.profiler.inner.stop(self.name)
        self._charge(USER_PROFILER)

    def _charge(self, phase: int | None = None) -> None:
        profiler = self.profiler
        if profiler.armed and threading.get_ident() == profiler.thread:
            profiler.ledger.charge(phase)


_CALLS: Final = 0
_TOTAL: Final = 1
_AFTER: Final = 2

_BEGIN_OF_CHECK: Final = ".on_sanity_check_start"
_END_OF_CHECK: Final = ".on_sanity_check_end"
"""Callback hooks around the sanity check, for which Lightning has no action."""


class OutsideLoopClock:
    """Sums the host time before and after one loop: in each action, and from its end to the next one.

    Args:
        clock: host clock, which is read twice per outermost action.
        running: running action whose end won't be reported; ``""`` if the next event starts one.

    Attributes:
        on_end: called when everything is over, if the loop has come to its end.
    """

    def __init__(self, clock: HostClock, running: str = "") -> None:
        self._clock = clock
        self._before: dict[str, list[int]] = {}
        self._after: dict[str, list[int]] = {}
        self._times: dict[str, list[int]] | None = self._before  # None while nothing is summed
        self._open = ""  # the outermost action, whose end will be reported
        self._depth = 0  # how often it runs within itself
        self._is_over = False
        self.on_end: Callable[[], None] = _nothing
        self._last_ns = clock()
        self._sum, self._column = [0, 0, 0], _AFTER
        if running:
            self._enter(running, self._before)

    def begin(self, name: str) -> None:
        if self._times is None:
            return
        if not self._open:
            self._charge(self._clock())
            is_check = name.endswith((_BEGIN_OF_CHECK, _END_OF_CHECK))
            self._open = SANITY_CHECK if is_check else name
            self._enter(self._open, self._times, calls=not name.endswith(_END_OF_CHECK))
        elif name == self._open:
            self._depth += 1

    def end(self, name: str) -> None:
        if not self._open or (SANITY_CHECK if name.endswith(_END_OF_CHECK) else name) != self._open:
            return
        if self._depth:
            self._depth -= 1
            return
        self._charge(self._clock())
        self._open, self._column = "", _AFTER

    def loop_begins(self, now: int) -> None:
        """Leave the time to the ledger from now on."""
        self._charge(now)
        self._stop()

    def loop_ends(self, now: int) -> None:
        """Continue after the loop, starting with its report."""
        self._last_ns, self._times = now, self._after
        self._enter(REPORT, self._after)

    def give_up(self) -> None:
        """Stop if no loop came, or one that isn't measured."""
        if self._times is self._before:
            self._stop()

    def finish(self) -> None:
        if self._times is self._after:
            self._charge(self._clock())
            self._stop()
            self._is_over = True
            on_end, self.on_end = self.on_end, _nothing
            on_end()

    def times(self) -> OutsideLoop:
        return OutsideLoop(before=_times(self._before), after=_times(self._after) if self._is_over else None)

    def _enter(self, name: str, times: dict[str, list[int]], *, calls: int = 1) -> None:
        self._sum, self._column = times.setdefault(name, [0, 0, 0]), _TOTAL
        self._sum[_CALLS] += calls

    def _charge(self, now: int) -> None:
        self._sum[self._column] += now - self._last_ns
        self._last_ns = now

    def _stop(self) -> None:
        self._times, self._open, self._depth = None, "", 0


class OutsideLoopAction(Action):
    __slots__ = ("name", "outside_clock")

    def __init__(self, outside_clock: OutsideLoopClock, name: str) -> None:
        self.outside_clock = outside_clock
        self.name = name

    def __enter__(self) -> None:
        self.outside_clock.begin(self.name)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self.outside_clock.end(self.name)


def _times(sums: dict[str, list[int]]) -> tuple[ActionTime, ...]:
    return tuple(
        ActionTime(action=name, calls=calls, total_ns=int(total_ns), after_ns=int(after_ns))
        for name, (calls, total_ns, after_ns) in sums.items()
        if isfinite(total_ns) and isfinite(after_ns)  # a clock may fail
    )


def check_names(delegate: Any) -> None:
    """Check after the first step that all required names have occurred.

    Raises:
        ModelProfError: when this Lightning version doesn't report the parts of a step.
    """
    missing = delegate.missing_hooks()
    if missing:
        raise ModelProfError(
            f"this Lightning version doesn't report {', '.join(sorted(missing))} to its profiler"
        )


def check_epoch(delegate: Any, ledger: PhaseLedger) -> None:
    """Check names after an epoch of a fit: if a batch was trained on but no step ended, they differ.

    An epoch that was skipped before its first training step shows nothing about names.

    Raises:
        ModelProfError: when they differ.
    """
    if not ledger.steps_ended and delegate.has_trained:
        check_names(delegate)
        raise ModelProfError("this Lightning version doesn't report the end of a batch to its profiler")


def find_delegate(profiler: Any, delegate: PhaseProfiler) -> PhaseProfiler | None:
    """Return the delegate in a chain whose ``inner`` is ``delegate``, or ``None``."""
    while isinstance(profiler, PhaseProfiler):
        if profiler.inner is delegate:
            return profiler
        profiler = profiler.inner
    return None


def uninstall(trainer: Any, delegate: PhaseProfiler) -> None:
    """Remove ``delegate`` from ``trainer.profiler``, wherever it is in a chain of delegates."""
    try:
        delegate.disarm()
    finally:
        outer = find_delegate(trainer.profiler, delegate)
        if trainer.profiler is delegate:
            trainer.profiler = delegate.inner
        elif outer is not None:
            outer.inner = delegate.inner


def _itself(profiler: Any) -> Any:
    return profiler


def _raise_again() -> None:
    raise  # noqa: PLE0704 -- called while the error is being handled


def _nothing() -> None:
    pass
