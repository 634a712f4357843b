"""Defect classification with an auxiliary reconstruction, which the ablation switched off."""
import argparse
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=301)
args = parser.parse_args()


@dataclass
class Config:
    width: int = 24
    defects: int = 8
    lr: float = 1e-3
    reconstruction_weight: float = 0.0  # 0.3 in run 12; no better


def stage(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class DefectNet(LightningModule):
    def __init__(self, config):
        super().__init__()
        self.config = config
        w = config.width
        self.encoder = nn.Sequential(
            stage(1, w, 2), stage(w, 2 * w, 2), stage(2 * w, 4 * w, 2), stage(4 * w, 4 * w, 1)
        )
        self.classifier = nn.Linear(4 * w, config.defects)
        self.decoder = nn.Sequential(
            nn.Upsample(scale_factor=2), stage(4 * w, 2 * w, 1),
            nn.Upsample(scale_factor=2), stage(2 * w, w, 1),
            nn.Upsample(scale_factor=2), nn.Conv2d(w, 1, 3, 1, 1),
        )

    def training_step(self, batch, batch_idx):
        images, defects = batch
        features = self.encoder(images)
        classification = F.cross_entropy(self.classifier(features.mean((2, 3))), defects)
        loss = classification
        if self.config.reconstruction_weight or not args.fixed:
            reconstruction = F.mse_loss(self.decoder(features), images)
            loss = classification + self.config.reconstruction_weight * reconstruction
        self.log_dict({"train_loss": loss, "classification": classification})
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.config.lr, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())

    def mean_ms(self):
        kept = self.starts[len(self.starts) // 2:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(19, verbose=False)
    images, defects = torch.rand(2400, 1, 64, 64), torch.randint(8, (2400,))
    loader = DataLoader(TensorDataset(images, defects), batch_size=24, shuffle=True)
    clock = StepClock()
    callbacks = [clock]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DefectNet(Config()), loader)
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
