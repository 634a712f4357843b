"""Make a slow loss fast in five steps that the profiler points out.

    python examples/article_003.py
    python examples/article_003.py --accelerator gpu --batch-size 1024 --image-size 256 --workers 8

A small convolutional net trains with a hand-written cross entropy that looks fine. Each stage profiles the
training and prints the verdict, the findings and the lines in this file that wait for values, copy tensors or
create them on the CPU in every step. The next stage fixes one of them:

    0  original code
    1  create the class weights once instead of in every step
    2  check the labels in the DataLoader instead of on the device
    3  create the row indices on the device instead of with Python's range
    4  use torch.nn.NLLLoss instead of the hand-written sum
    5  use torch.nn.CrossEntropyLoss for everything
    6  compile it (with --compile)

On a GPU, each of the first three makes the CPU wait until the device is idle, so they can cost more than the
net. On a CPU nothing waits. The report names the same lines, but they cost little compared to the net.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.report.model import Report, Status

NUM_CLASSES = 10
STAGES = (
    "original code",
    "weights created once",
    "labels checked in the loader",
    "row indices on the device",
    "nn.NLLLoss",
    "nn.CrossEntropyLoss",
    "nn.CrossEntropyLoss, compiled",
)
WHAT = {"waits": "values read", "copies": "copies", "host_tensors": "tensors created on the CPU"}
"""Columns of the source lines table that show a problem."""


class Net(nn.Module):
    """Eight convolutions, each followed by pooling while the image is larger than a pixel."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 8, 12, 16, 20, 24, 28, 32, NUM_CLASSES)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(channels)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (batch, classes)."""
        for convolution in self.convolutions:
            images = convolution(images).relu()
            if images.shape[-1] > 1:
                images = nn.functional.max_pool2d(images, 2)
        return images.mean(dim=(2, 3))


def log_softmax(x: Tensor) -> Tensor:
    """Return the log probabilities of the classes."""
    return x - x.exp().sum(-1).log().unsqueeze(-1)


