"""The sizes of a loop's batches, and what steps of some sizes cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lightning_modelprof.run.ranges import Count

Shapes: TypeAlias = tuple[tuple[Count, ...], ...]
"""The shapes of all tensors of a batch, in order. A long list of tensors is one entry: how many, their
elements in all, and the largest of each dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFlops:
    """FLOPs of one phase in one dtype.

    Attributes:
        phase: one of ``FLOP_PHASES`` but the optimizer, whose work does not depend on the batch.
        dtype: of the operands.
        flops: without Fourier transforms.
    """

    phase: str
    dtype: str
    flops: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCount:
    """What one counted step of some size cost.

    Attributes:
        shapes: of its batch.
        step: its number in the loop.
        flops: by phase and dtype.
    """

    shapes: Shapes
    step: Count
    flops: tuple[PhaseFlops, ...]

    @property
    def total(self) -> int:
        """FLOPs of all phases and dtypes."""
        return sum(one.flops for one in self.flops)
