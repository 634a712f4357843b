"""The order of the rows that ``sorted_by`` asks for."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.timeline.tally import NOTHING, Tally
from lightning_modelprof.analysis.trace.operator_costs import MemoryChange
from lightning_modelprof.report.options import SortKey

_MEMORY: Final = {
    "cpu_memory": "host",
    "cpu_self_memory": "host_self",
    "gpu_memory": "device",
    "gpu_self_memory": "device_self",
}
"""Key → the figure of a :class:`MemoryChange`."""


def is_of_memory(sorted_by: SortKey | None) -> bool:
    """Whether the figure that is asked for is one of memory."""
    return sorted_by in _MEMORY


def row_order(
    sorted_by: SortKey | None,
    *,
    calls: int,
    host: Tally | None,
    device: Tally | None,
    has_device: bool,
    self_ns: tuple[int | None, int | None] | None = None,
    memory: MemoryChange | None = None,
) -> tuple[bool, float]:
    """Where a row stands by the figure that was asked for; rows that have none are last.

    Args:
        sorted_by: the figure; ``None`` is GPU total where there are device events, else CPU total.
        calls: the row's calls.
        host: its times on the host; ``None`` in tables of the device, where a CPU key counts as the GPU's.
        device: its times on the device; ``None`` when it has none.
        has_device: whether any row can have times on the device.
        self_ns: its own times on host and device; ``None`` where they are not known apart from the total.
        memory: by how much it changed what is in use; ``None`` where that was not recorded, so that a figure
            of it leaves the rows in their usual order.

    Returns:
        A key to sort by: largest figures first, but smallest first of minima.
    """
    usual: SortKey = "gpu_total" if has_device else "cpu_total"
    chosen = sorted_by or usual
    if chosen in _MEMORY:
        if memory is not None:
            return False, -getattr(memory, _MEMORY[chosen])
        chosen = usual
    if chosen == "calls":
        return False, -calls
    side, _, figure = chosen.partition("_")
    is_host = side == "cpu" and host is not None
    tally = (host if is_host else device) or NOTHING
    value: float | None
    if figure == "self":
        value = tally.total_ns if self_ns is None else self_ns[0 if is_host else 1]
    else:
        value = getattr(tally, f"{figure}_ns")
    if value is None:
        return True, 0
    return False, value if figure == "min" else -value
