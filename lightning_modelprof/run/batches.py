"""Batch sizes of a loop, and what steps of some sizes cost."""

from __future__ import annotations

from typing import TypeAlias

from lightning_modelprof.record import Count, Int, Record

Shapes: TypeAlias = tuple[tuple[Count, ...], ...]
"""Shapes of all tensors in a batch, in order. A long list of tensors is one entry: its length, the total
number of elements and the maximum of each dimension."""


class BatchSizes(Record, frozen=True, kw_only=True):
    """Batch sizes, and the number of clean steps of each.

    Attributes:
        shapes: distinct sizes; other records refer to a size by its index here.
        clean_steps: number of clean steps, by size.
        num_rounded: how many of ``shapes``, the last ones, have varying dimensions rounded to 3%; 0 while
            sizes are few.
        other_steps: clean steps of any other or unknown size.
    """

    shapes: tuple[Shapes, ...]
    clean_steps: tuple[Count, ...]
    num_rounded: Count = 0
    other_steps: Count = 0


class PhaseFlops(Record, frozen=True, kw_only=True):
    """FLOPs of one phase in one dtype.

    Attributes:
        phase: one of ``FLOP_PHASES`` except the optimizer, whose work doesn't depend on the batch.
        dtype: of the operands.
        flops: without Fourier transforms.
    """

    phase: str
    dtype: str
    flops: Count


class SizeCount(Record, frozen=True, kw_only=True):
    """FLOPs of one counted step of some size."""

    shapes: Shapes
    step: Count
    flops: tuple[PhaseFlops, ...]

    @property
    def total(self) -> int:
        return sum(one.flops for one in self.flops)


class CpuUse(Record, frozen=True, kw_only=True):
    """CPU time of some clean steps, and of the machine over the whole loop; all in nanoseconds.

    Attributes:
        num_steps: clean steps in which the times below were read, at most every thirteenth.
        steps_ns: wall time of these steps.
        fetches_ns: wall time of their fetches.
        fetches_thread_ns: CPU time of the training thread during the fetches.
        rest_thread_ns: CPU time of the training thread in the rest of the steps.
        rest_process_ns: CPU time of all threads of the process in the rest of the steps.
        loop_ns: wall time of the loop, over which the times below were read.
        process_ns: CPU time of this process.
        num_asked: of these steps, those with a batch made by workers.
        num_ready: of those, the ones whose batch was ready before it was fetched.
        depths: of those, how many found 0, 1, 2 ... batches ready; the last entry counts that many or more.
            Empty if this wasn't recorded.
        workers_ns: CPU time of child processes started during the loop; ``None`` if unknown.
        busy_ns: time that all the machine's CPUs together were busy, with any work; ``None`` if unknown.
        cpus_ns: ``busy_ns`` plus idle time; ``None`` if unknown.
    """

    num_steps: Count
    steps_ns: Int
    fetches_ns: Int
    fetches_thread_ns: Int
    rest_thread_ns: Int
    rest_process_ns: Int
    loop_ns: Int
    process_ns: Int
    num_asked: Count = 0
    num_ready: Count = 0
    depths: tuple[Count, ...] = ()
    workers_ns: Int | None = None
    busy_ns: Int | None = None
    cpus_ns: Int | None = None


class RepeatedSamples(Record, frozen=True, kw_only=True):
    """A few samples of a map-style data set, compared as they were in their batches.

    Attributes:
        num_indices: watched indices of the data set that came again.
        num_compared: samples compared with the one that came before for the same index.
        num_equal: of those, how many had the same bytes.
        sample_bytes: size of one sample in its batch.
        num_samples: length of the data set; ``None`` if it has none.
        note: why nothing could be compared, a clause; ``""`` otherwise.
    """

    num_indices: Count = 0
    num_compared: Count = 0
    num_equal: Count = 0
    sample_bytes: Count = 0
    num_samples: Count | None = None
    note: str = ""
