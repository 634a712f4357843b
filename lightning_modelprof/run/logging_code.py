"""Which functions log or compute metrics: ``self.log``, loggers, and what a torchmetrics metric does."""

from __future__ import annotations

from typing import Final

_LIGHTNING: Final = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
_LOGS: Final = ("log", "log_dict")
_METRICS: Final = ("torchmetrics.metric", "torchmetrics.collections")
_METRIC_PACKAGE: Final = "torchmetrics.wrappers."
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
    """What a function does for the user's metrics: ``log``, ``LOGGER``, or the name of a method of a metric.

    Args:
        module: name of the Python module that it is in.
        function: its name, qualified or not.

    Returns:
        ``""`` if it is no such function.
    """
    name = function.rpartition(".")[2]
    if module in _LIGHTNING:
        return "log" if name in _LOGS else ""
    if (module in _METRICS or module.startswith(_METRIC_PACKAGE)) and name in _METHODS:
        return name
    return LOGGER if f"{module}.".startswith(_LOGGERS) else ""
