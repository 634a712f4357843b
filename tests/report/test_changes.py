"""Suggested changes apply to trainings with one fault, training still runs, and nothing else changes."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.report.changes.all_changes import CHANGES
from lightning_modelprof.report.model import CHANGES_NUMERICS, SAME_RESULTS, Status
from lightning_modelprof.report.rules.all_rules import RULES
from tests.support.changed_trainings import ANYTHING, NET, REFUSED, TRAININGS, Training, rebuilt

pytestmark = pytest.mark.slow


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "my repository"
    folder.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


WAITS = ("input_bound", "worker_startup")
"""Findings about time spent on data; the others need none."""


def train(file, name, callback, folder, *, waits=False):
    """Run a training file as a user's module; returns the trained weights."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # workers import it
    try:
        spec.loader.exec_module(module)
        if not waits:
            module.time = SimpleNamespace(sleep=lambda seconds: None)
        return module.main(callback, str(folder)).state_dict()
    finally:
        torch.autograd.set_detect_anomaly(False)


def finding_of(training, repository, tmp_path):
    """A training's finding, its run (measured or doctored) and its weights."""
    file = repository / "train.py"
    file.write_bytes(training.text.encode())
    callback = ModelProfCallback(
        active=0,
        skip_first=1,
        report={"terminal": False, "files": False},
        rules={training.finding: training.rules} if training.rules else None,
        **training.arguments,
    )
    name = f"user_{abs(hash(training.name))}"
    weights = train(file, name, callback, tmp_path, waits=training.finding in WAITS)
    run = callback.run
    if training.doctor is not None:
        run = training.doctor(run, training.text)
    found = [one for one in rebuilt(run).findings if one.kind == training.finding]
    assert found
    return found[0], run, weights


@pytest.mark.parametrize("training", TRAININGS, ids=lambda one: one.name)
def test_change_applies_and_training_runs(training, repository, tmp_path):
    finding, _, before = finding_of(training, repository, tmp_path)
    assert finding.status is Status.FOUND, finding.summary
    change = finding.change
    assert change is not None, finding.action
    assert change.diff, (change.text, finding.locations)
    assert change.label == training.label
    assert 1 <= len(change.changed_lines) <= 6
    added = [line for line in change.changed_lines if line.startswith("+")]
    for part in training.added:
        assert any(part in line for line in added), added

    file, old = repository / "train.py", training.text.encode()
    subprocess.run(["git", "apply"], input=change.diff.encode(), cwd=repository, check=True)
    new = file.read_bytes()
    ast.parse(new)
    kept = [line for line in old.split(b"\n") if f"-{line.decode()}".rstrip("\r") not in change.changed_lines]
    left = [line for line in new.split(b"\n") if f"+{line.decode()}".rstrip("\r") not in change.changed_lines]
    assert kept == left
    assert (b"\r\n" in old) == (b"\r\n" in new)

    after = train(file, f"changed_{abs(hash(training.name))}", Callback(), tmp_path)
    if change.label == SAME_RESULTS:
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_at_least_20_trainings_are_covered():
    assert len(TRAININGS) >= 20
    assert len({one.name for one in TRAININGS}) == len(TRAININGS)


def test_every_change_belongs_to_a_rule():
    assert set(CHANGES) <= {rule.kind for rule in RULES}


@pytest.mark.parametrize("training", REFUSED, ids=lambda one: one.name)
def test_change_without_single_statement_is_line_to_write(training, repository, tmp_path):
    finding, _, _ = finding_of(training, repository, tmp_path)
    assert finding.status is Status.FOUND, finding.summary
    assert finding.change is not None
    assert (finding.change.diff, finding.change.file, finding.change.changed_lines) == ("", None, ())
    assert "=" in finding.change.text, finding.change.text
    assert finding.change.label == training.label


