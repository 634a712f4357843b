"""Convolutional VAE that is watched closely while it trains."""
import argparse
import tempfile
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=650)
args = parser.parse_args()


class VAE(LightningModule):
    def __init__(self, latent=24):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 24, 3, 2, 1), nn.SiLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.SiLU(),
            nn.Conv2d(48, 64, 3, 1, 1), nn.SiLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.SiLU(),
            nn.Flatten(), nn.Linear(64 * 49, 2 * latent),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 64 * 49), nn.SiLU(), nn.Unflatten(1, (64, 7, 7)),
            nn.Conv2d(64, 64, 3, 1, 1), nn.SiLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.SiLU(), nn.Conv2d(16, 1, 3, 1, 1),
        )

    def training_step(self, batch, batch_idx):
        (x,) = batch
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        reconstruction = F.mse_loss(self.decoder(z), x, reduction="sum") / len(x)
        divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        loss = reconstruction + divergence
        self.log_dict({"loss": loss, "reconstruction": reconstruction, "divergence": divergence})
        return loss

    def on_before_optimizer_step(self, optimizer):
        if args.fixed:
            if self.global_step % 50 == 0:
                grads = [p.grad for p in self.parameters()]
                self.log("grad_norm", nn.utils.get_total_norm(grads))
            return
        for name, parameter in self.named_parameters():
            self.log(f"weight/{name}", parameter.detach().norm(), on_step=True, on_epoch=True)
            self.log(f"grad/{name}", parameter.grad.norm(), on_step=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Pace(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(23, verbose=False)
    images = torch.rand(6000, 1, 28, 28)
    loader = DataLoader(TensorDataset(images), batch_size=48, shuffle=True, drop_last=True)
    pace = Pace()
    callbacks = [pace]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks,
        logger=CSVLogger(args.profile or tempfile.mkdtemp(), flush_logs_every_n_steps=100),
        log_every_n_steps=50 if args.fixed else 5,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(VAE(), loader)
    starts = pace.starts[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
