"""Limits on what measuring costs: clock reads, synchronization and leftover objects."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.profilers import Profiler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback
from tests.support.bench import FakeClock, HookedModel, ManualModel, PlainModel, Truth, make_trainer

NUM_STEPS = 8

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


class CountingProfiler(Profiler):
    """Counts the events Lightning reports to its profiler, per step."""

    def __init__(self) -> None:
        super().__init__()
        self.per_step: list[int] = []

    def start(self, action_name: str) -> None:
        if action_name.endswith(".train_dataloader_next"):
            self.per_step.append(0)
        self.count()

    def stop(self, action_name: str) -> None:
        self.count()

    def count(self) -> None:
        if self.per_step:
            self.per_step[-1] += 1

    def summary(self) -> str:
        return ""


class ReadCounter:
    """A dataset that records the clock's read count at each fetch."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.reads: list[int] = []

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(self.clock.reads)
        return torch.ones(2)


class EmptyCallback(Callback):
    """Overrides nothing, so it must not cost a clock read."""


@pytest.mark.parametrize(
    ("model_class", "accumulate"),
    [(PlainModel, 1), (PlainModel, 2), (HookedModel, 1), (HookedModel, 2), (ManualModel, 1)],
)
def test_at_most_one_clock_read_per_lightning_event(model_class, accumulate):
    extra = {"accumulate_grad_batches": accumulate}
    clock = FakeClock()
    truth = Truth(clock)
    counting = CountingProfiler()
    make_trainer(profiler=counting, callbacks=[EmptyCallback()], **extra).fit(
        model_class(truth), DataLoader(ReadCounter(clock))
    )
    # Leave out reads by the sampling thread and in inspected steps.
    callback = ModelProfCallback(
        report={"terminal": False, "files": False}, inspect={"sampling": False}, flops=False
    )
    callback._clock = clock
    data = ReadCounter(clock)
    make_trainer(callbacks=[EmptyCallback(), callback], **extra).fit(model_class(truth), DataLoader(data))

    reads = [after - before for before, after in zip(data.reads, data.reads[1:], strict=False)]
    # Our callback adds events to those of the control run; they don't count in its favor.
    steps = list(zip(reads, counting.per_step, strict=False))
    assert len(steps) == NUM_STEPS - 1
    assert all(0 < read <= events for read, events in steps[1:]), steps  # names are checked in step 0
    if model_class is PlainModel:
        # hooks that aren't overridden aren't measured separately
        assert all(read <= events / 2 for read, events in steps[1:]), steps


def test_no_synchronization_or_collective_per_step(monkeypatch):
    """Runs of two lengths make exactly as many calls as without the callback."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__"):
        count(torch.Tensor, name)
    count(torch.cuda, "synchronize")
    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object"):
        count(torch.distributed, name)

    def calls_of(num_steps: int, *callbacks: Callback) -> Counter[str]:
        calls.clear()
        make_trainer(callbacks=list(callbacks), log_every_n_steps=10).fit(
            TinyModel(), DataLoader(torch.ones(num_steps, 2))
        )
        return Counter(calls)

    def ours() -> Callback:
        return ModelProfCallback(report={"terminal": False, "files": False})

    def per_steps(*makers: Any) -> Counter[str]:
        long, short = (calls_of(num_steps, *(make() for make in makers)) for num_steps in (39, 19))
        long.subtract(short)
        return +long

    assert per_steps(ours) == per_steps()
    assert per_steps(Synchronising)["item"] == 20  # proves that the test can fail


class TinyModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Synchronising(Callback):
    """What our callback must not do."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        outputs["loss"].item()


class ObjectCounter(Callback):
    """Counts the live objects at two steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.counts: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in self.steps:
            gc.collect()
            self.counts.append(len(gc.get_objects()))


def test_steps_leave_only_their_row():
    begin, end = 30, 230  # after the window, whose tables are kept
    counter = ObjectCounter(begin, end)
    # no sampling: samples arrive at irregular times
    quiet = {"report": {"terminal": False, "files": False}, "inspect": {"sampling": False}}
    callbacks = [counter, ModelProfCallback(**quiet, log_every_n_steps=1000)]
    make_trainer(callbacks=callbacks, log_every_n_steps=1000).fit(
        TinyModel(), DataLoader(torch.ones(end + 2, 2))
    )
    growth = counter.counts[1] - counter.counts[0]
    # a row is a tuple with the list of the step's phases; a few objects belong to Lightning
    assert growth <= 2 * (end - begin) + 50


def test_logging_turns_rows_into_arrays():
    """Logging a point turns the rows since the last one into arrays."""

    begin, end = 40, 240  # the window's report, which stays, is written before step 40
    counter = ObjectCounter(begin, end)
    callback = ModelProfCallback(
        report={"terminal": False, "files": False}, inspect={"sampling": False}, log_every_n_steps=50
    )
    trainer = make_trainer(callbacks=[counter, callback], enable_progress_bar=True, log_every_n_steps=50)
    trainer.progress_bar_callback.disable()
    trainer.fit(TinyModel(), DataLoader(torch.ones(end + 2, 2)))
    assert counter.counts[1] - counter.counts[0] <= 2 * 50 + 100
