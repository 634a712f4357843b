"""Topic classification of support tickets with a small transformer."""
import argparse
import time

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--steps", type=int, default=261)
args = parser.parse_args()

VOCABULARY, TOPICS, MAX_LENGTH, PAD = 8000, 20, 256, 0


class Tickets(Dataset):
    def __init__(self, count=6000):
        generator = torch.Generator().manual_seed(8)
        lengths = torch.empty(count).log_normal_(3.6, 0.45, generator=generator)
        self.texts = [
            torch.randint(1, VOCABULARY, (length,), generator=generator)
            for length in lengths.long().clamp(8, MAX_LENGTH).tolist()
        ]
        self.topics = torch.randint(TOPICS, (count,), generator=generator)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], self.topics[index]


def collate(samples):
    texts, topics = zip(*samples)
    if args.fixed:
        return pad_sequence(texts, batch_first=True, padding_value=PAD), torch.stack(topics)
    tokens = torch.full((len(texts), MAX_LENGTH), PAD)
    for row, text in enumerate(texts):
        tokens[row, :len(text)] = text
    return tokens, torch.stack(topics)


class TicketClassifier(LightningModule):
    def __init__(self, width=96, depth=3):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.positions = nn.Parameter(torch.randn(MAX_LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 3 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOPICS)

    def forward(self, tokens):
        padding = tokens == PAD
        x = self.tokens(tokens) + self.positions[:tokens.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(2).to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1))

    def training_step(self, batch, batch_idx):
        tokens, topics = batch
        loss = nn.functional.cross_entropy(self(tokens), topics)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())

    def mean_ms(self):
        kept = self.starts[len(self.starts) // 2:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(17, verbose=False)
    loader = DataLoader(Tickets(), batch_size=12, shuffle=True, collate_fn=collate, drop_last=True)
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
    trainer.fit(TicketClassifier(), loader)
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
