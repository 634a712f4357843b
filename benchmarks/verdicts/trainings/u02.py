"""Keyword spotting on log-mel spectrograms."""
import argparse
import time

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=701)
args = parser.parse_args()

RATE, N_FFT, HOP, N_MELS = 8000, 512, 160, 64


def hz_to_mel(hz):
    return 2595.0 * np.log10(1.0 + hz / 700.0)


def mel_to_hz(mel):
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


def mel_filterbank(n_mels=N_MELS, n_fft=N_FFT, rate=RATE):
    edges = mel_to_hz(np.linspace(hz_to_mel(40.0), hz_to_mel(rate / 2), n_mels + 2))
    frequencies = np.linspace(0, rate / 2, n_fft // 2 + 1)
    bank = np.zeros((n_mels, len(frequencies)), dtype=np.float32)
    for m in range(n_mels):
        left, centre, right = edges[m:m + 3]
        rising = (frequencies - left) / (centre - left)
        falling = (right - frequencies) / (right - centre)
        bank[m] = np.maximum(0.0, np.minimum(rising, falling))
    return torch.from_numpy(bank)


class LogMel:
    def __init__(self):
        self.bank = mel_filterbank() if args.fixed else None

    def __call__(self, wave):
        bank = self.bank if args.fixed else mel_filterbank()
        window = torch.hann_window(N_FFT)
        spectrum = torch.stft(wave, N_FFT, HOP, window=window, return_complex=True)
        mel = bank @ spectrum.abs().square()
        return (mel + 1e-6).log()


class Keywords(Dataset):
    def __init__(self, count=4000, transform=None):
        generator = torch.Generator().manual_seed(2)
        self.waves = torch.randn(count, RATE // 2, generator=generator) * 0.1
        self.labels = torch.randint(12, (count,), generator=generator)
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.waves[index]), self.labels[index]


class Spotter(LightningModule):
    def __init__(self):
        super().__init__()
        layers, width = [], 1
        for out, stride in ((16, 2), (48, 2), (96, 1)):
            layers += [nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)]
            layers += [nn.ReLU()]
            width = out
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 12))

    def training_step(self, batch, batch_idx):
        spectrograms, labels = batch
        loss = nn.functional.cross_entropy(self.net(spectrograms[:, None]), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main():
    seed_everything(4, verbose=False)
    loader = DataLoader(Keywords(transform=LogMel()), batch_size=32, shuffle=True, drop_last=True)
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
    trainer.fit(Spotter(), loader)
    starts = clock.starts[len(clock.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    main()
