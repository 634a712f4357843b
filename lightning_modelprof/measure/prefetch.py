"""How far the DataLoader's workers can get, and are, ahead of the loop."""

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


def next_is_ready(trainer: Any, loop: Loop = FIT) -> bool | None:
    """Whether workers have made the batch that the loop fetches next, of each dataloader that has workers.

    ``None`` without workers, and where it cannot be told. It takes about 10 us and no batch.

    Caveats:
        A batch that came out of order counts as the next one.
    """
    try:
        iterators = getattr(trainer, loop.trainer_attribute)._combined_loader._iterator.iterators
        ready = [_has_batch(one) for one in iterators if hasattr(one, "_data_queue")]
    except Exception:  # before the first fetch, or another torch or Lightning
        return None
    return all(ready) if ready else None


def _has_batch(iterator: Any) -> bool:
    """Whether a batch waits in the queue, or was taken from it before its turn."""
    return len(iterator._task_info.get(iterator._rcvd_idx, ())) > 1 or not iterator._data_queue.empty()
