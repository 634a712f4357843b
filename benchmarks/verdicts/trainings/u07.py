"""Roads in aerial images: binary segmentation with training metrics."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryF1Score, BinaryJaccardIndex

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=501)
args = parser.parse_args()


class Tiles(Dataset):
    def __init__(self, count=480, size=128):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.rand(count, 3, size, size, generator=generator)
        blobs = F.avg_pool2d(torch.rand(count, 1, size, size, generator=generator), 9, 1, 4)
        self.roads = (blobs[:, 0] > 0.52).long()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.roads[index]


class RoadNet(LightningModule):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 4, 4, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.body = nn.Sequential(*[
            layer for _ in range(5) for layer in
            (nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        ])
        self.head = nn.Sequential(nn.Conv2d(width, 16, 1), nn.PixelShuffle(4))
        settings = {"validate_args": False} if args.fixed else {}
        self.train_metrics = MetricCollection({
            "iou": BinaryJaccardIndex(**settings),
            "f1": BinaryF1Score(**settings),
        })

    def forward(self, images):
        x = self.stem(images)
        return self.head(x + self.body(x)).squeeze(1)

    def training_step(self, batch, batch_idx):
        images, roads = batch
        logits = self(images)
        loss = F.binary_cross_entropy_with_logits(logits, roads.float())
        self.train_metrics.update((logits.detach() > 0).long(), roads)
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.train_metrics.compute())
        self.train_metrics.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Pace(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(15, verbose=False)
    loader = DataLoader(Tiles(), batch_size=8, shuffle=True)
    pace = Pace()
    callbacks = [pace]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(RoadNet(), loader)
    starts = pace.starts[len(pace.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
