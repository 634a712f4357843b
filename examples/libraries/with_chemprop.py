"""Profile a chemprop model: pass the callback to your Trainer.

pip install chemprop
python examples/libraries/with_chemprop.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from chemprop import data, models, nn
from lightning.pytorch import Trainer

from lightning_modelprof import ModelProfCallback

ATOMS = ("C", "N", "O", "CC", "C(=O)", "C(C)", "c1ccccc1")


def fit(callbacks: Sequence[Any], *, faster: bool = False) -> models.MPNN:
    """Train on 1,000 random molecules.

    Args:
        callbacks: Callbacks for the Trainer.
        faster: Follow the report's advice.
    """
    dataset = data.MoleculeDataset(molecules())
    dataset.cache = faster
    model = models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN())
    trainer(callbacks).fit(model, data.build_dataloader(dataset, batch_size=32, num_workers=0))
    return model


def trainer(callbacks: Sequence[Any]) -> Trainer:
    """Return a Trainer for a fit or a prediction."""
    return Trainer(
        max_epochs=4,
        accelerator="cpu",
        callbacks=[*callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
    )


def molecules(number: int = 1_000) -> list[data.MoleculeDatapoint]:
    """Return random chains of atoms and rings, with a target that depends on them."""
    generator = np.random.default_rng(0)
    points = []
    for _ in range(number):
        smiles = "".join(generator.choice(ATOMS, size=8))
        points.append(data.MoleculeDatapoint.from_smi(f"C{smiles}", [float(smiles.count("N"))]))
    return points


def predict(model: models.MPNN, callbacks: Sequence[Any] = ()) -> object:
    """Predict 20 molecules."""
    loader = data.build_dataloader(data.MoleculeDataset(molecules(20)), shuffle=False)
    return trainer(callbacks).predict(model, loader)


if __name__ == "__main__":
    callback = ModelProfCallback()
    predict(fit([callback]), [callback])
