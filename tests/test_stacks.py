"""The callback in other people's stacks: their loggers, configuration, data, compilers, sharding and models.

What is optional is skipped where it is not installed; the extra ``test`` installs it all.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import CombinedLoader
from pytorch_lightning.cli import LightningCLI
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lightning_modelprof import ConfigError, ModelProfCallback
from lightning_modelprof.flops.count import added_up
from tests.fits import (
    ROOT,
    Net,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    report_of,
    steps_of,
    windows_of,
)
from tests.support import MIXES_PACKAGES

pytestmark = pytest.mark.filterwarnings("ignore:(?!ModelProfCallback)")

FILES = {"report.html", "report.json", "report.txt", "run.json"}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other make such small models slow on a machine that has more to do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def flops_of(callback):
    return added_up(callback.run.ranks[0].model_cost.count).flops


# Loggers


def csv_points(logger):
    with Path(logger.log_dir, "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name in row.keys() - {"step"}:
                if row[name]:
                    yield name, int(row["step"]), float(row[name])


def tensorboard_points(logger):
    events = EventAccumulator(logger.log_dir).Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield name, event.step, event.value


def wandb_points(logger):
    """From the file that `wandb sync` would send: records in the framing of LevelDB's log."""
    wandb_internal_pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (file,) = Path(logger.save_dir).glob(f"wandb/*{logger.version}/*.wandb")
    data, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in {1, 4}:  # whole, or the last part
            history = wandb_internal_pb2.Record.FromString(record).history
            record = b""
            row = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item
            }
            for name in row.keys() - {"_step", "_timestamp", "_runtime", "trainer/global_step"}:
                yield name, row["trainer/global_step"], row[name]


def mlflow_points(logger):
    for name in logger.experiment.get_run(logger.run_id).data.metrics:
        for metric in logger.experiment.get_metric_history(logger.run_id, name):
            yield name, metric.step, metric.value


def make_wandb(folder):
    pytest.importorskip("wandb", reason="needs wandb")
    return WandbLogger(save_dir=folder, offline=True, project="digits")


def make_mlflow(folder):
    pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    return MLFlowLogger(save_dir=str(folder / "mlruns"))


POINTS = {
    CSVLogger: csv_points,
    TensorBoardLogger: tensorboard_points,
    WandbLogger: wandb_points,
    MLFlowLogger: mlflow_points,
}
LOGGERS = {
    "CSV": lambda folder: [CSVLogger(folder)],
    "TensorBoard": lambda folder: [TensorBoardLogger(folder)],
    "W&B": lambda folder: [make_wandb(folder)],
    "MLflow": lambda folder: [make_mlflow(folder)],
    "three": lambda folder: [CSVLogger(folder), TensorBoardLogger(folder), make_mlflow(folder)],
    "none": lambda folder: [],
}


