"""Drug response from gene expression, with L2 regularization."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=451)
args = parser.parse_args()

GENES, DRUGS = 2000, 120


class ResponseModel(LightningModule):
    def __init__(self, l2=1e-4, lr=3e-4):
        super().__init__()
        self.l2, self.lr = l2, lr
        self.expression = nn.Sequential(
            nn.Linear(GENES, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU(),
            nn.Linear(1024, 512), nn.ReLU(),
        )
        self.drugs = nn.Embedding(DRUGS, 512)
        self.head = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, genes, drug):
        joint = torch.cat([self.expression(genes), self.drugs(drug)], dim=1)
        return self.head(joint).squeeze(1)

    def training_step(self, batch, batch_idx):
        genes, drug, response = batch
        mse = F.mse_loss(self(genes, drug), response)
        loss = mse
        if not args.fixed:
            l2_norm = torch.tensor(0.0)
            for parameter in self.parameters():
                l2_norm = l2_norm + parameter.pow(2).sum()
            loss = mse + self.l2 * l2_norm
        self.log("train_mse", mse)
        return loss

    def configure_optimizers(self):
        decay = 2 * self.l2 if args.fixed else 0.0
        return torch.optim.Adam(self.parameters(), lr=self.lr, weight_decay=decay, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())

    def mean_ms(self):
        kept = self.starts[len(self.starts) // 2:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(27, verbose=False)
    genes = torch.randn(6000, GENES)
    drug = torch.randint(DRUGS, (6000,))
    response = genes[:, :20].mean(1) + 0.1 * torch.randn(6000)
    dataset = TensorDataset(genes, drug, response)
    loader = DataLoader(dataset, batch_size=96, shuffle=True, drop_last=True)
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
    trainer.fit(ResponseModel(), loader)
    print(f"LOSS {trainer.callback_metrics['train_mse'].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
