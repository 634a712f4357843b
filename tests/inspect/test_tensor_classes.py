"""Training works with custom tensor classes, which can't always be created while operators are watched."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_modelprof.measure.steps.batch_shapes import own_tensors
from tests.support.fits import Net, fit_quietly, make_callback, make_trainer


class Labelled(torch.Tensor):
    """Created by torch's own constructor, as in libraries that label tensors."""

    __module__ = "labels.tensors"

    @staticmethod
    def __new__(cls, values, *args, **kwargs):
        return super().__new__(cls, values)


def work_with(values):
    return Labelled(Labelled(values).as_subclass(torch.Tensor).T[0].T).as_subclass(torch.Tensor)


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_error_is_in_torch():
    """If this no longer fails, nothing needs to be left out any more."""
    work_with(torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="already associated"), Watch():
        work_with(torch.ones(3, 2))


class OfOurs(Net):
    """Creates such tensors itself, from plain batches."""

    __module__ = "labels.models"

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0 * work_with(torch.ones(3, 2)).sum()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.ones(8)


def labelled(rows):
    return {"x": Labelled(torch.stack(rows))}


class OfBatches(Net):
    """Gets such tensors from another package."""

    __module__ = "models"

    def training_step(self, batch, batch_idx):
        values = batch["x"].as_subclass(torch.Tensor)
        return self.layers(values).sum() + 0 * work_with(torch.ones(3, 2)).sum()

    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(8, 1)


@pytest.mark.parametrize("flops", [True, None])
@pytest.mark.parametrize("kind", [OfOurs, OfBatches])
def test_training_with_custom_tensors_continues(tmp_path, kind, flops):
    data = DataLoader(Rows(), batch_size=2, collate_fn=labelled if kind is OfBatches else None)
    callback = make_callback(tmp_path, active=0, flops=flops)
    trainer = make_trainer(tmp_path, callback)
    fit_quietly(trainer, kind(), data)
    assert trainer.global_step == 20
    cost = callback.run.ranks[0].model_cost
    said = cost.count.copy_reason if cost.count is not None else cost.count_note
    assert "tensors of class labels.tensors.Labelled can't always be created" in said
    assert cost.times is not None, "modules are timed all the same"


def test_own_tensors_of_model_package():
    assert own_tensors(OfOurs) is Labelled
    assert own_tensors(nn.Linear) is None
