"""Tests callbacks saved to files, sent to other processes and copied by libraries."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from multiprocessing.reduction import ForkingPickler

import cloudpickle
import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_modelprof import ModelProfCallback
from tests.support.fits import Net, fit_quietly, loader, make_callback, make_trainer, run_script

pytestmark = pytest.mark.slow

SAVED = ModelProfCallback(active=3, dirpath="out", rules={"slow_steps": False})


class Own(ModelProfCallback):
    """A user's subclass."""


def saved_by_torch(one):
    torch.save(one, file := io.BytesIO())
    return file.getvalue()


def loaded_by_torch(data):
    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.parametrize("dump", [pickle.dumps, saved_by_torch])
@pytest.mark.parametrize("kind", [ModelProfCallback, Own])
def test_file_has_plain_callback(dump, kind):
    data = dump(kind(active=3))
    assert b"modelprof" not in data.lower()
    load = pickle.loads if dump is pickle.dumps else loaded_by_torch
    made = load(data)
    assert type(made) is lightning.pytorch.Callback
    assert (made.active, made.skip_first, made.terminal) == (3, 10, True)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_all_pickle_protocols_work(protocol):
    made = pickle.loads(pickle.dumps(SAVED, protocol))
    assert type(made) is lightning.pytorch.Callback
    assert (made.active, made.dirpath, made.rules) == (3, "out", {"slow_steps": False})


def test_file_opens_without_this_package(tmp_path):
    """There it does nothing, whatever its attributes are called."""
    (tmp_path / "model.pkl").write_bytes(pickle.dumps({"callbacks": [SAVED]}))
    script = """
    import pickle, sys
    sys.modules["lightning_modelprof"] = None
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    kept = pickle.load(open("model.pkl", "rb"))
    del sys.modules["lightning_modelprof"]  # its entry point is installed here
    trainer = Trainer(max_steps=3, logger=False, enable_checkpointing=False, accelerator="cpu", **kept)
    trainer.fit(BoringModel())
    assert trainer.global_step == 3
    assert "lightning_modelprof.lightning.callback" not in sys.modules
    """
    result = run_script(script, cwd=tmp_path, has_ours=False)
    assert result.returncode == 0, result.stderr[-3000:]


class OnlyLightnings(pickle.Unpickler):
    """Like darts, which only loads classes from known packages."""

    def find_class(self, module, name):
        if module.partition(".")[0] not in ("pytorch_lightning", "copyreg"):
            raise pickle.UnpicklingError(f"{module}.{name} is not allow-listed")
        return super().find_class(module, name)


def test_saved_class_is_that_of_trainers_package(tmp_path):
    """A saved model may contain its Trainer's arguments."""
    callback = make_callback(tmp_path, active=0)
    trainer = pytorch_lightning.Trainer(
        callbacks=[callback],
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert callback.report is not None
    made = OnlyLightnings(io.BytesIO(pickle.dumps(callback))).load()
    assert type(made) is pytorch_lightning.Callback


@pytest.mark.parametrize("dumps", [ForkingPickler.dumps, cloudpickle.dumps])
@pytest.mark.parametrize("kind", [ModelProfCallback, Own])
def test_callback_sent_to_another_process_measures(tmp_path, dumps, kind):
    sent = kind(active=0, dirpath=tmp_path / "run", report={"terminal": False}, flops=False)
    made = pickle.loads(dumps({"callbacks": [sent]}))["callbacks"][0]
    assert type(made).__name__ == kind.__name__
    fit_quietly(make_trainer(tmp_path, made), Net(), loader(24))
    assert len(made.run.ranks[0].steps) == 12


def test_original_gets_its_copys_report(tmp_path):
    """Libraries copy their Trainer arguments before each fit."""
    users = make_callback(tmp_path, active=0)
    for number in (24, 16):
        made = copy.deepcopy({"callbacks": [copy.deepcopy(users)]})["callbacks"][0]
        assert type(made) is ModelProfCallback
        fit_quietly(make_trainer(tmp_path, made), Net(), loader(number))
        assert len(users.run.ranks[0].steps) == number // 2
        assert users.report is made.report
    is_there = weakref.ref(made)
    del made
    gc.collect()
    assert is_there() is None, "the original does not keep it"
    assert "8 training steps" in users.report.title


def test_original_keeps_its_own_report(tmp_path):
    users = make_callback(tmp_path, active=0)
    fit_quietly(make_trainer(tmp_path, users), Net(), loader(24))
    made = copy.deepcopy(users)
    assert made.report is users.report, "a report does not change, and is not copied"
    fit_quietly(make_trainer(tmp_path, made), Net(), loader(16))
    assert [len(one.run.ranks[0].steps) for one in (users, made)] == [12, 8]


def test_copy_outlives_its_original(tmp_path):
    made = copy.copy(make_callback(tmp_path, active=0))
    gc.collect()
    fit_quietly(make_trainer(tmp_path, made), Net(), loader(24))
    assert len(made.run.ranks[0].steps) == 12


class Counting:
    """Counts samples, and refers to the callback that calls it."""

    def __init__(self):
        self.callback = ModelProfCallback(samples_fn=self)

    def __call__(self, batch):
        return 1


def test_callback_that_refers_to_itself_is_copied():
    made = copy.deepcopy(Counting())
    assert made.callback.config.samples_fn is made


def test_older_trainer_accepts_callback(tmp_path):
    """Before 2.6, pytorch_lightning checks for its own class among the bases."""
    script = """
    import sys, types
    import lightning_modelprof
    older = types.ModuleType("pytorch_lightning")
    older.__version__, older.Callback = "2.5.6", type("Callback", (), {"on_fit_end": lambda *args: "theirs"})
    sys.modules["pytorch_lightning"] = older
    class Both(lightning_modelprof.ModelProfCallback, older.Callback):
        pass
    for _ in range(2):
        assert isinstance(lightning_modelprof.ModelProfCallback(), older.Callback)
        assert isinstance(Both(), older.Callback)
    assert lightning_modelprof.ModelProfCallback().on_fit_end(None, None) is None
    """
    result = run_script(script, cwd=tmp_path, has_ours=False)
    assert result.returncode == 0, result.stderr[-3000:]
