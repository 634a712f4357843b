"""Assign Lightning's actions inside a fit's validation loop to parts of the validation.

``measure/steps/validation_parts.py`` counts the parts; this module starts them and chooses what follows.
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
"""Private methods of Lightning; if one is missing, its time stays in the part around it."""


class ValidationStartAction(Action):
    """First hook of a validation loop.

    Args:
        part: the hook's own part of the validation.
        takes_gap: whether the time since the last event already was validation (the start of its workers),
            which is so unless this hook is the very first one.
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
    """Last hook of a validation loop, with its own part."""

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
    """Counts the time inside as one part, minus that of actions inside it.

    Args:
        after: part that follows; ``None`` continues the one before.
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
    """Fetch of a validation batch, which ends the logging before it."""

    __slots__ = ("before_ns",)

    def __init__(self, ledger: PhaseLedger) -> None:
        super().__init__(ledger, DATALOADER)
        self.before_ns = 0

    def __enter__(self) -> None:
        super().__enter__()
        parts = self.ledger.validation
        self.before_ns = parts.total_ns[DATALOADER]
        if self.outer != FORWARD:  # a validation_step that takes a dataloader_iter continues
            self.outer = OTHER

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        super().__exit__()
        parts = self.ledger.validation
        parts.fetch_ns = parts.total_ns[DATALOADER] - self.before_ns


class PartBeginAction(Action):
    """Action with which a part starts that lasts until the next one."""

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
    """Action that ends with its batch; metrics and loggers follow until the next fetch."""

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
    """Method of Lightning's that is a part but has no action."""

    def __init__(self, original: Callable[..., Any], action: Action) -> None:
        super().__init__(original)
        self._action = action

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._action:
            return self.original(*args, **kwargs)


def time_metrics(
    trainer: Any, ledger: PhaseLedger, guarded: Callable[[Action], Action], cleanup: ExitStack
) -> None:
    """Time the computation of a validation's metrics apart from their logging, until ``cleanup``.

    Args:
        guarded: wraps an action so that its errors don't reach the loop.
    """
    connector = getattr(trainer, "_logger_connector", None)
    for name, part in ((METRICS_COMPUTED, EPOCH_END), (METRICS_LOGGED, LOGGING)):
        method = getattr(connector, name, None)
        if method is not None:
            stand_in(connector, name, TimedPart(method, guarded(PartAction(ledger, part))), cleanup)
