"""lightning-modelprof in a LightningCLI program: nothing in the code, everything in the YAML file.

    python examples/cli.py fit --config configs/lightning_cli.yaml

The callback is named in the file by its class path. Its arguments can be set on the command line too, as long
as it is the last callback of the list:

    python examples/cli.py fit --config configs/lightning_cli.yaml --trainer.callbacks.active 5

All its arguments: python examples/cli.py fit --trainer.callbacks.help lightning_modelprof.ModelProfCallback
"""

from __future__ import annotations

from digits import Digits
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_modelprof.errors import require

require("jsonargparse", "docstring_parser", extra="examples", where="examples/cli.py")

from lightning.pytorch.cli import LightningCLI  # noqa: E402


class DigitsModel(LightningModule):
    """Two linear layers.

    Args:
        hidden: number of units between the two layers.
        learning_rate: step size of Adam.
    """

    def __init__(self, hidden: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 32 * 32, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> optim.Optimizer:
        """Adam at a constant rate."""
        return optim.Adam(self.parameters(), lr=self.learning_rate)


class DigitsData(LightningDataModule):
    """The handwritten digits of `digits.py`.

    Args:
        batch_size: samples per step.
        num_workers: processes that load ahead; 0 loads in the training process, between two steps.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Shuffled batches."""
        return DataLoader(Digits(), batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)


if __name__ == "__main__":
    LightningCLI(DigitsModel, DigitsData)
