"""Real CPU fits for tests: tiny models, quick trainers, and the fits' results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.config.options import FIELDS, GROUP_OF, GROUPS
from lightning_modelprof.inspect.flops.count import added_up
from lightning_modelprof.lightning.trainer_loop import TrainerLoop
from lightning_modelprof.run.loops import FIT
from lightning_modelprof.run.phases import RANGE_PREFIX, STEP_RANGE_PREFIX
from lightning_modelprof.trace.model import Category
from lightning_modelprof.trace.reader import read_trace
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]

# Seconds without a batch until torch checks its workers; 5 by default.
_MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)

REPORT_FILES = {"report.html", "report.json", "report.txt", "run.json"}


class Numbers(Dataset):
    """Deterministic inputs and targets."""

    def __init__(self, size=64, width=8):
        generator = torch.Generator().manual_seed(7)
        self.data = torch.rand(size, width, generator=generator)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], self.data[index].sum()


class Net(LightningModule):
    """A small regression; ``at_batch`` is called with the batch number in ``training_step``."""

    def __init__(self, at_batch=None, dropout=0.0):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)
        )
        self.at_batch = at_batch

    def loss(self, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs).squeeze(-1), targets)

    def training_step(self, batch, batch_idx):
        if self.at_batch is not None:
            self.at_batch(batch_idx)
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Manual(Net):
    """The same with manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Fetching(Net):
    """The same with its own fetches."""

    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return self.loss(batch)


def loader(size=64, batch_size=2, **kwargs):
    return DataLoader(Numbers(size), batch_size=batch_size, **kwargs)


def loop_of_trainer(trainer, kind=FIT):
    """A loop of an incomplete trainer."""
    loop = TrainerLoop.__new__(TrainerLoop)
    loop.trainer, loop.kind = trainer, kind
    return loop


def make_trainer(folder, *callbacks, **kwargs):
    """A quiet trainer; ``kwargs`` override its settings."""
    quiet = {
        "accelerator": "cpu",
        "callbacks": list(callbacks),
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "default_root_dir": folder,
        "log_every_n_steps": 5,
        "max_epochs": 1,
    }
    return Trainer(**(quiet | kwargs))


def grouped(values):
    """Move the values of groups into their groups' arguments."""
    arguments = {}
    for name, value in values.items():
        group = GROUP_OF.get(name, name if name in GROUPS and isinstance(value, dict) else None)
        if group is None:
            arguments[name] = value
        else:
            arguments.setdefault(group, {}).update(value if name == group else {name: value})
    return arguments


def flat(config):
    """All values of a configuration by name, including grouped ones; the inverse of ``grouped``."""
    values = {name: getattr(config, name) for name in FIELDS if name not in GROUPS}
    return values | {name: getattr(getattr(config, group), name) for name, group in GROUP_OF.items()}


def make_callback(folder, **kwargs):
    """A callback that writes to ``folder/modelprof``, without inspection and samples and with early windows.

    Values of groups are passed like arguments.
    """
    defaults = {"skip_first": 0, "dirpath": folder / "modelprof"}
    defaults |= dict.fromkeys(("terminal", "flops", "sampling"), False)
    return ModelProfCallback(**grouped(defaults | kwargs))


def run_fit(folder, *, module=None, data=None, val=None, others=(), trainer=None, **kwargs):
    """Fit with the callback and return it; ``kwargs`` are its arguments."""
    callback = make_callback(folder, **kwargs)
    fit_quietly(
        make_trainer(folder, callback, *others, **(trainer or {})), module or Net(), data or loader(), val
    )
    return callback


def fit_quietly(trainer, module, data, val=None, **kwargs):
    """Silence Lightning's own advice, but not our warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!ModelProfCallback)")
        trainer.fit(module, data, val, **kwargs)


def table_of(report, table_id):
    """The only table with this id."""
    (table,) = (table for table in report.tables if table.id == table_id)
    return table


@contextmanager
def our_warnings():
    """Collect the messages of this package's warnings."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if str(w.message).startswith("ModelProfCallback")]


def steps_of(callback):
    return callback.run.ranks[0].steps


def flops_of(callback):
    """FLOPs of the counted step by phase."""
    return added_up(callback.run.ranks[0].model_cost.count).flops


def windows_of(callback):
    return callback.run.ranks[0].windows


def ranges(trace, prefix):
    """(rest of the name, start, end) of the CPU ranges that start with ``prefix``, in order."""
    names = set(trace.name_ids(prefix).tolist())
    return [
        (trace.names[trace.name[i]][len(prefix) :], int(trace.begin_ns[i]), int(trace.end_ns[i]))
        for i in range(len(trace))
        if trace.category[i] == Category.USER_ANNOTATION and int(trace.name[i]) in names
    ]


def step_ranges(trace):
    return ranges(trace, STEP_RANGE_PREFIX)


def phase_ranges(trace):
    return ranges(trace, RANGE_PREFIX)


def trace_of(folder, window):
    return read_trace(folder / "modelprof" / window.trace_file)


def report_of(folder):
    return json.loads((folder / "modelprof" / "report.json").read_text())


def is_profiling():
    return torch.autograd._profiler_enabled()


def run_script(source, *arguments, cwd, timeout=120, env=None, fresh=False, has_ours=True):
    """Run a program in its own process, where a crash or a kill is harmless.

    torch, Lightning and this package are already imported, unless ``fresh`` or without ``has_ours``.
    """
    source = textwrap.dedent(source)
    if not fresh:
        return warm.start(source, *arguments, cwd=cwd, env=env, has_ours=has_ours).wait(timeout)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
