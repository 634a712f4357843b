"""lightning-modelprof in a Hydra program: the callback is named in the YAML file, nothing of it in the code.

    pip install hydra-core
    python examples/hydra_app.py
    python examples/hydra_app.py callback.steps=[20,25] trainer.max_steps=40 model.width=256
    python examples/hydra_app.py '~callback'                                    # without it

The configuration is hydra_config/config.yaml beside this file.
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
    """What the report's samples per second count."""
    return len(batch[0])


class Regression(LightningModule):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The loss of one batch."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs).squeeze(1), targets)

    def configure_optimizers(self) -> optim.Optimizer:
        """Adam at a constant rate."""
        return optim.Adam(self.parameters(), lr=1e-3)


@hydra.main(version_base=None, config_path="hydra_config", config_name="config")
def main(config: DictConfig) -> None:
    """Builds what the configuration names, and trains."""
    callbacks = [instantiate(config.callback)] if "callback" in config else []
    inputs = torch.rand(2048, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1)), batch_size=32)
    instantiate(config.trainer, callbacks=callbacks).fit(instantiate(config.model), data)


if __name__ == "__main__":
    main()
