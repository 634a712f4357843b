"""Age from face crops: a residual network, gradients accumulated over four batches."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError


class Residual(nn.Module):
    def __init__(self, inp, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, out)
        self.skip = nn.Conv2d(inp, out, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class AgeNet(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 5, 2, 2), nn.ReLU(),
            Residual(32, 64, 2), Residual(64, 96, 2), Residual(96, 128, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1),
        )
        self.mae = MeanAbsoluteError()

    def training_step(self, batch, batch_idx):
        faces, age = batch
        predicted = self.net(faces).squeeze(1)
        loss = F.smooth_l1_loss(predicted, age)
        self.mae.update(predicted.detach(), age)
        self.log("mae", self.mae, on_step=False, on_epoch=True)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Stamp(Callback):
    def __init__(self):
        self.stamps = []

    def on_train_batch_start(self, *_):
        self.stamps.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--steps", type=int, default=260)
    args = parser.parse_args()
    seed_everything(37, verbose=False)
    faces = torch.rand(960, 3, 96, 96)
    age = faces.mean((1, 2, 3)) * 8
    loader = DataLoader(TensorDataset(faces, age), batch_size=24, shuffle=True)
    stamp = Stamp()
    callbacks = [stamp]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=max(1, args.steps // 4), callbacks=callbacks,
        accumulate_grad_batches=4, logger=False, default_root_dir=args.profile,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(AgeNet(), loader)
    stamps = stamp.stamps[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (stamps[-1] - stamps[0]) / (len(stamps) - 1):.3f}")


if __name__ == "__main__":
    main()
