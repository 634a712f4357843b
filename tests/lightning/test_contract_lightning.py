"""Tests what we rely on in Lightning: the names and the order of its profiler actions.

They are undocumented. If a test fails after a Lightning upgrade, add the new names to ``run/loops.py``,
``lightning/classify.py`` and ``phases.py``. Until then users get a warning and times by hooks.
"""

from __future__ import annotations

import inspect
from typing import Any

import lightning
import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_modelprof.lightning.classify import INSIDE_TRANSFER, PHASE_OF_HOOK
from lightning_modelprof.lightning.phases import REQUIRED_HOOKS
from lightning_modelprof.lightning.rank_wait import BROADCAST
from lightning_modelprof.run.loops import PREDICT, TEST, VALIDATE
from tests.support.bench import HAS_SAVE_ACTION, make_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning", "ignore::UserWarning:pytorch_lightning"
)

PACKAGES = [lightning.pytorch, pytorch_lightning]


def is_about_training(event: str) -> bool:
    return "dataloader_next" in event or ".on_train_batch" in event or "run_training_epoch" in event


def events_of(
    package: Any, *, loop: str = "fit", is_manual: bool = False, epochs: int = 2, **arguments: Any
) -> list[str]:
    """Calls of Lightning's profiler in a loop: ``> action`` at the start, ``< action`` at the end."""
    events: list[str] = []

    class Recorder(package.profilers.Profiler):
        def start(self, action_name: str) -> None:
            events.append(f"> {action_name}")

        def stop(self, action_name: str) -> None:
            events.append(f"< {action_name}")

        def summary(self) -> str:
            return ""

    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not is_manual
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            loss = self.layer(batch).sum()
            if not is_manual:
                return loss
            self.manual_backward(loss)
            self.optimizers().step()
            return None

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            pass

        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            pass

        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            if is_manual:
                return optimizer
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Other(package.Callback):
        state_key = "Other"

    data = DataLoader(torch.ones(3, 2))
    trainer = make_trainer(
        package.Trainer,
        profiler=Recorder(),
        max_epochs=epochs,
        **{"callbacks": [Other()], **arguments},
    )
    if loop == "fit":
        trainer.fit(Net(), data, DataLoader(torch.ones(2, 2)))
    else:
        getattr(trainer, loop)(Net(), data)
    return events


def hooks_of(events: list[str]) -> set[str]:
    return {event.rpartition(".")[2].removeprefix("> ") for event in events if event.startswith(">")}


def step_of(events: list[str], number: int) -> list[str]:
    """Events from one fetch to the next; ``= action`` if nothing is inside."""
    fetch = "> [_TrainingEpochLoop].train_dataloader_next"
    starts = [index for index, event in enumerate(events) if event == fetch]
    return merged_events(events[starts[number] : starts[number + 1]])


def merged_events(events: list[str]) -> list[str]:
    """Events with start and end merged into ``= action`` if nothing is inside."""
    merged: list[str] = []
    for event in events:
        if event.startswith("<") and merged[-1] == event.replace("<", ">", 1):
            merged[-1] = merged[-1].replace(">", "=", 1)
        else:
            merged.append(event)
    return merged


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_fires_all_actions_we_use(package, tmp_path):
    saving = package.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
    automatic = events_of(package, callbacks=[saving], enable_checkpointing=True)
    hooks = hooks_of(automatic)
    expected = {
        *REQUIRED_HOOKS,
        *PHASE_OF_HOOK,
        *INSIDE_TRANSFER,
        *("run_training_batch", "optimizer_step", "on_train_batch_start"),
        *(["save_checkpoint"] if HAS_SAVE_ACTION else []),
        *("on_train_batch_end", "on_validation_model_zero_grad", "on_validation_model_eval"),
    }
    assert expected - hooks == set(), "Lightning no longer fires these actions"
    manual = hooks_of(events_of(package, is_manual=True))
    assert {"on_before_backward", "on_after_backward", "optimizer_step"} - manual == set()


