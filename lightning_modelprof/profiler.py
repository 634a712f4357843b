"""The door to the profilers: ``Trainer(profiler=ModelProfiler())``, and ``LoopProfiler`` for plain loops."""

from lightning_modelprof.engine.profiler import LoopProfiler
from lightning_modelprof.lightning.profiler import ModelProfiler

__all__ = ["LoopProfiler", "ModelProfiler"]
