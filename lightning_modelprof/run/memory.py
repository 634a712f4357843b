"""Measured facts about memory: over the steps, by phase and category in one step, and when it ran out.

Bytes everywhere. ``None`` is *not measured*; the notes say why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CATEGORIES: Final = ("parameters", "buffers", "gradients", "optimizer state", "batch", "activations", "other")
"""What a live tensor is. Activations were made in forward and are alive after their operator; other is what
backward, the optimizer and anything else made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Memory at the begin of one step.

    Attributes:
        step: its number in the loop.
        rss_bytes: resident memory of the process.
        allocated_bytes, reserved_bytes: of the device, as torch's caching allocator counts; ``None`` without
            a device that counts.
    """

    step: int
    rss_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The most that was alive in one phase of one step.

    Attributes:
        phase: ``forward``, ``backward``, ``recompute``, ``optimizer`` (``FLOP_PHASES``).
        num_bytes: most in storages of tensors that the step used or made, on the model's device.
        by_category: bytes at that moment by ``CATEGORIES``; they sum to ``num_bytes``.
        operator: that reached it, such as ``aten::convolution``.
        module: path of the innermost module that it ran in.
    """

    phase: str
    num_bytes: int
    by_category: dict[str, int]
    operator: str
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Live tensors of one step of one process, operator by operator.

    Attributes:
        step: its number.
        device: type of the device that the model is on.
        begin_bytes: alive when its batch began: parameters, buffers, optimizer state, gradients, the batch.
        peaks: of each phase that ran, in their order.
        dropped: what could not be followed, a sentence each.
    """

    step: int
    device: str
    begin_bytes: int
    peaks: tuple[PhasePeak, ...]
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds memory: tensors of one category in one module, or one large tensor.

    Attributes:
        name: such as ``layers.0.weight``, or the path of a module.
        category: one of ``CATEGORIES``.
        num_bytes: of it.
    """

    name: str
    category: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Memory of the device ran out.

    Attributes:
        step: number of the step; ``phase``: the phase that was running.
        phase: its key.
        message: first line of the exception.
        requested_bytes: what was asked for, if the message says it.
        total_bytes, allocated_bytes, reserved_bytes: of the device when the exception came through.
        by_category: what is known to be held then; the rest is activations and whatever else.
        holders: largest first.
    """

    step: int
    phase: str
    message: str
    requested_bytes: int | None
    total_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    by_category: dict[str, int]
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """Memory of one rank over one loop.

    Attributes:
        curve: at some steps, evenly spread over the loop; at most a thousand.
        peak_rss_bytes: most resident memory that the process ever had.
        peak_allocated_bytes, peak_reserved_bytes: most that the device's allocator ever counted in this
            process.
        num_retries: how often the allocator had to give cached memory back to go on.
        num_ooms: how often it could not go on.
        total_bytes: memory of the device.
        step_memory: live tensors of the inspected step; ``None`` unless ``profile_memory`` asked for it.
        out_of_memory: ``None`` if it did not happen.
        notes: what could not be measured and why, a sentence each.
    """

    curve: tuple[MemoryPoint, ...] = ()
    peak_rss_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    num_retries: int | None = None
    num_ooms: int | None = None
    total_bytes: int | None = None
    step_memory: StepMemory | None = None
    out_of_memory: OutOfMemory | None = None
    notes: tuple[str, ...] = ()