class HandWrittenLoss(nn.Module):
    """A weighted cross entropy with the problems left in this stage."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.register_buffer("weight", torch.tensor([0.1] * NUM_CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the batch's loss."""
        prediction = log_softmax(output)
        weight = self.weight
        if self.stage < 1:
            weight = torch.Tensor([0.1] * NUM_CLASSES).to(output.device)  # problem 1
        return self.weighted_nll(prediction, target, weight)

    def weighted_nll(self, prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted negative log likelihood."""
        if self.stage < 2:
            assert target.max() < NUM_CLASSES  # problem 2
        if self.stage < 3:
            nll = -prediction[range(target.shape[0]), target]  # problem 3
        else:
            rows = torch.arange(target.shape[0], device=target.device)
            nll = -prediction[rows, target]
        nll = nll * weight[target]
        nll = nll / weight[target].sum()
        return nll.sum()


class LibraryLoss(nn.Module):
    """The same loss with torch's own modules."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        weight = torch.tensor([0.1] * NUM_CLASSES)
        self.loss = nn.NLLLoss(weight) if stage == 4 else nn.CrossEntropyLoss(weight)
        self.takes_probabilities = stage == 4

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the batch's loss."""
        return self.loss(log_softmax(output) if self.takes_probabilities else output, target)


class Classifier(LightningModule):
    """The net with a stage's loss."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.net = Net()
        self.loss: nn.Module = HandWrittenLoss(stage) if stage < 4 else LibraryLoss(stage)
        if stage == 6:
            self.loss.compile()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the batch's loss."""
        images, target = batch
        return self.loss(self.net((images.float() / 255 - 0.5) / 0.5), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use gradient descent with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)


class FakeImages(Dataset[list[Tensor]]):
    """Random images, fetched a batch at a time."""

    def __init__(self, num_images: int, size: int, *, checked: bool) -> None:
        self.images = torch.randint(0, 256, (256, 3, size, size), dtype=torch.uint8)
        self.labels = torch.randint(0, NUM_CLASSES, (num_images,))
        self.checked = checked

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        rows = torch.tensor(indices)
        labels = self.labels[rows]
        if self.checked and labels.max() >= NUM_CLASSES:
            raise ValueError(f"a label of {int(labels.max())}")
        return [self.images[rows % len(self.images)], labels]


@dataclass(frozen=True)
class Result:
    """One stage's step time and findings.

    Attributes:
        step_ns: Mean step time in nanoseconds.
        verdict: The first line of the report.
        findings: Titles of the findings.
        lines: Lines in the losses that wait, copy or create tensors in every step.
    """

    stage: int
    step_ns: float
    verdict: str
    findings: tuple[str, ...]
    lines: tuple[str, ...]


def train(stage: int, options: argparse.Namespace) -> Report:
    """Profile one stage's training."""
    seed_everything(0, verbose=False)
    num_images = options.steps * options.batch_size
    loader = DataLoader(
        FakeImages(num_images, options.image_size, checked=stage >= 2),
        options.batch_size,
        num_workers=options.workers,
        pin_memory=options.accelerator == "gpu",
        collate_fn=list,
        drop_last=True,
    )
    callback = ModelProfCallback(
        active=5,
        wait=8,
        flops=True,
        report={"terminal": False, "progress_bar": False},
        dirpath=options.out / f"stage_{stage}",
    )
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=1,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|torch")
        trainer.fit(Classifier(stage), loader)
    assert callback.report is not None
    return callback.report


def read(stage: int, report: Report) -> Result:
    """Read a report's figures and its lines in this file's losses."""
    table = next(table for table in report.tables if table.id == "source_lines")
    keys = [column.key for column in table.columns]
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    lines = []
    for cells in table.rows:
        row = dict(zip(keys, cells, strict=True))
        file, _, line = str(row["place"]).rpartition(":")
        does = [f"{what}: {row[key]}" for key, what in WHAT.items() if row[key]]
        is_ours = Path(file).name == Path(__file__).name and "__getitems__" not in str(row["function"])
        if is_ours and does:
            lines.append(f"line {line}: {', '.join(does)}: {source[int(line) - 1].strip()}")
    assert report.verdict is not None
    return Result(
        stage=stage,
        step_ns=float(report.summary.benchmark.batch_cost_ns.avg),
        verdict=f"{report.verdict.kind.replace('_', '-').upper()}: {report.verdict.summary}",
        findings=tuple(one.title for one in report.findings if one.status is Status.FOUND),
        lines=tuple(lines),
    )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compile", action="store_true", help="add stage 6, which compiles the last loss")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(len(STAGES)))
    parser.add_argument("--out", type=Path, help="folder for the reports (default: a temporary one)")
    options = parser.parse_args()
    if options.stages is None:
        options.stages = list(range(len(STAGES) if options.compile else len(STAGES) - 1))
    options.out = options.out or Path(tempfile.mkdtemp(prefix="article_003_"))
    return options


def main() -> None:
    """Train all stages in turn, which takes less than a minute."""
    options = parse()
    torch.set_num_threads(
        1
    )  # with more threads, noise from other processes outweighs the differences between stages
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = []
    for stage in options.stages:
        result = read(stage, train(stage, options))
        results.append(result)
        print(f"\nStage {stage} ({STAGES[stage]}): {result.step_ns / 1e6:.2f} ms per step")
        print(f"  {result.verdict}")
        for finding in result.findings:
            print(f"  found: {finding}")
        for line in result.lines or ("no line waits, copies or creates tensors",):
            print(f"  {line}")
    print(f"\nstage{'':28} ms/step   speedup over stage {options.stages[0]}")
    for result in results:
        speed = results[0].step_ns / result.step_ns
        print(f"{result.stage}  {STAGES[result.stage]:30}{result.step_ns / 1e6:8.2f}   {speed:.2f}")
    first, last = (options.out / f"stage_{stage}" for stage in (options.stages[0], options.stages[-1]))
    print("On a busy machine, one run per stage isn't enough. compare shows how sure the result is.")
    print(f"\nThe reports are in {options.out}. To compare two of them:")
    print(f"    lightning-modelprof compare {first} {last}")


if __name__ == "__main__":
    main()
