"""Bring the steps of all ranks together, at a point that every rank reaches."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed

from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.run.rank_files import unpack_rank_steps
from lightning_modelprof.run.records import RankSteps


def all_gather(message: bytes, device: torch.device) -> list[bytes]:
    """The messages of all ranks; every rank must call this, as the ranks talk to each other.

    Args:
        message: of this rank.
        device: carries the messages.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    # Tensors of one size: every backend can carry those.
    sizes = [int(size) for size in _gather(torch.tensor([len(message)], device=device))]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    if message:
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    rows = _gather(padded.to(device))
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def read_messages(messages: list[bytes]) -> tuple[RankSteps, ...]:
    """What the ranks have measured; one with an empty message, or a damaged one, is left out."""
    found = []
    for message in messages:
        with suppress(ArchiveError):
            found.append(unpack_rank_steps(message))
    return tuple(sorted(found, key=lambda steps: steps.rank))


def _gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, tensor)
    return gathered
