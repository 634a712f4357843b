"""Profile a pytorch-tabular model: pass the callback to ``fit``.

pip install pytorch_tabular
python examples/libraries/with_pytorch_tabular.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

from lightning_modelprof import ModelProfCallback

COLUMNS = [f"column {number}" for number in range(8)]


def fit(callbacks: Sequence[Any], *, faster: bool = False) -> TabularModel:
    """Train a classifier on 6,400 rows.

    Args:
        callbacks: Callbacks for the Trainer.
        faster: Follow the report's advice.
    """
    model = TabularModel(
        data_config=DataConfig(target=["label"], continuous_cols=COLUMNS),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="64-32"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=512 if faster else 64,
            max_epochs=3,
            accelerator="cpu",
            progress_bar="none",
            checkpoints=None,
            early_stopping=None,
            load_best=False,
            trainer_kwargs={"enable_model_summary": False},
        ),
        verbose=False,
    )
    model.fit(train=table(), callbacks=[*callbacks])
    return model


def table(rows: int = 6_400) -> pd.DataFrame:
    """Return random numbers, with a label that depends on them."""
    values = np.random.default_rng(0).normal(size=(rows, len(COLUMNS)))
    return pd.DataFrame(values, columns=COLUMNS).assign(label=(values.sum(axis=1) > 0).astype(int))


def predict(model: TabularModel) -> object:
    """Predict 64 rows; the library does so without a Trainer."""
    return model.predict(table(64))


if __name__ == "__main__":
    predict(fit([ModelProfCallback()]))