@pytest.fixture
def services(monkeypatch):
    """Nothing of W&B talks to anybody or stays behind; MLflow 3 asks for leave to write files."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def logged_by(folder, make, *callbacks):
    """The loggers of a fit, and for each of them name → its points."""
    folder.mkdir()
    loggers = make(folder)
    torch.manual_seed(3)
    trainer = make_trainer(folder, *callbacks, logger=loggers, log_every_n_steps=4)
    fit_quietly(trainer, Net(), loader())
    found = []
    for logger in loggers:
        logger.finalize("success")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()
            sys.modules["wandb"].teardown()  # its service may still be writing
        points = defaultdict(list)
        for name, step, value in POINTS[type(logger)](logger):
            points[name].append((step, value))
        found.append({name: sorted(values) for name, values in points.items()})
    return loggers, found


@pytest.mark.parametrize("name", LOGGERS)
def test_loggers_get_the_scalars_and_the_users_metrics_as_they_were(tmp_path, services, name):
    _, before = logged_by(tmp_path / "bare", LOGGERS[name])
    callback = ModelProfCallback(skip_first=0, active=0, terminal=False, flops=False, sampling=False)
    with our_warnings() as messages:
        loggers, after = logged_by(tmp_path / "measured", LOGGERS[name], callback)
    assert messages == []
    for bare, measured in zip(before, after, strict=True):
        ours = {tag: points for tag, points in measured.items() if tag.startswith("modelprof/")}
        assert {tag: points for tag, points in measured.items() if tag not in ours} == bare
        assert len(bare["loss"]) == 8
        assert [step for step, _ in ours["modelprof/ips"]] == [3, 7, 11, 15, 19, 23, 27, 31]
        assert {"modelprof/phase_ms/forward", "modelprof/reader_ratio"} <= ours.keys()
        assert all(value > 0 for _, value in ours["modelprof/ips"])

    if name == "none":
        folder = tmp_path / "measured" / "modelprof"
    elif loggers[0].log_dir is not None:
        folder = Path(loggers[0].log_dir) / "modelprof"
    else:  # beside its checkpoints: a folder of this run alone
        first = loggers[0]
        folder = Path(first.save_dir) / first.name / first.version / "modelprof"
    (found,) = (tmp_path / "measured").rglob("run.json")
    assert found.parent == folder
    assert {path.name for path in folder.iterdir()} >= FILES


def test_mlflow_finds_no_experiment_that_is_none(tmp_path, services, caplog):
    (logger,), _ = logged_by(tmp_path / "fit", LOGGERS["MLflow"], make_callback(tmp_path, dirpath=None))
    names = {experiment.name for experiment in logger.experiment.search_experiments()}
    assert names == {"Default", "lightning_logs"}
    assert "Malformed" not in caplog.text
    assert list((tmp_path / "fit").rglob("report.html"))


# Hydra

HYDRA = {
    "steps": ([10, 13], (10, 13)),
    "activities": (["cpu"], ["cpu"]),
    "views": (["kernel", "operator"], ["kernel", "operator"]),
    "ignore_modules": (["Dropout"], ["Dropout"]),
    "peak_flops_per_s": ({"float32": 1e12}, {"float32": 1e12}),
    "rules": (
        {"input_bound": {"warning": 0.1}, "slow_logger": False},
        {"input_bound": {"warning": 0.1}, "slow_logger": False},
    ),
}


@pytest.mark.parametrize("convert", ["none", "partial", "object", "all"])
def test_hydra_makes_the_callback(tmp_path, convert):
    hydra = pytest.importorskip("hydra", reason="needs hydra-core")
    utils = pytest.importorskip("hydra.utils")
    omegaconf = pytest.importorskip("omegaconf")
    assert hydra.__version__
    config = omegaconf.OmegaConf.create(
        {
            "_target_": "lightning_modelprof.ModelProfCallback",
            "_convert_": convert,
            "terminal": False,
            "dirpath": str(tmp_path / "modelprof"),
            "samples_fn": {"_target_": "builtins.len", "_partial_": True},
            **{name: given for name, (given, _) in HYDRA.items()},
        }
    )
    callback = utils.instantiate(config)
    for name, (_, wanted) in HYDRA.items():
        value = getattr(callback.config, name)
        assert not omegaconf.OmegaConf.is_config(value), name
        assert (tuple(value) if name == "steps" else value) == wanted, name
    if convert == "none":
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
        (window,) = windows_of(callback)
        assert window.recorded_steps == (10, 11, 12)
        assert report_of(tmp_path)["run"]["status"] == "finished"


def test_a_slip_in_a_hydra_config_is_named(tmp_path):
    utils = pytest.importorskip("hydra.utils", reason="needs hydra-core")
    target = {"_target_": "lightning_modelprof.ModelProfCallback"}
    with pytest.raises(Exception, match=r"unknown argument 'wramup'\. Did you mean 'warmup'"):
        utils.instantiate({**target, "wramup": 1})
    callback = utils.instantiate({**target, "steps": [10]})
    with pytest.raises(ConfigError, match=r"steps: expected two integers \(start, end\), got \[10\]"):
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())


def test_hydra_example(tmp_path):
    pytest.importorskip("hydra", reason="needs hydra-core")
    overrides = ["callback.steps=[3,6]", "trainer.max_steps=8", f"hydra.run.dir={tmp_path}"]
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "hydra_app.py", *overrides],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Model Summary (steps 3 to 5)" in result.stdout
    assert {path.name for path in (tmp_path / "modelprof").iterdir()} >= FILES


# pytorch_lightning


class OldNameNet(pytorch_lightning.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OldNameCallback(ModelProfCallback, pytorch_lightning.Callback):
    """What the README tells those who need a callback of pytorch_lightning."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            ModelProfCallback,
            marks=pytest.mark.skipif(
                not MIXES_PACKAGES, reason="this pytorch_lightning refuses callbacks of lightning"
            ),
        ),
        OldNameCallback,
    ],
)
def test_every_loop_of_pytorch_lightning(tmp_path, kind):
    callback = kind(skip_first=0, active=0, terminal=False, sampling=False)
    logger = pytorch_lightning.loggers.CSVLogger(tmp_path)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module, data = OldNameNet(), loader(20)
    loops = {"fit": 10, "validate": 10, "test": 10, "predict": 10}
    folder = Path(logger.log_dir) / "modelprof"
    for number, (loop, steps) in enumerate(loops.items()):
        getattr(trainer, loop)(module, data)
        assert callback.run.info.loop == loop
        assert callback.run.info.status == "finished"
        assert len(steps_of(callback).step) == steps
        assert flops_of(callback)["forward"] == 2 * 2 * 8  # 2 samples, 8 multiply-adds each
        written = folder if number == 0 else folder.with_name(f"modelprof_{number}")
        assert {path.name for path in written.iterdir()} >= FILES


