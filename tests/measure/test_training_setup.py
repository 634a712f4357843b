"""Reading the setup of a live training; unreadable parts do no harm."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_modelprof.lightning.trainer_loop import TrainerLoop
from lightning_modelprof.measure.setup import training_setup
from lightning_modelprof.measure.setup.environment import run_info
from lightning_modelprof.measure.setup.model_setup import convolution_biases
from lightning_modelprof.measure.setup.training_setup import read_setup
from lightning_modelprof.measure.user_code import own_methods, place_of
from lightning_modelprof.report.model import Status
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.loops import FIT
from tests.support.fits import Net, Numbers, loader, loop_of_trainer, report_of, run_fit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def line_of(function):
    return function.__code__.co_firstlineno


class Rows(Numbers):
    def __getitem__(self, index):
        return super().__getitem__(index)


class Noisy(Callback):
    def on_train_batch_end(self, *args):
        pass


class Own(Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def on_train_batch_start(self, *args):
        pass


def start(worker):
    pass


@pytest.mark.slow
def test_setup_is_read_from_fit(tmp_path):
    data = DataLoader(Subset(Rows(64), range(32)), batch_size=2, num_workers=1, worker_init_fn=start)
    callback = run_fit(tmp_path, module=Own(), data=data, others=[Noisy()], active=0)
    setup = callback.run.ranks[0].setup
    assert setup.notes == ()
    [one] = setup.loaders
    assert (one.kind, one.num_workers, one.prefetch_factor, one.batch_size) == ("DataLoader", 1, 2, 2)
    assert (one.persistent_workers, one.pin_memory) == (False, False)
    assert one.start_method in torch.multiprocessing.get_all_start_methods()
    assert (one.dataset.file, one.dataset.line) == (__file__, line_of(Rows.__getitem__))
    assert (one.worker_init.function, one.collate.is_library) == ("start", True)
    [optimizer] = setup.optimizers
    assert (optimizer.kind, optimizer.num_tensors, optimizer.has_fused, optimizer.fused) == (
        "SGD",
        4,
        True,
        None,
    )
    assert setup.keeps_gradients is True
    assert setup.module_hooks["on_train_batch_start"].line == line_of(Own.on_train_batch_start)
    assert setup.module_hooks["training_step"].function == "Net.training_step"
    [noisy] = [one for one in setup.callbacks if one.callback == "Noisy"]
    assert list(noisy.hooks) == ["on_train_batch_end"]
    assert (setup.num_threads, setup.usable_cpus) == (torch.get_num_threads(), training_setup.usable_cpus())
    assert (setup.cuda, setup.compiled, setup.layers) == (None, None, ())
    assert load_run(tmp_path).ranks[0].setup == setup


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profiler", "name", "status"),
    [("advanced", "AdvancedProfiler", "found"), ("simple", "SimpleProfiler", "clean"), (None, "", "clean")],
)
def test_trainer_profiler_is_found(tmp_path, profiler, name, status):
    callback = run_fit(tmp_path, trainer={"profiler": profiler}, active=0)
    assert callback.run.ranks[0].setup.profiler == name
    [finding] = [one for one in callback.report.findings if one.kind == "profiler_left_on"]
    assert finding.status.value == status


def test_unreadable_part_loses_only_itself(tmp_path):
    class Odd:
        """Not a trainer at all."""

    setup = read_setup(loop_of_trainer(Odd()))
    assert {note.partition(" ")[0] for note in setup.notes} >= {"trainer", "callbacks"}
    assert setup.loaders == ()


@pytest.mark.slow
def test_callback_state_key_may_be_class(tmp_path):
    """Old versions of Lightning used a class as the key."""

    class Keyed(Noisy):
        state_key = Net

    callback = run_fit(tmp_path, others=[Keyed()], active=0)
    assert callback.report is not None
    assert str(Net) in [one.callback for one in load_run(tmp_path).ranks[0].setup.callbacks]


class Stream:
    def __iter__(self):
        yield from ([torch.rand(2, 8), torch.rand(2)] for _ in range(20))


@pytest.mark.slow
def test_loader_that_is_not_from_torch(tmp_path):
    callback = run_fit(tmp_path, data=Stream(), active=0)
    setup = callback.run.ranks[0].setup
    assert (setup.loaders[0].kind, setup.loaders[0].num_workers) == ("Stream", None)
    assert setup.loaders[0].dataset.line == line_of(Stream.__iter__)


@pytest.mark.parametrize(
    ("text", "expected"), [("150000 100000", 2), ("max 100000", 8), ("50000 100000", 1), ("odd", 8)]
)
def test_usable_cpus_respect_container_quota(tmp_path, monkeypatch, text, expected):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(training_setup, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert training_setup.usable_cpus() == expected


def test_place_of_function():
    def inner():
        pass

    assert place_of(inner).line == line_of(inner)
    assert place_of(functools.partial(inner)).line == line_of(inner)
    assert place_of(functools.wraps(inner)(lambda: None)).line == line_of(inner)
    assert (place_of(len).file, place_of(len).is_library) == (None, True)
    assert place_of(torch.nn.Linear.forward).is_library
    assert place_of(3) is None
    assert "training_step" in own_methods(Own(), ("LightningModule",))
    assert "log" not in own_methods(Own(), ("LightningModule",))


def bias(*layers):
    return [(one.convolution, one.is_sequential) for one in convolution_biases(nn.Sequential(*layers))]


def test_convolution_bias_before_batchnorm():
    assert bias(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)) == [("0", True)]
    assert bias(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)) == []
    assert bias(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)) == []
    assert bias(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(8)) == []
    assert bias(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)) == []


def test_convolution_bias_matched_by_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.conv2, self.bn3 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    [found] = convolution_biases(nn.Sequential(Block()))
    assert (found.convolution, found.normalisation, found.is_sequential) == ("0.conv1", "0.bn1", False)
    assert (found.owner.file, found.owner.line) == (__file__, line_of(Block.__init__))


@pytest.mark.slow
def test_recompilations_by_torch_compile(tmp_path):
    """Batches of three shapes cause two recompilations with their guard, and there is one graph break."""

    class Compiled(Net):
        def __init__(self):
            super().__init__()
            self.compiled = torch.compile(self.pieces, backend="eager", dynamic=False)

        def pieces(self, inputs):
            outputs = self.layers(inputs)
            torch._dynamo.graph_break()
            return outputs * 2

        def training_step(self, batch, batch_idx):
            inputs, _ = batch
            return self.compiled(inputs[: 1 + batch_idx % 3]).mean()

    torch._dynamo.reset()
    callback = run_fit(tmp_path, module=Compiled(), data=loader(batch_size=4), active=0, skip_first=4)
    compiled = callback.run.ranks[0].setup.compiled
    mine = [one for one in compiled.compilations if one.function.function == "pieces"]
    assert [one.attempt for one in mine] == [0, 1, 2]
    assert all(one.function.file == __file__ and one.seconds > 0 for one in mine)
    assert any("size mismatch" in reason for reason in compiled.failed_guards["pieces"])
    assert sum(compiled.graph_breaks.values()) >= 1
    [finding] = [one for one in callback.report.findings if one.kind == "compile_recompiles"]
    assert finding.status is Status.FOUND
    assert finding.locations[0].file == __file__
    seconds = sum(one.seconds for one in compiled.compilations if one.attempt)
    assert finding.saving_ns_per_step == pytest.approx(1e9 * seconds / 16)


@pytest.mark.slow
def test_recompiled_module_is_located_at_its_call(tmp_path):
    """torch.compile(module) compiles a function of torch's, which users can't change."""

    class Compiled(Net):
        def __init__(self):
            super().__init__()
            self.compiled = torch.compile(self.layers, backend="eager", dynamic=False)

        def training_step(self, batch, batch_idx):
            inputs, _ = batch
            return self.compiled(inputs[: 1 + batch_idx % 3]).mean()  # @compiled

    torch._dynamo.reset()
    callback = run_fit(tmp_path, module=Compiled(), data=loader(batch_size=4), active=0, skip_first=4)
    [finding] = [one for one in callback.report.findings if one.kind == "compile_recompiles"]
    [place] = finding.locations
    text = Path(__file__).read_text().split("\n")
    if hasattr(torch._dynamo.utils.CompilationMetrics, "stack_trace"):
        assert (place.file, place.is_exact) == (__file__, True)
        assert text[place.line - 1].endswith("# @compiled")
    else:
        assert place.file is None or place.file == __file__


@pytest.mark.slow
def test_findings_are_in_report_json(tmp_path):
    run_fit(tmp_path, active=0, skip_first=5)
    document = report_of(tmp_path)  # report.schema.json describes its format
    assert len({one["kind"] for one in document["findings"]}) > 20


LIBRARY = """
import lightning.pytorch
__version__ = "3.2.1"

class Trainer(lightning.pytorch.Trainer):
    pass

class Forecaster(lightning.pytorch.LightningModule):
    pass
"""


def test_versions_include_model_library(tmp_path, monkeypatch):
    """The library is the one of the model's class or of its base class; a user's file has no version."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "forecasts.py").write_text(LIBRARY)
    (tmp_path / "users.py").write_text(
        LIBRARY.replace(".LightningModule", ".Forecaster").replace("lightning.pytorch", "forecasts")
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    users = importlib.import_module("users")
    trainer = users.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.strategy.connect(users.Forecaster())
    info = run_info(TrainerLoop(trainer, FIT), config={}, sample_unit="samples", version="0")
    assert list(info.versions) == ["lightning-modelprof", "torch", "forecasts", "lightning", "python"]
    assert info.versions["forecasts"] == "3.2.1"
    for name in ("users", "forecasts"):
        sys.modules.pop(name)
