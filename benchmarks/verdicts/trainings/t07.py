"""Transformer encoder for event sequences, with a guard against diverging steps."""
import argparse
import copy
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVENTS = 500


class NaNGuard(Callback):
    """Goes back to the last good state when the loss is not finite."""

    def __init__(self, every=1):
        self.every = every
        self.good = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not torch.isfinite(outputs["loss"]):
            pl_module.load_state_dict(self.good["model"])
            trainer.optimizers[0].load_state_dict(self.good["optimizer"])
        elif batch_idx % self.every == 0:
            state = {
                "model": pl_module.state_dict(),
                "optimizer": trainer.optimizers[0].state_dict(),
            }
            self.good = copy.deepcopy(state)


class EventModel(LightningModule):
    def __init__(self, dim=256):
        super().__init__()
        self.embed = nn.Embedding(EVENTS, dim)
        layer = nn.TransformerEncoderLayer(dim, 8, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 2)

    def training_step(self, batch, batch_idx):
        events, churned = batch
        hidden = self.encoder(self.embed(events))
        loss = F.cross_entropy(self.head(hidden.mean(1)), churned)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-4, fused=True)


class Stopwatch(Callback):
    def __init__(self):
        self.marks = []

    def on_train_batch_start(self, *_):
        self.marks.append(time.perf_counter())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=220)
    args = parser.parse_args()
    seed_everything(8, verbose=False)
    events = torch.randint(0, EVENTS, (3000, 40))
    churned = (events[:, -1] % 2).long()
    loader = DataLoader(TensorDataset(events, churned), 8, shuffle=True, drop_last=True)
    watch = Stopwatch()
    callbacks = [watch, NaNGuard(every=100 if args.fixed else 1)]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, logger=False, callbacks=callbacks,
        gradient_clip_val=1.0, default_root_dir=args.profile, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(EventModel(), loader)
    marks = watch.marks[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (marks[-1] - marks[0]) / (len(marks) - 1):.3f}")
