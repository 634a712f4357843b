"""A slow loss, made fast in five steps, each of which the profiler points at.

    python examples/article_003.py
    python examples/article_003.py --accelerator gpu --batch-size 1024 --image-size 256 --workers 8

A small convolutional net is trained with a cross entropy that somebody wrote by hand. Nothing in it looks
wrong. Every stage profiles the training and prints the verdict, what was found, and which lines of this file
wait for values, copy or make tensors on the host in every step. The next stage mends one of them:

    0  as it was written
    1  the weights of the classes are made once and not in every step
    2  the labels are checked where they are loaded and not on the device
    3  the row numbers are made on the device, not by Python's range
    4  torch.nn.NLLLoss for the hand-written sum
    5  torch.nn.CrossEntropyLoss for all of it
    6  that, compiled (with --compile)

On a GPU each of the first three makes the host wait until the device has done all that it was given, which is
why they can cost more than the net. On a CPU nothing waits: the lines are named all the same, and cost no
more than their own work, which is little beside the net.
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
    "as it was written",
    "weights made once",
    "labels checked by the loader",
    "row numbers made on the device",
    "nn.NLLLoss",
    "nn.CrossEntropyLoss",
    "nn.CrossEntropyLoss, compiled",
)
WHAT = {"waits": "values read", "copies": "copies", "host_tensors": "tensors made on the host"}
"""Columns of the table of source lines that tell of a problem."""


class Net(nn.Module):
    """Eight convolutions, each followed by a pooling that halves the image as long as it can."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 8, 12, 16, 20, 24, 28, 32, NUM_CLASSES)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(channels)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        for convolution in self.convolutions:
            images = convolution(images).relu()
            if images.shape[-1] > 1:
                images = nn.functional.max_pool2d(images, 2)
        return images.mean(dim=(2, 3))


def log_softmax(x: Tensor) -> Tensor:
    """Logarithms of the probabilities of the classes."""
    return x - x.exp().sum(-1).log().unsqueeze(-1)


class HandWrittenLoss(nn.Module):
    """A weighted cross entropy, as slow as the stage says."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.register_buffer("weight", torch.tensor([0.1] * NUM_CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of a batch."""
        prediction = log_softmax(output)
        weight = self.weight
        if self.stage < 1:
            weight = torch.Tensor([0.1] * NUM_CLASSES).to(output.device)  # problem 1
        return self.weighted_nll(prediction, target, weight)

    def weighted_nll(self, prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Negative logarithms of the probabilities of the right classes, weighted."""
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
    """The same by torch's own losses."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        weight = torch.tensor([0.1] * NUM_CLASSES)
        self.loss = nn.NLLLoss(weight) if stage == 4 else nn.CrossEntropyLoss(weight)
        self.takes_probabilities = stage == 4

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of a batch."""
        return self.loss(log_softmax(output) if self.takes_probabilities else output, target)


class Classifier(LightningModule):
    """The net and the loss of a stage."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.net = Net()
        self.loss: nn.Module = HandWrittenLoss(stage) if stage < 4 else LibraryLoss(stage)
        if stage == 6:
            self.loss.compile()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """The loss of a batch."""
        images, target = batch
        return self.loss(self.net((images.float() / 255 - 0.5) / 0.5), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Gradient descent with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)


class FakeImages(Dataset[list[Tensor]]):
    """Random images with the shape of photographs, fetched a batch at a time."""

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
    """What one stage took, and what its report says.

    Attributes:
        step_ns: mean time of a step.
        verdict: the first line of the report.
        findings: titles of what was found.
        lines: lines of the losses that wait, copy or make tensors in every step.
    """

    stage: int
    step_ns: float
    verdict: str
    findings: tuple[str, ...]
    lines: tuple[str, ...]


def train(stage: int, options: argparse.Namespace) -> Report:
    """Profile the training of a stage."""
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
    """The figures of a report, and its lines that are in this file's losses."""
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
        step_ns=float(report.sections["benchmark"]["batch_cost_ns"]["avg"]),
        verdict=f"{report.verdict.kind.replace('_', '-').upper()}: {report.verdict.summary}",
        findings=tuple(one.title for one in report.findings if one.status is Status.FOUND),
        lines=tuple(lines),
    )


def parse() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compile", action="store_true", help="also compile the last loss (stage 6)")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(len(STAGES)))
    parser.add_argument("--out", type=Path, help="folder for the reports (default: a temporary one)")
    options = parser.parse_args()
    if options.stages is None:
        options.stages = list(range(len(STAGES) if options.compile else len(STAGES) - 1))
    options.out = options.out or Path(tempfile.mkdtemp(prefix="article_003_"))
    return options


def main() -> None:
    """Train all stages, one after the other; it takes less than a minute."""
    options = parse()
    torch.set_num_threads(1)  # with more, what else the machine does counts for more than the stages
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = []
    for stage in options.stages:
        result = read(stage, train(stage, options))
        results.append(result)
        print(f"\nStage {stage}: {STAGES[stage]}: {result.step_ns / 1e6:.2f} ms per step")
        print(f"  {result.verdict}")
        for finding in result.findings:
            print(f"  found: {finding}")
        for line in result.lines or ("no line waits, copies or makes tensors",):
            print(f"  {line}")
    print(f"\nstage{'':28} ms/step   times as fast as stage {options.stages[0]}")
    for result in results:
        speed = results[0].step_ns / result.step_ns
        print(f"{result.stage}  {STAGES[result.stage]:30}{result.step_ns / 1e6:8.2f}   {speed:.2f}")
    first, last = (options.out / f"stage_{stage}" for stage in (options.stages[0], options.stages[-1]))
    print("On a busy machine one run of each tells little: compare says how sure it is.")
    print(f"\nThe reports are in {options.out}; to compare two of them:")
    print(f"    lightning-modelprof compare {first} {last}")


if __name__ == "__main__":
    main()
