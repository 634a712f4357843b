"""Measured facts about memory: over the steps, by phase and category in one step, and when it ran out.

Bytes everywhere. ``None`` is *not measured*; the notes say why.
"""

from __future__ import annotations

from typing import Final

from lightning_modelprof.place import Place
from lightning_modelprof.record import Count, Int, Record

CATEGORIES: Final = ("parameters", "buffers", "gradients", "optimizer state", "batch", "activations", "other")
"""What a live tensor is, the first that fits. Activations were made in forward, or in a part of it that ran
again; other is what backward and the optimizer made on the way, and tensors whose owner is unknown."""

BEGIN: Final = "begin"
"""Stands for a phase where the batch has not begun."""


class MemoryPoint(Record, frozen=True, kw_only=True):
    """Memory as it was first seen in one step.

    Attributes:
        anonymous_bytes: that part of it which is neither mapped from files nor shared; ``None`` where the
            system does not tell.
        allocated_bytes, reserved_bytes: of the device, as torch's caching allocator counts; ``None`` without
            a device that counts.
    """

    step: Count
    rss_bytes: Int | None
    allocated_bytes: Int | None
    reserved_bytes: Int | None
    anonymous_bytes: Int | None = None


class PhasePeak(Record, frozen=True, kw_only=True):
    """The most that was alive in one phase of one step.

    Attributes:
        phase: ``forward``, ``backward``, ``recompute``, ``optimizer`` (``FLOP_PHASES``). The optimizer's is
            also what clips gradients.
        num_bytes: most in storages of tensors that the step used or made, on the model's device.
        by_category: bytes at that moment by ``CATEGORIES``; they sum to ``num_bytes``.
        operator: that reached it, such as ``aten::convolution``.
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
        device: type of the device that the model is on.
        begin_bytes: alive when its batch began: parameters, buffers, optimizer state, gradients, the batch.
        begin_by_category: the same by ``CATEGORIES``; they sum to ``begin_bytes``.
        peaks: of each phase that ran, in the order of ``FLOP_PHASES``.
        dropped: what could not be followed, a sentence each.
    """

    step: Count
    device: str
    begin_bytes: Int
    begin_by_category: dict[str, Int]
    peaks: tuple[PhasePeak, ...]
    dropped: tuple[str, ...] = ()


class Holder(Record, frozen=True, kw_only=True):
    """Who holds memory: tensors of one category in one module, or one large tensor.

    Attributes:
        name: such as ``layers.0.weight``, or the path of a module.
        category: one of ``CATEGORIES``.
    """

    name: str
    category: str
    num_bytes: Int


class OutOfMemory(Place, frozen=True, kw_only=True):
    """Memory of the device, or of the host, ran out.

    Attributes:
        phase: key of the phase that failed, as in ``PHASES``, read from the exception's traceback; ``""`` if
            that does not tell.
        device: type of the device whose memory it was, such as ``cuda``.
        message: first line of the exception.
        requested_bytes: what was asked for, if the message says it.
        total_bytes, allocated_bytes, reserved_bytes: of the device when it failed, if the message says
            it; else when the exception came through, and some was given back already.
        by_category: what is known to be held; the rest of what is allocated is activations, the batch and
            whatever else.
        holders: largest first.
        file, line, function: the innermost line of the user's that asked.
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
    """An attribute of an object of the user's that became larger from look to look.

    Attributes:
        owner: class of the object.
        first_step, last_step: steps at whose begin it was looked at, between which it only grew.
        first_size, last_size: elements then: of a tensor, an array, a list, or all lists in a dictionary.
        lines: of the class that add to it; empty where its source does not tell.
        element_bytes: of its last element, with what Python takes for it; ``None`` where that may hold more
            than is seen, such as a tensor with its graph, and in runs of older versions.
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
        peak_rss_bytes: most resident memory that the process ever had.
        peak_allocated_bytes, peak_reserved_bytes: most that the device's allocator counted in this process,
            or since the user last reset its peaks.
        num_retries: how often the allocator had to give cached memory back to go on.
        num_ooms: how often it could not go on.
        total_bytes: memory of the device; ``None`` without one.
        host_total_bytes: memory that this process may use: of the machine, or of its container if that has
            less.
        step_memory: live tensors of the inspected step; ``None`` unless ``profile_memory`` asked for it.
        out_of_memory: ``None`` if it did not happen.
        growing: attributes of the model and the callbacks that grow, fastest first; empty in runs of older
            versions.
        notes: what could not be measured and why, a sentence each.
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
