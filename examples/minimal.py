"""The smallest use of lightning-modelprof: add one callback to the Trainer.

    pip install -e ".[examples]"
    python examples/minimal.py

When training ends, it prints the report and saves it in lightning_logs/version_0/modelprof.
"""

from digits import Digits
from lightning import LightningModule, Trainer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader
from torchmetrics import Accuracy

from lightning_modelprof import ModelProfCallback


class Classifier(LightningModule):
    """One linear layer, trained on handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
        self.accuracy = Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the batch's loss."""
        images, labels = batch
        scores = self.net(images)
        self.accuracy(scores, labels)
        self.log("train_accuracy", self.accuracy)
        return nn.functional.cross_entropy(scores, labels)

    def configure_optimizers(self) -> optim.Optimizer:
        """Use plain gradient descent."""
        return optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = Trainer(max_steps=50, callbacks=[ModelProfCallback(active=10)])
    trainer.fit(Classifier(), DataLoader(Digits(), batch_size=32, shuffle=True))
