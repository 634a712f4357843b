"""A Lightning whose action names we do not know: said once, measured by hooks, training unharmed."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_modelprof.lightning.classify import ActionTable
from lightning_modelprof.lightning.fallback import MEASURED
from lightning_modelprof.lightning.phases import PhaseProfiler
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.steps import NOT_MEASURED, StepTag
from lightning_modelprof.show.format import DASH
from lightning_modelprof.show.text import render_text
from tests.support import MS, Bench, CostlyCallback, HookedModel, PlainManualModel, PlainModel, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def rename(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """From now on Lightning calls an action by another name."""

    def renaming_table(self: PhaseProfiler, make: Any) -> ActionTable:
        def make_renamed(name: str) -> Any:
            owner, dot, own_hook = name.rpartition(".")
            is_callback = name.startswith("[Callback]")
            return make(f"{owner}{dot}renamed_{own_hook}" if own_hook == hook and not is_callback else name)

        return ActionTable(make_renamed)

    monkeypatch.setattr(PhaseProfiler, "_table", renaming_table)


def fit_with_warning(bench: Bench, model: Any, **arguments: Any) -> str:
    """Train and return the only warning that is ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bench.fit(model, bench.data(4), max_epochs=2, **arguments)
    ours = [str(entry.message) for entry in caught if "ModelProfCallback" in str(entry.message)]
    assert len(ours) == 1, ours
    return ours[0]


