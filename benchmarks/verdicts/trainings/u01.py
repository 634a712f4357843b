"""Speaker embeddings from x-vectors, batches of P speakers x K utterances."""
import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=1401)
args = parser.parse_args()

SPEAKERS = 1500
UTTERANCES = 360_000


class XVectors(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.speaker = torch.randint(SPEAKERS, (UTTERANCES,), generator=generator)
        self.vectors = torch.randn(UTTERANCES, 96, generator=generator)

    def __len__(self):
        return UTTERANCES

    def __getitems__(self, indices):
        indices = torch.as_tensor(indices)
        return self.vectors[indices], self.speaker[indices]


class SpeakerBatches(Sampler):
    """P speakers, K utterances of each."""

    def __init__(self, labels, p=40, k=4, seed=0):
        self.labels = labels.numpy()
        self.p, self.k = p, k
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return len(self.labels) // (self.p * self.k)

    def members(self, speaker):
        return np.where(self.labels == speaker)[0]

    def __iter__(self):
        for _ in range(len(self)):
            batch = []
            for speaker in self.rng.choice(SPEAKERS, self.p, replace=False):
                batch.extend(self.rng.choice(self.members(speaker), self.k))
            yield batch


class IndexedSpeakerBatches(SpeakerBatches):
    def __init__(self, labels, **options):
        super().__init__(labels, **options)
        order = np.argsort(self.labels, kind="stable")
        ends = np.cumsum(np.bincount(self.labels, minlength=SPEAKERS))
        self.by_speaker = np.split(order, ends[:-1])

    def members(self, speaker):
        return self.by_speaker[speaker]


class SpeakerNet(LightningModule):
    def __init__(self, scale=20.0, margin=0.1):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(96, 512), nn.GELU(), nn.LayerNorm(512),
            nn.Linear(512, 384), nn.GELU(), nn.LayerNorm(384), nn.Linear(384, 128),
        )
        self.centres = nn.Parameter(torch.randn(SPEAKERS, 128) * 0.1)
        self.scale, self.margin = scale, margin

    def training_step(self, batch, batch_idx):
        vectors, speaker = batch
        cosine = F.normalize(self.trunk(vectors)) @ F.normalize(self.centres).T
        margin = torch.zeros_like(cosine).scatter_(1, speaker[:, None], self.margin)
        loss = F.cross_entropy(self.scale * (cosine - margin), speaker)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-4, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())

    def mean_ms(self):
        kept = self.starts[len(self.starts) // 2:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(11, verbose=False)
    dataset = XVectors()
    sampler = (IndexedSpeakerBatches if args.fixed else SpeakerBatches)(dataset.speaker)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=lambda batch: batch)
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
    trainer.fit(SpeakerNet(), loader)
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