def test_library_code_gets_no_diff(repository, tmp_path):
    installed = repository / "site-packages"
    installed.mkdir()
    for name in ("loader in the call of fit", "anomaly detection of the Trainer", "a bias before BatchNorm"):
        [training] = [one for one in TRAININGS if one.name == name]
        finding, run, _ = finding_of(training, installed, tmp_path)
        assert finding.status is Status.FOUND, finding.summary
        assert finding.change is None or not finding.change.diff
        assert run.ranks[0].setup.statements == ()


CLI = """
from lightning.pytorch.cli import LightningCLI


class Data(LightningDataModule):
    def __init__(self, num_workers: int = 0, size: int = 4):
        super().__init__()
        self.num_workers, self.size = num_workers, size

    def train_dataloader(self):
        return DataLoader(Images(), batch_size=self.size, num_workers=self.num_workers)


def main(callback, folder):
    defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1,
                "enable_progress_bar": False, "enable_model_summary": False, "callbacks": [callback]}
    cli = LightningCLI(Net, Data, args=["fit", "--trainer.detect_anomaly=true"], trainer_defaults=defaults,
                       save_config_callback=None)
    return cli.model
"""


@pytest.mark.parametrize(
    ("finding", "key", "label"),
    [
        ("anomaly_detection", "trainer.detect_anomaly: false", SAME_RESULTS),
        ("input_bound", "data.num_workers: ", CHANGES_NUMERICS),
        ("optimizer_not_fused", "", CHANGES_NUMERICS),
    ],
)
def test_lightning_cli_gets_its_yaml_key(finding, key, label, repository, tmp_path):
    rules = ANYTHING | ({"least_tensors": 1} if finding == "optimizer_not_fused" else {})
    training = Training(finding, finding, NET + CLI, rules=rules)
    found, run, _ = finding_of(training, repository, tmp_path)
    assert run.ranks[0].setup.configured_by == "LightningCLI"
    assert found.status is Status.FOUND, found.summary
    assert found.change.label == label
    assert found.change.is_yaml == bool(key)
    assert found.change.text.startswith(key)
    assert bool(found.change.diff) == (not key)


def test_edited_file_gets_no_diff(repository, tmp_path):
    [training] = [one for one in TRAININGS if one.name == "profiler by name"]
    finding, run, _ = finding_of(training, repository, tmp_path)
    assert finding.change.diff
    file = repository / "train.py"
    old = file.read_bytes()
    file.write_bytes(old + b"\n")
    [edited] = [one for one in rebuilt(run).findings if one.kind == training.finding]
    assert edited.change == replace(finding.change, diff="", file=None, line=None)
    assert edited.change.text == "Trainer(..., profiler=None)"
    file.write_bytes(old)
    [again] = [one for one in rebuilt(run).findings if one.kind == training.finding]
    assert again == finding
    file.unlink()
    [gone] = [one for one in rebuilt(run).findings if one.kind == training.finding]
    assert gone == edited


def test_module_that_other_code_may_train_is_not_frozen(repository, tmp_path):
    """The module is copied, unfrozen later or stepped by another optimizer."""
    [training] = [one for one in TRAININGS if one.finding == "unused_gradients"]
    made = "        self.teacher.eval()\n"
    for line in (
        "self.copies = [__import__('copy').deepcopy(self.teacher)]",
        "self.other = torch.optim.SGD(self.teacher.parameters(), lr=0.1)",
        "self.unfreeze_later = lambda: self.teacher.requires_grad_(True)",
    ):
        assert made in training.source
        text = training.source.replace(made, f"{made}        {line}\n")
        finding, run, _ = finding_of(replace(training, source=text), repository, tmp_path)
        assert finding.status is Status.FOUND
        assert finding.change is None, line
        assert not [one for one in run.ranks[0].setup.statements if one.about == "untrained"]


def test_only_two_labels_are_used():
    assert {one.label for one in (*TRAININGS, *REFUSED)} == {SAME_RESULTS, CHANGES_NUMERICS}
