"""Measured facts about one step: source lines that wait for the device, copy, or run many operators."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Record

SYNCHRONISATION: Final = "synchronisation"
"""The CPU needs a value or a size before it can continue: ``.item()``, ``if loss > 0``, a mask."""


DEVICE_TO_HOST: Final = "device_to_host"


HOST_TO_DEVICE: Final = "host_to_device"


HOST_TENSOR: Final = "host_tensor"
"""A tensor is made from Python numbers or a NumPy array, in CPU memory."""


BATCH_START: Final = "batch_start"
"""Before the batch's own work: a fetch without workers, the transfer, other callbacks' hooks."""


BATCH_END: Final = "batch_end"
"""After the batch's own work: callbacks' hooks, metrics for loggers and the progress bar."""


PRINT: Final = "print"
"""Operator of a site that converts a tensor to text; torch hides the real operators."""


class SourceSite(Place, frozen=True, kw_only=True):
    """One place in the source that synchronises or copies.

    Attributes:
        kind: one of the constants above.
        file, line: the innermost user line on the stack. In backward, where torch runs alone, it's the line
            of the forward whose gradient is computed. ``None`` without such a line.
        function_line: first line of that function, by which torch's Python tracer identifies it.
        callers: library functions between that line and the operator, innermost first; empty if the line
            itself ran the operator.
        phase: one of ``FLOP_PHASES``, ``BATCH_START`` or ``BATCH_END``.
        operator: name without overload, as in ``aten::_local_scalar_dense``, or ``PRINT``.
        device: type of the tensor's device, such as ``cuda``; for a copy, the one that isn't the CPU.
        num_bytes: copied or made, in all calls; ``None`` if unknown.
        is_blocking: whether the CPU waits until the device is done; ``None`` on the CPU, where none is.
        is_pinned: for a copy, whether the CPU memory is pinned; else ``None``.
        is_non_blocking: for a copy, whether ``non_blocking=True`` was passed; else ``None``.
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
        """Whether ``self.log`` or a torchmetrics metric did it for the line."""
        return any(logging_kind(*_module_and_function(name)) for name in self.callers)

    @property
    def caller(self) -> str:
        """The innermost of ``callers`` that isn't torch's, else the innermost; ``""`` without any."""
        others = (name for name in self.callers if not name.startswith("torch."))
        return next(others, self.callers[0] if self.callers else "")


class LineCount(Place, frozen=True, kw_only=True):
    """Operators that one user line ran in one phase and module.

    Attributes:
        file, line, function_line, phase: as in :class:`SourceSite`; operators without a user line (such as
            the optimizer's own) are grouped under ``None``.
        calls: dispatched operators, including views.
        views: of them, those that only give another view of a tensor and start no kernel.
        operators: number of different ones.
        elements: in the results of all calls except views.
        num_bytes: of the operands and results of all calls except views, without any caching.
        logging: calls except views that ``self.log`` or a torchmetrics metric ran for the line.
        constant: calls except views that depend only on sizes and on module tensors that didn't change in the
            step, so that they compute the same in every step; 0 if that isn't certain.
        unsized: calls missing in ``elements`` and ``num_bytes``: of sparse and other tensors of unknown size.
        took_ns: CPU-side wall time in all calls except views and logging; 0 in runs of older versions.
        gradients: calls of ``torch.autograd.grad`` by the line, directly or through a library; like
            everything below, 0 in runs of older versions.
        reductions: calls that reduce a trained parameter to one number, such as the norm in a penalty.
        double: calls except views and logging with a float64 tensor among operands or results.
        to_double: of them, those that make a float64 tensor from tensors of other types.
        double_ns: the ``double`` calls' part of ``took_ns``.
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
        device: type of the model's device.
        sites: most calls first.
        lines: most operators first.
        dropped: omissions and failures, a sentence each.
    """

    step: Count | None
    device: str
    sites: tuple[SourceSite, ...]
    lines: tuple[LineCount, ...]
    dropped: tuple[str, ...] = ()


def _module_and_function(name: str) -> tuple[str, str]:
    """Split a dotted name at its first capitalized part, else before its last part."""
    names = name.split(".")
    end = next((number for number, one in enumerate(names) if one[:1].isupper()), len(names) - 1)
    return ".".join(names[:end]), ".".join(names[end:])


_LIGHTNING: Final = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


_LOGS: Final = ("log", "log_dict")


_METRICS: Final = ("torchmetrics.metric", "torchmetrics.collections")


_METRIC_PACKAGE: Final = "torchmetrics.wrappers."


LOG: Final = "log"
"""Kind of ``self.log`` and ``self.log_dict``."""


LOGGER: Final = "logger"
"""Kind of code in loggers, and in the packages that they write with."""


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
"""``wrapped_func`` is torchmetrics' wrapper around every metric's ``update`` and ``compute``."""


def logging_kind(module: str, function: str) -> str:
    """A function's role in logging: ``LOG``, ``LOGGER``, or the name of a metric's method.

    Args:
        function: its name, qualified or not.

    Returns:
        ``""`` for any other function.
    """
    name = function.rpartition(".")[2]
    if module in _LIGHTNING:
        return LOG if name in _LOGS else ""
    if (module in _METRICS or module.startswith(_METRIC_PACKAGE)) and name in _METHODS:
        return name
    return LOGGER if f"{module}.".startswith(_LOGGERS) else ""
