"""The ranks of a job in one table: which of them have the fact, and what to say of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_modelprof.analysis.absent import Absent

FactT = TypeVar("FactT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(Generic[FactT]):
    """A fact of the ranks of a job.

    Attributes:
        found: rank → fact of those that have it, in order.
        notes: what belongs under the table: which ranks it is without, and why; empty without a table.
        absent_reason: why there is no table; ``None`` when at least one rank has the fact.
        are_several: whether the job has several ranks, with or without the fact.
    """

    found: Mapping[int, FactT]
    notes: tuple[str, ...]
    absent_reason: str | None
    are_several: bool

    def prefix(self, rank: int) -> str:
        """What the name of a row of this rank begins with: nothing where there is only one."""
        return f"rank {rank} " if self.are_several else ""


def split_ranks(by_rank: Mapping[int, FactT | Absent]) -> Ranks[FactT]:
    """Part the ranks that have a fact from those that have a reason instead."""
    found = {rank: fact for rank, fact in sorted(by_rank.items()) if not isinstance(fact, Absent)}
    lacking: dict[str, list[int]] = {}
    for rank, fact in sorted(by_rank.items()):
        if isinstance(fact, Absent):
            lacking.setdefault(fact.reason, []).append(rank)
    return Ranks(
        found=found,
        notes=tuple(f"Without {_listed(ranks)}: {reason}." for reason, ranks in lacking.items())
        if found
        else (),
        absent_reason=None if found else "; ".join(lacking) or "there is no trace",
        are_several=len(by_rank) > 1,
    )


def _listed(ranks: list[int]) -> str:
    """``rank 3`` or ``ranks 3, 5``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
