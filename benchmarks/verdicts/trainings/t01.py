"""Click prediction on a table of impressions."""
import argparse
import time

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning import Callback, LightningModule, Trainer, seed_everything

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=420)
args = parser.parse_args()

NUMERIC = [f"n{i}" for i in range(24)]
CATEGORICAL = [f"c{i}" for i in range(8)]
CARDINALITY = 400


def make_frame(rows=30000):
    rng = np.random.default_rng(3)
    data = {name: rng.normal(size=rows).astype("float32") for name in NUMERIC}
    data |= {name: rng.integers(0, CARDINALITY, rows) for name in CATEGORICAL}
    frame = pd.DataFrame(data)
    frame["clicked"] = (frame["n0"] + 0.3 * frame["n1"] > 0.4).astype("float32")
    return frame


class Impressions(Dataset):
    def __init__(self, frame):
        self.frame = frame

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, index):
        row = self.frame.iloc[index]
        numeric = torch.tensor(row[NUMERIC].to_numpy(dtype="float32"))
        categorical = torch.tensor(row[CATEGORICAL].to_numpy(dtype="int64"))
        return numeric, categorical, torch.tensor(row["clicked"], dtype=torch.float32)


class ImpressionTensors(Dataset):
    def __init__(self, frame):
        self.numeric = torch.from_numpy(frame[NUMERIC].to_numpy(dtype="float32"))
        self.categorical = torch.from_numpy(frame[CATEGORICAL].to_numpy(dtype="int64"))
        self.clicked = torch.from_numpy(frame["clicked"].to_numpy(dtype="float32"))

    def __len__(self):
        return len(self.clicked)

    def __getitem__(self, index):
        return self.numeric[index], self.categorical[index], self.clicked[index]


class WideAndDeep(LightningModule):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(CARDINALITY, 16) for _ in CATEGORICAL)
        width = len(NUMERIC) + 16 * len(CATEGORICAL)
        self.deep = nn.Sequential(
            nn.Linear(width, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 1)
        )
        self.wide = nn.Linear(len(NUMERIC), 1)

    def forward(self, numeric, categorical):
        embedded = [table(categorical[:, i]) for i, table in enumerate(self.tables)]
        deep = self.deep(torch.cat([numeric, *embedded], dim=1))
        return (deep + self.wide(numeric)).squeeze(1)

    def training_step(self, batch, batch_idx):
        numeric, categorical, clicked = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(numeric, categorical), clicked)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())

    def mean_ms(self):
        kept = self.starts[5:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(1, verbose=False)
    frame = make_frame()
    dataset = ImpressionTensors(frame) if args.fixed else Impressions(frame)
    loader = DataLoader(dataset, batch_size=128, shuffle=True)
    clock = StepClock()
    callbacks = [clock]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(WideAndDeep(), loader)
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