class OldNameData(pytorch_lightning.LightningDataModule):
    def train_dataloader(self):
        return loader(32)


def test_command_line_of_pytorch_lightning(tmp_path):
    """It wants callbacks that are its own; its older Trainers do, too."""
    pytest.importorskip("docstring_parser", reason="LightningCLI needs jsonargparse[signatures]")
    config = {
        "trainer": {
            "max_epochs": 1,
            "accelerator": "cpu",
            "default_root_dir": str(tmp_path),
            **dict.fromkeys(
                ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
            ),
            "callbacks": [
                {
                    "class_path": f"{__name__}.OldNameCallback",
                    "init_args": {"steps": [3, 6], "terminal": False, "views": ["kernel", "model"]},
                }
            ],
        },
    }
    cli = LightningCLI(OldNameNet, OldNameData, args={"subcommand": "fit", "fit": config})
    (callback,) = (one for one in cli.trainer.callbacks if isinstance(one, ModelProfCallback))
    (window,) = windows_of(callback)
    assert window.recorded_steps == (3, 4, 5)
    run = report_of(tmp_path)["run"]
    assert (run["model"], run["status"]) == ("OldNameNet", "finished")


# Data and optimization


class Data(LightningDataModule):
    def setup(self, stage):
        self.stage = stage

    def train_dataloader(self):
        return loader(20)

    def val_dataloader(self):
        return [loader(8), loader(4)]


def test_datamodule(tmp_path):
    callback = make_callback(tmp_path, active=0)
    trainer = make_trainer(tmp_path, callback, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Validated(), datamodule=Data())
    assert len(steps_of(callback).step) == 20
    assert callback.run.ranks[0].setup.num_val_batches == 6
    assert [one.batch_size for one in callback.run.ranks[0].setup.loaders] == [2]


class Validated(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


class Pairs(Net):
    """A batch of two loaders: a list, or a dict."""

    def training_step(self, batch, batch_idx):
        batches = [one for one in (batch.values() if isinstance(batch, dict) else batch) if one is not None]
        return sum(self.loss(one) for one in batches)


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        pytest.param(lambda: [loader(20), loader(12)], 10, id="a list"),
        pytest.param(lambda: {"a": loader(20), "b": loader(12)}, 10, id="a dict"),
        pytest.param(lambda: CombinedLoader([loader(20), loader(12)], "min_size"), 6, id="min_size"),
        pytest.param(lambda: CombinedLoader([loader(20), loader(12)], "max_size"), 10, id="max_size"),
        pytest.param(
            lambda: CombinedLoader([loader(20), loader(12)], "max_size_cycle"), 10, id="max_size_cycle"
        ),
    ],
)
def test_several_dataloaders(tmp_path, data, steps):
    with our_warnings() as messages:
        callback = make_callback(tmp_path, active=0, flops=True)
        fit_quietly(make_trainer(tmp_path, callback), Pairs(), data())
    assert messages == []
    assert len(steps_of(callback).step) == steps
    assert len(callback.run.ranks[0].setup.loaders) == 2
    # 8 x 16 and 16 x 1 multiply-adds a sample, 2 samples a batch, of two loaders
    assert flops_of(callback)["forward"] == 2 * 2 * 2 * (8 * 16 + 16)


