"""CPU time of this process."""

from __future__ import annotations

import os
from typing import NamedTuple

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


class CpuTime(NamedTuple):
    """CPU time that this process has used so far, all its threads together, in ns."""

    user_ns: int
    system_ns: int


def cpu_time() -> CpuTime:
    """User and system time, as ``time`` shows them; to the microsecond where the system has it."""
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return CpuTime(round(usage.ru_utime * 1e9), round(usage.ru_stime * 1e9))
    times = os.times()
    return CpuTime(round(times.user * 1e9), round(times.system * 1e9))
