"""Measured facts about memory: over the steps, by phase and category in one step, and when it ran out.

All sizes are in bytes. ``None`` means *not measured*; the notes say why.
"""

from __future__ import annotations

from typing import Final

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Record

CATEGORIES: Final = ("parameters", "buffers", "gradients", "optimizer state", "batch", "activations", "other")
"""Categories of live tensors; the first that fits applies. Activations were made in forward or its
recomputation. Other is intermediate tensors of backward and the optimizer, and those of unknown owner."""

BEGIN: Final = "begin"
"""Stands for the phase before a batch has started."""


class MemoryPoint(Record, frozen=True, kw_only=True):
    """Memory when it was first read in one step.

    Attributes:
        anonymous_bytes: the part of it that is neither file-backed nor shared; ``None`` if unknown.
        allocated_bytes, reserved_bytes: of the device, by torch's caching allocator; ``None`` without a
            device that counts.
    """

    step: Count
    rss_bytes: Int | None
    allocated_bytes: Int | None
    reserved_bytes: Int | None
    anonymous_bytes: Int | None = None


class PhasePeak(Record, frozen=True, kw_only=True):
    """Peak live memory of one phase of one step.

    Attributes:
        phase: ``forward``, ``backward``, ``recompute`` or ``optimizer`` (``FLOP_PHASES``), which includes
            gradient clipping.
        num_bytes: peak storage of tensors that the step used or made, on the model's device.
        by_category: bytes at that moment by ``CATEGORIES``; they sum to ``num_bytes``.
        operator: the one that reached it, such as ``aten::convolution``.
        module: path of the innermost module that it ran in.
    """

    phase: str
    num_bytes: Int
    by_category: dict[str, Int]
    operator: str
    module: str


class StepMemory(Record, frozen=True, kw_only=True):
    """Live tensors of one step of one process, operator by operator.

    Attributes:
        device: type of the model's device.
        begin_bytes: live when its batch started: parameters, buffers, optimizer state, gradients, the batch.
        begin_by_category: the same by ``CATEGORIES``; they sum to ``begin_bytes``.
        peaks: of each phase that ran, in the order of ``FLOP_PHASES``.
        dropped: tensors that couldn't be tracked, a sentence each.
    """

    step: Count
    device: str
    begin_bytes: Int
    begin_by_category: dict[str, Int]
    peaks: tuple[PhasePeak, ...]
    dropped: tuple[str, ...] = ()


class Holder(Record, frozen=True, kw_only=True):
    """A holder of memory: tensors of one category in one module, or one large tensor.

    Attributes:
        name: such as ``layers.0.weight``, or the path of a module.
        category: one of ``CATEGORIES``.
    """

    name: str
    category: str
    num_bytes: Int


class OutOfMemory(Place, frozen=True, kw_only=True):
    """The device's or the CPU's memory ran out.

    Attributes:
        phase: key of the phase that failed, as in ``PHASES``, from the exception's traceback; ``""`` if
            unknown.
        device: type of the device whose memory it was, such as ``cuda``.
        message: first line of the exception.
        requested_bytes: size of the failed allocation, if the message gives it.
        total_bytes, allocated_bytes, reserved_bytes: of the device at the failure, if the message gives them;
            else when the exception came through, after some memory was freed.
        by_category: known holdings; the rest of the allocated memory is activations, the batch and others.
        holders: largest first.
        file, line, function: the user's innermost line that allocated.
    """

    step: Count
    phase: str
    device: str
    message: str
    requested_bytes: Int | None
    total_bytes: Int | None
    allocated_bytes: Int | None
    reserved_bytes: Int | None
    by_category: dict[str, Int]
    holders: tuple[Holder, ...]


class GrowingAttribute(Record, frozen=True, kw_only=True):
    """An attribute of a user's object that grew at every check.

    Attributes:
        owner: class of the object.
        first_step, last_step: steps at whose start it was checked, between which it only grew.
        first_size, last_size: its elements then: of a tensor, an array, a list, or all lists in a dictionary.
        lines: the class's lines that add to it; empty if its source doesn't show them.
        element_bytes: size of its last element with Python's overhead; ``None`` if it may hold more than
            that, such as a tensor with its graph, and in runs of older versions.
    """

    owner: str
    name: str
    first_step: Count
    last_step: Count
    first_size: Count
    last_size: Count
    lines: tuple[Place, ...] = ()
    element_bytes: Int | None = None


class MemoryFigures(Record, frozen=True, kw_only=True):
    """Memory of one rank over one loop, without its curve.

    Attributes:
        peak_rss_bytes: the process's peak resident memory.
        peak_allocated_bytes, peak_reserved_bytes: the device allocator's peaks in this process, or since the
            user last reset them.
        num_retries: how often the allocator had to free cached memory to continue.
        num_ooms: how often it couldn't continue.
        total_bytes: memory of the device; ``None`` without one.
        host_total_bytes: memory available to this process: the machine's, or its container's if smaller.
        step_memory: live tensors of the inspected step; ``None`` without ``profile_memory``.
        out_of_memory: ``None`` if it didn't happen.
        growing: growing attributes of the model and the callbacks, fastest first; empty in runs of older
            versions.
        notes: what couldn't be measured and why, a sentence each.
    """

    peak_rss_bytes: Int | None = None
    peak_allocated_bytes: Int | None = None
    peak_reserved_bytes: Int | None = None
    num_retries: Count | None = None
    num_ooms: Count | None = None
    total_bytes: Int | None = None
    host_total_bytes: Int | None = None
    step_memory: StepMemory | None = None
    out_of_memory: OutOfMemory | None = None
    growing: tuple[GrowingAttribute, ...] = ()
    notes: tuple[str, ...] = ()


class MemoryRecord(MemoryFigures, frozen=True, kw_only=True):
    """Memory of one rank over one loop.

    Attributes:
        curve: at some steps, evenly spread over the loop; at most a thousand.
    """

    curve: tuple[MemoryPoint, ...] = ()
