"""profile_loader and the command ``loader``: a DataLoader without a training."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_modelprof import ConfigError, ModelProfError, profile_loader
from lightning_modelprof.cli.loader import find_loader
from lightning_modelprof.cli.main import main
from lightning_modelprof.loop import loader_profile


class Slow(Dataset):
    def __init__(self, number=40):
        self.number = number
        self.transform = slowly

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return self.transform(torch.full((2,), float(index)))


def slowly(sample):
    time.sleep(0.004)
    return sample


def test_batches_are_taken_and_transforms_named(capsys):
    profile = profile_loader(DataLoader(Slow(), 4, num_workers=1), max_batches=20, max_s=None)
    (workers,) = profile.run.ranks[0].workers
    sample, transform, _ = workers.calls
    assert (sample.name, transform.name) == ("Slow.__getitem__", "slowly")
    assert transform.calls >= 80  # workers may be ahead
    assert transform.total_ns / transform.calls >= 4e6
    assert profile.samples_per_s == pytest.approx(4 * profile.batches_per_s)
    assert profile.batches_per_s < 1 / 0.016
    assert "20 batches of DataLoader" in capsys.readouterr().out


def test_a_notebook_gets_a_card_and_no_text(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(loader_profile, "show_in_notebook", lambda report: not shown.append(report))
    profile = profile_loader(DataLoader(Slow(8), 4), max_batches=2, max_s=None)
    assert shown == [profile.report]
    assert capsys.readouterr().out == ""
    assert repr(profile) == "<LoaderProfile: lightning-modelprof: 2 batches of DataLoader>"


def test_without_workers_and_with_a_step():
    began = time.monotonic()
    profile = profile_loader(
        DataLoader(Slow(8), 4), step_s=0.05, max_batches=6, max_s=None, print_profile=False
    )
    assert time.monotonic() - began >= 6 * 0.05 + 24 * 0.004
    assert profile.run.ranks[0].num_steps == 6
    assert not profile.run.ranks[0].workers


def test_it_ends_with_the_epoch_where_nothing_else_ends_it():
    profile = profile_loader(DataLoader(Slow(8), 4), max_s=None, print_profile=False)
    assert profile.run.ranks[0].num_steps == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [({"step_s": -1}, "step_s"), ({"max_batches": 0}, "max_batches"), ({"max_s": "long"}, "max_s")],
)
def test_what_cannot_be_meant_is_refused(arguments, part):
    with pytest.raises(ModelProfError, match=rf"profile_loader\({part}\): expected"):
        profile_loader([1], **arguments)


def test_no_batch_and_no_loader_are_refused():
    with pytest.raises(ModelProfError, match="expected batches, got none"):
        profile_loader([], print_profile=False)
    with pytest.raises(ModelProfError, match="what else gives batches"):
        profile_loader(3)


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.zeros(6, 1)), 2)
def make(): return loader
class Data:
    def prepare_data(self): self.is_prepared = True
    def setup(self, stage): assert self.is_prepared; self.stage = stage
    def train_dataloader(self): return loader if self.stage == "fit" else None
number = 3
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    file = tmp_path / "scripted_loader.py"
    file.write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    found = [find_loader(f"{file}:{name}") for name in ("loader", "make", "Data")]
    assert found[0] is found[1] is found[2]
    assert find_loader("scripted_loader:loader") is found[0]
    assert main(["loader", f"{file}:make", "--batches", "5"]) == 0
    assert "5 batches of DataLoader" in capsys.readouterr().out
    for wrong, part in (
        ("scripted_loader", "MODULE:FACTORY"),
        (f"{tmp_path}/none.py:make", "a file"),
        ("no_such_module_here:make", "a module"),
        (f"{file}:mak", "Did you mean"),
        (f"{file}:number", "to give a DataLoader"),
    ):
        with pytest.raises(ConfigError, match=part):
            find_loader(wrong)
