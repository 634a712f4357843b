"""Tests that the command shown in the dashboard adds the windows of all ranks."""

from __future__ import annotations

import html
import json
import re
import shlex
import sys

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext

from lightning_modelprof.cli.main import main
from lightning_modelprof.config.options import ReportOptions
from lightning_modelprof.engine.outputs import Outputs
from lightning_modelprof.engine.run_folder import RunFolder
from lightning_modelprof.tensorboard_plugin.selection import Selection
from lightning_modelprof.tensorboard_plugin.stored_profiles import StoredProfiles
from lightning_modelprof.tensorboard_plugin.views import VIEWS, render
from tests.support.fits import run_script

JOB = """
import json, sys
import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset
from lightning_modelprof import ModelProfCallback

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="gloo", start_method="fork"),
    max_steps=12,
    logger=TensorBoardLogger("my logs", name="net"),
    callbacks=[ModelProfCallback(skip_first=2, wait=2, active=3, bounds={"ranks": json.loads(sys.argv[1])})],
    enable_progress_bar=False,
    enable_checkpointing=False,
    enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(TensorDataset(torch.zeros(64, 4)), 2))
"""


class Stored:
    """Profiles in a log directory, as read by the dashboard."""

    def __init__(self, logdir):
        multiplexer = EventMultiplexer()
        multiplexer.AddRunsFromDirectory(str(logdir)).Reload()
        self._profiles = StoredProfiles(MultiplexerDataProvider(multiplexer, str(logdir)))

    def runs(self):
        return list(self._profiles.list(RequestContext(), ""))

    def window(self, run):
        return self._profiles.read(RequestContext(), "", run, "modelprof/window_0")


def distributed(window):
    view = next(one for one in VIEWS if one.key == "distributed")
    [document] = render(view, Selection(window=window, window_tag="modelprof/window_0"))
    return document


def command_in(document):
    found = re.search("<pre><code>(.*)</code></pre>", document["above"])
    return None if found is None else shlex.split(html.unescape(found[1]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="gloo on the loopback interface is tried on Linux")
def test_shown_command_adds_windows_of_all_ranks(tmp_path, monkeypatch, capsys):
    result = run_script(JOB, json.dumps("all"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    monkeypatch.chdir(tmp_path)
    stored = Stored("my logs")
    assert stored.runs() == ["net/version_0"]
    own = stored.window("net/version_0")
    command = command_in(distributed(own))
    assert command == [
        *("lightning-modelprof", "tensorboard", "my logs/net/version_0/modelprof", "--logdir", "my logs")
    ]
    assert main(command[1:]) in (0, None)
    stored = Stored("my logs")
    (added,) = set(stored.runs()) - {"net/version_0"}
    both = stored.window(added)
    assert {one.rank for one in both.report.summary.traces} == {0, 1}
    assert command_in(distributed(both)) is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="gloo on the loopback interface is tried on Linux")
def test_no_command_if_only_one_rank_records(tmp_path):
    result = run_script(JOB, json.dumps([0]), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert command_in(distributed(Stored(tmp_path / "my logs").window("net/version_0"))) is None


def test_no_command_without_files_or_tensorboard(tmp_path):
    options = ReportOptions(tensorboard=True)
    logger = TensorBoardLogger(tmp_path)

    def command(directory, loggers):
        outputs = Outputs(RunFolder(path=directory, created="now"), loggers, options, pytest.fail)
        return outputs.all_ranks_command

    assert command(tmp_path / "run", [logger]).endswith(f"tensorboard {tmp_path}/run --logdir {tmp_path}")
    assert command(None, [logger]) == command(tmp_path / "run", []) == ""
