"""How far the DataLoader's workers can get ahead of the loop."""

from __future__ import annotations

from typing import Any

from lightning_modelprof.run.loops import FIT, Loop


def num_prefetched(trainer: Any, loop: Loop = FIT) -> int:
    """Batches that the workers of the loop's dataloader keep ready; of several the largest number.

    0 without workers, and for whatever is not made like torch's DataLoader.
    """
    try:
        loaders = getattr(trainer, loop.trainer_attribute)._combined_loader.flattened
    except Exception:  # no dataloader yet, or another Lightning
        return 0
    return max((_of_loader(loader) for loader in loaders), default=0)


def _of_loader(loader: Any) -> int:
    try:
        num_workers, prefetch_factor = loader.num_workers, loader.prefetch_factor
    except Exception:  # somebody else's loader may do anything
        return 0
    if not isinstance(num_workers, int) or not isinstance(prefetch_factor, int):
        return 0  # prefetch_factor is None without workers
    return num_workers * prefetch_factor if num_workers > 0 and prefetch_factor > 0 else 0
