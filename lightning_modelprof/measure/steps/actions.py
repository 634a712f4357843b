"""Contexts that tell the ledger about events of Lightning's profiler interface, one class per kind.

An action object is created once per action name (``lightning/classify.py`` decides its kind) and entered and
left whenever the action happens. Each event costs one clock reading and a few assignments.
"""

from __future__ import annotations

from typing import Final

from lightning_modelprof.measure.steps.ledger import (
    BACKWARD,
    CALLBACKS,
    DATALOADER,
    DATALOADER_INIT,
    LOGGING,
    OTHER,
    PhaseLedger,
    Ranges,
)


class Action:
    """A context without effect: the time inside belongs to what surrounds it."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        pass


INHERIT: Final = Action()
"""For actions that aren't phases themselves. It has no state, so any thread may use it."""


class PhaseAction(Action):
    """Assigns the time inside to one phase, minus the time of inner actions.

    The surrounding phase is stored here rather than on a stack, so that an action that was started and never
    stopped (an exception between Lightning's start and stop) can't shift later ones.
    """

    __slots__ = ("ledger", "outer", "phase")

    def __init__(self, ledger: PhaseLedger, phase: int) -> None:
        self.ledger = ledger
        self.phase = phase
        self.outer = OTHER

    def __enter__(self) -> None:
        ledger = self.ledger
        now = ledger.clock()
        self.outer = current = ledger.current
        ledger.self_ns[current] += now - ledger.last_ns
        ledger.last_ns = now
        ledger.current = self.phase

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        ledger = self.ledger
        now = ledger.clock()
        ledger.self_ns[ledger.current] += now - ledger.last_ns
        ledger.last_ns = now
        ledger.current = self.outer


class CallbackAction(PhaseAction):
    """A hook of another callback, with its own total: everything inside except hooks of further callbacks.

    Includes a checkpoint that it saves. Hooks called in the meantime have their own totals, so all totals
    together never exceed the loop's time.
    """

    __slots__ = ("begin_ns", "calls", "hooks_before_ns", "total_ns")

    def __init__(self, ledger: PhaseLedger) -> None:
        super().__init__(ledger, CALLBACKS)
        self.calls = self.total_ns = self.begin_ns = self.hooks_before_ns = 0

    def __enter__(self) -> None:
        ledger = self.ledger
        now = ledger.clock()
        self.outer = current = ledger.current
        ledger.self_ns[current] += now - ledger.last_ns
        self.begin_ns = ledger.last_ns = now
        self.hooks_before_ns = ledger.hooks_ns
        ledger.current = CALLBACKS

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        ledger = self.ledger
        now = ledger.clock()
        ledger.self_ns[ledger.current] += now - ledger.last_ns
        ledger.last_ns = now
        ledger.current = self.outer
        self.calls += 1
        self.total_ns += now - self.begin_ns - (ledger.hooks_ns - self.hooks_before_ns)
        ledger.hooks_ns = self.hooks_before_ns + now - self.begin_ns


class ExceptionAction(Action):
    """``on_exception`` of another callback: if that raises, the loop's end isn't announced."""

    __slots__ = ("ledger",)

    def __init__(self, ledger: PhaseLedger) -> None:
        self.ledger = ledger

    def __enter__(self) -> None:
        self.ledger.on_failure()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        if error is not None:
            self.ledger.on_missed_end()


class BatchStartAction(CallbackAction):
    """``on_train_batch_start`` of a callback: a step starts here if ``training_step`` fetches itself."""

    __slots__ = ()

    def __enter__(self) -> None:
        if self.ledger.needs_batch_start:
            self.ledger.begin_batch()
        super().__enter__()


