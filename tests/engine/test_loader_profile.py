"""Tests profile_loader and the ``loader`` command, which profile a DataLoader without training."""

import re
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_modelprof import ModelProfError, profile_loader
from lightning_modelprof.cli.loader import find_loader
from lightning_modelprof.cli.main import main
from lightning_modelprof.engine import loader_profile


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


def test_batches_are_loaded_and_transforms_named(capsys):
    profile = profile_loader(DataLoader(Slow(), 4, num_workers=1), max_batches=20, max_s=None)
    (workers,) = profile.run.ranks[0].workers
    sample, transform, _ = workers.calls
    assert (sample.name, transform.name) == ("Slow.__getitem__", "slowly")
    assert sample.calls >= 80  # workers may prefetch
    assert sample.total_ns / sample.calls >= 4e6
    assert (transform.total_ns or 0) <= sample.total_ns  # a busy machine may take too few samples
    assert profile.samples_per_s == pytest.approx(4 * profile.batches_per_s)
    assert profile.batches_per_s < 1 / 0.016
    assert "20 batches of DataLoader" in capsys.readouterr().out


def test_output_says_how_to_set_step_time(capsys):
    """Without a step, every batch is waited for, which says nothing about training."""
    profile = profile_loader(DataLoader(Slow(), 4), max_batches=20, max_s=None)
    assert profile.report.verdict.summary.startswith("A batch arrives every ")
    assert "--step-ms 40 or step_s=0.04" in " ".join(capsys.readouterr().out.split())
    profile = profile_loader(DataLoader(Slow(), 4), step_s=0.01, max_batches=20, max_s=None)
    assert "--step-ms" not in capsys.readouterr().out


def test_notebook_gets_card_and_no_text(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(loader_profile, "show_in_notebook", lambda report, **_: not shown.append(report))
    profile = profile_loader(DataLoader(Slow(8), 4), max_batches=2, max_s=None)
    assert shown == [profile.report]
    assert capsys.readouterr().out == ""
    assert repr(profile) == "<LoaderProfile: lightning-modelprof: 2 batches of DataLoader>"


def test_step_time_is_simulated_without_workers():
    began = time.monotonic()
    profile = profile_loader(
        DataLoader(Slow(8), 4), step_s=0.05, max_batches=6, max_s=None, print_profile=False
    )
    assert time.monotonic() - began >= 6 * 0.05 + 24 * 0.004
    assert profile.run.ranks[0].num_steps == 6
    assert not profile.run.ranks[0].workers


def test_profile_ends_with_epoch_by_default():
    profile = profile_loader(DataLoader(Slow(8), 4), max_s=None, print_profile=False)
    assert profile.run.ranks[0].num_steps == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"step_s": -1}, "step_s"),
        ({"step_s": float("inf")}, "step_s"),
        ({"max_batches": 0}, "max_batches"),
        ({"max_batches": 2.5}, "max_batches"),
        ({"max_s": "long"}, "max_s"),
        ({"max_s": 0}, "max_s"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, part):
    with pytest.raises(ModelProfError, match=rf"profile_loader\({part}\): expected"):
        profile_loader([1], **arguments)


def test_empty_loader_and_non_loader_are_rejected():
    with pytest.raises(ModelProfError, match="expected batches, got none"):
        profile_loader([], print_profile=False)
    with pytest.raises(ModelProfError, match="another iterable of batches"):
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
"""


def test_command_profiles_loaders_from_files_and_modules(tmp_path, monkeypatch, capsys):
    file = tmp_path / "scripted_loader.py"
    file.write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    found = [find_loader(f"{file}:{name}") for name in ("loader", "make", "Data")]
    assert found[0] is found[1] is found[2]
    assert find_loader("scripted_loader:loader") is found[0]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["loader", f"{file}:make", "--batches", "5"]) == 0
    said = capsys.readouterr()
    assert "5 batches of DataLoader" in said.out
    assert said.err.startswith("Loading batches for up to 20 s.\n")


WRONG = """
import os, signal, sys, torch
from torch.utils.data import DataLoader, TensorDataset
class Data:
    def __init__(self, fault=None): self.fault = fault
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 6: self.fault()
        return torch.zeros(1)
