"""Character model of source code; the cluster may preempt the job, so it is saved often."""
import argparse
import tempfile
import time

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=401)
args = parser.parse_args()

CHARACTERS, CONTEXT = 128, 64


class Snippets(Dataset):
    def __init__(self, length=400_000):
        generator = torch.Generator().manual_seed(77)
        self.text = torch.randint(CHARACTERS, (length,), generator=generator)

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index):
        start = index * CONTEXT
        return self.text[start:start + CONTEXT], self.text[start + 1:start + CONTEXT + 1]


class Block(nn.Module):
    def __init__(self, width, heads=6):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        n, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class CodeModel(LightningModule):
    def __init__(self, width=384, depth=4):
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, CHARACTERS)

    def training_step(self, batch, batch_idx):
        text, following = batch
        logits = self.head(self.blocks(self.characters(text) + self.positions))
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())


def main(folder):
    seed_everything(7, verbose=False)
    loader = DataLoader(Snippets(), batch_size=2, shuffle=True, drop_last=True)
    clock = StepClock()
    saving = ModelCheckpoint(
        dirpath=f"{folder}/checkpoints", every_n_train_steps=200 if args.fixed else 5,
        save_top_k=1, save_last=False,
    )
    callbacks = [clock, saving]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(CodeModel(), loader)
    starts = clock.starts[len(clock.starts) // 2:]
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {1e3 * (starts[-1] - starts[0]) / (len(starts) - 1):.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
