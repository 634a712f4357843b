"""Where windows end training (``stop_after_profile``) on all ranks, and one of them has stepped aside."""

from __future__ import annotations

from typing import Any

from lightning_modelprof.config import ProfileConfig
from lightning_modelprof.fit.windows import recording_ranks


class ScheduledStop:
    """Ends training with the step in which the other ranks end it, of which Lightning does not tell a rank.

    Args:
        batch: Lightning's number of that step's batch.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def look(self, trainer: Any) -> None:
        """A batch begins."""
        if trainer.fit_loop.total_batch_idx >= self._batch:
            trainer.should_stop = True


def scheduled_stop(config: ProfileConfig, trainer: Any) -> ScheduledStop | None:
    """The stop of a fit that is about to begin; ``None`` where no other rank stops."""
    if not config.stop_after_profile or trainer.world_size == 1:
        return None
    last = config.schedule.window(config.schedule.repeat - 1)
    if last is None or not recording_ranks(config, trainer.world_size):
        return None
    return ScheduledStop(trainer.fit_loop.total_batch_idx + 1 + last.last + 1)
