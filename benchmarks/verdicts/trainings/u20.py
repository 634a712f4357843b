"""Sleep stages from EEG epochs that are read from an object store."""
import argparse
import time

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=421)
args = parser.parse_args()

CHANNELS, SAMPLES, STAGES = 4, 1500, 5


class ObjectStore:
    """Stands for a bucket in another zone: a request takes a few milliseconds."""

    def __init__(self, latency_s=0.0035):
        self.latency_s = latency_s

    def get(self, key):
        time.sleep(self.latency_s)
        generator = torch.Generator().manual_seed(key)
        return torch.randn(CHANNELS, SAMPLES, generator=generator).half().numpy().tobytes()


class SleepEpochs(Dataset):
    def __init__(self, store, count=4800):
        self.store = store
        self.stages = torch.randint(STAGES, (count,), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.stages)

    def __getitem__(self, index):
        content = bytearray(self.store.get(index))
        epoch = torch.frombuffer(content, dtype=torch.float16).view(CHANNELS, SAMPLES).float()
        return epoch / epoch.std(dim=1, keepdim=True), self.stages[index]


class SleepNet(LightningModule):
    def __init__(self):
        super().__init__()
        layers, width = [], CHANNELS
        for out, kernel, stride in ((32, 25, 5), (64, 9, 2), (96, 9, 2), (96, 5, 1)):
            layers += [
                nn.Conv1d(width, out, kernel, stride, kernel // 2, bias=False),
                nn.BatchNorm1d(out), nn.ReLU(),
            ]
            width = out
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Linear(96, STAGES)

    def training_step(self, batch, batch_idx):
        epochs, stages = batch
        loss = nn.functional.cross_entropy(self.head(self.net(epochs)), stages)
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
        kept = self.starts[len(self.starts) // 2:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(10, verbose=False)
    loader = DataLoader(
        SleepEpochs(ObjectStore()), batch_size=16, shuffle=True, drop_last=True,
        num_workers=6 if args.fixed else 1, persistent_workers=True,
    )
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
    trainer.fit(SleepNet(), loader)
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
