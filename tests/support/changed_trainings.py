"""Trainings with one fault in one statement, each a user's file, and their fixes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.model import CHANGES_NUMERICS, SAME_RESULTS
from lightning_modelprof.run.model_cost import ModelCost
from lightning_modelprof.run.records import Run
from lightning_modelprof.run.setup import DeviceSetup
from lightning_modelprof.run.sites import HOST_TO_DEVICE, SYNCHRONISATION, SourceSite, StepSites
from lightning_modelprof.run.stacks import LogCall, SampledStack, StackFrame, StackSamples

ANYTHING = {"warning": 0, "critical": 0, "floor_ns": 0}
CUDA = DeviceSetup(capability=(9, 0), total_bytes=100, reserved_bytes=50)

PRELUDE = """\
# A training of a user's: é, 日本.
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler


class Images(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((3, 4, 4), index / 120), index % 2

"""
NET = """
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layer(x.flatten(1)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

"""
QUIET = (
    'accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,'
    " enable_model_summary=False, callbacks=[callback]"
)
MAIN = f"""
def main(callback, folder):
    seed_everything(1, verbose=False)
    model = Net()
    trainer = Trainer(max_epochs=1, {QUIET})
    trainer.fit(model, DataLoader(Images(), batch_size=4))
    return model
"""


def net(step="", init="", optimizer="", more=""):
    """A module with the given parts, otherwise as in ``NET``."""
    text = NET
    for old, new in (
        ("        self.layer = nn.Linear(48, 2)\n", init),
        ('        self.log("loss", loss)\n', step),
        ("        return torch.optim.Adam(self.parameters(), lr=1e-3)\n", optimizer),
    ):
        text = text.replace(old, textwrap.indent(textwrap.dedent(new), 8 * " ") if new else old)
    return text + more


def main(fit, trainer="max_epochs=1"):
    """A training function."""
    return (
        "\n\ndef main(callback, folder):\n    seed_everything(1, verbose=False)\n    model = Net()\n"
        + textwrap.indent(textwrap.dedent(fit).replace("TRAINER", f"{trainer}, {QUIET}"), 4 * " ")
        + "    return model\n"
    )


@dataclass(frozen=True)
class Training:
    """A training, its expected finding, and the label of its change.

    ``doctor`` gives the run the device that a finding needs, with places from the source's lines.
    """

    name: str
    finding: str
    source: str
    added: tuple[str, ...] = ()
    label: str = SAME_RESULTS
    doctor: Callable[[Run, str], Run] | None = None
    rules: dict[str, Any] = field(default_factory=lambda: ANYTHING)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self):
        """Content of the file."""
        return PRELUDE + self.source


def with_cuda(run, source):
    """The run as if on a GPU."""
    setup = replace(run.ranks[0].setup, cuda=CUDA)
    return replace(
        run,
        info=replace(run.info, device_type="cuda"),
        ranks=(replace(run.ranks[0], setup=setup), *run.ranks[1:]),
    )


def with_pinned(run, source):
    """On a GPU, with batches in pinned memory."""
    run = with_site(HOST_TO_DEVICE, "# copies")(run, source)
    loaders = tuple(replace(one, pin_memory=True) for one in run.ranks[0].setup.loaders)
    setup = replace(run.ranks[0].setup, loaders=loaders)
    return replace(run, ranks=(replace(run.ranks[0], setup=setup),))


def with_site(kind, mark):
    """On a GPU, where the line with a mark blocks the CPU."""

    def doctored(run, source):
        run = with_cuda(run, source)
        statement = next(one for one in run.ranks[0].setup.statements)
        line = next(at for at, text in enumerate(source.split("\n"), 1) if mark in text)
        site = SourceSite(
            kind=kind,
            file=statement.file,
            line=line,
            function="training_step",
            function_line=1,
            callers=(),
            module="",
            phase="forward",
            operator="aten::_local_scalar_dense" if kind == SYNCHRONISATION else "aten::copy_",
            device="cuda",
            calls=1,
            num_bytes=4,
            is_blocking=True,
            is_pinned=False,
            is_non_blocking=False,
        )
        cost = run.ranks[0].model_cost or ModelCost(modules=())
        cost = replace(cost, sites=StepSites(step=3, device="cuda", sites=(site,), lines=()))
        return replace(run, ranks=(replace(run.ranks[0], model_cost=cost),))

    return doctored


def with_samples(run, source):
    """As if half of the time were in the logging line: 50 of 100 samples."""
    file = run.ranks[0].setup.statements[0].file
    line = next(at for at, text in enumerate(source.split("\n"), 1) if "self.log(" in text)
    frames = (
        StackFrame(
            file=file,
            line=line,
            function="Net.training_step",
            function_line=line - 3,
            python_module="train",
            is_users=True,
        ),
        StackFrame(
            file="module.py",
            line=9,
            function="LightningModule.log",
            function_line=1,
            python_module="lightning.pytorch.core.module",
            is_users=False,
        ),
    )
    stacks = tuple(
        SampledStack(phase="forward", frames=found, samples=50, time_ns=10**9) for found in ((0, 1), ())
    )
    call = LogCall(file=file, line=line, names=("loss",), options=("sync_dist",))
    samples = StackSamples(frames=frames, stacks=stacks, samples=100, log_calls=(call,))
    return replace(run, ranks=(replace(run.ranks[0], stacks=samples),))


def rebuilt(run):
    """The report of a run without traces."""
    return build_report(Facts(run))


LOADER_ADDED = ("num_workers=", "persistent_workers=True")
CONV = """
x, y = batch
"""
FROZEN = """
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 2))
        self.layer = nn.Linear(48, 2)
        self.teacher.eval()

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.flatten(1)
        return nn.functional.mse_loss(self.layer(x), self.teacher(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=1e-2)

"""
CNN = """
class Net(LightningModule):
    def __init__(self):
        super().__init__()
{layers}
        self.head = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.features(x).mean((2, 3))), y)

    def features(self, x):
        return {features}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)

