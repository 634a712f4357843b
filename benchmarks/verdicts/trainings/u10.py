"""Deep narrow residual network with an exponential moving average of its weights."""
import argparse
import time

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=601)
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return x + self.gain * self.down(nn.functional.silu(self.up(self.norm(x))))


class SpectraNet(LightningModule):
    def __init__(self, width=64, depth=64):
        super().__init__()
        self.inputs = nn.Linear(256, width)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.outputs = nn.Linear(width, 5)

    def training_step(self, batch, batch_idx):
        spectra, properties = batch
        predicted = self.outputs(self.blocks(self.inputs(spectra)))
        loss = nn.functional.mse_loss(predicted, properties)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class EMA(Callback):
    """Keeps averaged weights; swaps them in for evaluation."""

    def __init__(self, decay=0.999):
        self.decay = decay
        self.shadow, self.backup = {}, {}

    def on_fit_start(self, trainer, module):
        for name, param in module.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def on_train_batch_end(self, trainer, module, *_):
        if args.fixed:
            weights = [p.data for _, p in module.named_parameters() if p.requires_grad]
            torch._foreach_lerp_(list(self.shadow.values()), weights, 1.0 - self.decay)
            return
        for name, param in module.named_parameters():
            if param.requires_grad:
                assert name in self.shadow
                new_average = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
                self.shadow[name] = new_average.clone()

    def on_validation_start(self, trainer, module):
        self.backup = {name: p.data for name, p in module.named_parameters()}
        for name, param in module.named_parameters():
            param.data = self.shadow[name]

    def on_validation_end(self, trainer, module):
        for name, param in module.named_parameters():
            param.data = self.backup[name]


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())

    def mean_ms(self):
        kept = self.starts[len(self.starts) // 2:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(29, verbose=False)
    spectra, properties = torch.randn(8000, 256), torch.randn(8000, 5)
    loader = DataLoader(TensorDataset(spectra, properties), batch_size=64, shuffle=True)
    clock = StepClock()
    callbacks = [clock, EMA()]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(SpectraNet(), loader)
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
