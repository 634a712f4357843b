"""Runs the examples, the overhead benchmark and the configurations as a user would."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pickle
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback
from tests.support import warm
from tests.support.fits import run_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
LIGHTNING_CLI = ROOT / "configs" / "lightning_cli.yaml"

needs_images = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sklearn", "PIL")),
    reason="needs scikit-learn and pillow: pip install -e '.[examples]'",
)


def run(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a repository script in another directory, as `python SCRIPT ARGUMENTS`."""
    file = ROOT / script
    return warm.start(file.read_text(), *arguments, cwd=cwd, file=file).wait(300)


def succeed(script: str, *arguments: object, cwd: Path) -> str:
    """Run a script that must succeed; return its output."""
    result = run(script, *arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "Traceback" not in result.stderr, result.stderr[-4000:]
    return result.stdout


def check_files(folder: Path, *, profiled: bool) -> None:
    """Check that the files of a run exist and can be read."""
    report = json.loads((folder / "report.json").read_text())
    assert report["schema_version"] == 2
    json.loads((folder / "run.json").read_text())
    assert (folder / "report.txt").read_text().strip()
    assert bool(list(folder.glob("traces/*.pt.trace.json.gz"))) == profiled


@needs_images
def test_minimal_example_runs(tmp_path):
    printed = succeed("examples/minimal.py", cwd=tmp_path)
    assert "all tables: lightning-modelprof report " in printed
    check_files(tmp_path / "lightning_logs" / "version_0" / "modelprof", profiled=True)


@needs_images
def test_plain_loop_example_runs(tmp_path):
    printed = succeed("examples/plain_loop.py", "--epochs", 2, cwd=tmp_path)
    assert "Sequential, 64 training steps (finished)" in " ".join(printed.split())
    check_files(tmp_path / "modelprof", profiled=True)


def test_cifar10_profiles_by_default(tmp_path):
    printed = succeed("examples/cifar10.py", "--max-steps", 30, "--batch-size", 8, cwd=tmp_path)
    assert "all tables: lightning-modelprof report " in printed
    assert "tensorboard --logdir lightning_logs" in printed
    folder = Path("lightning_logs") / "version_0" / "modelprof"
    assert printed.count(f"page: {folder}/report.html") == 1
    check_files(tmp_path / folder, profiled=True)
    assert list((tmp_path / folder.parent).glob("events.out.tfevents.*"))


@needs_images
def test_cifar10_reads_real_files_and_half_open_steps(tmp_path):
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in (1, 2):
        batch = {
            b"data": random.integers(256, size=(40, 3 * 32 * 32), dtype=np.uint8),
            b"labels": random.integers(10, size=40).tolist(),
        }
        (folder / f"data_batch_{number}").write_bytes(pickle.dumps(batch))

    printed = succeed(
        "examples/cifar10.py",
        *("--data-dir", folder.parent, "--steps", 3, 14, "--max-steps", 18),
        *("--batch-size", 4, "--num-workers", 1, "--log-dir", tmp_path / "logs"),
        cwd=tmp_path,
    )
    assert "all tables: lightning-modelprof report " in printed
    check_files(tmp_path / "logs" / "version_0" / "modelprof", profiled=True)
    (trace,) = (tmp_path / "logs").glob("version_0/modelprof/traces/*")
    assert "3-13" in trace.name  # (3, 14) excludes its end


@needs_images
def test_cifar10_compare_runs_four_steps(tmp_path):
    printed = succeed("examples/cifar10.py", "--compare", "--max-steps", 40, "--batch-size", 8, cwd=tmp_path)
    before = re.search(r"^ +0 +[\d.]+% +[\d.]+ ms +([\d.]+) steps/s$", printed, re.MULTILINE)
    after = re.search(r"^ +2 +[\d.]+% +[\d.]+ ms +([\d.]+) steps/s$", printed, re.MULTILINE)
    result = re.search(r"Speedup: ([\d.]+)x \(([+-]\d+)% steps per second, 95% interval", printed)
    assert before, printed
    assert after, printed
    assert result, printed
    ratio = float(after[1]) / float(before[1])
    # All values are rounded; on a slow machine 0.01 steps/s is a large error.
    error = ratio * (0.006 / float(before[1]) + 0.006 / float(after[1]))
    assert float(result[1]) == pytest.approx(ratio, abs=0.006 + error)
    assert float(result[2]) == pytest.approx(100 * (ratio - 1), abs=0.6 + 100 * error)
    assert "Two runs with the same setting differed by up to" in printed

    logs = tmp_path / "lightning_logs"
    for version, name, profiled in (
        ("version_0", "1_baseline", False),
        ("version_1", "2_profile", True),
        ("version_2", "3_fixed_profile", True),
        ("version_3", "4_fixed", False),
    ):
        check_files(logs / version / name / "modelprof", profiled=profiled)


@needs_images
def test_cifar10_without_data_says_how_to_get_it(tmp_path):
    result = run("examples/cifar10.py", "--data-dir", tmp_path / "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    for part in (
        f"--data-dir {tmp_path / 'nowhere'}",
        "expected the files",
        "found no such folder",
        "cifar-10-python.tar.gz",
    ):
        assert part in result.stderr


@needs_images
@pytest.mark.parametrize(
    ("before", "after", "drift", "expected"),
    [
        ((70.99, 0.1), (137.3, 0.1), 0.02, ["1.93x (+93%", "more than noise"]),
        ((70.0, 0.1), (70.1, 0.1), 0.0, ["1.00x (+0%", "show no difference"]),
        ((70.0, 0.1), (72.0, 0.1), 0.07, ["1.03x (+3%", "differed by up to 1.07x", "within the noise"]),
        (
            (70.0, 20.0),
            (96.6, 20.0),
            0.037,
            ["1.38x", "up to 1.04x", "interval includes 1x", "show no difference"],
        ),
        ((70.0, 0.1), (60.0, 0.1), 0.02, ["0.86x (-14%", "more than noise"]),
        ((70.0, 0.1), (60.0, None), 0.02, ["0.86x (-14%", "Too few steps"]),
    ],
)
def test_gain_is_claimed_only_beyond_noise(monkeypatch, before, after, drift, expected):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    gain = importlib.import_module("cifar10").gain

    figures = [SimpleNamespace(avg=avg, standard_error=error) for avg, error in (before, after)]
    text = gain(*figures, drift)
    assert ("more than noise" in text) == ("more than noise" in expected)
    for part in expected:
        assert part in text


WITHOUT = """
import runpy, sys
from pathlib import Path
missing, script = sys.argv[1:3]
sys.modules[missing] = None  # as if it were not installed
sys.path.insert(0, str(Path(script).parent))
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


@needs_images
@pytest.mark.parametrize(
    ("script", "missing"),
    [("minimal.py", "sklearn"), ("cifar10.py", "PIL"), ("cli.py", "jsonargparse")],
)
def test_missing_extra_names_its_install_command(tmp_path, script, missing):
    result = run_script(WITHOUT, missing, ROOT / "examples" / script, cwd=tmp_path)
    assert result.returncode == 1
    error = result.stderr.strip().split("\n")[-1]
    assert error.startswith("lightning_modelprof.errors.MissingExtraError: examples/")
    assert f"needs {missing}, which is not installed." in error
    assert error.endswith('Install from the clone: pip install -e ".[examples]"')


@needs_images
def test_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "examples"))))
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    [card] = [html for output in shown if "<svg" in (html := output.get("data", {}).get("text/html", ""))]
    assert card.count("<svg") == 1
    assert "report.html" in card
    assert len(json.dumps(shown)) < 60_000, "the card, a table and the picture of the last cell"
    assert (tmp_path / "step.svg").read_text(encoding="utf-8").startswith("<svg")


@needs_images
def test_lightning_cli_configuration_runs(tmp_path):
    pytest.importorskip("docstring_parser", reason="LightningCLI needs jsonargparse[signatures]")
    printed = succeed(
        "examples/cli.py",
        *("fit", "--config", LIGHTNING_CLI, "--trainer.max_steps", 25, "--trainer.callbacks.active", 5),
        cwd=tmp_path,
    )
    assert "all tables: lightning-modelprof report " in printed
    folder = tmp_path / "lightning_logs" / "version_0"
    check_files(folder / "modelprof", profiled=True)
    assert "lightning_modelprof.ModelProfCallback" in (folder / "config.yaml").read_text()


def test_pipeline_timing_shows_three_methods(tmp_path):
    sizes = ("--device", "cpu", "--warm-up", 2, "--runs", 8, "--image-size", 16, "--width", 8)
    printed = succeed("examples/pipeline_timing.py", *sizes, cwd=tmp_path)
    alone, pipeline, missed = printed.split("\n\n")
    assert re.search(r"^ +wall( +[\d.]+ ms){2} +[\d.]+$", alone, re.MULTILINE), printed
    assert "no device events on the CPU" in alone
    for method in ("wall", "synchronize", "event"):
        row = re.search(rf"^ +{method}((?: +[\d.]+ ms){{4}})$", pipeline, re.MULTILINE)
        assert row, printed
        model1, cpu_work, model2, whole = (float(ms) for ms in re.findall(r"[\d.]+", row[1]))
        # The sum of the parts' medians may slightly exceed the median of the whole.
        assert 0 < model1 + cpu_work + model2 <= 1.5 * whole + 0.01
        assert f"  {method} " in missed


def test_overhead_benchmark_runs(tmp_path):
    printed = succeed(
        "benchmarks/overhead.py",
        *("--rounds", 1, "--steps", 50, "--json", tmp_path / "overhead.json"),
        *("--only", "ours", "ours-logger"),
        cwd=tmp_path,
    )
    assert "ModelProfCallback + logger" in printed
    results = json.loads((tmp_path / "overhead.json").read_text())
    bases = {"bare", "empty-callback", "logger", "throughput-monitor"}
    assert set(results["variants"]) == {"ours", "ours-logger"} | bases
    for variant in results["variants"].values():
        assert len(variant["fits"]) == 1
        assert variant["step_us"]["median"] > 0


def test_documented_configurations_exist():
    names = {path.name for path in CONFIGS}
    assert names >= {"default.yaml", "timer_only.yaml", "deep_dive.yaml", "lightning_cli.yaml"}


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


# The LightningCLI file configures a whole program: see test_lightning_cli_configuration_runs.
@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path != LIGHTNING_CLI], ids=lambda path: path.name
)
def test_every_configuration_trains(path, tmp_path):
    callback = ModelProfCallback.from_yaml(path)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=40,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Small(), DataLoader(torch.rand(100, 4), batch_size=2))
    assert trainer.global_step > 0
    assert callback.report is not None


def test_article_names_each_problem_until_fixed(tmp_path):
    """Each stage removes one of the marked lines."""
    out = tmp_path / "reports"
    arguments = ("--stages", 0, 1, 2, 3, "--steps", 30, "--batch-size", 32, "--out", out)
    printed = succeed("examples/article_003.py", *arguments, cwd=tmp_path)
    stages = re.split(r"^Stage ", printed, flags=re.M)[1:]
    named = [set(map(int, re.findall(r"# problem (\d)", stage))) for stage in stages]
    assert named == [{1, 2, 3}, {2, 3}, {3}, set()]
    check_files(out / "stage_3", profiled=True)
