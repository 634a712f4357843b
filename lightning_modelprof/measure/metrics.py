"""Benchmark figures as a torchmetrics metric, so that they can be reduced over ranks.

Updated with a batch of steps when one is cut for a log or a report, never per step; ranks talk to each
other only when :meth:`BenchmarkMetric.compute_over_ranks` is called at a point that every rank reaches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.records import AllRanks
from lightning_modelprof.run.steps import NOT_MEASURED, StepTimings

DATALOADER = PHASE_INDEX["dataloader"]


class BenchmarkMetric(Metric):
    """Totals and extremes over clean steps; states are int64 and exact.

    States and their reduction over ranks: number of steps, batch, reader and sample totals and the number
    of steps with a known sample count are summed; the longest and shortest batch are max and min.
    """

    full_state_update = False
    num_steps: Tensor
    batch_total_ns: Tensor
    reader_total_ns: Tensor
    samples: Tensor
    num_counted: Tensor
    num_read: Tensor
    batch_max_ns: Tensor
    batch_min_ns: Tensor

    def __init__(self) -> None:
        # Never synchronise on compute: compute is called for live figures in between as well.
        super().__init__(sync_on_compute=False)
        for name in (
            "num_steps",
            "batch_total_ns",
            "reader_total_ns",
            "samples",
            "num_counted",
            "num_read",
        ):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("batch_max_ns", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")
        largest = torch.tensor(torch.iinfo(torch.int64).max)
        self.add_state("batch_min_ns", largest, dist_reduce_fx="min")

    def update(self, steps: StepTimings) -> None:
        """Add clean steps."""
        if len(steps) == 0:
            return
        reader_ns = steps.phases_ns[:, DATALOADER]
        is_read, is_counted = reader_ns != NOT_MEASURED, steps.samples != NOT_MEASURED
        self.num_steps += len(steps)
        self.batch_total_ns += int(steps.duration_ns.sum())
        self.reader_total_ns += int(reader_ns[is_read].sum())
        self.num_read += int(is_read.sum())
        self.samples += int(steps.samples[is_counted].sum())
        self.num_counted += int(is_counted.sum())
        self.batch_max_ns = torch.maximum(self.batch_max_ns, torch.tensor(int(steps.duration_ns.max())))
        self.batch_min_ns = torch.minimum(self.batch_min_ns, torch.tensor(int(steps.duration_ns.min())))

    def compute(self) -> dict[str, int | None] | None:
        """The fields of :class:`AllRanks` for the steps added so far; ``None`` without a step.

        A plain dict, because torchmetrics walks through what ``compute`` returns and refuses frozen
        dataclasses.
        """
        num_steps = int(self.num_steps)
        if num_steps == 0:
            return None
        return {
            "num_steps": num_steps,
            "batch_total_ns": int(self.batch_total_ns),
            "batch_max_ns": int(self.batch_max_ns),
            "batch_min_ns": int(self.batch_min_ns),
            "reader_total_ns": int(self.reader_total_ns) if int(self.num_read) == num_steps else None,
            "samples": int(self.samples) if int(self.num_counted) == num_steps else None,
        }

    def synchronized(self, world_size: int) -> AllRanks | None:
        """The figures over all ranks, after ``sync``, which every rank must call; this talks to nobody."""
        self._computed = None  # this rank's own, from before
        try:
            figures: dict[str, Any] | None = self.compute()
        finally:
            self.unsync(should_unsync=self._is_synced)
            self.to("cpu")
            self._computed = None  # not this rank's own
        return None if figures is None else AllRanks(world_size=world_size, **figures)
