"""Measured facts about the CPU time that batches and steps take."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_modelprof.run.ranges import Count, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """CPU time of some clean steps, and of the machine over the whole loop; all in nanoseconds.

    Attributes:
        num_steps: clean steps of which the times below were read, each seventh at most.
        steps_ns: wall time of these steps.
        fetches_ns: wall time of the fetches in them.
        fetches_thread_ns: CPU time of the training thread in the fetches.
        rest_thread_ns: CPU time of the training thread in the rest of the steps.
        rest_process_ns: CPU time of all threads of the process in the rest of the steps.
        loop_ns: wall time of the loop, over which the times below were read.
        process_ns: CPU time of this process.
        num_asked: of these steps, those whose batch workers made.
        num_ready: of those, the ones whose batch was there before it was fetched.
        workers_ns: CPU time of processes that it started in the loop; ``None`` where nobody can tell.
        busy_ns: time that the machine's CPUs were busy, all together, with whatever; ``None`` likewise.
        cpus_ns: ``busy_ns`` and the time that they were idle; ``None`` likewise.
    """

    num_steps: Count
    steps_ns: Whole
    fetches_ns: Whole
    fetches_thread_ns: Whole
    rest_thread_ns: Whole
    rest_process_ns: Whole
    loop_ns: Whole
    process_ns: Whole
    num_asked: Count = 0
    num_ready: Count = 0
    workers_ns: Whole | None = None
    busy_ns: Whole | None = None
    cpus_ns: Whole | None = None
