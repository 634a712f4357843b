"""The door to the profilers: ``Trainer(profiler=ModelProfiler())``, and ``LoopProfiler`` for plain loops."""

from lightning_modelprof.lightning.profiler import ModelProfiler
from lightning_modelprof.loop.profiler import LoopProfiler

__all__ = ["LoopProfiler", "ModelProfiler"]
