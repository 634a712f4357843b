"""A profile that can't be written for the dashboard causes a warning, and nothing else."""

from __future__ import annotations

import shutil
from collections import namedtuple

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modelprof.engine import outputs, trace_work, traces
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer, our_warnings

pytestmark = pytest.mark.slow

Usage = namedtuple("Usage", "total used free")


def fit(folder, *, tensorboard=True, files=True, logger=None, seed=3, **kwargs):
    """Fit with one window; return the weights and this package's warnings."""
    torch.manual_seed(seed)
    module = Net()
    arguments = {"active": 2, "wait": 2, "skip_first": 2, "tensorboard": tensorboard, "files": files} | kwargs
    callback = make_callback(folder, **arguments)
    logger = TensorBoardLogger(folder, name="net", version=0) if logger is None else logger
    with our_warnings() as messages:
        fit_quietly(make_trainer(folder, callback, logger=logger), module, loader())
    return [parameter.detach().clone() for parameter in module.parameters()], messages


def profiles(folder):
    """Tag → number of blobs, in all event files below a folder."""
    found = {}
    for file in sorted(folder.rglob("events.out*")):
        events = EventAccumulator(str(file), size_guidance={"tensors": 0}).Reload()
        tags = [
            tag
            for tag in events.Tags()["tensors"]
            if events.SummaryMetadata(tag).plugin_data.plugin_name == "modelprof"
        ]
        found |= {tag: len(events.Tensors(tag)[0].tensor_proto.string_val) for tag in tags}
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Weights of a fit with ``tensorboard=False``."""
    return fit(tmp_path_factory.mktemp("plain"), tensorboard=False)[0]


def same(weights, others):
    return all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


def test_profiles_are_written_without_changing_training(tmp_path, plain):
    weights, messages = fit(tmp_path)
    assert same(weights, plain)
    assert messages == []
    assert profiles(tmp_path / "net") == {"modelprof/window_0": 2, "modelprof/run": 2}


def test_no_profile_is_written_to_nearly_full_disk(tmp_path, plain, monkeypatch):
    asked = []

    def usage(folder):
        asked.append(str(folder))
        return Usage(2**40, 2**40 - 2**20, 2**20)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    weights, messages = fit(tmp_path)
    assert same(weights, plain)
    (message,) = messages
    assert "1,048,576 bytes are free" in message
    assert profiles(tmp_path / "net") == {}
    assert set(asked) == {str(tmp_path / "net" / "version_0")}


def test_small_profile_needs_little_disk_space(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**40, 0, outputs.SPARE_BYTES + 2**20))
    monkeypatch.setattr(outputs, "TEXTS_BYTES", 2**20)
    assert fit(tmp_path)[1] == []
    assert profiles(tmp_path / "net"), "a window of this net takes some kilobytes"


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), RecursionError()])
def test_error_while_making_profile_is_a_warning(tmp_path, plain, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(trace_work, "window_profile", fail)
    weights, messages = fit(tmp_path)
    assert same(weights, plain)
    (message,) = messages
    assert "couldn't write to the dashboard" in message
    assert type(error).__name__ in message
    assert profiles(tmp_path / "net") == {"modelprof/run": 2}, "the other profile is there"


def test_profile_is_made_once_for_all_loggers(tmp_path, monkeypatch):
    made = []
    original = trace_work.window_profile
    monkeypatch.setattr(trace_work, "window_profile", lambda *a, **k: made.append(1) or original(*a, **k))
    loggers = [TensorBoardLogger(tmp_path, name=name, version=0) for name in ("a", "b")]
    assert fit(tmp_path, logger=loggers)[1] == []
    assert len(made) == 1
    for name in ("a", "b"):
        assert {"modelprof/window_0", "modelprof/run"} <= set(profiles(tmp_path / name))


def test_no_profile_is_made_without_tensorboard_logger(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_work, "window_profile", lambda *a, **k: pytest.fail("nobody reads it"))
    assert fit(tmp_path, logger=False)[1] == []


def test_two_fits_without_files_have_different_tags(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="net", version=0)
    for _ in range(2):
        assert fit(tmp_path, logger=logger, files=False)[1] == []
    tags = profiles(tmp_path / "net")
    assert len(tags) == 4
    assert all(tag.startswith("modelprof_") for tag in tags)


def test_only_some_of_many_windows_are_written():
    kept = [index for index in range(1_000) if traces.is_for_dashboard(index)]
    assert kept[:16] == list(range(16))
    assert [len([index for index in kept if low <= index < 2 * low]) for low in (16, 32, 64, 128, 256)] == [
        8
    ] * 5
    assert kept[16:24] == [16, 18, 20, 22, 24, 26, 28, 30]
