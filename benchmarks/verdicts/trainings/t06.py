"""A small DCGAN with two optimizers."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self, latent=64):
        super().__init__()
        self.start = nn.Linear(latent, 96 * 8 * 8)
        self.up = nn.Sequential(
            nn.ReLU(),
            nn.ConvTranspose2d(96, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
        )

    def forward(self, z):
        return self.up(self.start(z).view(-1, 96, 8, 8))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 48, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(48, 96, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(96 * 64, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


class GAN(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = Generator()
        self.discriminator = Discriminator()

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(len(real), 64)

        self.toggle_optimizer(opt_g)
        fake = self.generator(z)
        g_loss = F.softplus(-self.discriminator(fake)).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        d_real = self.discriminator(real)
        d_fake = self.discriminator(fake.detach())
        d_loss = F.softplus(-d_real).mean() + F.softplus(d_fake).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
        d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
        return [g, d]


class StepTimes(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", metavar="DIR")
    parser.add_argument("--steps", type=int, default=180)
    args = parser.parse_args()
    seed_everything(2, verbose=False)
    data = TensorDataset(torch.rand(4096, 3, 32, 32) * 2 - 1)
    loader = DataLoader(data, batch_size=96, shuffle=True, drop_last=True)
    times = StepTimes()
    callbacks = [times]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=2 * args.steps, logger=False,
        callbacks=callbacks, default_root_dir=args.profile, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(GAN(), loader)
    s = times.starts[5:]
    print(f"LOSS {trainer.callback_metrics['d_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (s[-1] - s[0]) / (len(s) - 1):.3f}")