class Adversaries(LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        real, _ = batch
        noise = torch.ones(len(real), 4)
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * self.critic(self.generator(noise)).mean()
            if sign < 0:
                loss = loss + self.critic(real).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]


def test_two_optimizers_by_hand(tmp_path):
    weights = []
    for callbacks in ((), (make_callback(tmp_path, active=3, flops=True),)):
        torch.manual_seed(4)
        module = Adversaries()
        fit_quietly(make_trainer(tmp_path, *callbacks), module, loader(40))
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    (callback,) = callbacks
    record = callback.run.ranks[0]
    assert len(record.steps.step) == 20
    assert record.setup.manual_optimization
    assert [one.kind for one in record.setup.optimizers] == ["Adam", "Adam"]
    took_ns = {one["phase"]: one["total_ns"] for one in report_of(tmp_path)["phases"]}
    assert min(took_ns[phase] for phase in ("forward", "backward", "optimizer")) > 0
    generator, critic = 2 * 4 * 8, 2 * 8  # multiply-adds of a batch of 2
    assert flops_of(callback)["forward"] == 2 * (2 * generator + 3 * critic)
    # First the generator's weights and what flows through the critic to it, then the critic's weights twice.
    assert flops_of(callback)["backward"] == 2 * (critic + generator + 2 * critic)
    assert windows_of(callback)[0].recorded_steps == (2, 3, 4)


# torch.compile


class Layers(torch.nn.Sequential):
    """torch.compile leaves the forward of torch's own containers alone."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Compiled(Net):
    """Compiled by part or in place; with ``breaks``, Dynamo cuts the graph in the middle."""

    def __init__(self, how, backend, breaks):
        super().__init__()
        self.layers = Layers(*self.layers)
        self.breaks = breaks
        if how == "part":
            self.layers = torch.compile(self.layers, backend=backend)
        elif how == "in place":
            self.layers.compile(backend=backend)

    def training_step(self, batch, batch_idx):  # Dynamo cannot follow Lightning's log
        loss = self.loss(batch)
        if self.breaks:
            torch._dynamo.graph_break()
        return 2 * loss


@pytest.mark.parametrize("how", ["part", "in place", "whole", "whole with a break"])
def test_torch_compile_makes_the_same_graphs(tmp_path, how):
    counters = importlib.import_module("torch._dynamo.utils").counters  # by name: it takes a second
    backend, seen = "aot_eager", []
    callback = make_callback(tmp_path, active=4, skip_first=2, flops=True)
    for callbacks in ((), (callback,)):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(6)
        module = Compiled(how, backend, breaks="break" in how)
        fitted = torch.compile(module, backend=backend) if "whole" in how else module
        fit_quietly(make_trainer(tmp_path, *callbacks), fitted, loader(63))  # the last batch is smaller
        kinds = ("frames", "stats", "graph_break", "unimplemented", "inductor")
        dynamo = {kind: dict(counters[kind]) for kind in kinds}
        seen.append((dynamo, [parameter.detach().clone() for parameter in module.parameters()]))
    (bare, weights), (measured, measured_weights) = seen
    assert measured == bare
    assert bare["stats"]["unique_graphs"] >= 2  # one for the last batch
    assert sum(bare["graph_break"].values()) == (2 if "break" in how else 0)
    assert all(torch.equal(a, b) for a, b in zip(weights, measured_weights, strict=True))
    assert callback.run.info.status == "finished"
    assert flops_of(callback)["forward"] == 2 * 2 * (8 * 16 + 16)


# Sharded models


RANK = """
import sys, json
from pathlib import Path
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from tests.fits import Net, fit_quietly, loader, make_callback, make_trainer
from lightning_modelprof.flops.count import added_up

class Sharded(Net):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard
        if not hasattr(self, "is_sharded"):
            self.is_sharded = True
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.layers[0], self.layers[3], self):
                fully_shard(layer, mesh=mesh)

class Split(Net):
    def configure_model(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)

