"""Which steps of a fit are inspected: one that is counted, and some in which modules are timed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from lightning_modelprof.config.options import DEFAULTS, ProfileConfig
from lightning_modelprof.measure.window.schedule import Action, Schedule
from lightning_modelprof.run.loops import Loop

NUM_TIMED: Final = 3
"""Steps in which modules are timed: enough to see one slow step for what it is."""

SKIPPED_SHARE: Final = 1 / 6
"""Of a loop that is known to be short no more is skipped, or too few steps would be left for a verdict."""

SHORT_LOOP: Final = 30
"""Steps; in a loop of fewer, modules are timed in one of them."""

_WARM: Final = 1
"""The first step is never taken if there are others: lazy modules, allocators and kernels start in it."""

_BATCHES: Final = {
    "validate": "num_val_batches",
    "test": "num_test_batches",
    "predict": "num_predict_batches",
}
"""Loop → where the Trainer has the number of batches of each dataloader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionPlan:
    """Step numbers of a fit.

    Attributes:
        counted: the step whose FLOPs are counted; ``None`` when every step is in a profiler window.
        timed: the steps in which modules are timed.
    """

    counted: int | None
    timed: tuple[int, ...]


def plan_later(
    plan: InspectionPlan, by: int, *, schedule: Schedule | None, accumulate: int
) -> InspectionPlan:
    """The same steps, at least so many steps later.

    Args:
        plan: as it was.
        by: how many.
        schedule: of windows that do not wait as well; ``None`` if there are none.
        accumulate: batches per optimizer step: the counted step stays at the same place among them.
    """
    assert plan.counted is not None
    wanted = (plan.counted, *plan.timed)
    by = math.ceil(by / accumulate) * accumulate
    if schedule is not None and schedule.active:
        end = by + schedule.skip_first + 2 * accumulate * max(schedule.cycle, 1)
        free = (
            one
            for one in range(by, end, accumulate)
            if all(schedule.action(step + one) is Action.WAIT for step in wanted)
        )
        by = next(free, end)
    return InspectionPlan(counted=plan.counted + by, timed=tuple(step + by for step in plan.timed))


def steps_to_skip(config: ProfileConfig, num_steps: int | None) -> int:
    """How many first steps the benchmark leaves out: what was asked for, or fewer in a short loop.

    Args:
        config: its default is no order.
        num_steps: length of the loop; ``None`` if unknown.
    """
    if num_steps is None or config.skip_first != DEFAULTS.skip_first:
        return config.skip_first
    return max(1, math.floor(min(num_steps * SKIPPED_SHARE, config.skip_first)))


def plan_inspection(
    schedule: Schedule,
    *,
    skip_first: int,
    accumulate: int = 1,
    num_steps: int | None = None,
    num_timed: int = NUM_TIMED,
) -> InspectionPlan:
    """Choose steps that are in no profiler window, and if possible among those that the benchmark skips.

    Args:
        schedule: of the profiler windows.
        skip_first: steps that the benchmark leaves out.
        accumulate: batches per optimizer step; the counted step ends with one, if possible.
        num_steps: length of the fit; ``None`` if unknown.
        num_timed: steps in which modules are timed.
    """
    wanted = accumulate + num_timed
    # Every kind of step has come by then; without waits, free steps come only after the last window.
    cycles = 2 if schedule.wait else max(2, schedule.repeat)
    behind = skip_first + cycles * schedule.cycle + wanted + _WARM
    last = behind if num_steps is None else min(behind, num_steps)
    begin = max(_WARM, skip_first - wanted)
    if last <= begin:
        begin = max(0, min(_WARM, last - 1), last - wanted)
    free = [step for step in range(begin, last) if schedule.action(step) is Action.WAIT]
    stepping = [step for step in free[:-num_timed] or free if (step + 1) % accumulate == 0]
    counted = next(iter(stepping or free), None)
    timed = [step for step in free if counted is not None and step > counted]
    return InspectionPlan(counted=counted, timed=tuple(timed[:num_timed]))


def num_steps(trainer: Any, loop: Loop) -> int | None:
    """How many batches the loop will have, if Lightning knows."""
    if loop.is_fit:
        limits = (
            [trainer.num_training_batches * trainer.max_epochs]
            if trainer.max_epochs not in (None, -1)
            else []
        )
        if trainer.max_steps != -1:
            limits.append(trainer.max_steps * trainer.accumulate_grad_batches)
    else:
        limits = [sum(getattr(trainer, _BATCHES[loop.key]))]
    shortest = min(limits, default=math.inf)
    return None if shortest == math.inf else int(shortest)
