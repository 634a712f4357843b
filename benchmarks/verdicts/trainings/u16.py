"""Word-level LSTM with truncated backpropagation: the state goes from batch to batch."""
import argparse
import time

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--profile")
parser.add_argument("--fixed", action="store_true", help="nothing to fix")
parser.add_argument("--steps", type=int, default=451)
args = parser.parse_args()

WORDS, STREAMS, SPAN = 2000, 16, 40


class Streams(Dataset):
    """Parallel streams of a corpus; item i is the i-th span of all of them."""

    def __init__(self, words=400_000):
        generator = torch.Generator().manual_seed(50)
        corpus = torch.randint(WORDS, (words,), generator=generator)
        self.streams = corpus[:words // STREAMS * STREAMS].view(STREAMS, -1)

    def __len__(self):
        return (self.streams.shape[1] - 1) // SPAN

    def __getitem__(self, index):
        start = index * SPAN
        text = self.streams[:, start:start + SPAN]
        following = self.streams[:, start + 1:start + SPAN + 1]
        return text, following


class WordModel(LightningModule):
    def __init__(self, width=256):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(width, WORDS)
        self.decoder.weight = self.words.weight
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        self.state = None

    def on_train_epoch_start(self):
        self.state = None

    def training_step(self, batch, batch_idx):
        text, following = batch
        output, state = self.lstm(self.dropout(self.words(text)), self.state)
        self.state = tuple(part.detach() for part in state)
        logits = self.decoder(self.dropout(output))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        self.log("train_loss", loss)
        self.log("perplexity", loss.detach().exp(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5.0, fused=True)


class StepClock(Callback):
    def __init__(self):
        self.starts = []

    def on_train_batch_start(self, *_):
        self.starts.append(time.perf_counter())

    def mean_ms(self):
        kept = self.starts[len(self.starts) // 2:]
        return 1e3 * (kept[-1] - kept[0]) / (len(kept) - 1)


def main():
    seed_everything(3, verbose=False)
    loader = DataLoader(Streams(), batch_size=None, shuffle=False)
    clock = StepClock()
    callbacks = [clock]
    if args.profile:
        from lightning_modelprof import ModelProfCallback

        callbacks.append(ModelProfCallback(dirpath=args.profile))
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=args.steps, callbacks=callbacks, logger=False,
        default_root_dir=args.profile, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=0.25,
    )
    trainer.fit(WordModel(), loader)
    print(f"LOSS {trainer.callback_metrics['train_loss'].item():.6f}")
    print(f"STEP_MS {clock.mean_ms():.3f}")


if __name__ == "__main__":
    main()
