"""The order of the rows that ``sorted_by`` asks for."""

from __future__ import annotations

from lightning_modelprof.analysis.tally import NOTHING, Tally
from lightning_modelprof.report.options import SortKey


def row_order(
    sorted_by: SortKey | None, *, calls: int, host: Tally | None, device: Tally | None, has_device: bool
) -> tuple[bool, float]:
    """Where a row stands by the figure that was asked for; rows that have none are last.

    Args:
        sorted_by: the figure; ``None`` is GPU total where there are device events, else CPU total.
        calls: the row's calls.
        host: its times on the host; ``None`` in tables of the device, where a CPU key counts as the GPU's.
        device: its times on the device; ``None`` when it has none.
        has_device: whether any row can have times on the device.

    Returns:
        A key to sort by: largest figures first, but smallest first of minima.
    """
    chosen = sorted_by or ("gpu_total" if has_device else "cpu_total")
    if chosen == "calls":
        return False, -calls
    side, _, figure = chosen.partition("_")
    tally = (host if side == "cpu" and host is not None else device) or NOTHING
    value: float | None = getattr(tally, f"{figure}_ns")
    if value is None:
        return True, 0
    return False, value if figure == "min" else -value
