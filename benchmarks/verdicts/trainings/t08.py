"""Adapts an image tower to a frozen text tower; the classes are given as prompts."""
import argparse
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TEMPLATES = ["a photo of a {}", "a blurry photo of a {}", "a drawing of the {}"]
NAMES = [f"thing{i}" for i in range(24)]
PROMPTS = [template.format(name) for name in NAMES for template in TEMPLATES]


def tokenize(text, length=16):
    ids = [1 + sum(map(ord, word)) % 998 for word in text.split()]
    return torch.tensor(ids + [0] * (length - len(ids)))


class TextTower(nn.Module):
    def __init__(self, dim=192):
        super().__init__()
        self.embed = nn.Embedding(1000, dim)
        layer = nn.TransformerEncoderLayer(dim, 6, 4 * dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.encoder(self.embed(tokens)).mean(1)


class ImageTower(nn.Module):
    def __init__(self, dim=192):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 4, 4), nn.GELU(), nn.Conv2d(32, 64, 3, padding=1), nn.GELU(),
            nn.Conv2d(64, 96, 3, 2, 1), nn.GELU(),
        )
        self.project = nn.Linear(96, dim)

    def forward(self, images):
        return self.project(self.net(images).mean((2, 3)))


class PromptClassifier(LightningModule):
    def __init__(self, fixed):
        super().__init__()
        self.image = ImageTower()
        self.text = TextTower().requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("tokens", torch.stack([tokenize(p) for p in PROMPTS]))
        self.fixed = fixed
        self.cache = None

    def class_vectors(self):
        with torch.no_grad():
            vectors = F.normalize(self.text(self.tokens), dim=1)
        vectors = vectors.view(len(NAMES), len(TEMPLATES), -1).mean(1)
        return F.normalize(vectors, dim=1)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        if self.fixed:
            if self.cache is None:
                self.cache = self.class_vectors()
            classes = self.cache
        else:
            classes = self.class_vectors()
        features = F.normalize(self.image(images), dim=1)
        loss = F.cross_entropy(self.scale.exp() * features @ classes.T, labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, lr=1e-3)


class Laps(Callback):
    def __init__(self):
        self.laps = []

    def on_train_batch_start(self, *_):
        self.laps.append(time.perf_counter())

    def on_train_end(self, *_):
        laps = self.laps[5:]
        self.step_ms = 1e3 * (laps[-1] - laps[0]) / (len(laps) - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=420)
    args = parser.parse_args()
    seed_everything(31, verbose=False)
    data = TensorDataset(torch.randn(2000, 3, 64, 64), torch.randint(0, len(NAMES), (2000,)))
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
    laps = Laps()
    callbacks = [laps]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(PromptClassifier(args.fixed), loader)
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {laps.step_ms:.3f}")


if __name__ == "__main__":
    main()
