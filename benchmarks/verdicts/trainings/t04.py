"""Energy demand from many sensor columns; a batch is a dict of columns."""
import argparse
import time

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

ap = argparse.ArgumentParser()
ap.add_argument("--profile")
ap.add_argument("--fixed", action="store_true")
ap.add_argument("--steps", type=int, default=1500)
args = ap.parse_args()

COLUMNS = [f"sensor_{i:02d}" for i in range(48)]


class Readings(Dataset):
    """Columns in memory, cut by lists of indices."""

    def __init__(self, rows=40000):
        g = torch.Generator().manual_seed(0)
        self.columns = {name: torch.randn(rows, generator=g) for name in COLUMNS}
        self.demand = sum(self.columns[name] for name in COLUMNS[:6]).sin()

    def __len__(self):
        return len(self.demand)

    def __getitem__(self, indices):
        indices = torch.as_tensor(indices)
        batch = {name: column[indices] for name, column in self.columns.items()}
        batch["demand"] = self.demand[indices]
        return batch


class Demand(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(len(COLUMNS), 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(),
            nn.Linear(512, 1),
        )

    def training_step(self, batch, batch_idx):
        x = torch.stack([batch[name] for name in COLUMNS], dim=1)
        loss = nn.functional.mse_loss(self.net(x).squeeze(1), batch["demand"])
        self.log("mse", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Clock(Callback):
    starts = []

    def on_train_batch_start(self, *unused):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(4, verbose=False)
    data = Readings()
    sampler = BatchSampler(
        RandomSampler(data, generator=torch.Generator().manual_seed(9)), 256, drop_last=True
    )
    if args.fixed:
        loader = DataLoader(data, sampler=sampler, batch_size=None)
    else:
        loader = DataLoader(
            data, sampler=sampler, batch_size=None, num_workers=2, persistent_workers=True
        )
    callbacks = [Clock()]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_steps=args.steps, max_epochs=-1, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=args.profile,
    )
    trainer.fit(Demand(), loader)
    starts = Clock.starts[5:]
    print(f"LOSS {trainer.callback_metrics['mse'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
