"""Public module of the profilers, such as ``Trainer(profiler=ModelProfiler())``."""

from lightning_modelprof.engine.profiler import LoopProfiler
from lightning_modelprof.lightning.profiler import ModelProfiler

__all__ = ["LoopProfiler", "ModelProfiler"]
