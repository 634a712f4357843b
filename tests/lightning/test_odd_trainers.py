"""Tests that the callback trains with everything Lightning accepts: odd loggers, URLs, loaders, ..."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from torch.utils.data import DataLoader, IterableDataset

from lightning_modelprof import ConfigError, ModelProfCallback
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer, our_warnings, steps_of

pytestmark = pytest.mark.slow

NUM_STEPS = 8


class Odd(Logger):
    """A logger with given properties. A property that is an exception is raised."""

    def __init__(self, **properties):
        super().__init__()
        self.properties = {"name": "odd", "version": 0, "save_dir": None, "log_dir": None} | properties

    def _get(self, name):
        value = self.properties[name]
        if isinstance(value, Exception):
            raise value
        return value

    name = property(lambda self: self._get("name"))
    version = property(lambda self: self._get("version"))
    save_dir = property(lambda self: self._get("save_dir"))
    log_dir = property(lambda self: self._get("log_dir"))

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, *args, **kwargs):
        pass


def mocked():
    logger = MagicMock(spec=TensorBoardLogger)
    logger.save_dir, logger.name, logger.version = Mock(), Mock(), Mock()
    return logger


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.rand(8), torch.tensor(1.0)


class Generator:
    """A loader that is just an iterable."""

    def __iter__(self):
        return (([torch.rand(2, 8), torch.rand(2)]) for _ in range(NUM_STEPS))


class OddNames(Callback):
    """Can't be compared, and has an odd state key."""

    @property
    def state_key(self):
        return "a\nb"

    def __eq__(self, other):
        raise ValueError("no")

    __hash__ = None


class MockedMethods(Callback):
    on_train_batch_start = Mock()
    on_train_batch_end = MagicMock()


# Name → arguments of the Trainer and fit, and part of the only warning ("" for no warning).
ADDRESS = "isn't on this machine"
NO_PATH = "isn't a path but a"
FAILED = "the run's directory is unknown"
TABLE = {
    "default_root_dir: memory": ({"default_root_dir": "memory://runs/a"}, ADDRESS),
    "default_root_dir: s3": ({"default_root_dir": "s3://bucket/a"}, ADDRESS),
    "TensorBoardLogger: memory": (lambda: {"logger": TensorBoardLogger("memory://runs")}, ADDRESS),
    "CSVLogger: memory": (lambda: {"logger": CSVLogger("memory://runs")}, ADDRESS),
    "log_dir: chained address": (lambda: {"logger": Odd(log_dir="simplecache::gs://b/c")}, ADDRESS),
    "save_dir: address": (lambda: {"logger": Odd(save_dir="gs://b/c")}, ADDRESS),
    "log_dir: Path of an address": (lambda: {"logger": Odd(log_dir=Path("hdfs://host/c"))}, ADDRESS),
    "default_root_dir: file": (lambda: {"default_root_dir": f"file://{Path.cwd()}/filed"}, ""),
    "log_dir: Mock": (lambda: {"logger": Odd(log_dir=Mock())}, NO_PATH),
    "log_dir: MagicMock": (lambda: {"logger": Odd(log_dir=MagicMock())}, NO_PATH),
    "log_dir: int": (lambda: {"logger": Odd(log_dir=3)}, NO_PATH),
    "log_dir: bytes": (lambda: {"logger": Odd(log_dir=b"bytes")}, NO_PATH),
    "log_dir: None": (lambda: {"logger": Odd()}, ""),
    "log_dir: empty": (lambda: {"logger": Odd(log_dir="")}, ""),
    "log_dir: raises": (lambda: {"logger": Odd(log_dir=RuntimeError("not yet"))}, FAILED),
    "log_dir: NUL": (lambda: {"logger": Odd(log_dir="a\0b")}, "isn't writable"),
    "log_dir: a file": (lambda: {"logger": Odd(log_dir=__file__)}, "is a file"),
    "save_dir: Mock": (lambda: {"logger": Odd(save_dir=Mock())}, NO_PATH),
    "version: raises": (lambda: {"logger": Odd(save_dir="kept", version=OSError("x"))}, FAILED),
    "version: None": (lambda: {"logger": Odd(save_dir="kept", version=None)}, ""),
    "name: None": (lambda: {"logger": Odd(save_dir="kept", name=None)}, ""),
    "name: int": (lambda: {"logger": Odd(save_dir="kept", name=7, version=1.5)}, ""),
    "a mocked logger": (lambda: {"logger": mocked()}, NO_PATH),
    "two loggers": (lambda: {"logger": [Odd(log_dir=Mock()), Odd(log_dir="second")]}, NO_PATH),
    "loader: no length": (lambda: {"loader": DataLoader(Endless(), batch_size=2)}, ""),
    "loader: a generator": (lambda: {"loader": Generator()}, ""),
    "loader: batch_size None": (
        lambda: {"loader": DataLoader([(torch.ones(2, 8), torch.ones(2))] * NUM_STEPS, batch_size=None)},
        "",
    ),
    "profiler: simple": (lambda: {"profiler": SimpleProfiler(dirpath=".", filename="simple")}, ""),
    "profiler: advanced": (lambda: {"profiler": AdvancedProfiler(dirpath=".", filename="advanced")}, ""),
    "profiler: pytorch": (lambda: {"profiler": "pytorch"}, "already uses torch.profiler"),
    "callback: odd names": (lambda: {"callbacks": [OddNames()]}, ""),
    "callback: mocked methods": (lambda: {"callbacks": [MockedMethods()]}, ""),
}


