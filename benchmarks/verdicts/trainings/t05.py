"""A student learns from a trained teacher (knowledge distillation)."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def block(inp, out):
    return nn.Sequential(
        nn.Conv2d(inp, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
        nn.MaxPool2d(2),
    )


def convnet(width, classes=20):
    return nn.Sequential(
        block(3, width), block(width, 2 * width), block(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes),
    )


class Distiller(LightningModule):
    def __init__(self, temperature=3.0, alpha=0.7, fixed=False):
        super().__init__()
        self.teacher = convnet(40)
        self.teacher.eval()
        self.student = convnet(36)
        self.temperature = temperature
        self.alpha = alpha
        self.fixed = fixed

    def on_train_start(self):
        self.teacher.eval()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        if self.fixed:
            with torch.no_grad():
                targets = self.teacher(images)
        else:
            targets = self.teacher(images)
        logits = self.student(images)
        t = self.temperature
        soft = F.kl_div(
            F.log_softmax(logits / t, dim=1), F.softmax(targets / t, dim=1), reduction="batchmean"
        ) * t * t
        loss = self.alpha * soft + (1 - self.alpha) * F.cross_entropy(logits, labels)
        self.log_dict({"loss": loss, "soft": soft})
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=1e-3)


class BatchTimes(Callback):
    def __init__(self):
        self.times = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.times.append(time.perf_counter())

    def report(self):
        times = self.times[5:]
        print(f"STEP_MS {1000 * (times[-1] - times[0]) / (len(times) - 1):.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    seed_everything(21, verbose=False)
    images = torch.randn(2048, 3, 40, 40)
    labels = torch.randint(0, 20, (2048,))
    loader = DataLoader(TensorDataset(images, labels), 48, shuffle=True, drop_last=True)
    times = BatchTimes()
    callbacks = [times]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, logger=False, callbacks=callbacks,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Distiller(fixed=args.fixed), loader)
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    times.report()


if __name__ == "__main__":
    main()
