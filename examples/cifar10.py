"""Find out why training is slow, fix it and measure the gain, in four steps.

The network comes from PaddlePaddle's profiler tutorial: three convolutions that classify 32x32 images. The
tutorial's four steps are:

    1. Train without a profiler window and note the steps per second (ips).
           python examples/cifar10.py --timer-only
    2. Profile a few steps and see where the time goes.
           python examples/cifar10.py
       The report's Reader Ratio shows that training waits for data more than a third of the time.
    3. Change one thing, and profile again to check its effect.
           python examples/cifar10.py --num-workers 2
    4. Train without a window again and compare with step 1.
           python examples/cifar10.py --num-workers 2 --timer-only

To run all four and print the gain:
           python examples/cifar10.py --compare

Workers need free CPUs. On a busy machine the fix gains little.

The data is scikit-learn's handwritten digits (see digits.py), so nothing is downloaded. To use CIFAR-10,
unpack cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html and pass --data-dir.
First run: pip install -e ".[examples]"
"""

from __future__ import annotations

import argparse
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import Digits, augment
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Accuracy

from lightning_modelprof import ModelProfCallback

Images = Dataset[tuple[Tensor, int]]  # (image, label) pairs


class ConvNet(LightningModule):
    """The tutorial's network, without any profiling code."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.conv3 = nn.Conv2d(64, 64, kernel_size=3)
        self.linear1 = nn.Linear(1024, 64)
        self.linear2 = nn.Linear(64, num_classes)
        self.accuracy = Accuracy(task="multiclass", num_classes=num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores for a batch of 3x32x32 images."""
        x = max_pool2d(relu(self.conv1(images)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        x = relu(self.conv3(x)).flatten(1)
        return self.linear2(relu(self.linear1(x)))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the batch's loss."""
        images, labels = batch
        scores = self(images)
        loss = cross_entropy(scores, labels)
        self.accuracy(scores, labels)
        self.log("train_loss", loss)
        self.log("train_accuracy", self.accuracy)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use Adam, as in the tutorial."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Cifar10(Images):
    """CIFAR-10's 50,000 training images ("python version"), augmented like the digits.

    The files are pickles, which can run code when loaded. Only use files you trust.

    Args:
        data_dir: The directory `cifar-10-batches-py`, or the one that contains it.

    Raises:
        FileNotFoundError: If there are no `data_batch_*` files.
    """

    def __init__(self, data_dir: Path) -> None:
        folder = data_dir if data_dir.name == "cifar-10-batches-py" else data_dir / "cifar-10-batches-py"
        files = sorted(folder.glob("data_batch_*"))
        if not files:
            found = ", ".join(sorted(path.name for path in data_dir.glob("*"))[:5]) or "nothing"
            raise FileNotFoundError(
                f"--data-dir {data_dir}: expected the files {folder}/data_batch_1 ... data_batch_5,"
                f" found {found if data_dir.is_dir() else 'no such folder'}."
                " Unpack cifar-10-python.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html) there,"
                " or leave out --data-dir to train on scikit-learn's digits."
            )
        batches = [pickle.loads(path.read_bytes(), encoding="bytes") for path in files]
        pixels = np.concatenate([batch[b"data"] for batch in batches])
        self.images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        self.labels = [int(label) for batch in batches for label in batch[b"labels"]]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return augment(Image.fromarray(self.images[index])), self.labels[index]


def train(
    args: argparse.Namespace,
    images: Images,
    *,
    num_workers: int,
    timer_only: bool,
    name: str | None = None,
    terminal: bool = True,
) -> ModelProfCallback:
    """Train a new network for `--max-steps` steps; returns the callback with the report."""
    seed_everything(args.seed, verbose=False)
    loader = DataLoader(
        images,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )

    # Profiling needs only this callback. It prints the report when fit() ends, if terminal is true.
    if timer_only:
        profiling = ModelProfCallback(timer_only=True, report={"terminal": terminal})
    elif args.steps:
        profiling = ModelProfCallback(steps=tuple(args.steps), report={"terminal": terminal})
    else:
        profiling = ModelProfCallback(active=10, report={"terminal": terminal})

    logger = TensorBoardLogger(args.log_dir, name=None, sub_dir=name)
    trainer = Trainer(
        max_steps=args.max_steps,
        devices=1,
        callbacks=[profiling],
        logger=logger,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(ConvNet(), loader)
    return profiling


def compare(args: argparse.Namespace, images: Images) -> None:
    """Run the four steps; print the second one's report and the gain."""
    workers = args.num_workers or 2

    print("--- 1 of 4: Baseline without a profiler window. Data loading runs in the main process.")
    baseline = train(args, images, num_workers=0, timer_only=True, name="1_baseline", terminal=False)
    print("--- 2 of 4: The same with a window of ten steps, to see where the time goes.")
    profile = train(args, images, num_workers=0, timer_only=False, name="2_profile")
    print(f"--- 3 of 4: The fix. {workers} workers load data during training steps.")
    fixed_profile = train(
        args, images, num_workers=workers, timer_only=False, name="3_fixed_profile", terminal=False
    )
    print("--- 4 of 4: The fix without a window, to measure the gain.")
    fixed = train(args, images, num_workers=workers, timer_only=True, name="4_fixed", terminal=False)

    before, after = benchmark(baseline), benchmark(fixed)
    print(f"Before and after:\n{'num_workers':>13}{'Reader Ratio':>15}{'batch_cost':>13}{'ips':>18}")
    for num_workers, figures in ((0, before), (workers, after)):
        reader_ratio, batch_cost_ns = figures.reader_ratio.avg, figures.batch_cost_ns.avg
        print(
            f"{num_workers:>13}{reader_ratio:>15.1%}{batch_cost_ns / 1e6:>10.2f} ms"
            f"{figures.steps_per_s.avg:>9.2f} steps/s"
        )

    # Each setting ran twice, once with a window, whose steps these figures exclude. The difference between
    # the two shows how much the machine varies from run to run.
    repeats = ((before, benchmark(profile)), (after, benchmark(fixed_profile)))
    drift = max(abs(math.log(one.steps_per_s.avg / other.steps_per_s.avg)) for one, other in repeats)
    print(gain(before.steps_per_s, after.steps_per_s, drift))


def benchmark(callback: ModelProfCallback) -> Any:
    """Return the figures for a run's clean steps, which make runs comparable."""
    if callback.report is None:
        raise RuntimeError("no report; the callback warned about the reason during training")
    figures = callback.report.summary.benchmark
    if figures is None:
        raise SystemExit("error: no clean steps to compare. Increase --max-steps.")
    return figures


def gain(before: Any, after: Any, drift: float) -> str:
    """Describe the gain and its uncertainty.

    From 70.99 to 137.3 steps/s is 1.93x, a gain of 93%; the tutorial calls it 193%.

    Args:
        before: Mean and standard error of the steps per second, as in the report.
        after: The same for the changed program.
        drift: Difference between two runs with the same setting, as a natural logarithm.
    """
    ratio = after.avg / before.avg
    text = f"Speedup: {ratio:.2f}x ({100 * (ratio - 1):+.0f}% steps per second"
    if before.standard_error is None or after.standard_error is None:
        return f"{text}). Too few steps to estimate the noise: increase --max-steps."

    # Relative errors of a ratio add in quadrature; in logarithms the interval stays above zero.
    error = math.hypot(before.standard_error / before.avg, after.standard_error / after.avg)
    low, high = ratio * math.exp(-1.96 * error), ratio * math.exp(1.96 * error)
    text += f", 95% interval {low:.2f}x to {high:.2f}x).\n"
    text += f"Two runs with the same setting differed by up to {math.exp(drift):.2f}x. "
    if low <= 1 <= high:
        return f"{text}The interval includes 1x, so these runs show no difference."
    if abs(math.log(ratio)) <= drift:
        return f"{text}The change is within the noise, so these runs show no difference."
    if ratio < 1:
        return f"{text}It's slower, by more than noise. Workers need free CPUs."
    return f"{text}The speedup is more than noise."


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-workers", type=int, default=0, help="DataLoader workers (default: 0)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step (default: 32)")
    parser.add_argument("--max-steps", type=int, default=100, help="steps to train (default: 100)")
    parser.add_argument(
        "--data-dir", type=Path, help="folder with CIFAR-10 (default: use scikit-learn's digits)"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=Path("lightning_logs"),
        help="folder for logs (default: lightning_logs)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--timer-only", action="store_true", help="measure phases and ips only, without a window"
    )
    mode.add_argument(
        "--steps", type=int, nargs=2, metavar=("START", "END"), help="profile steps START to END - 1"
    )
    mode.add_argument(
        "--compare", action="store_true", help="run all four steps; the fix uses --num-workers, or 2"
    )
    return parser.parse_args()


def main() -> None:
    """Train or compare, as the command line says."""
    args = parse_args()
    # One thread for training leaves the other CPUs to the workers and makes CPU runs comparable.
    torch.set_num_threads(1)
    try:
        images = Cifar10(args.data_dir) if args.data_dir else Digits()
    except FileNotFoundError as error:
        raise SystemExit(f"error: {error}") from None

    if args.compare:
        compare(args, images)
    else:
        train(args, images, num_workers=args.num_workers, timer_only=args.timer_only)
    print(f"Open the runs in TensorBoard: tensorboard --logdir {args.log_dir}")


if __name__ == "__main__":
    main()
