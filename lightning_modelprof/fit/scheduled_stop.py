"""Where windows end training (``stop_after_profile``) on several ranks.

Lightning does not tell a rank that another one has set ``should_stop``: a rank that ends alone leaves the
others waiting in their next collective. So every rank ends at the same batch, by the schedule, whatever
became of its own windows, and only if all have agreed to it.
"""

from __future__ import annotations

from typing import Any

from lightning_modelprof.config.options import ProfileConfig
from lightning_modelprof.loop.windows import recording_ranks


class ScheduledStop:
    """Ends training with the step in which the last window closes.

    Args:
        num_steps: of this fit, until it ends.

    Attributes:
        plan: what all ranks must agree on.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._batch: int | None = None
        self.plan = f"stop after {num_steps}"

    def begin(self, trainer: Any) -> None:
        """All ranks have agreed, and training begins; Lightning's number of the last batch is known now."""
        self._batch = trainer.fit_loop.total_batch_idx + self._num_steps

    def look(self, trainer: Any) -> None:
        """A batch begins."""
        if self._batch is not None and trainer.fit_loop.total_batch_idx >= self._batch:
            trainer.should_stop = True


def scheduled_stop(config: ProfileConfig, trainer: Any) -> ScheduledStop | None:
    """The stop of a fit that is about to begin; ``None`` if windows do not end it, or with one rank."""
    if not config.stop_after_profile or trainer.world_size == 1:
        return None
    last = config.schedule.window(config.schedule.repeat - 1)
    if last is None or not recording_ranks(config, trainer.world_size):
        return None
    return ScheduledStop(last.last + 2)
