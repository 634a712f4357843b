"""Calls that only samples tell apart: a user's own optimizer, and autograd's anomaly detection."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.callbacks import anomaly_detection
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.optimizer import slow_optimizer
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from tests.support.bench import make_trainer
from tests.support.diagnosed import MS, SETUP, analysis_of, only, steps_of


def frame(function, module, *, line=7, is_users=False):
    return StackFrame(
        file=f"{module}.py",
        line=line,
        function=function,
        function_line=5,
        python_module=module,
        is_users=is_users,
    )


WRAPPER = frame("profile_hook_step.<locals>.wrapper", "torch.optim.optimizer")
ADAM = frame("Adam.step", "torch.optim.adam")
OWN = frame("Rowwise.step", "train", is_users=True)
ROW = frame("update_row", "train", line=40, is_users=True)
HOOK = frame("Net.optimizer_step", "train", line=60, is_users=True)
OTHER = frame("Net.forward", "train", line=80, is_users=True)
STACKS = frame("format_stack", "traceback")


def samples_of(*stacks):
    """(phase, frames outermost first, samples)."""
    frames = tuple(dict.fromkeys(one for _, path, _ in stacks for one in path))
    return StackSamples(
        frames=frames,
        stacks=tuple(
            SampledStack(
                phase=phase, frames=tuple(frames.index(one) for one in path), samples=n, time_ns=n * MS
            )
            for phase, path, n in stacks
        ),
        samples=sum(n for _, _, n in stacks),
    )


def optimizers(*stacks, **kwargs):
    steps = steps_of(forward=12, optimizer=8)
    return only(judge(slow_optimizer, analysis_of(steps, stacks=samples_of(*stacks), **kwargs)))


def test_slow_user_optimizer_is_found():
    """40 of 100 samples are in the user's rows and 10 in torch's part, so 8 of 20 ms per step."""
    finding = optimizers(
        ("optimizer", (WRAPPER, OWN, ROW), 40),
        ("optimizer", (WRAPPER, OWN, WRAPPER, ADAM), 10),
        ("forward", (OTHER,), 50),
    )
    assert (finding.severity, finding.saving_ns_per_step) == (Severity.CRITICAL, 8 * MS)
    assert finding.summary == f"Rowwise.step takes {COST} in the optimizer step."
    [place] = finding.locations
    assert (place.file, place.line, place.inner.line) == ("train.py", 7, 40)


@pytest.mark.parametrize(
    "path",
    [
        (WRAPPER, ADAM),
        (HOOK, WRAPPER, ADAM),  # a user's hook that only calls torch's optimizer
        (frame("Adam.step", "bitsandbytes.optim"),),
    ],
)
def test_torch_and_library_optimizers_are_clean(path):
    finding = optimizers(("optimizer", path, 50), ("forward", (OTHER,), 50))
    assert finding.status is Status.CLEAN


def test_work_in_optimizer_step_hook_is_found():
    finding = optimizers(("optimizer", (HOOK, ROW), 50), ("optimizer", (HOOK, WRAPPER, ADAM), 50))
    assert finding.saving_ns_per_step == 10 * MS


def test_few_samples_give_no_finding():
    stacks = (("optimizer", (WRAPPER, OWN), 9), ("forward", (OTHER,), 1))
    unsure = optimizers(*stacks)
    assert unsure.status is Status.NOT_EVALUATED
    assert unsure.summary.endswith("per step, but 9 stack samples are too few to tell")
    assert optimizers(("optimizer", (WRAPPER, OWN), 3), ("forward", (OTHER,), 97)).status is Status.CLEAN
    assert only(judge(slow_optimizer, analysis_of(steps_of(forward=1)))).status is Status.NOT_EVALUATED


@pytest.mark.parametrize(
    ("is_on", "samples", "status", "severity"),
    [
        (True, 30, Status.FOUND, Severity.CRITICAL),
        (True, 5, Status.FOUND, Severity.INFO),
        (False, 30, Status.CLEAN, None),
        (None, 30, Status.NOT_EVALUATED, None),
    ],
)
def test_anomaly_detection_by_setting_and_samples(is_on, samples, status, severity):
    stacks = samples_of(("forward", (OTHER, STACKS), samples), ("backward", (), 100 - samples))
    setup = replace(SETUP, detects_anomaly=is_on)
    finding = only(judge(anomaly_detection, analysis_of(steps_of(forward=20), stacks=stacks, setup=setup)))
    assert (finding.status, finding.severity, finding.locations) == (status, severity, ())
    assert finding.saving_ns_per_step == (6 * MS if samples == 30 and is_on else None)
    is_timed = finding.saving_ns_per_step is not None
    assert finding.action.endswith("Saves at least 6 ms per step.") is is_timed
    assert ("minimum time per step" in [one.label for one in finding.evidence]) is is_timed


class Deep(LightningModule):
    """Many small operators, because anomaly detection records each with its stack."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch):
        out = self.layer(torch.ones(4, 2))
        for _ in range(100):
            out = out * 1.0
        return out.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("is_on", [True, False])
def test_anomaly_detection_is_found_in_real_fit(tmp_path, is_on):
    callback = ModelProfCallback(
        active=0, dirpath=tmp_path / "run", flops=False, report={"terminal": False, "tensorboard": False}
    )
    trainer = make_trainer(
        callbacks=[callback], default_root_dir=tmp_path, max_steps=60, max_epochs=-1, detect_anomaly=is_on
    )
    trainer.fit(Deep(), [0] * 100)
    [finding] = [one for one in callback.report.findings if one.kind == "anomaly_detection"]
    assert finding.status is (Status.FOUND if is_on else Status.CLEAN)
    assert callback.run.ranks[0].setup.detects_anomaly is is_on


@pytest.mark.slow
def test_interrupted_fit_knows_anomaly_detection(tmp_path):
    """Lightning switches it off before our exception hook runs."""

    class Interrupted(Deep):
        def training_step(self, batch, batch_idx):
            if batch_idx == 20:
                raise KeyboardInterrupt
            return super().training_step(batch)

    callback = ModelProfCallback(
        active=0,
        dirpath=tmp_path / "run",
        flops=False,
        report={"terminal": False, "tensorboard": False},
        inspect={"sampling": False},
    )
    trainer = make_trainer(
        callbacks=[callback], default_root_dir=tmp_path, max_steps=60, max_epochs=-1, detect_anomaly=True
    )
    with pytest.raises((KeyboardInterrupt, SystemExit)):  # depends on Lightning's version
        trainer.fit(Interrupted(), [0] * 100)
    assert callback.run.ranks[0].setup.detects_anomaly is True
