"""Tests that known CPU costs in the training thread land in their phases.

The user code times itself, so noise affects the expected and the measured times alike.
The tolerance is 5% plus twice the phase's time without the costs. Each cost is at least 2 ms.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.run.steps import StepTag, StepTimings
from tests.support.bench import make_trainer, thread_clock

NUM_STEPS = 16
RELATIVE = 0.05
ALLOWANCE_NS = 1_000_000
"""Added to the 5%, as code after a nap runs on a cold core. The smallest cost is twice as large."""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


class Spent:
    """Time the user code spent, per step and phase, measured by itself."""

    def __init__(self, scale: int = 1) -> None:
        self.scale = scale
        self.steps: list[defaultdict[str, int]] = []

    def begin_step(self) -> None:
        self.steps.append(defaultdict(int))

    def nap(self, phase: str, milliseconds: int) -> None:
        """Spin instead of sleeping: after a sleep, code runs many times slower on a cold core."""
        begin = time.thread_time_ns()
        while time.thread_time_ns() - begin < self.scale * milliseconds * 1_000_000:
            pass
        if self.steps:
            self.steps[-1][phase] += time.thread_time_ns() - begin


class NappingData:
    def __init__(self, spent: Spent) -> None:
        self.spent = spent

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> Tensor:
        self.spent.begin_step()
        self.spent.nap("dataloader", 3)
        return torch.ones(2)


class NappingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, spent: Spent) -> Tensor:
        ctx.spent = spent
        return loss * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.spent.nap("backward", 8)
        return grads[0], None


class NappingSGD(torch.optim.SGD):
    def __init__(self, spent: Spent, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.spent = spent

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.spent.nap("optimizer", 11)
        return loss


class NappingScheduler(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, spent: Spent, optimizer: Any) -> None:
        self.spent = spent
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, *args: Any) -> None:
        super().step(*args)
        self.spent.nap("lr_scheduler", 2)


class NappingModel(LightningModule):
    def __init__(self, spent: Spent, *, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        self.spent = spent
        self.layer = nn.Linear(2, 1)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.spent.nap("transfer", 4)
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.spent.nap("forward", 6)
        loss: Tensor = NappingBackward.apply(self.layer(batch).sum(), self.spent)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.spent.nap("forward", 2)
        return None

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.spent.nap("clip", 5)

    def configure_optimizers(self) -> Any:
        optimizer = NappingSGD(self.spent, self.parameters())
        if not self.automatic_optimization:
            return optimizer
        scheduler = {"scheduler": NappingScheduler(self.spent, optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class NappingCallback(Callback):
    def __init__(self, spent: Spent) -> None:
        self.spent = spent

    def on_train_batch_start(self, *args: Any) -> None:
        self.spent.nap("callbacks", 2)

    def on_after_backward(self, *args: Any) -> None:
        self.spent.nap("callbacks", 3)

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.spent.nap("callbacks", 2)

    def on_train_batch_end(self, *args: Any) -> None:
        self.spent.nap("callbacks", 2)


def run(spent: Spent, mode: str) -> StepTimings:
    callback = ModelProfCallback(report={"terminal": False, "files": False})
    callback._clock = thread_clock()  # unaffected by other processes
    make_trainer(
        callbacks=[NappingCallback(spent), callback, NappingCallback(spent)],
        accumulate_grad_batches=2 if mode == "accumulating" else 1,
    ).fit(NappingModel(spent, is_manual=mode == "manual"), DataLoader(NappingData(spent)))
    assert callback.run is not None
    steps = callback.run.ranks[0].steps
    assert len(steps) == len(spent.steps) == NUM_STEPS
    return steps


@pytest.mark.parametrize("mode", ["automatic", "manual", "accumulating"])
def test_every_injected_cost_lands_in_its_phase(mode):
    # Measures the rest of the step: Lightning's loop, collating, a small model, its gradients.
    without_costs = run(Spent(scale=0), mode)
    spent = Spent()
    steps = run(spent, mode)
    assert steps.phases_ns.sum(axis=1).tolist() == steps.duration_ns.tolist()
    stepping = (steps.tags & StepTag.NO_OPTIMIZER_STEP) == 0
    assert stepping.tolist() == ([False, True] * 8 if mode == "accumulating" else [True] * NUM_STEPS)

    # Skip the first two steps, in which action names are new. Check accumulating and stepping ones apart.
    # A busy machine only adds time, to random steps, while a cost in the wrong phase is in every step.
    # So the best-matching step decides.
    for is_stepping in set(stepping.tolist()):
        keep = np.flatnonzero((stepping == is_stepping) & (np.arange(NUM_STEPS) >= 2))
        for index, phase in enumerate(PHASES):
            measured = steps.phases_ns[keep, index]
            truth = np.array([spent.steps[step].get(phase.key, 0) for step in keep])
            rest = without_costs.phases_ns[keep, index].min()
            assert (measured >= truth).all(), phase.key
            assert (measured - truth * (1 + RELATIVE)).min() <= 2 * rest + ALLOWANCE_NS, phase.key