"""

TRAININGS = [
    Training("loader in the call of fit", "input_bound", NET + MAIN, LOADER_ADDED, CHANGES_NUMERICS),
    Training(
        "loader before fit, over several lines",
        "input_bound",
        NET
        + main(
            """
            loader = DataLoader(
                Images(),
                batch_size=4,  # as in the paper (table 2)
                shuffle=True,
            )
            trainer = Trainer(TRAINER)
            trainer.fit(model, train_dataloaders=loader)
            """
        ),
        LOADER_ADDED,
        CHANGES_NUMERICS,
    ),
    Training(
        "loader of a function, no comma at the end, CRLF",
        "input_bound",
        (
            NET
            + "\ndef loader(size):\n    return DataLoader(\n        Images(),\n"
            + "        batch_size=size  # rows\n    )\n"
            + main("trainer = Trainer(TRAINER)\ntrainer.fit(model, loader(4))\n")
        ).replace("\n", "\r\n"),
        LOADER_ADDED,
        CHANGES_NUMERICS,
    ),
    Training(
        "loader in train_dataloader, num_workers=0",
        "input_bound",
        net(more="    def train_dataloader(self):\n        return DataLoader(Images(), 4, num_workers=0)\n")
        + main("trainer = Trainer(TRAINER)\ntrainer.fit(model)\n"),
        LOADER_ADDED,
        CHANGES_NUMERICS,
    ),
    Training(
        "loader of a DataModule, indented by tabs",
        "input_bound",
        NET + "\nclass Data(LightningDataModule):\n\tdef train_dataloader(self):\n\t\treturn DataLoader(\n"
        "\t\t\tImages(), batch_size=4,\n\t\t)\n\n\tdef val_dataloader(self):\n"
        "\t\treturn DataLoader(Images(), batch_size=4)\n"
        + main("trainer = Trainer(TRAINER)\ntrainer.fit(model, datamodule=Data())\n"),
        LOADER_ADDED,
        CHANGES_NUMERICS,
    ),
    Training(
        "loader that setup makes",
        "input_bound",
        NET + "\nclass Data(LightningDataModule):\n    def setup(self, stage):\n"
        "        self.train = DataLoader(Images(), batch_size=4)\n\n"
        "    def train_dataloader(self):\n        return self.train\n"
        + main("trainer = Trainer(TRAINER)\ntrainer.fit(model, datamodule=Data())\n"),
        LOADER_ADDED,
        CHANGES_NUMERICS,
    ),
    Training(
        "workers that restart",
        "worker_startup",
        NET
        + main(
            "loader = DataLoader(Images(), batch_size=4, num_workers=1, persistent_workers=False)\n"
            "trainer = Trainer(TRAINER)\ntrainer.fit(model, loader)\n",
            trainer="max_epochs=3",
        ),
        ("persistent_workers=True",),
        CHANGES_NUMERICS,
    ),
    Training(
        "memory that isn't pinned",
        "host_to_device_copy",
        NET + MAIN,
        ("pin_memory=True",),
        doctor=lambda run, source: _without_line(with_site(HOST_TO_DEVICE, "x, y = batch")(run, source)),
    ),
    Training(
        "a copy that blocks",
        "host_to_device_copy",
        net(step="x = x.to(self.device)  # copies\nself.log('loss', loss)\n") + MAIN,
        ("non_blocking=True",),
        doctor=with_pinned,
    ),
    Training(
        "a logger at every step",
        "slow_logger",
        NET
        + MAIN.replace("logger=False", "logger=CSVLogger(folder)").replace(
            "max_epochs=1", "max_epochs=1, log_every_n_steps=1"
        ),
        ("log_every_n_steps=50",),
    ),
    Training(
        "precision",
        "amp_off",
        NET + MAIN.replace("max_epochs=1", "precision=32, max_epochs=1"),
        ("precision='bf16-mixed'",),
        CHANGES_NUMERICS,
        doctor=with_cuda,
        rules={},
    ),
    Training(
        "anomaly detection of the Trainer",
        "anomaly_detection",
        NET + MAIN.replace("max_epochs=1", "detect_anomaly=True, max_epochs=1"),
        ("detect_anomaly=False",),
    ),
    Training(
        "anomaly detection of torch",
        "anomaly_detection",
        NET + "\nclass Search(Callback):\n    def on_train_start(self, trainer, pl_module):\n"
        "        torch.autograd.set_detect_anomaly(True)\n"
        + MAIN.replace("[callback]", "[Search(), callback]"),
        ("set_detect_anomaly(False)",),
    ),
    Training(
        "profiler by name",
        "profiler_left_on",
        NET + MAIN.replace("max_epochs=1", 'profiler="advanced", max_epochs=1'),
        ("profiler=None",),
        rules={},
    ),
    Training(
        "profiler by its class",
        "profiler_left_on",
        NET + MAIN.replace("max_epochs=1", "max_epochs=1, profiler=AdvancedProfiler()"),
        ("profiler=None",),
        rules={},
    ),
    Training(
        "optimizer that is returned",
        "optimizer_not_fused",
        NET + MAIN,
        ("fused=True",),
        CHANGES_NUMERICS,
        rules=ANYTHING | {"least_tensors": 1},
    ),
    Training(
        "optimizer with a scheduler",
        "optimizer_not_fused",
        net(
            optimizer="""
            optimizer = torch.optim.AdamW(
                self.parameters(),
                lr=1e-3,
            )
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
            """
        )
        + MAIN,
        ("fused=True",),
        CHANGES_NUMERICS,
        rules=ANYTHING | {"least_tensors": 1},
    ),
    Training(
        "a value that ranks agree on in each step",
        "slow_logging_calls",
        net(step='self.log("loss", loss, sync_dist=True)\n') + MAIN,
        ('self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)',),
        doctor=with_samples,
    ),
    Training(
        "a value that is logged",
        "host_device_sync",
        net(step='self.log("loss", loss.item(), prog_bar=True)\n') + MAIN,
        ('self.log("loss", loss, prog_bar=True)',),
        doctor=with_site(SYNCHRONISATION, ".item()"),
    ),
    Training(
        "values that are logged together",
        "host_device_sync",
        net(step='self.log_dict({"loss": loss.item(), "twice": (2 * loss).detach().item()})\n') + MAIN,
        ('{"loss": loss, "twice": (2 * loss).detach()}',),
        doctor=with_site(SYNCHRONISATION, ".item()"),
    ),
    Training(
        "a bias before BatchNorm",
        "conv_bias_before_batchnorm",
        CNN.format(
            layers="        self.conv1 = nn.Conv2d(3, 8, 3)\n        self.bn1 = nn.BatchNorm2d(8)",
            features="self.bn1(self.conv1(x))",
        )
        + MAIN,
        ("nn.Conv2d(3, 8, 3, bias=False)",),
        CHANGES_NUMERICS,
        rules={},
    ),
    Training(
        "two biases in a Sequential",
        "conv_bias_before_batchnorm",
        CNN.format(
            layers="        self.body = nn.Sequential(\n            nn.Conv2d(3, 8, 3, padding=1),\n"
            "            nn.BatchNorm2d(8),\n            nn.ReLU(),\n"
            "            nn.Conv2d(8, 8, 3, bias=True),\n            nn.BatchNorm2d(8),\n        )",
            features="self.body(x)",
        )
        + MAIN,
        ("nn.Conv2d(3, 8, 3, padding=1, bias=False)", "nn.Conv2d(8, 8, 3, bias=False)"),
        CHANGES_NUMERICS,
        rules={},
    ),
    Training(
        "a teacher that nothing trains",
        "unused_gradients",
        FROZEN + MAIN,
        ("self.teacher.requires_grad_(False)",),
        arguments={"flops": True},
    ),
]


def _without_line(run):
    """As for Lightning's own copy, which no user line makes."""
    cost = run.ranks[0].model_cost
    sites = tuple(replace(one, file=None, line=None, phase="batch_start") for one in cost.sites.sites)
    cost = replace(cost, sites=replace(cost.sites, sites=sites))
    return replace(run, ranks=(replace(run.ranks[0], model_cost=cost),))


