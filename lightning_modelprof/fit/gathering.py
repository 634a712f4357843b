"""Bring the steps of all ranks together, at a point that every rank reaches."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.run.rank_files import pack_rank_steps, rank_steps, unpack_rank_steps
from lightning_modelprof.run.records import RankSteps, Run


def gather_rank_steps(strategy: Any, world_size: int, run: Run | None) -> tuple[RankSteps, ...]:
    """What every rank measured; every rank must call this, as the ranks talk to each other.

    A rank that cannot say anything sends an empty message, and is left out.

    Args:
        strategy: Lightning's, which carries the messages.
        world_size: number of ranks.
        run: what this rank measured; ``None`` if that failed.
    """
    try:
        message = b"" if run is None else pack_rank_steps(rank_steps(run))
    except Exception:  # the others are waiting
        message = b""
    found = []
    for one in _all_gather(strategy, world_size, message):
        with suppress(ArchiveError):
            found.append(unpack_rank_steps(one))
    return tuple(sorted(found, key=lambda steps: steps.rank))


def _all_gather(strategy: Any, world_size: int, message: bytes) -> list[bytes]:
    """The messages of all ranks, as tensors: every backend and strategy can carry those."""
    device = strategy.root_device
    sizes = strategy.all_gather(torch.tensor([len(message)], device=device)).reshape(world_size).tolist()
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(message)] = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
    gathered = strategy.all_gather(padded.to(device)).reshape(world_size, -1).cpu()
    return [bytes(row[:size].tolist()) for row, size in zip(gathered, sizes, strict=True)]
