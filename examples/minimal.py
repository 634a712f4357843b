"""The smallest use of lightning-modelprof: one callback in the list.

    pip install -e "PATH_OF_THE_CLONE[examples]"
    python examples/minimal.py

The report is printed when training ends, and lies with its files in lightning_logs/version_0/modelprof.
"""

from digits import Digits
from lightning import LightningModule, Trainer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_modelprof import ModelProfCallback


class Classifier(LightningModule):
    """One linear layer, trained on handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> optim.Optimizer:
        """Plain gradient descent."""
        return optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = Trainer(max_steps=50, callbacks=[ModelProfCallback(active=10)])
    trainer.fit(Classifier(), DataLoader(Digits(), batch_size=32, shuffle=True))
