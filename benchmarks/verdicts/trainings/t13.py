"""Forecast of a day from two weeks: the decoder feeds on its own predictions."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Load(LightningDataModule):
    def __init__(self, history=56, horizon=20):
        super().__init__()
        self.history, self.horizon = history, horizon

    def setup(self, stage):
        g = torch.Generator().manual_seed(1)
        t = torch.arange(self.history + self.horizon)
        phase = 6.3 * torch.rand(5000, 1, generator=g)
        series = torch.sin(t / 4 + phase) + 0.1 * torch.randn(5000, len(t), generator=g)
        self.past, self.future = series[:, : self.history, None], series[:, self.history :]

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.past, self.future), 128, shuffle=True, drop_last=True)


class Seq2Seq(LightningModule):
    def __init__(self, hidden=256):
        super().__init__()
        self.encoder = nn.LSTM(1, hidden, batch_first=True)
        self.keys = nn.Linear(hidden, hidden, bias=False)
        self.cell = nn.LSTMCell(1 + hidden, hidden)
        self.out = nn.Linear(2 * hidden, 1)

    def forward(self, past, horizon):
        memory, (h, c) = self.encoder(past)
        keys = self.keys(memory).transpose(1, 2)
        h, c = h[0], c[0]
        context = memory[:, -1]
        value = past[:, -1]
        predictions = []
        for _ in range(horizon):
            h, c = self.cell(torch.cat([value, context], 1), (h, c))
            weights = torch.bmm(h[:, None], keys).softmax(2)
            context = torch.bmm(weights, memory)[:, 0]
            value = self.out(torch.cat([h, context], 1))
            predictions.append(value)
        return torch.cat(predictions, 1)

    def training_step(self, batch, batch_idx):
        past, future = batch
        loss = F.mse_loss(self(past, future.shape[1]), future)
        self.log("mse", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class StepWatch(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, *_):
        self.seen.append(time.perf_counter())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--steps", type=int, default=130)
    args = parser.parse_args()
    seed_everything(19, verbose=False)
    watch = StepWatch()
    callbacks = [watch]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        gradient_clip_val=1.0, default_root_dir=args.profile, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Seq2Seq(), datamodule=Load())
    seen = watch.seen[5:]
    print(f"LOSS {trainer.callback_metrics['mse'].item():.6f}")
    print(f"STEP_MS {1e3 * (seen[-1] - seen[0]) / (len(seen) - 1):.3f}")
