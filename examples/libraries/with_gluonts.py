"""Profile a GluonTS estimator: pass the callback in ``trainer_kwargs``.

pip install "gluonts[torch]"
python examples/libraries/with_gluonts.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator

from lightning_modelprof import ModelProfCallback


def fit(callbacks: Sequence[Any], *, faster: bool = False) -> Any:
    """Train DeepAR on 50 noisy waves.

    Args:
        callbacks: Callbacks for the Trainer.
        faster: Follow the report's advice.
    """
    estimator = DeepAREstimator(
        freq="h",
        prediction_length=12,
        context_length=48,
        hidden_size=32,
        batch_size=32,
        num_batches_per_epoch=40,
        trainer_kwargs={
            "max_epochs": 3,
            "accelerator": "cpu",
            "callbacks": [*callbacks],
            "enable_progress_bar": False,
        },
    )
    return estimator.train(waves(), cache_data=faster)


def waves() -> ListDataset:
    """Return 50 noisy waves of 500 hours."""
    generator = np.random.default_rng(0)
    time = np.arange(500)
    return ListDataset(
        [
            {"start": "2026-01-01", "target": np.sin(time / 20 + phase) + generator.normal(size=500) / 10}
            for phase in range(50)
        ],
        freq="h",
    )


def predict(predictor: Any) -> object:
    """Predict the next 12 hours of each series; GluonTS does so without a Trainer."""
    return list(predictor.predict(waves()))


if __name__ == "__main__":
    predict(fit([ModelProfCallback()]))
