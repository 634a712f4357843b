"""Fraud in sequences of card payments."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchmetrics.classification import BinaryAUROC


class FraudNet(LightningModule):
    def __init__(self, fixed):
        super().__init__()
        self.fixed = fixed
        self.encode = nn.Sequential(
            nn.Linear(16 * 12, 384), nn.ReLU(), nn.LayerNorm(384), nn.Linear(384, 384), nn.ReLU(),
            nn.Linear(384, 1),
        )
        self.train_auc = BinaryAUROC()

    def forward(self, payments):
        return self.encode(payments.flatten(1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        payments, fraud = batch
        scores = self(payments)
        loss = F.binary_cross_entropy_with_logits(scores, fraud.float())
        self.train_auc.update(scores.detach().sigmoid(), fraud)
        if self.fixed:
            self.log("train_auc", self.train_auc, on_step=False, on_epoch=True)
        else:
            self.log("train_auc", self.train_auc.compute(), prog_bar=True)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self):
        if not self.fixed:
            self.train_auc.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Chrono(Callback):
    def __init__(self):
        self.laps = []

    def on_train_batch_start(self, *_):
        self.laps.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=900)
    args = parser.parse_args()
    seed_everything(41, verbose=False)
    payments = torch.randn(160_000, 16, 12)
    fraud = (payments[:, :, 0].sum(1) + 4 * torch.randn(160_000) > 9).long()
    data = TensorDataset(payments, fraud)
    loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 1000, False), batch_size=None)
    chrono = Chrono()
    callbacks = [chrono]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(FraudNet(args.fixed), loader)
    laps = chrono.laps[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (laps[-1] - laps[0]) / (len(laps) - 1):.3f}")


if __name__ == "__main__":
    main()
