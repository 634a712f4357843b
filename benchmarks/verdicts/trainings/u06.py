"""Physics-informed network for Burgers' equation."""
import argparse
import math
import time

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true", help="nothing to fix")
parser.add_argument("--steps", type=int, default=551)
args = parser.parse_args()

VISCOSITY = 0.01 / math.pi


class Collocation(Dataset):
    """An item is a whole batch of points: inside, at t = 0 and at the walls."""

    def __init__(self, batches=150, inside=2048, edge=256):
        self.batches, self.inside, self.edge = batches, inside, edge

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inside = torch.rand(self.inside, 2, generator=generator) * torch.tensor([1.0, 2.0])
        inside = inside - torch.tensor([0.0, 1.0])
        x0 = 2 * torch.rand(self.edge, 1, generator=generator) - 1
        start = torch.cat([torch.zeros_like(x0), x0], 1)
        times = torch.rand(self.edge, 1, generator=generator)
        walls = torch.cat([times, torch.randint(2, times.shape, generator=generator) * 2.0 - 1], 1)
        return inside, start, walls


class Burgers(LightningModule):
    def __init__(self, width=96, depth=5):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def residual(self, points):
        points = points.requires_grad_(True)
        u = self.net(points)
        gradient = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        u_t, u_x = gradient[:, :1], gradient[:, 1:]
        u_xx = torch.autograd.grad(u_x.sum(), points, create_graph=True)[0][:, 1:]
        return u_t + u * u_x - VISCOSITY * u_xx

    def training_step(self, batch, batch_idx):
        inside, start, walls = batch
        physics = self.residual(inside).square().mean()
        initial = (self.net(start) + torch.sin(math.pi * start[:, 1:])).square().mean()
        boundary = self.net(walls).square().mean()
        loss = physics + 10 * initial + 10 * boundary
        self.log_dict({"loss": loss, "physics": physics, "initial": initial, "boundary": boundary})
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3, fused=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())

    def mean_ms(self):
        kept = self.starts[len(self.starts) // 2:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(9, verbose=False)
    loader = DataLoader(Collocation(), batch_size=None, shuffle=True)
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
    trainer.fit(Burgers(), loader)
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
