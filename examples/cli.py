"""Use lightning-modelprof in a LightningCLI program, with changes to the YAML file only.

    python examples/cli.py fit --config configs/lightning_cli.yaml

The file names the callback by its class path. You can also set its arguments on the command line, if it's the
last callback in the list:

    python examples/cli.py fit --config configs/lightning_cli.yaml --trainer.callbacks.active 5

To list its arguments:

    python examples/cli.py fit --trainer.callbacks.help lightning_modelprof.ModelProfCallback
"""

from __future__ import annotations

from digits import Digits
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader
from torchmetrics import Accuracy

from lightning_modelprof.errors import require

require("jsonargparse", "docstring_parser", extra="examples", where="examples/cli.py")

from lightning.pytorch.cli import LightningCLI  # noqa: E402


class DigitsModel(LightningModule):
    """Two linear layers.

    Args:
        hidden: Number of hidden units.
        learning_rate: Adam's learning rate.
    """

    def __init__(self, hidden: int = 64, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 32 * 32, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )
        self.accuracy = Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the batch's loss."""
        images, labels = batch
        scores = self.net(images)
        loss = nn.functional.cross_entropy(scores, labels)
        self.accuracy(scores, labels)
        self.log("train_loss", loss)
        self.log("train_accuracy", self.accuracy)
        return loss

    def configure_optimizers(self) -> optim.Optimizer:
        """Use Adam with a constant learning rate."""
        return optim.Adam(self.parameters(), lr=self.learning_rate)


class DigitsData(LightningDataModule):
    """The handwritten digits from `digits.py`.

    Args:
        batch_size: Samples per step.
        num_workers: Number of DataLoader workers; 0 loads in the main process, between steps.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return shuffled batches."""
        return DataLoader(Digits(), batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)


if __name__ == "__main__":
    LightningCLI(DigitsModel, DigitsData)