torch.set_num_threads(1)
found = {}
for kind in (Sharded, Split):
    sizes = {"data_parallel_size": 2 if kind is Sharded else 1}
    sizes["tensor_parallel_size"] = 2 // sizes["data_parallel_size"]
    weights = []
    folder = Path(kind.__name__)
    callback = make_callback(folder, active=3, skip_first=2, flops=True)
    data = loader(64 if kind is Sharded else 32)  # 16 batches for each rank
    for callbacks in ((), (callback,)):
        torch.manual_seed(2)
        module = kind()
        strategy = ModelParallelStrategy(**sizes, process_group_backend="gloo")
        fit_quietly(make_trainer(folder, *callbacks, strategy=strategy, devices=2), module, data)
        weights.append([parameter.full_tensor().tolist() if hasattr(parameter, "full_tensor")
                        else parameter.tolist() for parameter in module.parameters()])
    cost, setup = callback.run.ranks[0].model_cost, callback.run.ranks[0].setup
    found[kind.__name__] = {
        "is_equal": weights[0] == weights[1],
        "model": callback.run.info.model,
        "module": setup.module.name,
        "is_library": setup.module.is_library,
        "hooks": sorted(setup.module_hooks),
        "setup_notes": setup.notes,
        "flops": added_up(cost.count).flops,
        "modules": [(one.path, one.type_name, one.parameters) for one in cost.modules],
        "sizes": {one.kind: one.elements for one in cost.size.sizes},
        "timed": [one.path for one in cost.times.times],
        "windows": [window.recorded_steps for window in callback.run.ranks[0].windows],
        "status": callback.run.info.status,
        "ranks": getattr(callback.run.all_ranks, "world_size", None),
    }
