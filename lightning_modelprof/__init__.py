"""Show where PyTorch Lightning training time goes.

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
    from lightning_modelprof.config.options import Bounds, InspectOptions, ReportOptions
    from lightning_modelprof.engine.loader_profile import profile_loader
    from lightning_modelprof.engine.profiler import LoopProfiler
    from lightning_modelprof.inspect.flops.count import count_flops
    from lightning_modelprof.lightning.callback import ModelProfCallback
    from lightning_modelprof.lightning.profiler import ModelProfiler
    from lightning_modelprof.reading import read_report
    from lightning_modelprof.reading_traces import analyze
    from lightning_modelprof.show.terminal.terminal import print_report
    from lightning_modelprof.timing.event_timer import EventTimer
    from lightning_modelprof.timing.inference import benchmark_inference
    from lightning_modelprof.timing.model_profile import profile_model

__version__ = "0.1.0"

__all__ = [
    "ArchiveError",
    "Bounds",
    "ConfigError",
    "EventTimer",
    "InspectOptions",
    "LoopProfiler",
    "MissingExtraError",
    "ModelProfCallback",
    "ModelProfError",
    "ModelProfiler",
    "ReportOptions",
    "TraceError",
    "__version__",
    "analyze",
    "benchmark_inference",
    "count_flops",
    "print_report",
    "profile_loader",
    "profile_model",
    "read_report",
]

_HOMES = {
    "Bounds": "config.options",
    "EventTimer": "timing.event_timer",
    "InspectOptions": "config.options",
    "LoopProfiler": "engine.profiler",
    "ModelProfCallback": "callback",
    "ModelProfiler": "lightning.profiler",
    "ReportOptions": "config.options",
    "analyze": "reading_traces",
    "benchmark_inference": "timing.inference",
    "count_flops": "inspect.flops.count",
    "print_report": "show.terminal.terminal",
    "profile_loader": "engine.loader_profile",
    "profile_model": "timing.model_profile",
    "read_report": "reading",
}
"""Public name → the file it is imported from when it is first used."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
