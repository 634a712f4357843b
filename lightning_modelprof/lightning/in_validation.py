"""What Lightning's actions mean inside a validation loop of a fit: which of its parts they are.

The parts are counted in ``measure/steps/validation_parts.py``; here is what begins them and what comes after.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from lightning_modelprof.lightning.rank_wait import stand_in
from lightning_modelprof.measure.stand_in import StandIn
from lightning_modelprof.measure.steps.actions import Action
from lightning_modelprof.measure.steps.ledger import PhaseLedger
from lightning_modelprof.run.phases import PART_INDEX

DATALOADER: Final = PART_INDEX["dataloader"]
DATALOADER_INIT: Final = PART_INDEX["dataloader_init"]
EPOCH_END: Final = PART_INDEX["epoch_end"]
FORWARD: Final = PART_INDEX["forward"]
LOGGING: Final = PART_INDEX["logging"]
MODULE_HOOKS: Final = PART_INDEX["module_hooks"]
OTHER: Final = PART_INDEX["other"]
TRANSFER: Final = PART_INDEX["transfer"]

METRICS_COMPUTED: Final = "update_eval_epoch_metrics"
METRICS_LOGGED: Final = "log_eval_end_metrics"
"""Lightning's own methods, which are private: where there is none, its time stays in the part around it."""


class ValidationStartAction(Action):
    """The first hook of a validation loop.

    Args:
        part: of the validation that the hook itself is.
        takes_gap: whether the time since the last event was validation already (the start of its
            workers), which is so when this hook is not the very first one.
    """

    __slots__ = ("after", "ledger", "part", "takes_gap")

    def __init__(self, ledger: PhaseLedger, *, part: int, after: int, takes_gap: bool) -> None:
        self.ledger = ledger
        self.part = part
        self.after = after
        self.takes_gap = takes_gap

    def __enter__(self) -> None:
        ledger = self.ledger
        if self.takes_gap:
            ledger.enter_validation(DATALOADER_INIT)
            ledger.begin_part(self.part)
        else:
            ledger.charge()
            ledger.enter_validation(self.part)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self.ledger.begin_part(self.after)


class ValidationEndAction(Action):
    """The last hook of a validation loop, and which part of it that hook is."""

    __slots__ = ("ledger", "part")

    def __init__(self, ledger: PhaseLedger, part: int) -> None:
        self.ledger = ledger
        self.part = part

    def __enter__(self) -> None:
        self.ledger.begin_part(self.part)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        ledger = self.ledger
        if ledger.in_validation:
            ledger.charge()
            ledger.leave_validation()


class PartAction(Action):
    """The time inside is one part's, less what actions inside it take.

    Args:
        after: the part that follows; ``None`` goes on with the one before.
    """

    __slots__ = ("after", "ledger", "outer", "part")

    def __init__(self, ledger: PhaseLedger, part: int, after: int | None = None) -> None:
        self.ledger = ledger
        self.part = part
        self.after = after
        self.outer = OTHER

    def __enter__(self) -> None:
        parts = self.ledger.validation
        self.outer = parts.part
        parts.calls[self.part] += 1
        self.ledger.begin_part(self.part)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self.ledger.begin_part(self.outer if self.after is None else self.after)


class FetchPartAction(PartAction):
    """The fetch of a validation batch; what was logged before it is over then."""

    __slots__ = ("before_ns",)

    def __init__(self, ledger: PhaseLedger) -> None:
        super().__init__(ledger, DATALOADER)
        self.before_ns = 0

    def __enter__(self) -> None:
        super().__enter__()
        parts = self.ledger.validation
        self.before_ns = parts.total_ns[DATALOADER]
        if self.outer != FORWARD:  # a validation_step that takes a dataloader_iter goes on
            self.outer = OTHER

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        super().__exit__()
        parts = self.ledger.validation
        parts.fetch_ns = parts.total_ns[DATALOADER] - self.before_ns


class PartBeginAction(Action):
    """With another action a part begins that lasts until the next one does."""

    __slots__ = ("action", "ledger", "part")

    def __init__(self, ledger: PhaseLedger, part: int, action: Action) -> None:
        self.ledger = ledger
        self.part = part
        self.action = action

    def __enter__(self) -> None:
        self.ledger.begin_part(self.part)
        self.action.__enter__()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self.action.__exit__(kind, error, trace)


class BatchEndPartAction(Action):
    """The end of another action is the end of the batch: metrics and loggers follow until the next fetch."""

    __slots__ = ("action", "ledger")

    def __init__(self, ledger: PhaseLedger, action: Action) -> None:
        self.ledger = ledger
        self.action = action

    def __enter__(self) -> None:
        self.action.__enter__()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        self.action.__exit__(kind, error, trace)
        self.ledger.begin_part(LOGGING)


class TimedPart(StandIn):
    """A method of Lightning's that is a part, and that no action tells of."""

    def __init__(self, original: Callable[..., Any], action: Action) -> None:
        super().__init__(original)
        self._action = action

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._action:
            return self.original(*args, **kwargs)


def time_metrics(
    trainer: Any, ledger: PhaseLedger, guarded: Callable[[Action], Action], cleanup: ExitStack
) -> None:
    """Tell the computing of a validation's metrics from their logging, until ``cleanup``.

    Args:
        guarded: makes an action harmless: its errors do not reach the loop.
    """
    connector = getattr(trainer, "_logger_connector", None)
    for name, part in ((METRICS_COMPUTED, EPOCH_END), (METRICS_LOGGED, LOGGING)):
        method = getattr(connector, name, None)
        if method is not None:
            stand_in(connector, name, TimedPart(method, guarded(PartAction(ledger, part))), cleanup)
