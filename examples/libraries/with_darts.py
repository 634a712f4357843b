"""Profile a darts model: pass the callback in ``pl_trainer_kwargs``.

pip install darts
python examples/libraries/with_darts.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel

from lightning_modelprof import ModelProfCallback


def fit(callbacks: Sequence[Any], *, faster: bool = False) -> NBEATSModel:
    """Train N-BEATS on a noisy wave.

    Args:
        callbacks: Callbacks for the Trainer.
        faster: Follow the report's advice.
    """
    model = NBEATSModel(
        input_chunk_length=48,
        output_chunk_length=12,
        n_epochs=4,
        batch_size=32,
        num_stacks=10,
        num_blocks=1,
        num_layers=2,
        layer_widths=64,
        random_state=0,
        optimizer_kwargs={"lr": 1e-3, "fused": True} if faster else {"lr": 1e-3},
        pl_trainer_kwargs={"accelerator": "cpu", "callbacks": [*callbacks], "enable_progress_bar": False},
    )
    model.fit(wave())
    return model


def wave() -> TimeSeries:
    """Return a noisy wave of 2,000 points."""
    time = np.arange(2_000)
    noise = np.random.default_rng(0).normal(scale=0.1, size=len(time))
    return TimeSeries.from_values((np.sin(time / 20) + noise).astype(np.float32))


def predict(model: NBEATSModel) -> object:
    """Predict the next 12 points."""
    return model.predict(12)


if __name__ == "__main__":
    predict(fit([ModelProfCallback()]))