def test_full_action_names(tmp_path):
    """Names without an owner, and owners that we check."""
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
    events = events_of(lightning.pytorch, callbacks=[saving], enable_checkpointing=True)
    for name in (
        "run_training_epoch",
        "run_training_batch",
        *(["save_checkpoint"] if HAS_SAVE_ACTION else []),
        "[_TrainingEpochLoop].train_dataloader_next",
        "[LightningModule]Net.on_train_batch_end",
        "[LightningModule]Net.optimizer_step",
        "[Strategy]SingleDeviceStrategy.training_step",
    ):
        assert f"> {name}" in events, name
    # A callback's state key may contain dots and brackets; the hook follows the last dot.
    assert f"> [Callback]{saving.state_key}.on_train_batch_end" in events
    assert "> optimizer_step" in events_of(lightning.pytorch, is_manual=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_actions_are_properly_nested(package):
    open_actions: list[str] = []
    for event in events_of(package):
        kind, _, name = event.partition(" ")
        if kind == ">":
            open_actions.append(name)
        else:
            assert open_actions.pop() == name
    assert open_actions == []


STEP = """
= [_TrainingEpochLoop].train_dataloader_next
= [LightningModule]Net.on_before_batch_transfer
> [Strategy]SingleDeviceStrategy.batch_to_device
= [LightningModule]Net.transfer_batch_to_device
= [LightningModule]Net.on_after_batch_transfer
< [Strategy]SingleDeviceStrategy.batch_to_device
= [Callback]Other.on_train_batch_start
= [LightningModule]Net.on_train_batch_start
= [Strategy]SingleDeviceStrategy.on_train_batch_start
> run_training_batch
> [LightningModule]Net.optimizer_step
= [Strategy]SingleDeviceStrategy.training_step
= [Callback]Other.on_before_zero_grad
= [LightningModule]Net.on_before_zero_grad
= [LightningModule]Net.optimizer_zero_grad
> [Strategy]SingleDeviceStrategy.backward
= [Callback]Other.on_before_backward
= [LightningModule]Net.on_before_backward
= [Callback]Other.on_after_backward
= [LightningModule]Net.on_after_backward
< [Strategy]SingleDeviceStrategy.backward
= [Callback]Other.on_before_optimizer_step
= [LightningModule]Net.on_before_optimizer_step
= [LightningModule]Net.configure_gradient_clipping
< [LightningModule]Net.optimizer_step
< run_training_batch
= [LightningModule]Net.lr_scheduler_step
= [Callback]Other.on_train_batch_end
= [LightningModule]Net.on_train_batch_end
"""

MANUAL_STEP = """
= [_TrainingEpochLoop].train_dataloader_next
= [LightningModule]Net.on_before_batch_transfer
> [Strategy]SingleDeviceStrategy.batch_to_device
= [LightningModule]Net.transfer_batch_to_device
= [LightningModule]Net.on_after_batch_transfer
< [Strategy]SingleDeviceStrategy.batch_to_device
= [Callback]Other.on_train_batch_start
= [LightningModule]Net.on_train_batch_start
= [Strategy]SingleDeviceStrategy.on_train_batch_start
> run_training_batch
> [Strategy]SingleDeviceStrategy.training_step
= [Callback]Other.on_before_backward
= [LightningModule]Net.on_before_backward
= [Callback]Other.on_after_backward
= [LightningModule]Net.on_after_backward
> optimizer_step
= [Callback]Other.on_before_optimizer_step
= [LightningModule]Net.on_before_optimizer_step
< optimizer_step
< [Strategy]SingleDeviceStrategy.training_step
< run_training_batch
= [Callback]Other.on_train_batch_end
= [LightningModule]Net.on_train_batch_end
"""


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("is_manual", "expected"), [(False, STEP), (True, MANUAL_STEP)])
def test_action_order_within_step(package, is_manual, expected):
    assert step_of(events_of(package, is_manual=is_manual), 1) == expected.strip().splitlines()


def test_action_order_around_epochs_and_validation():
    events = [event for event in events_of(lightning.pytorch) if is_about_training(event) or "model" in event]
    fetch = ["> [_TrainingEpochLoop].train_dataloader_next", "< [_TrainingEpochLoop].train_dataloader_next"]
    hooks = [
        "[Callback]Other.on_train_batch_start",
        "[LightningModule]Net.on_train_batch_start",
        "[Strategy]SingleDeviceStrategy.on_train_batch_start",
        "[Callback]Other.on_train_batch_end",
        "[LightningModule]Net.on_train_batch_end",
    ]
    batch = fetch + [f"{kind} {hook}" for hook in hooks for kind in "><"]
    validation = [
        f"{kind} [LightningModule]Net.on_validation_model_{hook}"
        for hook in ("zero_grad", "eval")
        for kind in "><"
    ]
    epoch = ["> run_training_epoch", *(3 * batch), *validation, "< run_training_epoch"]
    assert events == 2 * epoch


EVALUATION_BATCH = """
= [{owner}].{fetch}
= [LightningModule]Net.on_before_batch_transfer
> [Strategy]SingleDeviceStrategy.batch_to_device
= [LightningModule]Net.transfer_batch_to_device
= [LightningModule]Net.on_after_batch_transfer
< [Strategy]SingleDeviceStrategy.batch_to_device
= [Callback]Other.on_{hooks}_batch_start
= [LightningModule]Net.on_{hooks}_batch_start
= [Strategy]SingleDeviceStrategy.{step_hook}
= [Callback]Other.on_{hooks}_batch_end
= [LightningModule]Net.on_{hooks}_batch_end
"""

EVALUATION_START = """
= [Callback]Other.on_{hooks}_start
= [LightningModule]Net.on_{hooks}_start
= [Strategy]SingleDeviceStrategy.on_{hooks}_start
= [Callback]Other.on_{hooks}_epoch_start
= [LightningModule]Net.on_{hooks}_epoch_start
"""

EVALUATION_END = """
= [Callback]Other.on_{hooks}_epoch_end
= [LightningModule]Net.on_{hooks}_epoch_end
= [Callback]Other.on_{hooks}_end
= [LightningModule]Net.on_{hooks}_end
= [Strategy]SingleDeviceStrategy.on_{hooks}_end
"""


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("loop", [VALIDATE, TEST, PREDICT], ids=lambda loop: loop.key)
def test_action_order_in_evaluation_loop(package, loop):
    events = merged_events(events_of(package, loop=loop.key))
    first = events.index(f"= [Callback]Other.on_{loop.hooks}_start")
    last = events.index(f"= [Strategy]SingleDeviceStrategy.on_{loop.hooks}_end")
    names = {
        "owner": "_PredictionLoop" if loop is PREDICT else "_EvaluationLoop",
        "fetch": loop.fetch,
        "hooks": loop.hooks,
        "step_hook": loop.step_hook,
    }
    parts = (EVALUATION_START, *(3 * [EVALUATION_BATCH]), EVALUATION_END)
    expected = [line for part in parts for line in part.format(**names).strip().splitlines()]
    assert events[first : last + 1] == expected


def test_rank_wait_method_exists():
    """Without this method the wait stays in the phase Logging; see ``lightning/rank_wait.py``."""
    loops = pytest.importorskip("lightning.pytorch.loops.training_epoch_loop")
    if Version(lightning.__version__) < Version("2.6"):
        pytest.skip("of Lightning 2.6 and later")
    assert inspect.signature(getattr(loops._TrainingEpochLoop, BROADCAST)).parameters.keys() == {"self"}
