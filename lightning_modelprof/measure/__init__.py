"""Measures training as it runs: clocks, phase times, the profiler window. Builds ``run``'s records."""