class AfterBackwardAction(CallbackAction):
    """``on_after_backward`` of a callback: the first one ends manual optimization's backward."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        end_manual_backward(self)


class FetchAction(PhaseAction):
    """The fetch of a batch, which ends the previous step."""

    __slots__ = ("has_range",)

    def __init__(self, ledger: PhaseLedger) -> None:
        super().__init__(ledger, DATALOADER)
        self.has_range = False

    def __enter__(self) -> None:
        ledger = self.ledger
        now = ledger.clock()
        self.outer = current = ledger.current
        ledger.self_ns[current] += now - ledger.last_ns
        ledger.last_ns = now
        # The gap before the fetch (loggers, worker start-up) doesn't continue after it.
        if ledger.batch_ended:
            ledger.end_step()
            self.outer = OTHER
        else:
            if current == DATALOADER_INIT:
                ledger.close_gap_range()
                self.outer = OTHER
            if ledger.device is not None:
                ledger.device.mark(DATALOADER)
        ledger.batch_began = True
        ledger.current = DATALOADER
        cpu = ledger.cpu
        cpu.left -= 1
        if cpu.left <= 0 or cpu.is_reading:
            cpu.begin_fetch()
        self.has_range = ledger.ranges is not None
        if ledger.ranges is not None:
            ledger.ranges.push(DATALOADER)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        ledger = self.ledger
        if ledger.cpu.is_reading:
            ledger.cpu.end_fetch()
        if self.has_range and ledger.ranges is not None:
            ledger.ranges.pop()
        PhaseAction.__exit__(self)
        if ledger.device is not None:
            ledger.device.mark(ledger.current)


class BatchEndAction(Action):
    """Ends the batch with another action: metrics and loggers follow until the next fetch."""

    __slots__ = ("action", "ledger")

    def __init__(self, ledger: PhaseLedger, action: Action) -> None:
        self.ledger = ledger
        self.action = action

    def __enter__(self) -> None:
        self.action.__enter__()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        ledger = self.ledger
        now = ledger.clock()
        ledger.self_ns[ledger.current] += now - ledger.last_ns
        ledger.last_ns = now
        ledger.batch_ended = True
        if ledger.ranges is None:
            ledger.current = LOGGING
        else:
            self._close_range(ledger.ranges)
            ledger.open_gap(LOGGING)

    def _close_range(self, ranges: Ranges) -> None:
        """End the action in a trace too, so that what follows isn't inside it."""
        if isinstance(self.action, TracedAction) and self.action.has_range:
            self.action.has_range = False
            ranges.pop()


class EpochAction(Action):
    """``run_training_epoch``."""

    __slots__ = ("ledger",)

    def __init__(self, ledger: PhaseLedger) -> None:
        self.ledger = ledger

    def __enter__(self) -> None:
        self.ledger.begin_epoch()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        if error is not None:
            self.ledger.charge()
            self.ledger.discard()  # aborted: what would have come before the next fetch is missing
        else:
            self.ledger.end_epoch()


class ManualBackwardStartAction(PhaseAction):
    """``on_before_backward`` of the module under manual optimization, right before the backward.

    ``manual_backward`` fires no action of its own, only the hooks before and after it.
    """

    __slots__ = ()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        super().__exit__()
        ledger = self.ledger
        ledger.backward_outer = ledger.current
        ledger.current = BACKWARD
        if ledger.device is not None:
            ledger.device.mark(BACKWARD)
        if ledger.ranges is not None:
            ledger.ranges.push(BACKWARD)


class ManualBackwardEndAction(PhaseAction):
    """``on_after_backward`` of the module under manual optimization."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        end_manual_backward(self)


def end_manual_backward(action: PhaseAction) -> None:
    """If a manual backward is open, continue the phase around it after ``action``."""
    ledger = action.ledger
    if ledger.backward_outer is None:
        return
    action.outer = ledger.backward_outer
    ledger.backward_outer = None
    if ledger.device is not None:
        ledger.device.mark(action.outer)
    if ledger.ranges is not None:
        ledger.ranges.pop()


class DeviceMarkedAction(Action):
    """Puts marks on the device's stream at both ends of another action."""

    __slots__ = ("action", "ledger")

    def __init__(self, ledger: PhaseLedger, action: PhaseAction) -> None:
        self.ledger = ledger
        self.action = action

    def __enter__(self) -> None:
        self.action.__enter__()
        if self.ledger.device is not None:
            self.ledger.device.mark(self.action.phase)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self.action.__exit__()
        if self.ledger.device is not None:
            self.ledger.device.mark(self.ledger.current)


class TracedAction(Action):
    """Writes another action as a named range into the trace being recorded."""

    __slots__ = ("action", "has_range", "ledger", "phase")

    def __init__(self, ledger: PhaseLedger, action: Action, phase: int) -> None:
        self.ledger = ledger
        self.action = action
        self.phase = phase
        self.has_range = False

    def __enter__(self) -> None:
        self.action.__enter__()
        self.has_range = self.ledger.ranges is not None
        if self.ledger.ranges is not None:
            self.ledger.ranges.push(self.phase)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        if self.has_range and self.ledger.ranges is not None:
            self.ledger.ranges.pop()
        self.action.__exit__()
