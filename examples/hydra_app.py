"""Use lightning-modelprof in a Hydra program, with changes to the YAML file only.

    pip install hydra-core
    python examples/hydra_app.py
    python examples/hydra_app.py callback.steps=[20,25] trainer.max_steps=40 model.width=256
    python examples/hydra_app.py '~callback'                                    # without the callback

The configuration is in hydra_config/config.yaml.
"""

from __future__ import annotations

import hydra
import torch
from hydra.utils import instantiate
from lightning import LightningModule
from omegaconf import DictConfig
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset


def samples_in(batch: list[Tensor]) -> int:
    """Count a batch's samples, for the report's samples/s."""
    return len(batch[0])


class Regression(LightningModule):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the batch's loss."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs).squeeze(1), targets)

    def configure_optimizers(self) -> optim.Optimizer:
        """Use Adam with a constant learning rate."""
        return optim.Adam(self.parameters(), lr=1e-3)


@hydra.main(version_base=None, config_path="hydra_config", config_name="config")
def main(config: DictConfig) -> None:
    """Build the configured objects and train."""
    callbacks = [instantiate(config.callback)] if "callback" in config else []
    inputs = torch.rand(2048, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1)), batch_size=32)
    instantiate(config.trainer, callbacks=callbacks).fit(instantiate(config.model), data)


if __name__ == "__main__":
    main()
