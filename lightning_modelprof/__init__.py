"""Shows where PyTorch Lightning training time goes.

Names are imported when they are first used, so that the command line needs neither torch nor lightning.
"""

from __future__ import annotations

import importlib
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
    from lightning_modelprof.config import Bounds, InspectOptions, ReportOptions
    from lightning_modelprof.flops.count import count_flops
    from lightning_modelprof.measure.event_timer import EventTimer
    from lightning_modelprof.measure.inference_benchmark import benchmark_inference
    from lightning_modelprof.model_profile import profile_model
    from lightning_modelprof.report_reading import read_report
    from lightning_modelprof.show.terminal import print_report
    from lightning_modelprof.trace_report import analyze

__version__ = "0.1.0"

__all__ = [
    "ArchiveError",
    "Bounds",
    "ConfigError",
    "EventTimer",
    "InspectOptions",
    "MissingExtraError",
    "ModelProfCallback",
    "ModelProfError",
    "ReportOptions",
    "TraceError",
    "__version__",
    "analyze",
    "benchmark_inference",
    "count_flops",
    "print_report",
    "profile_model",
    "read_report",
]

_HOMES = {
    "Bounds": "config",
    "EventTimer": "measure.event_timer",
    "InspectOptions": "config",
    "ModelProfCallback": "callback",
    "ReportOptions": "config",
    "analyze": "trace_report",
    "benchmark_inference": "measure.inference_benchmark",
    "count_flops": "flops.count",
    "print_report": "show.terminal",
    "profile_model": "model_profile",
    "read_report": "report_reading",
}
"""Public name → the file it is imported from when it is first used."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
