"""Callbacks added without code changes, by ``LIGHTNING_MODELPROF`` and Lightning's entry points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_modelprof import ConfigError, ModelProfCallback
from lightning_modelprof.config import sources as config_sources
from lightning_modelprof.config.sources import SWITCH, is_switched_off
from lightning_modelprof.run.archive import load_run
from tests.support.fits import Net, fit_quietly, flat, loader, our_warnings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
QUIET = {
    "accelerator": "cpu",
    "max_steps": 8,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """Entry points from pyproject.toml, instead of those of the installed package."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = tmp_path / "site" / "lightning_modelprof-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-modelprof\nVersion: 1.0\n")
    lines = []
    for group, members in points.items():
        if group.endswith("callbacks_factory"):
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in members.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.chdir(tmp_path)


def ours(trainer):
    return [one for one in trainer.callbacks if type(one) is ModelProfCallback]


def test_unset_variable_adds_no_callback_and_no_imports(monkeypatch):
    monkeypatch.delenv("LIGHTNING_MODELPROF", raising=False)
    assert ours(lightning.pytorch.Trainer(**QUIET)) == []
    code = (
        "import sys; import lightning_modelprof.lightning.from_environment as f; assert f.callbacks() == [];"
        "print(*{'torch', 'lightning', 'yaml', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_unchanged_program_is_measured(tmp_path, monkeypatch, package):
    monkeypatch.setenv("LIGHTNING_MODELPROF", "active=0,report.terminal=false,dirpath=out")

    class Model(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.LazyLinear(1)

        def training_step(self, batch):
            return self.layer(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = package.Trainer(**QUIET)
    trainer.fit(Model(), loader())
    assert len(load_run(tmp_path / "out" / "run.json").ranks[0].steps) == 8


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", {}),
        ("on", {}),
        ("active=3", {"active": 3}),
        (
            "steps=[3, 5], report.views=[device, kernel],with_stack=true",
            {"steps": (3, 5), "with_stack": True, "views": ["device", "kernel"]},
        ),
        ("dirpath=a b/c,unit=tokens", {"dirpath": "a b/c", "unit": "tokens"}),
        ("inspect.peak_flops_per_s=989e12", {"peak_flops_per_s": 989e12}),
    ],
)
def test_variable_sets_arguments(monkeypatch, value, expected):
    monkeypatch.setenv("LIGHTNING_MODELPROF", value)
    [callback] = ours(lightning.pytorch.Trainer(**QUIET))
    found, defaults = flat(callback.config), flat(ModelProfCallback().config)
    assert {name: found[name] for name in found if found[name] != defaults[name]} == expected


def test_variable_can_name_yaml_file(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MODELPROF", str(tmp_path / "prof.yaml"))
    (tmp_path / "prof.yaml").write_text("active: 4\n")
    [callback] = ours(lightning.pytorch.Trainer(**QUIET))
    assert callback.config.active == 4


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("maybe", "expected on (1, true, on, yes), off (0, false, off, no), arguments such as active=10"),
        (
            "activ=3",
            "environment variable LIGHTNING_MODELPROF: unknown argument 'activ'. Did you mean 'active'?",
        ),
        ("active=-1", "environment variable LIGHTNING_MODELPROF: active"),
        ("active=3,active=4", "expected each argument once, got 'active'"),
        ("=3", "LIGHTNING_MODELPROF"),
        ("active={", "expected arguments such as active=10,dirpath=out, got 'active={'"),
        ("none.yaml", "can't read none.yaml"),
    ],
)
def test_trainer_rejects_invalid_variable(monkeypatch, value, message):
    monkeypatch.setenv("LIGHTNING_MODELPROF", value)
    with pytest.raises(ConfigError) as caught:
        lightning.pytorch.Trainer(**QUIET)
    assert message in str(caught.value)


@pytest.mark.parametrize("word", ["0", "off", "No"])
def test_off_prints_one_message_and_only_with_callback(monkeypatch, capsys, word):
    monkeypatch.setenv("LIGHTNING_MODELPROF", word)
    monkeypatch.setattr("lightning_modelprof.engine.loop._HAS_PRINTED_OFF", False)
    trainer = lightning.pytorch.Trainer(**QUIET)
    assert ours(trainer) == []
    fit_quietly(trainer, Net(), loader())
    assert "ModelProf" not in capsys.readouterr().err
    for _ in range(2):
        trainer = lightning.pytorch.Trainer(**QUIET, callbacks=[ModelProfCallback()])
        fit_quietly(trainer, Net(), loader())
    lines = [line for line in capsys.readouterr().err.splitlines() if "ModelProf" in line]
    assert lines == [f"ModelProfCallback is off because LIGHTNING_MODELPROF={word}"]


def test_callback_in_code_overrides_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MODELPROF", "active=0,dirpath=theirs,report.terminal=false")
    own = ModelProfCallback(active=2, wait=0, skip_first=0, dirpath="own", report={"terminal": False})
    trainer = lightning.pytorch.Trainer(**QUIET, callbacks=[own])
    assert len(ours(trainer)) == 2
    with our_warnings() as messages:
        fit_quietly(trainer, Net(), loader())
    assert len(messages) == 1
    assert own.report is not None
    assert not (tmp_path / "theirs").exists()


def test_two_trainers_can_share_callback_list(tmp_path, monkeypatch):
    """Lightning adds the callback to the given list, so the second Trainer has two of ours."""
    monkeypatch.setenv("LIGHTNING_MODELPROF", "active=0,report.terminal=false,dirpath=out")
    shared = [lightning.pytorch.Callback()]
    for number in (1, 2):
        trainer = lightning.pytorch.Trainer(**QUIET, callbacks=shared)
        assert len(ours(trainer)) == number
        with our_warnings() as messages:
            fit_quietly(trainer, Net(), loader())
        assert len(messages) == number - 1
    assert {str(path.parent) for path in Path().rglob("run.json")} == {"out", "out/fit_2"}


def test_barebones_trainer_gets_callback(monkeypatch):
    monkeypatch.setenv("LIGHTNING_MODELPROF", "active=0,report.terminal=false,report.files=false")
    trainer = lightning.pytorch.Trainer(barebones=True, accelerator="cpu", max_steps=8)
    fit_quietly(trainer, Net(), loader())
    [callback] = ours(trainer)
    assert callback.report is not None


def test_variable_works_with_lightning_cli(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_MODELPROF", "active=0,report.terminal=false,dirpath=out")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    cli = LightningCLI(Net, trainer_defaults=QUIET, run=False, save_config_callback=None)
    fit_quietly(cli.trainer, cli.model, loader())
    assert (tmp_path / "out" / "run.json").exists()


def test_yaml_file_is_read_once_for_many_loops(tmp_path, monkeypatch):
    file = tmp_path / "profile.yaml"
    file.write_text("active: 0\n")
    monkeypatch.setenv(SWITCH, str(file))
    config_sources._says_no.cache_clear()
    assert not is_switched_off()
    file.unlink()
    assert not is_switched_off()
    monkeypatch.setenv(SWITCH, "off")
    assert is_switched_off()
    monkeypatch.setenv(SWITCH, "flase")
    for _ in range(2):
        with pytest.raises(ConfigError, match="flase"):
            is_switched_off()