def fail(): raise OSError(5, "no such picture")
def die(): os.kill(os.getpid(), signal.SIGKILL)
def interrupt(): raise KeyboardInterrupt
def raises(): fail()
def ends(): sys.exit(3)
def needs(path, size=3): pass
def nothing(): pass
def text(): return "abc"
def several(): return {"a": DataLoader(Data()), "b": DataLoader(Data())}
def empty(): return DataLoader(TensorDataset(torch.zeros(3, 1)), 4, drop_last=True)
def fails(): return DataLoader(Data(fail), 2)
def fails_in_worker(): return DataLoader(Data(fail), 2, num_workers=1)
def dies(): return DataLoader(Data(die), 2, num_workers=1)
def is_pickled(): return DataLoader(Data(lambda: 0), 2, num_workers=1, multiprocessing_context="spawn")
def interrupted(): return DataLoader(Data(interrupt), 2)
class Module:
    def prepare_data(self): pass
    def setup(self, stage): fail()
    def train_dataloader(self): pass
"""
WRONG_MODULES = {
    "wrong_loaders.py": WRONG,
    "wrong_syntax.py": "def make(:",
    "wrong_import.py": "import no_such_module_here",
    "wrong_script.py": "import argparse\nargparse.ArgumentParser().parse_args(['--lr'])",
    "argparse.py": "def make(): pass",
}
SAID = {
    "loaders": "expected MODULE:FACTORY, such as train.py:make_loader, got 'loaders'.",
    "none.py:make": "no such file: none.py",
    "no_such_module_here:make": "no module named 'no_such_module_here'. Give",
    "wrong_loaders.py:emty": "has no 'emty'. Did you mean 'empty'?",
    "wrong_syntax.py:make": "expected to import 'wrong_syntax.py', got SyntaxError. See the traceback",
    "wrong_import.py:make": "got ModuleNotFoundError. See the traceback above.",
    "wrong_script.py:make": "got SystemExit. Move the code that runs on import under if __name__",
    "argparse.py:make": "can't import 'argparse.py': another module named argparse",
    "wrong_loaders.py:raises": "expected a DataLoader from 'wrong_loaders.py:raises', got OSError.",
    "wrong_loaders.py:ends": "got SystemExit. Move the code that runs on import",
    "wrong_loaders.py:needs": "without arguments: missing a required argument: 'path'.",
    "wrong_loaders.py:nothing": "to be or return a DataLoader, got None. Name a function that returns one.",
    "wrong_loaders.py:text": "expected a DataLoader or another iterable of batches, got 'abc'.",
    "wrong_loaders.py:several": "got a dict of 2. Pass one of them, or combine them with lightning",
    "wrong_loaders.py:Module": "expected a DataLoader from 'wrong_loaders.py:Module', got OSError.",
    "wrong_loaders.py:empty": "Check the dataset's length, the sampler and drop_last.",
    "wrong_loaders.py:fails": "expected batches from 'wrong_loaders.py:fails', got OSError. See the",
    "wrong_loaders.py:fails_in_worker": "got OSError. See the traceback above.",
    "wrong_loaders.py:dies": "A worker was killed or exited. Check whether memory ran out, or try",
    "wrong_loaders.py:is_pickled": "Error. See the traceback above.",
}
USERS_LINES = {
    "wrong_syntax.py:make": "def make(:",
    "wrong_import.py:make": "import no_such_module_here",
    "wrong_loaders.py:raises": "no such picture",
    "wrong_loaders.py:Module": "no such picture",
    "wrong_loaders.py:fails": "no such picture",
    "wrong_loaders.py:fails_in_worker": "no such picture",
    "wrong_loaders.py:is_pickled": "lambda",
}


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    """Directory of modules that each have a fault."""
    for name, text in WRONG_MODULES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in WRONG_MODULES:
        if name != "argparse.py":
            sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("name", SAID)
def test_errors_are_explained_without_our_traceback(wrong, name, capsys):
    assert main(["loader", name, "--batches", "9"]) == 1
    said = capsys.readouterr().err
    assert SAID[name] in said.splitlines()[-1]
    assert USERS_LINES.get(name, "") in said
    # Before Python 3.11 a frame can't remove itself from a worker's traceback.
    assert "/lightning_modelprof/" not in said or (sys.version_info < (3, 11) and "_in_worker" in name)
    assert "<frozen importlib" not in said


def test_ctrl_c_ends_command_with_one_line(wrong, capsys):
    assert main(["loader", "wrong_loaders.py:interrupted"]) == 130
    assert capsys.readouterr().err == "lightning-modelprof: loader: interrupted\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--batches", "0"),
        ("--batches", "1.5"),
        ("--step-ms", "-1"),
        ("--step-ms", "inf"),
        ("--seconds", "0"),
        ("--seconds", "nan"),
    ],
)
def test_invalid_options_are_named(option, value, capsys):
    with pytest.raises(SystemExit):
        main(["loader", "train.py:make", option, value])
    assert re.search(f"{option}: expected an? (number|integer) ", capsys.readouterr().err)
