"""Whether making a batch computes or waits, and what the CPUs would allow if workers made the batches."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.record import Record
from lightning_modelprof.run.batches import CpuUse

_MOSTLY: Final = 0.5


_NEARLY_ALWAYS: Final = 0.9


_ENOUGH: Final = 7


class BatchCpu(Record, frozen=True, kw_only=True):
    """What batches and steps take of the CPUs.

    Attributes:
        computing: share of the time that making a batch takes in which it runs on a CPU, or is ready to; in
            the training thread or in the workers; ``None`` if it cannot be told.
        batch_ns: CPU time of one batch; ``None`` likewise.
        rest_ns: CPU time of the rest of a step, all threads of the process together.
        thread_share: CPU time of the training thread in the rest of a step, of the time of the whole step.
        free_cpus: CPUs that this process and its workers had or could have had, on average over the loop:
            those that nobody else used; ``None`` if nobody counts that.
        ready: share of fetches whose batch a worker had made before; ``None`` where fewer than seven were
            looked at, or where workers make none.
        depths: of these fetches, the share that found 0, 1, 2 ... batches made; empty likewise.
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
        """Whether making a batch takes a CPU most of the time; ``None`` if it cannot be told."""
        return None if self.computing is None else self.computing >= _MOSTLY

    @property
    def workers_keep_up(self) -> bool:
        """Whether batches are there before they are fetched, but for one in ten at most."""
        return self.ready is not None and self.ready >= _NEARLY_ALWAYS

    def idle_cpus(self, step_ns: float) -> int | None:
        """Whole CPUs that neither this training, its workers nor anybody else uses; ``None`` if unknown."""
        if self.free_cpus is None or step_ns <= 0:
            return None
        return max(0, round(self.free_cpus - (self.rest_ns + (self.batch_ns or 0.0)) / step_ns))

    def least_step_ns(self, rest_ns: float) -> float | None:
        """The shortest step that the CPUs allow when workers make the batches; ``None`` if it cannot be told.

        Where batches compute, a step and its batch take their CPU time from no more CPUs than are free.
        Where they wait, they take none from the rest of the step.

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
    """What follows from the CPU times of some steps.

    Args:
        num_workers: of the dataloader; ``None`` if it has none that are torch's.
        usable_cpus: that the process may use; ``None`` if unknown.
        cpu_wait_share: of the loop, in which the training thread was ready to run and had no CPU.
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
    # Whoever waits for a CPU is about to compute: of the time that a thread is ready, so much it gets one.
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
    """CPUs that nobody else used, on average; never fewer than this process and its workers used."""
    if use.busy_ns is None or use.cpus_ns is None or usable_cpus is None:
        return None
    ours_ns = use.process_ns + (use.workers_ns or 0)
    others_ns = max(0, use.busy_ns - ours_ns)
    free = min(float(usable_cpus), (use.cpus_ns - others_ns) / use.loop_ns)
    return max(free, min(ours_ns / use.loop_ns, float(usable_cpus)))
