"""Tests libraries built on Lightning through their own entry points. Each test needs its library."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.fits import ROOT, run_script

pytestmark = pytest.mark.compat

EXAMPLES = {
    "with_darts": "darts",
    "with_neuralforecast": "neuralforecast",
    "with_gluonts": "gluonts",
    "with_pytorch_forecasting": "pytorch_forecasting",
    "with_chemprop": "chemprop",
    "with_pytorch_tabular": "pytorch_tabular",
}

WITH_AND_WITHOUT = """
import importlib, sys, warnings
import torch
import lightning.pytorch, pytorch_lightning
from lightning_modelprof import ModelProfCallback

warnings.simplefilter("ignore")
folder, name = sys.argv[1:]
sys.path.insert(0, folder)
module = importlib.import_module(name)
kept, callback = [], ModelProfCallback(dirpath="modelprof")

def keep(base):
    class Keep(base):
        def on_train_end(self, trainer, pl_module):
            kept.append([value.clone() for value in pl_module.state_dict().values()])
    return Keep()

# Which package the library's Trainer is of, it tells by refusing callbacks of the other one.
for base in (lightning.pytorch.Callback, pytorch_lightning.Callback):
    try:
        lightning.pytorch.seed_everything(1)
        module.fit([keep(base)])
    except Exception:
        continue
    if kept:
        break
print("BEGIN", flush=True)
lightning.pytorch.seed_everything(1)
model = module.fit([callback, keep(base)])
print("FITTED", flush=True)
for _ in range(3):
    module.predict(model)
print("PREDICTED", flush=True)
plain, profiled = kept
assert len(plain) == len(profiled) > 0
assert all(torch.equal(one, other) for one, other in zip(plain, profiled)), "the weights differ"
"""


def test_every_example_has_library():
    scripts = {path.stem for path in (ROOT / "examples" / "libraries").glob("*.py")}
    assert scripts == set(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_library_example_is_profiled_unchanged(tmp_path, example):
    """The fit has a report, weights are bit-identical to an unprofiled fit, and prediction prints nothing."""
    if importlib.util.find_spec(EXAMPLES[example]) is None:
        pytest.skip(f"{EXAMPLES[example]} is not installed")
    folder = ROOT / "examples" / "libraries"
    result = run_script(WITH_AND_WITHOUT, folder, example, cwd=tmp_path, timeout=300, fresh=True)
    assert result.returncode == 0, result.stderr[-3000:]
    fitted = result.stdout.split("BEGIN")[1].split("FITTED")[0]
    assert " training steps (" in fitted
    assert "Perf Summary" in fitted
    predicted = result.stdout.split("FITTED")[1].split("PREDICTED")[0]
    assert "lightning-modelprof" not in predicted
    assert (tmp_path / "modelprof" / "report.html").is_file()
