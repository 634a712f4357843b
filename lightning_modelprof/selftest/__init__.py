"""Checks of the package's own numbers on the machine at hand, for ``lightning-modelprof selftest``.

Each check is a generator of comparisons of a figure of ours with one that was found without us. The parent
process (``runner``) needs neither torch nor Lightning: each check runs in a process of its own (``child``).
"""
