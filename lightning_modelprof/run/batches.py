"""The sizes of a loop's batches, and what steps of some sizes cost."""

from __future__ import annotations

from typing import TypeAlias

from lightning_modelprof.record import Count, Int, Record

Shapes: TypeAlias = tuple[tuple[Count, ...], ...]
"""The shapes of all tensors of a batch, in order. A long list of tensors is one entry: how many, their
elements in all, and the largest of each dimension."""


class BatchSizes(Record, frozen=True, kw_only=True):
    """Which sizes batches had, and how many clean steps had each.

    Attributes:
        shapes: every size once; a size is called by its place here.
        clean_steps: steps of the benchmark, by size.
        num_rounded: how many of ``shapes``, the last ones, have varying dimensions rounded to 3 %; 0 while
            sizes are few.
        other_steps: clean steps of still other sizes, or of batches whose size could not be told.
    """

    shapes: tuple[Shapes, ...]
    clean_steps: tuple[Count, ...]
    num_rounded: Count = 0
    other_steps: Count = 0


class PhaseFlops(Record, frozen=True, kw_only=True):
    """FLOPs of one phase in one dtype.

    Attributes:
        phase: one of ``FLOP_PHASES`` but the optimizer, whose work does not depend on the batch.
        dtype: of the operands.
        flops: without Fourier transforms.
    """

    phase: str
    dtype: str
    flops: Count


class SizeCount(Record, frozen=True, kw_only=True):
    """What one counted step of some size cost."""

    shapes: Shapes
    step: Count
    flops: tuple[PhaseFlops, ...]

    @property
    def total(self) -> int:
        return sum(one.flops for one in self.flops)


class CpuUse(Record, frozen=True, kw_only=True):
    """CPU time of some clean steps, and of the machine over the whole loop; all in nanoseconds.

    Attributes:
        num_steps: clean steps of which the times below were read, each thirteenth at most.
        steps_ns: wall time of these steps.
        fetches_ns: wall time of the fetches in them.
        fetches_thread_ns: CPU time of the training thread in the fetches.
        rest_thread_ns: CPU time of the training thread in the rest of the steps.
        rest_process_ns: CPU time of all threads of the process in the rest of the steps.
        loop_ns: wall time of the loop, over which the times below were read.
        process_ns: CPU time of this process.
        num_asked: of these steps, those whose batch workers made.
        num_ready: of those, the ones whose batch was there before it was fetched.
        depths: of those, how many found 0, 1, 2 ... batches made; the last one so many and more. Empty where
            nobody looked.
        workers_ns: CPU time of processes that it started in the loop; ``None`` where nobody can tell.
        busy_ns: time that the machine's CPUs were busy, all together, with whatever; ``None`` likewise.
        cpus_ns: ``busy_ns`` and the time that they were idle; ``None`` likewise.
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
    """A few samples of a map-style data set, as they were in their batches.

    Attributes:
        num_indices: of the data set, that were watched and came again.
        num_compared: samples that were compared with what came before for the same index.
        num_equal: of those, how many had the same bytes.
        sample_bytes: of one sample in its batch.
        num_samples: length of the data set; ``None`` if it has none.
        note: why nothing could be seen, a clause; ``""`` otherwise.
    """

    num_indices: Count = 0
    num_compared: Count = 0
    num_equal: Count = 0
    sample_bytes: Count = 0
    num_samples: Count | None = None
    note: str = ""
