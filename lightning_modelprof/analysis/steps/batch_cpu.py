"""Whether making a batch computes or waits, and what the CPUs would allow with more workers."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.record import Record
from lightning_modelprof.run.batches import CpuUse

_MOSTLY: Final = 0.5


_NEARLY_ALWAYS: Final = 0.9


_ENOUGH: Final = 7


class BatchCpu(Record, frozen=True, kw_only=True):
    """CPU use of batches and steps.

    Attributes:
        computing: share of the batch-making time, in the training thread or the workers, that runs on a CPU
            or is ready to; ``None`` if unknown.
        batch_ns: CPU time per batch; ``None`` if unknown.
        rest_ns: CPU time of the rest of a step, over all threads of the process.
        thread_share: CPU time of the training thread in the rest of a step, as a share of the whole step.
        free_cpus: CPUs that this process and its workers used or could have used, averaged over the loop;
            ``None`` if unknown.
        ready: share of fetches whose batch a worker had ready; ``None`` if fewer than seven were sampled, or
            without workers.
        depths: share of these fetches that found 0, 1, 2 ... batches ready; empty where ``ready`` is
            ``None``.
    """

    computing: float | None
    batch_ns: float | None
    rest_ns: float
    thread_share: float
    free_cpus: float | None
    ready: float | None = None
    depths: tuple[float, ...] = ()

    @property
    def is_computing(self) -> bool | None:
        """Whether making a batch takes mostly CPU time; ``None`` if unknown."""
        return None if self.computing is None else self.computing >= _MOSTLY

    @property
    def workers_keep_up(self) -> bool:
        """Whether at least nine in ten batches are ready before they're fetched."""
        return self.ready is not None and self.ready >= _NEARLY_ALWAYS

    def idle_cpus(self, step_ns: float) -> int | None:
        """Whole CPUs that nothing uses, neither this training nor other processes; ``None`` if unknown."""
        if self.free_cpus is None or step_ns <= 0:
            return None
        return max(0, round(self.free_cpus - (self.rest_ns + (self.batch_ns or 0.0)) / step_ns))

    def least_step_ns(self, rest_ns: float) -> float | None:
        """Shortest step time that the CPUs allow with workers; ``None`` if unknown.

        If batches compute, a step and its batch share the CPU time of the free CPUs. If they wait, they take
        none from the rest of the step.

        Args:
            rest_ns: wall time of a step without the wait for its batch.
        """
        if self.is_computing is False:
            return rest_ns
        if self.batch_ns is None or not self.free_cpus:
            return None
        return max(rest_ns, (self.batch_ns + self.rest_ns) / self.free_cpus)


def batch_cpu(
    use: CpuUse | None,
    *,
    num_workers: int | None,
    usable_cpus: int | None,
    cpu_wait_share: float | None,
) -> BatchCpu:
    """Derive CPU use from the CPU times of some steps.

    Args:
        num_workers: of the dataloader; ``None`` if it has no torch workers.
        usable_cpus: CPUs that the process may use; ``None`` if unknown.
        cpu_wait_share: share of the loop in which the training thread was ready to run but had no CPU.
    """
    if use is None or use.num_steps <= 0 or use.steps_ns <= 0 or use.loop_ns <= 0:
        raise NotMeasured("no step's CPU time was read")
    times_ns = (
        use.fetches_ns,
        use.fetches_thread_ns,
        use.rest_thread_ns,
        use.rest_process_ns,
        use.process_ns,
    )
    if min(*times_ns, use.workers_ns or 0) < 0:
        raise NotMeasured("a clock was set back")
    rest_ns = use.rest_process_ns / use.num_steps
    # A thread that waits for a CPU is about to compute: this is the share of its ready time with a CPU.
    thread = (use.fetches_thread_ns + use.rest_thread_ns) / use.steps_ns
    granted = thread / (thread + max(0.0, cpu_wait_share or 0.0)) if thread > 0 else 1.0
    computing: float | None = None
    batch_ns: float | None = None
    if num_workers == 0 and use.fetches_ns > 0:
        computing = min(1.0, use.fetches_thread_ns / use.fetches_ns / granted)
        batch_ns = use.fetches_thread_ns / use.num_steps
    elif num_workers and use.workers_ns is not None:
        used = use.workers_ns / use.loop_ns
        computing = min(1.0, used / num_workers / granted)
        batch_ns = used * use.steps_ns / use.num_steps
    return BatchCpu(
        computing=computing,
        batch_ns=batch_ns,
        rest_ns=rest_ns,
        thread_share=min(1.0, use.rest_thread_ns / use.steps_ns / granted),
        free_cpus=_free_cpus(use, usable_cpus),
        ready=use.num_ready / use.num_asked if use.num_asked >= _ENOUGH else None,
        depths=tuple(one / use.num_asked for one in use.depths) if use.num_asked >= _ENOUGH else (),
    )


def _free_cpus(use: CpuUse, usable_cpus: int | None) -> float | None:
    """CPUs without other processes' load, on average; at least what this process and its workers used."""
    if use.busy_ns is None or use.cpus_ns is None or usable_cpus is None:
        return None
    ours_ns = use.process_ns + (use.workers_ns or 0)
    others_ns = max(0, use.busy_ns - ours_ns)
    free = min(float(usable_cpus), (use.cpus_ns - others_ns) / use.loop_ns)
    return max(free, min(ours_ns / use.loop_ns, float(usable_cpus)))
