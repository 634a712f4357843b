"""Profile a pytorch-forecasting model: pass the callback to your Trainer.

pip install pytorch-forecasting
python examples/libraries/with_pytorch_forecasting.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from lightning.pytorch import Trainer
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

from lightning_modelprof import ModelProfCallback


def fit(callbacks: Sequence[Any], *, faster: bool = False) -> TemporalFusionTransformer:
    """Train a Temporal Fusion Transformer on 20 noisy waves.

    Args:
        callbacks: Callbacks for the Trainer.
        faster: Follow the report's advice.
    """
    data = dataset()
    model = TemporalFusionTransformer.from_dataset(
        data,
        hidden_size=16,
        attention_head_size=2,
        optimizer="adam",
        optimizer_params={"fused": True} if faster else None,
        log_interval=-1,
    )
    trainer = Trainer(
        max_steps=80,
        accelerator="cpu",
        callbacks=[*callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
    )
    workers = {"num_workers": 1, "persistent_workers": True} if faster else {"num_workers": 0}
    trainer.fit(model, data.to_dataloader(train=True, batch_size=32, **workers))
    return model


def dataset() -> TimeSeriesDataSet:
    """Return 20 noisy waves of 200 points."""
    generator = np.random.default_rng(0)
    time = np.arange(200)
    waves = [np.sin(time / 20 + phase) + generator.normal(scale=0.1, size=200) for phase in range(20)]
    frame = pd.DataFrame(
        {
            "series": np.repeat([f"series {number}" for number in range(20)], 200),
            "time": np.tile(time, 20),
            "value": np.concatenate(waves).astype(np.float32),
        }
    )
    return TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=48,
        max_prediction_length=12,
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )


def predict(model: TemporalFusionTransformer) -> object:
    """Predict the last 12 points of each series, with a Trainer the library creates."""
    return model.predict(
        dataset().to_dataloader(train=False, batch_size=64), trainer_kwargs={"logger": False}
    )


if __name__ == "__main__":
    predict(fit([ModelProfCallback()]))