def several(text, *parts):
    """Replace several parts of a text."""
    for old, new in parts:
        assert old in text
        text = text.replace(old, new)
    return text


REFUSED = [
    Training(
        "layers in a loop",
        "conv_bias_before_batchnorm",
        CNN.format(
            layers="        layers = []\n        for width in (3, 8):\n"
            "            layers += [nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8)]\n"
            "        self.body = nn.Sequential(*layers)",
            features="self.body(x)",
        )
        + MAIN,
        label=CHANGES_NUMERICS,
        rules={},
    ),
    Training(
        "layers in two statements",
        "conv_bias_before_batchnorm",
        CNN.format(
            layers="        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)\n"
            "        self.bn1 = nn.BatchNorm2d(8)\n"
            "        self.conv2 = nn.Conv2d(8, 8, 3)\n        self.bn2 = nn.BatchNorm2d(8)",
            features="self.bn2(self.conv2(self.bn1(self.conv1(x))))",
        )
        + MAIN,
        label=CHANGES_NUMERICS,
        rules={},
    ),
    Training(
        "a bias that is initialized",
        "conv_bias_before_batchnorm",
        CNN.format(
            layers="        self.conv1 = nn.Conv2d(3, 8, 3)\n        self.bn1 = nn.BatchNorm2d(8)\n"
            "        nn.init.zeros_(self.conv1.bias)",
            features="self.bn1(self.conv1(x))",
        )
        + MAIN,
        label=CHANGES_NUMERICS,
        rules={},
    ),
    Training(
        "a value that a callback may watch",
        "slow_logging_calls",
        net(step='self.log("loss", loss, sync_dist=True)\nmonitor = "loss_epoch"\n') + MAIN,
        doctor=with_samples,
    ),
    Training(
        "arguments in a dict",
        "input_bound",
        NET + several(MAIN, ("Images(), batch_size=4)", 'Images(), **{"batch_size": 4})')),
        label=CHANGES_NUMERICS,
    ),
    Training(
        "a number that is computed",
        "input_bound",
        NET + several(MAIN, ("batch_size=4)", "batch_size=4, num_workers=len(folder) * 0)")),
        label=CHANGES_NUMERICS,
    ),
    Training(
        "one of two loaders",
        "input_bound",
        NET
        + main(
            "if folder:\n    loader = DataLoader(Images(), batch_size=4)\n"
            "else:\n    loader = DataLoader(Images(), batch_size=4, shuffle=True)\n"
            "trainer = Trainer(TRAINER)\ntrainer.fit(model, loader)\n"
        ),
        label=CHANGES_NUMERICS,
    ),
    Training(
        "arguments of the Trainer in a dict",
        "anomaly_detection",
        NET + MAIN.replace("max_epochs=1", '**{"detect_anomaly": True}, max_epochs=1'),
    ),
]
"""Trainings without exactly one faulty statement, which get the line to write but no diff."""
