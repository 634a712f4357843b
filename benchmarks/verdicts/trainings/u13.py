"""Linear probing with attention pooling on a frozen backbone, random views each step."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true", help="nothing to fix")
parser.add_argument("--steps", type=int, default=651)
args = parser.parse_args()

CLASSES = 30


def random_views(images):
    """Random crop and resize, flip and brightness, drawn per image."""
    n = len(images)
    scale = 0.6 + 0.4 * torch.rand(n)
    shift = (1 - scale)[:, None] * (2 * torch.rand(n, 2) - 1)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = scale * torch.where(torch.rand(n) < 0.5, -1.0, 1.0)
    theta[:, 1, 1] = scale
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    views = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    return views * (0.8 + 0.4 * torch.rand(n, 1, 1, 1))


class Backbone(nn.Module):
    """Stands for a pretrained network."""

    def __init__(self):
        super().__init__()
        layers, width = [], 3
        for out, stride in ((32, 2), (64, 2), (128, 1), (128, 2)):
            layers += [nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)]
            layers += [nn.ReLU()]
            width = out
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).flatten(2).transpose(1, 2)


class Probe(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone().eval().requires_grad_(False)
        self.query = nn.Parameter(torch.randn(1, 4, 128) * 0.02)
        self.pool = nn.MultiheadAttention(128, 8, batch_first=True)
        self.head = nn.Linear(4 * 128, CLASSES)

    def on_train_epoch_start(self):
        self.backbone.eval()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        with torch.no_grad():
            features = self.backbone(random_views(images))
        query = self.query.expand(len(images), -1, -1)
        pooled, _ = self.pool(query, features, features, need_weights=False)
        loss = F.cross_entropy(self.head(pooled.flatten(1)), labels, label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        learned = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(learned, lr=0.05, momentum=0.9, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Pace(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(33, verbose=False)
    images, labels = torch.rand(2400, 3, 64, 64), torch.randint(CLASSES, (2400,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
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
    trainer.fit(Probe(), loader)
    starts = pace.starts[len(pace.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
