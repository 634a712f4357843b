"""Profile a neuralforecast model: pass the callback to the model, like all Trainer arguments.

pip install neuralforecast
python examples/libraries/with_neuralforecast.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

from lightning_modelprof import ModelProfCallback


def fit(callbacks: Sequence[Any], *, faster: bool = False) -> NeuralForecast:
    """Train NHITS on 20 noisy waves, which form one batch, so each epoch has one step.

    Args:
        callbacks: Callbacks for the Trainer.
        faster: Follow the report's advice.
    """
    model = NHITS(
        h=12,
        input_size=48,
        max_steps=200,
        windows_batch_size=128,
        val_check_steps=100 if faster else 10,
        random_seed=1,
        accelerator="cpu",
        callbacks=[*callbacks],
        enable_progress_bar=False,
        logger=False,
    )
    forecast = NeuralForecast(models=[model], freq=1)
    forecast.fit(waves(), val_size=24)
    return forecast


def waves() -> pd.DataFrame:
    """Return 20 noisy waves of 300 points."""
    generator = np.random.default_rng(0)
    time = np.arange(300)
    series = [np.sin(time / 20 + phase) + generator.normal(scale=0.1, size=300) for phase in range(20)]
    names = np.repeat([f"series {number}" for number in range(20)], 300)
    return pd.DataFrame({"unique_id": names, "ds": np.tile(time, 20), "y": np.concatenate(series)})


def predict(forecast: NeuralForecast) -> object:
    """Predict the next 12 points of each series."""
    return forecast.predict()


if __name__ == "__main__":
    predict(fit([ModelProfCallback()]))
