"""Bring the steps of all ranks together, at a point that every rank reaches."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed

from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.run.rank_files import unpack_rank_steps
from lightning_modelprof.run.records import RankSteps


def gather_rank_steps(message: bytes, device: torch.device) -> tuple[RankSteps, ...]:
    """What every rank measured; every rank must call this, as the ranks talk to each other.

    Args:
        message: of this rank, by ``pack_rank_steps``; a rank with an empty one is left out.
        device: carries the messages.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ()
    found = []
    for one in _all_gather(message, device):
        with suppress(ArchiveError):
            found.append(unpack_rank_steps(one))
    return tuple(sorted(found, key=lambda steps: steps.rank))


def _all_gather(message: bytes, device: torch.device) -> list[bytes]:
    """The messages of all ranks, as tensors of one size: every backend can carry those."""
    sizes = [int(size) for size in _gather(torch.tensor([len(message)], device=device))]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    if message:
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    rows = _gather(padded.to(device))
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def _gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, tensor)
    return gathered
