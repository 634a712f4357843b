"""The callback works with third-party loggers and configuration tools.

Tests skip optional packages that aren't installed; the extra ``test`` installs them all.
"""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modelprof import InspectOptions, ModelProfCallback, ReportOptions
from tests.support import warm
from tests.support.fits import (
    REPORT_FILES,
    ROOT,
    Net,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    our_warnings,
    report_of,
    windows_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:(?!ModelProfCallback)"),
]


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
    """Read the file that `wandb sync` would send: records framed like LevelDB's log."""
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
        if kind in {1, 4}:  # a whole record, or its last part
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
    """Keep W&B offline and stop it afterwards; MLflow 3 needs permission to write files."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def logged_by(folder, make, *callbacks):
    """A fit's loggers, and each logger's points by name."""
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
def test_loggers_get_our_scalars_and_unchanged_user_metrics(tmp_path, services, name):
    _, before = logged_by(tmp_path / "bare", LOGGERS[name])
    callback = ModelProfCallback(
        skip_first=0, active=0, report={"terminal": False}, flops=False, inspect={"sampling": False}
    )
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
    else:  # next to its checkpoints, in a folder of this run alone
        first = loggers[0]
        folder = Path(first.save_dir) / first.name / first.version / "modelprof"
    (found,) = (tmp_path / "measured").rglob("run.json")
    assert found.parent == folder
    assert {path.name for path in folder.iterdir()} >= REPORT_FILES


def test_mlflow_finds_no_extra_experiment(tmp_path, services, caplog):
    (logger,), _ = logged_by(tmp_path / "fit", LOGGERS["MLflow"], make_callback(tmp_path, dirpath=None))
    names = {experiment.name for experiment in logger.experiment.search_experiments()}
    assert names == {"Default", "lightning_logs"}
    assert "Malformed" not in caplog.text
    assert list((tmp_path / "fit").rglob("report.html"))


# Hydra

HYDRA = {
    "steps": ([10, 13], (10, 13)),
    "activities": (["cpu"], ["cpu"]),
    "report": (
        {"terminal": False, "views": ["kernel", "operator"]},
        ReportOptions(terminal=False, views=["kernel", "operator"]),
    ),
    "inspect": (
        {"ignore_modules": ["Dropout"], "peak_flops_per_s": {"float32": 1e12}},
        InspectOptions(ignore_modules=["Dropout"], peak_flops_per_s={"float32": 1e12}),
    ),
    "rules": (
        {"input_bound": {"warning": 0.1}, "slow_logger": False},
        {"input_bound": {"warning": 0.1}, "slow_logger": False},
    ),
}


@pytest.mark.parametrize("convert", ["none", "partial", "object", "all"])
def test_hydra_creates_callback(tmp_path, convert):
    hydra = pytest.importorskip("hydra", reason="needs hydra-core")
    utils = pytest.importorskip("hydra.utils")
    omegaconf = pytest.importorskip("omegaconf")
    assert hydra.__version__
    config = omegaconf.OmegaConf.create(
        {
            "_target_": "lightning_modelprof.ModelProfCallback",
            "_convert_": convert,
            "dirpath": str(tmp_path / "modelprof"),
            "samples_fn": {"_target_": "builtins.len", "_partial_": True},
            **{name: given for name, (given, _) in HYDRA.items()},
        }
    )
    callback = utils.instantiate(config)
    for name, (_, wanted) in HYDRA.items():
        value = getattr(callback.config, name)
        parts = vars(value).values() if name in ("report", "inspect") else [value]
        assert not any(map(omegaconf.OmegaConf.is_config, parts)), name
        assert (tuple(value) if name == "steps" else value) == wanted, name
    if convert == "none":
        fit_quietly(make_trainer(tmp_path, callback), Net(), loader())
        (window,) = windows_of(callback)
        assert window.recorded_steps == (10, 11, 12)
        assert report_of(tmp_path)["summary"]["run"]["status"] == "finished"


def test_hydra_config_error_names_argument(tmp_path):
    utils = pytest.importorskip("hydra.utils", reason="needs hydra-core")
    target = {"_target_": "lightning_modelprof.ModelProfCallback"}
    with pytest.raises(Exception, match=r"unknown argument 'wramup'\. Did you mean 'warmup'"):
        utils.instantiate({**target, "wramup": 1})
    with pytest.raises(Exception, match=r"steps: expected two integers \(start, end\), got \[10\]"):
        utils.instantiate({**target, "steps": [10]})


def test_hydra_example_runs(tmp_path):
    pytest.importorskip("hydra", reason="needs hydra-core")
    overrides = ["callback.steps=[3,6]", "trainer.max_steps=8", f"hydra.run.dir={tmp_path}"]
    example = ROOT / "examples" / "hydra_app.py"
    result = warm.start(example.read_text(), *overrides, cwd=tmp_path, file=example).wait(120)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "all tables: lightning-modelprof report " in result.stdout
    assert {path.name for path in (tmp_path / "modelprof").iterdir()} >= REPORT_FILES
