"""What runs during training: clocks, phase times, the profiler window. Builds records of ``run``."""
