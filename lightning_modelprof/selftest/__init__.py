"""Check the profiler's own numbers on this machine, for ``lightning-modelprof selftest``.

Each check is a generator of comparisons of a profiler number with an independent one. The parent process
(``runner``) imports neither torch nor Lightning; each check runs in its own process (``child``).
"""