HOOKS = ["train_dataloader_next", "training_step", "run_training_epoch", "on_train_batch_end"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("model_class", [PlainModel, PlainManualModel])
def test_unknown_names_are_said_once_and_measured_by_hooks(monkeypatch, hook, model_class):
    rename(monkeypatch, hook)
    bench = Bench()
    message = fit_with_warning(bench, model_class(bench.truth), log_every_n_steps=1)
    missing = "the end of a batch" if hook == "on_train_batch_end" else hook
    assert f"does not tell its profiler of {missing}" in message
    for lost in ("dataloader", "transfer", "logging", "validation", "callback"):
        assert lost in message

    steps = bench.record.steps
    by_hooks = steps.phases_ns[:, PHASE_INDEX["dataloader"]] == NOT_MEASURED
    num_before = 4 if hook == "on_train_batch_end" else 1  # seen, or lost, before the fallback began
    assert 8 - num_before - 1 <= by_hooks.sum() <= 8 - num_before
    rows = steps.phases_ns[by_hooks]
    for index, phase in enumerate(PHASES):
        assert ((rows[:, index] == NOT_MEASURED) == (index not in MEASURED)).all(), phase.key
    for key in ("forward", "backward"):
        assert (rows[1:, PHASE_INDEX[key]] > 0).all(), key
    assert steps.duration_ns[by_hooks].tolist() == [
        sum(ns for ns in row if ns != NOT_MEASURED) for row in rows.tolist()
    ]
    assert any("callback hooks" in note for note in bench.record.notes)


def test_steps_with_an_epochs_boundary_or_validation_are_not_clean(monkeypatch):
    rename(monkeypatch, "train_dataloader_next")
    bench = Bench(skip_first=0)
    fit_with_warning(bench, PlainModel(bench.truth), validation=bench.validation_data(), val_check_interval=3)
    # The first batch is not measured; validation runs after the third batch of four, so in the fourth's step.
    assert bench.has_tag(StepTag.VALIDATION) == [False, False, True, False, False, False, True]
    assert bench.has_tag(StepTag.FIRST_OF_EPOCH) == [False, False, False, True, False, False, False]


def test_forward_backward_and_optimizer_are_what_was_spent(monkeypatch):
    rename(monkeypatch, "train_dataloader_next")
    bench = Bench()
    fit_with_warning(bench, PlainModel(bench.truth, scheduler_interval="step"))
    # steps run from one on_train_batch_end to the next: the last ones are the truth's last ones, shifted
    rows = bench.record.steps.phases_ns.tolist()[-2:]
    truth = bench.truth.steps[-2:]
    for row, step in zip(rows, truth, strict=True):
        measured = dict(zip((phase.key for phase in PHASES), row, strict=True))
        for key in ("forward", "backward"):
            assert measured[key] == step[key]
        # without an end of its own the optimizer's time holds the schedulers
        assert measured["optimizer"] == step["optimizer"] + step["lr_scheduler"]
        assert measured["other"] == step["dataloader"]
        assert measured["zero_grad"] == step["zero_grad"]


def test_forward_goes_on_after_a_manual_backward(monkeypatch):
    rename(monkeypatch, "train_dataloader_next")
    bench = Bench()
    fit_with_warning(bench, PlainManualModel(bench.truth))
    row, step = bench.record.steps.phases_ns.tolist()[-1], bench.truth.steps[-1]
    forward, optimizer = row[PHASE_INDEX["forward"]], row[PHASE_INDEX["optimizer"]]
    assert forward // MS == 1 + 5 + 5  # zero_grad, and what comes before and after the backward
    # nothing marks the end of the optimizer's step, so what follows it counts as part of it
    assert forward + optimizer == step["forward"] + step["optimizer"]


def test_report_prints_dashes_for_what_is_lost(monkeypatch, tmp_path):
    rename(monkeypatch, "train_dataloader_next")
    bench = Bench(files=True, dirpath=tmp_path / "out", skip_first=0)
    fit_with_warning(bench, PlainModel(bench.truth))
    (row,) = [line for line in render_text(bench.callback.report).splitlines() if "Dataloader " in line][-1:]
    assert DASH in row
    assert "0.00" not in row
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    phases = {phase["phase"]: phase for phase in report["phases"]}
    assert phases["dataloader"]["total_ns"] is None
    assert phases["forward"]["total_ns"] > 0
    assert report["benchmark"]["reader_ratio"] is None
    assert report["benchmark"]["reader_cost_ns"] is None


@pytest.mark.parametrize("hook", HOOKS)
def test_training_is_unharmed(monkeypatch, hook):
    def weights(*callbacks: Callback, bench: Bench) -> torch.Tensor:
        torch.manual_seed(0)
        model = HookedModel(bench.truth)
        make_trainer(callbacks=list(callbacks), max_epochs=2).fit(model, bench.data(4))
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    control = weights(bench=Bench())
    rename(monkeypatch, hook)
    bench = Bench()
    with pytest.warns(RuntimeWarning, match="measuring by callback hooks"):
        measured = weights(bench.callback, CostlyCallback(bench.truth), bench=bench)
    assert torch.equal(control, measured)


def test_callbacks_are_restored_after_an_exception(monkeypatch):
    rename(monkeypatch, "train_dataloader_next")
    bench = Bench()

    class Fails(PlainModel):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("broken off")
            return super().training_step(batch, batch_idx)

    with pytest.warns(RuntimeWarning, match="measuring by callback hooks"):
        trainer = bench.fit(Fails(bench.truth), bench.data(5), raises=RuntimeError)
    assert trainer.callbacks == [bench.callback]


def test_known_names_are_no_reason_to_warn():
    bench = Bench()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bench.fit(PlainModel(bench.truth), bench.data(4), max_epochs=2)
    assert not [entry for entry in caught if "ModelProfCallback" in str(entry.message)]


def test_an_epoch_that_a_resumed_fit_only_validates_is_no_reason_to_warn(tmp_path):
    path = tmp_path / "in_validation.ckpt"

    class SavesInValidation(Callback):
        def on_validation_start(self, trainer, pl_module):
            trainer.save_checkpoint(path)

    bench = Bench()
    first = make_trainer(callbacks=[SavesInValidation()], val_check_interval=2)
    first.fit(PlainModel(bench.truth), bench.data(2), bench.validation_data())

    bench = Bench()
    arguments = {"validation": bench.validation_data(), "val_check_interval": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bench.fit(PlainModel(bench.truth), bench.data(2), max_epochs=3, ckpt_path=path, **arguments)
    assert [str(entry.message) for entry in caught if "ModelProfCallback" in str(entry.message)] == []
    steps = bench.record.steps
    assert len(steps.step) == 4  # of the second and the third epoch
    assert (steps.phases_ns[:, PHASE_INDEX["dataloader"]] > 0).all()