rank = int(sys.argv[1])
Path(f"rank{rank}.json").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What each of two ranks found, each a process of its own; Lightning takes them as it finds them."""
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    script = folder / "train.py"
    script.write_text(RANK)
    ranks = []
    for rank in ("0", "1"):
        environment = {**os.environ, **common, "LOCAL_RANK": rank, "PYTHONPATH": paths}
        command = [sys.executable, script, rank]  # a file: what `python -c` runs is nobody's code
        ranks.append(
            subprocess.Popen(
                command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        )
    errors = []
    try:
        errors = [process.communicate(timeout=120)[1].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], errors[0][-3000:] + errors[1][-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


FORWARD = 2 * 2 * (8 * 16 + 16)  # FLOPs of Net for a batch of 2
BACKWARD = 2 * 2 * (8 * 16 + 2 * 16)  # without the gradient of its input


@pytest.mark.parametrize(("kind", "share"), [("Sharded", 1), ("Split", 2)])
def test_sharded_by_torch(sharded, kind, share):
    """FSDP computes the whole model on every rank, tensor parallelism its part."""
    for rank in sharded:
        found = rank[kind]
        assert found["is_equal"]
        assert (found["model"], found["module"], found["is_library"]) == (kind, kind, False)
        assert not any("reshard" in hook for hook in found["hooks"])
        assert "training_step" in found["hooks"]
        assert found["setup_notes"] == []
        assert found["flops"] == {"forward": FORWARD // share, "backward": BACKWARD // share}
        layers = [["", kind, 0], ["layers", "Sequential", 0], ["layers.0", "Linear", 144]]
        assert found["modules"][:3] == layers
        assert "layers.3" in found["timed"]
        assert found["windows"] == [[4, 5, 6]]
        assert found["status"] == "finished"
        assert found["ranks"] == 2
    held = [rank[kind]["sizes"]["trainable parameters"] for rank in sharded]
    assert sum(held) == 161 if kind == "Sharded" else held == [81, 81]  # the last bias is on both


def test_fsdp_of_lightning_wants_a_gpu(tmp_path):
    """Lightning refuses it on a CPU, so it can only be tried on a GPU."""
    with pytest.raises(ValueError, match="strategy `fsdp` requires a GPU"):
        make_trainer(tmp_path, strategy="fsdp", devices=2)


# Models of others

L, B, T, E, F, V = 2, 4, 8, 16, 32, 64  # layers, batch, positions, width, feed-forward, vocabulary
RANK_OF_LORA = 2


def gpt2(transformers):
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=T, n_embd=E, n_layer=L, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama(transformers):
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=E, intermediate_size=F, num_hidden_layers=L, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def bert(transformers):
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=E, intermediate_size=F, num_hidden_layers=L, num_attention_heads=2
    )
    return transformers.BertForSequenceClassification(config)


CORE = 2 * B * T**2 * E  # scores and weighted sum
PROJECTION = B * T * E**2
MODELS = {
    # multiply-adds of the forward; GPT-2's feed-forward is four times as wide, Llama's has three products
    gpt2: L * (4 * PROJECTION + CORE + 8 * PROJECTION) + B * T * E * V,
    llama: L * (4 * PROJECTION + CORE + 3 * B * T * E * F) + B * T * E * V,
    bert: L * (4 * PROJECTION + CORE + 2 * B * T * E * F) + B * E * E + B * E * 2,
}


class Language(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        is_classifier = "Classification" in type(self.model).__name__
        loss = self.model(input_ids=batch, labels=batch[:, 0] % 2 if is_classifier else batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_language(folder, make):
    """Fits with and without the callback, and sees that the weights are the same."""
    words = torch.randint(0, V, (10 * B, T), generator=torch.Generator().manual_seed(1))
    callback = make_callback(
        folder, active=2, skip_first=2, flops=True, samples_fn=torch.numel, unit="tokens", terminal=False
    )
    weights = []
    for callbacks in ((), (callback,)):
        torch.manual_seed(8)
        module = Language(make())
        fit_quietly(make_trainer(folder, *callbacks), module, DataLoader(words, batch_size=B))
        weights.append(list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    return callback, module


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_transformers(tmp_path, model):
    transformers = pytest.importorskip("transformers", reason="needs the transformers library")
    with our_warnings() as messages:
        callback, module = fit_language(tmp_path, lambda: model(transformers))
    assert messages == []
    forward = 2 * MODELS[model]
    flops = flops_of(callback)
    # The first layer's input comes of an embedding, so backward is twice forward.
    assert (flops["forward"], flops["backward"]) == (forward, 2 * forward)
    cost = callback.run.ranks[0].model_cost
    assert cost.count.errors == ()
    assert sum(one.parameters for one in cost.modules) == sum(p.numel() for p in module.parameters())
    assert {one.path for one in cost.modules} == {path for path, _ in module.named_modules()}
    assert steps_of(callback).samples.tolist() == [B * T] * 10
    assert callback.report.verdict is not None


def test_lora(tmp_path):
    """A small part is trained: the counts, the sizes and the modules say so."""
    transformers = pytest.importorskip("transformers", reason="needs the transformers library")
    peft = pytest.importorskip("peft", reason="needs peft")
    lora = peft.LoraConfig(r=RANK_OF_LORA, target_modules=["q_proj", "v_proj"])
    with our_warnings() as messages:
        callback, module = fit_language(
            tmp_path, lambda: peft.get_peft_model(llama(transformers), lora, autocast_adapter_dtype=False)
        )
    assert messages == []

    half = B * T * E * RANK_OF_LORA  # multiply-adds of one of an adapter's two matrices
    forward = MODELS[llama] + L * 2 * 2 * half
    # No frozen weight has a gradient. Gradients flow down to the adapters of the first layer, whose own
    # input needs none: of its projections only the output's passes one on.
    feed_forward = 3 * B * T * E * F
    backward = B * T * E * V + L * (feed_forward + PROJECTION + 2 * CORE)
    backward += (L - 1) * (3 * PROJECTION + 2 * 4 * half) + 2 * 3 * half
    flops = flops_of(callback)
    assert (flops["forward"], flops["backward"]) == (2 * forward, 2 * backward)

    trained = L * 2 * 2 * E * RANK_OF_LORA
    frozen = sum(p.numel() for p in module.parameters()) - trained
    cost = callback.run.ranks[0].model_cost
    sizes = {one.kind: one.elements for one in cost.size.sizes}
    assert (sizes["trainable parameters"], sizes["frozen parameters"]) == (trained, frozen)
    assert sizes["gradients"] == trained
    assert sizes["optimizer state"] == 2 * trained + 2 * L * 2  # moments, and a step for each tensor
    assert sum(one.trainable for one in cost.modules) == trained
    assert sum(one.parameters for one in cost.modules) == trained + frozen
    assert callback.run.ranks[0].setup.num_trainable_tensors == 2 * L * 2