def train(folder, given, callback):
    """Weights after a fit with the arguments of a table row."""
    given = dict(given() if callable(given) else given)
    data = given.pop("loader", None)
    if data is None:
        data = loader(2 * NUM_STEPS)
    callbacks = [*given.pop("callbacks", []), *([callback] if callback else [])]
    torch.manual_seed(5)
    module = Net()
    trainer = make_trainer(folder, *callbacks, max_steps=NUM_STEPS, max_epochs=-1, **given)
    fit_quietly(trainer, module, data)
    assert trainer.global_step == NUM_STEPS
    return module.state_dict()


@pytest.mark.parametrize("name", TABLE)
def test_odd_arguments_do_not_affect_training(tmp_path, monkeypatch, name):
    given, said = TABLE[name]
    monkeypatch.chdir(tmp_path)
    expected = train(tmp_path / "runs", given, None)
    callback = ModelProfCallback(
        report={"terminal": False}, flops=False, inspect={"sampling": False}, skip_first=0, steps=(2, 4)
    )
    with our_warnings() as messages:
        found = train(tmp_path / "runs", given, callback)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(steps_of(callback)) == NUM_STEPS
    assert callback.run.info.status == "finished"
    if not said:
        assert messages == []
    else:
        (message,) = messages
        assert said in message
        assert any(said.casefold() in note.casefold() for note in callback.report.notes)
        assert "internal error" not in message
    (archive,) = tmp_path.rglob("run.json")
    if said and "Files go to" in messages[0]:
        assert messages[0].endswith(f". Files go to {archive.parent}.")
        assert not list(tmp_path.rglob("*MagicMock*"))
    assert archive.parent.name == "modelprof"


def test_unwritable_working_directory_is_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) == temporary)
    callback = ModelProfCallback(
        report={"terminal": False}, flops=False, inspect={"sampling": False}, active=0
    )
    with our_warnings() as messages:
        train(tmp_path / "runs", {}, callback)
    (message,) = messages
    assert "isn't writable" in message
    folder = Path(message.rpartition("Files go to ")[2].removesuffix("."))
    assert folder.is_relative_to(temporary), "nobody else can have made it"
    assert (folder / "run.json").is_file()


def test_remote_dirpath_is_rejected(tmp_path):
    callback = ModelProfCallback(dirpath="memory://runs", report={"terminal": False})
    with pytest.raises(ConfigError, match="expected a local directory for files, got memory://runs"):
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader(4))


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_other_loops_with_remote_root_save_locally(tmp_path, monkeypatch, loop):
    monkeypatch.chdir(tmp_path)

    class Evaluated(Net):
        test_step = Net.validation_step

        def predict_step(self, batch, batch_idx):
            return self.loss(batch)

    callback = make_callback(tmp_path, active=0, dirpath=None)
    trainer = make_trainer("memory://runs/b", callback)
    with our_warnings() as messages:
        getattr(trainer, loop)(Evaluated(), loader(2 * NUM_STEPS))
    assert len(messages) == 1
    assert callback.report is not None
    assert (tmp_path / "modelprof" / "run.json").is_file()
