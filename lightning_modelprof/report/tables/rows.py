"""Table rows: facts of multiple ranks, row order, and the common folder of files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from lightning_modelprof.analysis.lazy import NotMeasured, fact
from lightning_modelprof.analysis.timeline.tally import NOTHING, Tally
from lightning_modelprof.analysis.trace.operator_costs import MemoryChange
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.record import Record
from lightning_modelprof.report.options import SortKey

FactT = TypeVar("FactT")


class Ranks(Record, Generic[FactT], frozen=True, kw_only=True):
    """One fact of a job's ranks.

    Attributes:
        found: rank → fact of the ranks that have it, in order.
        notes: notes on missing ranks and why they're missing.
        are_several: whether the job has multiple ranks, with or without the fact.
    """

    found: Mapping[int, FactT]
    notes: tuple[str, ...]
    are_several: bool

    def prefix(self, rank: int) -> str:
        """Return the start of this rank's row names; empty in single-rank jobs."""
        return f"rank {rank} " if self.are_several else ""


def split_ranks(by_rank: Mapping[int, TraceFacts], which: fact[FactT]) -> Ranks[FactT]:
    """Separate the ranks that have a fact from those that don't.

    Raises:
        NotMeasured: if none has it; gives each reason once.
    """
    found: dict[int, FactT] = {}
    lacking: dict[str, list[int]] = {}
    for rank, facts in sorted(by_rank.items()):
        value = facts.get(which)
        if value is None:
            lacking.setdefault(facts.why_not(which), []).append(rank)
        else:
            found[rank] = value
    if not found:
        raise NotMeasured("; ".join(lacking) or "no trace")
    notes = tuple(f"Without {_listed(ranks)}: {reason}." for reason, ranks in lacking.items())
    return Ranks(found=found, notes=notes, are_several=len(by_rank) > 1)


def _listed(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


_MEMORY: Final = {
    "cpu_memory": "host",
    "cpu_self_memory": "host_self",
    "gpu_memory": "device",
    "gpu_self_memory": "device_self",
}
"""Sort key → attribute of :class:`MemoryChange`."""


def is_of_memory(sorted_by: SortKey | None) -> bool:
    return sorted_by in _MEMORY


def order_of(sorted_by: SortKey | None, *, has_device: bool, has_memory: bool = False) -> SortKey:
    """Return the requested sort key if it was recorded, else self time."""
    if sorted_by is not None and (has_memory or sorted_by not in _MEMORY):
        return sorted_by
    return "gpu_self" if has_device else "cpu_self"


def order_words(key: SortKey) -> str:
    """Return a note such as ``Sorted by GPU self time.``"""
    side, _, figure = key.partition("_")
    words = f"{side.upper()} {figure.replace('_', ' ')}{'' if key in _MEMORY else ' time'}"
    return f"Sorted by {words if figure else key}."


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
    """Return a row's place by the requested figure; rows without the figure are last.

    Args:
        sorted_by: the requested figure; ``None`` leaves it to ``order_of``.
        host: CPU times; ``None`` in GPU tables, where a CPU key counts as the GPU's.
        device: GPU times, if the row has any.
        has_device: whether any row can have GPU times.
        self_ns: self times on CPU and GPU; ``None`` if only the total is known.
        memory: change in allocated memory; ``None`` if not recorded, so memory keys keep the default order.

    Returns:
        A key to sort by: largest figures first, but smallest first for minima.
    """
    chosen = order_of(sorted_by, has_device=has_device, has_memory=memory is not None)
    if chosen in _MEMORY:
        return False, -getattr(memory, _MEMORY[chosen])
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


def shortened(file: str, folder: str) -> str:
    """Strip ``folder`` from a file's path; ``""`` strips nothing."""
    return file[len(folder) :].lstrip("/\\") if folder else file


def common_folder(files: set[str]) -> str:
    """Find the folder that contains all files; ``""`` if there is none, as for notebook cells."""
    if not files or any(file.startswith("<") for file in files):
        return ""
    try:
        folder = os.path.commonpath([os.path.dirname(file) for file in files])  # noqa: PTH120
    except ValueError:  # different drives, or relative and absolute paths
        return ""
    return folder if len(folder) > 1 else ""
