"""Shows where PyTorch Lightning training time goes.

Names are imported when they are first used, so that the command line needs neither torch nor lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_modelprof.errors import (
    ArchiveError,
    ConfigError,
    MissingExtraError,
    ModelProfError,
    TraceError,
)

if TYPE_CHECKING:
    from lightning_modelprof.callback import ModelProfCallback
    from lightning_modelprof.measure.timing import EventTimer, benchmark_inference

__version__ = "0.1.0"

__all__ = [
    "ArchiveError",
    "ConfigError",
    "EventTimer",
    "MissingExtraError",
    "ModelProfCallback",
    "ModelProfError",
    "TraceError",
    "__version__",
    "benchmark_inference",
]


def __getattr__(name: str) -> Any:
    if name == "ModelProfCallback":
        from lightning_modelprof.callback import ModelProfCallback  # noqa: PLC0415

        return ModelProfCallback
    if name in {"EventTimer", "benchmark_inference"}:
        from lightning_modelprof.measure import timing  # noqa: PLC0415

        return getattr(timing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
