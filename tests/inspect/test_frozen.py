"""Frozen modules are found if they compute the same output for the same sample in every step."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_modelprof.report.model import Status
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.repeats import frozen_forward
from lightning_modelprof.run.archive import decode_record, encode_record
from lightning_modelprof.run.batches import RepeatedSamples
from lightning_modelprof.run.model_cost import FrozenModule, StepWaste
from tests.support.diagnosed import analysis_of, cost_of, only, steps_of
from tests.support.fits import loader, run_fit


class Distilled(LightningModule):
    """A student that learns from a frozen teacher.

    ``given`` maps the batch's input to the teacher's; ``after`` is called with the module after each batch.
    """

    def __init__(self, given=None, after=None, teacher=None):
        super().__init__()
        self.student = nn.Linear(8, 4)
        self.teacher = teacher or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.teacher.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))
        self.given = given or (lambda module, inputs: inputs)
        self.after = after

    def training_step(self, batch, batch_idx):
        inputs, _ = batch
        with torch.no_grad():
            wanted = self.teacher(self.given(self, inputs))
        return nn.functional.mse_loss(self.student(inputs), wanted)

    def on_train_batch_end(self, *_):
        if self.after is not None:
            self.after(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def frozen_in(folder, module, data=None):
    """Path → (changes, has varying input), from a fit."""
    callback = run_fit(
        folder, module=module, data=data or loader(size=24), trainer={"max_epochs": 2}, flops=True
    )
    waste = callback.run.ranks[0].model_cost.waste
    return {one.path: (one.changes, one.has_varying_input) for one in waste.frozen}


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        None,
        lambda module, inputs: (inputs.double() * 2 - module.mean).float().flip(0),
        lambda module, inputs: torch.cat([inputs[:1], torch.zeros(1, 8)]) + torch.arange(8),
        lambda module, inputs: (torch.rand(2, 8), module.student(inputs), inputs)[2],
        lambda module, inputs: nn.functional.dropout(inputs, 0.0),
    ],
    ids=["the batch", "computed of it", "with constants", "beside random numbers", "nothing is dropped"],
)
def test_teacher_with_constant_outputs(given, tmp_path):
    assert frozen_in(tmp_path, Distilled(given)) == {"teacher": (False, False)}


def flipped_by_chance(_, inputs):
    return inputs.flip(1) if torch.rand(1) < 0.5 else inputs


def noise_in_a_part(_, inputs):
    made = inputs.clone()
    made[:, 2:4] = torch.randn(len(inputs), 2)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        lambda _, inputs: inputs + 0.1 * torch.randn_like(inputs),
        lambda _, inputs: inputs[torch.randperm(len(inputs))],
        lambda _, inputs: inputs * torch.empty(len(inputs), 1).uniform_(0.5, 1.5),
        lambda _, inputs: nn.functional.dropout(inputs, 0.5),
        noise_in_a_part,
        flipped_by_chance,
        lambda _, inputs: inputs * random.random(),
        lambda _, inputs: inputs * np.random.rand(),
        lambda module, inputs: torch.cat([module.student(inputs).detach()] * 2, dim=1),
    ],
    ids=[
        *("noise", "another order", "scale", "dropout", "noise in a part", "a choice", "Python's", "NumPy's"),
        "of what is trained",
    ],
)
def test_input_that_varies_between_epochs(given, tmp_path):
    assert frozen_in(tmp_path, Distilled(given)) == {"teacher": (False, True)}


@pytest.mark.slow
def test_noise_added_by_batch_hook_varies_input(tmp_path):
    class Noisy(Distilled):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] + torch.randn_like(batch[0]), batch[1]

    assert frozen_in(tmp_path, Noisy()) == {"teacher": (False, True)}


@pytest.mark.slow
def test_noise_added_by_collate_fn_varies_input(tmp_path):
    def collate(samples):
        inputs = torch.stack([one for one, _ in samples])
        return inputs + torch.randn_like(inputs), inputs

    data = loader(size=24, collate_fn=collate)
    assert frozen_in(tmp_path, Distilled(), data) == {"teacher": (False, True)}


@pytest.mark.slow
def test_shuffling_does_not_vary_input(tmp_path):
    assert frozen_in(tmp_path, Distilled(), loader(size=24, shuffle=True)) == {"teacher": (False, False)}


@pytest.mark.slow
def test_dropout_inside_varies_output(tmp_path):
    teacher = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
    assert frozen_in(tmp_path / "on", Distilled(teacher=teacher)) == {"teacher": (False, True)}
    assert frozen_in(tmp_path / "off", Distilled(teacher=teacher.eval())) == {"teacher": (False, False)}


@pytest.mark.slow
def test_batch_norm_inside_changes_module(tmp_path):
    teacher = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    assert frozen_in(tmp_path / "on", Distilled(teacher=teacher)) == {"teacher": (True, False)}
    assert frozen_in(tmp_path / "off", Distilled(teacher=teacher.eval())) == {"teacher": (False, False)}


def lerp(module):
    torch._foreach_lerp_(
        list(module.teacher.parameters()), [one + 1 for one in module.teacher.parameters()], 0.1
    )


def by_data(module):
    for one in module.teacher.parameters():
        one.data.mul_(0.9)


def by_other_data(module):
    for one in module.teacher.parameters():
        one.data = one.data * 0.9


def replaced(module):
    module.teacher = deepcopy(module.teacher)


def unfrozen(module):
    module.teacher.requires_grad_(module.global_step > 20)


def seldom(module):
    if module.global_step == 20:
        lerp(module)


@pytest.mark.slow
@pytest.mark.parametrize("update", [lerp, by_data, by_other_data, replaced, unfrozen, seldom])
def test_updated_target_network_changes(update, tmp_path):
    assert frozen_in(tmp_path, Distilled(after=torch.no_grad()(update))) == {"teacher": (True, False)}


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_before_zero_grad", "optimizer_step", "on_train_epoch_end"])
def test_target_network_updated_in_other_hooks_changes(hook, tmp_path):
    class Follows(Distilled):
        pass

    def update(module, *args, **kwargs):
        if hook == "optimizer_step":
            LightningModule.optimizer_step(module, *args, **kwargs)
        with torch.no_grad():
            lerp(module)

    setattr(Follows, hook, update)
    assert frozen_in(tmp_path, Follows()) == {"teacher": (True, False)}


@pytest.mark.slow
def test_watching_does_not_change_training(tmp_path):
    def weights(**given):
        torch.manual_seed(3)
        module = Distilled(lambda _, inputs: inputs + torch.randn_like(inputs))
        run_fit(tmp_path, module=module, data=loader(size=24, shuffle=True), **given)
        return list(module.parameters())

    assert all(map(torch.equal, weights(flops=True), weights(flops=False)))


# The finding


def judged(*frozen, equal=20):
    """A teacher and an encoder of 5 ms each; a step takes 20 ms."""
    cost = cost_of(("", 0, 0, 0), ("teacher", 0, 5, 0), ("encoder", 0, 5, 0), ("student", 10, 4, 6))
    waste = StepWaste(
        frozen=tuple(
            FrozenModule(path=path, changes=changes, has_varying_input=varying)
            for path, changes, varying in frozen
        )
    )
    repeated = RepeatedSamples(num_indices=9, num_compared=20, num_equal=equal, sample_bytes=8)
    given = partial(analysis_of, steps_of(forward=14, backward=6), repeated=repeated)
    return only(judge(frozen_forward, given(cost=replace(cost, waste=waste))))


def test_only_constant_modules_are_named():
    found = judged(("teacher", False, False), ("encoder", True, False))
    assert found.title == "Frozen teacher recomputes outputs every epoch"
    assert found.saving_ns_per_step == 5_000_000
    assert found.action == "Compute the outputs of teacher once, in the data set."


def test_varying_modules_have_no_finding():
    assert judged(("teacher", False, True), ("encoder", True, True)).status is Status.CLEAN


def test_run_without_frozen_modules_is_not_evaluated():
    assert judged().status is Status.NOT_EVALUATED


def test_frozen_modules_are_saved():
    waste = StepWaste(frozen=(FrozenModule(path="a", changes=True, has_varying_input=False),))
    assert decode_record(encode_record(waste), StepWaste) == waste
