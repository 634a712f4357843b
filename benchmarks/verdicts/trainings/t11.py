"""Topic of support tickets, which come as lines of JSON."""
import argparse
import json
import random
import re
import time
import zlib

import torch
import torch.nn.functional as F
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

VOCABULARY = 5000
TOPICS = ["billing", "login", "delivery", "bug"]
URL = re.compile(r"https?://[\w./-]+")
EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.]+")
TOKEN = re.compile(r"<\w+>|[a-z]+(?:'[a-z]+)?|\d+|[^\w\s]")


def make_lines(n=4000):
    rng = random.Random(6)
    words = ["".join(rng.choices("abcdefghilmnoprstu", k=rng.randint(2, 9))) for _ in range(3000)]
    lines = []
    for i in range(n):
        topic = rng.randrange(len(TOPICS))
        text = rng.choices(words[topic * 500 : topic * 500 + 1500], k=rng.randint(120, 180))
        text.insert(9, f"https://shop.example/orders/{i}")
        text.insert(30, f"user{i}@mail.example.org")
        lines.append(json.dumps({"id": i, "topic": TOPICS[topic], "body": " ".join(text).title()}))
    return lines


def encode(line, length=160):
    record = json.loads(line)
    body = EMAIL.sub("<email>", URL.sub("<url>", record["body"].lower()))
    ids = [zlib.crc32(token.encode()) % VOCABULARY for token in TOKEN.findall(body)][:length]
    return ids + [0] * (length - len(ids)), TOPICS.index(record["topic"])


def collate_lines(lines):
    ids, topics = zip(*[encode(line) for line in lines])
    return torch.tensor(ids), torch.tensor(topics)


def collate_tensors(rows):
    ids, topics = zip(*rows)
    return torch.stack(ids), torch.stack(topics)


class Tickets(LightningDataModule):
    def __init__(self, fixed):
        super().__init__()
        self.fixed = fixed

    def setup(self, stage):
        self.rows = make_lines()
        if self.fixed:
            encoded = [encode(line) for line in self.rows]
            self.rows = [(torch.tensor(ids), torch.tensor(topic)) for ids, topic in encoded]

    def train_dataloader(self):
        collate = collate_tensors if self.fixed else collate_lines
        return DataLoader(self.rows, batch_size=64, shuffle=True, collate_fn=collate, drop_last=True)


class TextCNN(LightningModule):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 48, k, padding=k // 2) for k in (3, 5))
        self.head = nn.Linear(96, len(TOPICS))

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        return self.head(torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], dim=1))

    def training_step(self, batch, batch_idx):
        ids, topics = batch
        loss = F.cross_entropy(self(ids), topics)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Clock(Callback):
    def __init__(self):
        self.ticks = []

    def on_train_batch_start(self, *_):
        self.ticks.append(time.perf_counter())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile")
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    seed_everything(13, verbose=False)
    clock = Clock()
    callbacks = [clock]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback())
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TextCNN(), datamodule=Tickets(args.fixed))
    ticks = clock.ticks[5:]
    print(f"LOSS {trainer.callback_metrics['loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (ticks[-1] - ticks[0]) / (len(ticks) - 1):.3f}")
