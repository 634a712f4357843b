"""Measured facts about one step: which source lines wait for the device, copy, or run many operators."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Record

SYNCHRONISATION: Final = "synchronisation"
"""The host must know a value, or how many, before it goes on: ``.item()``, ``if loss > 0``, a mask."""


DEVICE_TO_HOST: Final = "device_to_host"


HOST_TO_DEVICE: Final = "host_to_device"


HOST_TENSOR: Final = "host_tensor"
"""A tensor is made of Python numbers or of a NumPy array, in the host's memory."""


BATCH_START: Final = "batch_start"
"""What comes before the batch's own work: a fetch without workers, the transfer, other callbacks' hooks."""


BATCH_END: Final = "batch_end"
"""What comes after the batch's own work: callbacks' hooks, metrics for loggers and the progress bar."""


PRINT: Final = "print"
"""Operator of a site where a tensor is made into text; torch hides the operators of that."""


class SourceSite(Place, frozen=True, kw_only=True):
    """One place in the source that synchronises or copies.

    Attributes:
        kind: one of those above.
        file, line: the innermost line of the user's on the stack. In backward, where torch runs alone, it is
            the line of the forward whose gradient is computed. ``None`` when there is no such line.
        function_line: first line of that function: what torch's Python tracer knows it by.
        callers: functions of libraries between that line and the operator, innermost first; empty when the
            line itself ran the operator.
        phase: one of ``FLOP_PHASES``, ``BATCH_START`` or ``BATCH_END``.
        operator: name without overload, as in ``aten::_local_scalar_dense``, or ``PRINT``.
        device: type of the device that has the tensor, such as ``cuda``; of a copy, the one that is not the
            host.
        num_bytes: that were copied or made, in all calls; ``None`` where that is not known.
        is_blocking: whether the host waits until the device is done; ``None`` on the CPU, where none is.
        is_pinned: of a copy: whether the host's memory is pinned; else ``None``.
        is_non_blocking: of a copy: whether ``non_blocking=True`` was asked for; else ``None``.
    """

    kind: str
    function_line: Count | None
    callers: tuple[str, ...]
    phase: str
    operator: str
    device: str
    calls: Count
    num_bytes: Int | None
    is_blocking: bool | None
    is_pinned: bool | None
    is_non_blocking: bool | None

    @property
    def is_logging(self) -> bool:
        """Whether ``self.log`` or a metric of torchmetrics did it for the line."""
        return any(logging_kind(*_module_and_function(name)) for name in self.callers)

    @property
    def caller(self) -> str:
        """The one of ``callers`` to name: the innermost that is not torch's; ``""`` without any."""
        others = (name for name in self.callers if not name.startswith("torch."))
        return next(others, self.callers[0] if self.callers else "")


class LineCount(Place, frozen=True, kw_only=True):
    """The operators that one line of the user's ran in one phase and module.

    Attributes:
        file, line, function_line, phase: as in :class:`SourceSite`; operators without a line of the user's
            (the optimizer's own, say) are together under ``None``.
        calls: operators that were dispatched, views too.
        views: those of them that only look at a tensor in another way, and start no kernel.
        operators: how many different ones.
        elements: in the results of all calls but views.
        num_bytes: of the operands and the results of all calls but views, as if none were in a cache.
        logging: calls but views that ``self.log`` or a metric of torchmetrics ran for the line.
        constant: calls but views that depend on nothing but sizes and tensors that modules hold and that did
            not change in the step, so that they compute the same in every step; 0 where that is not sure.
        unsized: calls that are missing in ``elements`` and ``num_bytes``: of sparse and other tensors that do
            not say how large they are.
        took_ns: host time in all calls but views and those of logging; 0 in runs of older versions.
        gradients: calls of ``torch.autograd.grad`` that the line made, itself or through a library; like all
            that follows, 0 in runs of older versions.
        reductions: calls that make one number of a trained parameter, such as the norm of a penalty.
        double: calls but views and those of logging with a float64 tensor among operands or results.
        to_double: those of them that make a float64 tensor of tensors that aren't.
        double_ns: the part of ``took_ns`` that is theirs.
    """

    function_line: Count | None
    phase: str
    calls: Count
    views: Count
    operators: Count
    elements: Count
    num_bytes: Int
    unsized: Int = 0
    logging: Count = 0
    constant: Count = 0
    took_ns: Count = 0
    gradients: Count = 0
    reductions: Count = 0
    double: Count = 0
    to_double: Count = 0
    double_ns: Count = 0

    @property
    def own_calls(self) -> int:
        return self.calls - self.views - self.logging


class StepSites(Record, frozen=True, kw_only=True):
    """Source lines of one step of one process.

    Attributes:
        step: number of the step in its loop; ``None`` outside of one.
        device: type of the device that the model is on.
        sites: most calls first.
        lines: most operators first.
        dropped: what was left out, and what failed, a sentence each.
    """

    step: Count | None
    device: str
    sites: tuple[SourceSite, ...]
    lines: tuple[LineCount, ...]
    dropped: tuple[str, ...] = ()


def _module_and_function(name: str) -> tuple[str, str]:
    """Of a dotted name; modules are written small, classes and functions in classes come after."""
    names = name.split(".")
    end = next((number for number, one in enumerate(names) if one[:1].isupper()), len(names) - 1)
    return ".".join(names[:end]), ".".join(names[end:])


_LIGHTNING: Final = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


_LOGS: Final = ("log", "log_dict")


_METRICS: Final = ("torchmetrics.metric", "torchmetrics.collections")


_METRIC_PACKAGE: Final = "torchmetrics.wrappers."


LOG: Final = "log"
"""What is said of ``self.log`` and ``self.log_dict``."""


LOGGER: Final = "logger"
"""What is said of code of loggers, and of the packages that they write with."""


_LOGGERS: Final = (
    "lightning.pytorch.loggers.",
    "lightning.fabric.loggers.",
    "pytorch_lightning.loggers.",
    "lightning_fabric.loggers.",
    "torch.utils.tensorboard.",
    "tensorboardX.",
    "aim.",
    "clearml.",
    "comet_ml.",
    "mlflow.",
    "neptune.",
    "swanlab.",
    "wandb.",
)


_METHODS: Final = ("forward", "update", "compute", "sync", "reset", "wrapped_func")
"""``wrapped_func`` is what torchmetrics puts around every metric's ``update`` and ``compute``."""


def logging_kind(module: str, function: str) -> str:
    """What a function does for the user's metrics: ``LOG``, ``LOGGER``, or the name of a method of a metric.

    Args:
        function: its name, qualified or not.

    Returns:
        ``""`` if it is no such function.
    """
    name = function.rpartition(".")[2]
    if module in _LIGHTNING:
        return LOG if name in _LOGS else ""
    if (module in _METRICS or module.startswith(_METRIC_PACKAGE)) and name in _METHODS:
        return name
    return LOGGER if f"{module}.".startswith(_LOGGERS) else ""
