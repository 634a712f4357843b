"""How long do two models take that share a pipeline with CPU work? Three methods, and what each misses.

    python examples/pipeline_timing.py        # on a GPU, or without one on the CPU, in a few seconds
    python examples/pipeline_timing.py --device cuda --batch-size 32 --image-size 224

The pipeline is model1, then work on the CPU alone, then model2. A device works behind the host's back, so

    wall         a host clock around each model sees only how long the launches took;
    synchronize  waiting for the device around each model gives the right times, but the host stands still
                 meanwhile: the CPU work no longer runs beside model1, and the pipeline takes longer;
    event        marks on the device's stream give the same times, and nothing waits.

On the CPU nothing runs behind the host's back, and the three agree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_modelprof import EventTimer, benchmark_inference

Method = Literal["wall", "synchronize", "event"]
Stage = Callable[[str], AbstractContextManager[None]]


def make_models(width: int) -> tuple[nn.Module, nn.Module]:
    """Convolutions that make features of images, and a head that makes a score of them."""
    convolutions = nn.Sequential(
        nn.Conv2d(3, width, kernel_size=3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1),
        nn.GELU(),
    )
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(2 * width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
        nn.GELU(),
        nn.Linear(width, 1),
    )
    return convolutions.eval(), head.eval()


def cpu_work(size: int) -> None:
    """What a pipeline does between its models, here with random numbers."""
    (np.random.randn(1, 3, size, size).astype(np.float32) * 1024**0.5).sum()


class HostClock:
    """Times stages with the host clock, waiting for the device or not."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.times_ns: dict[str, list[int]] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """A context manager for one call of a stage."""
        return HostStage(self, name)


class HostStage(AbstractContextManager[None]):
    """One call of a stage."""

    def __init__(self, clock: HostClock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.clock.wait()
        self.begin_ns = perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        self.clock.wait()
        self.clock.times_ns.setdefault(self.name, []).append(perf_counter_ns() - self.begin_ns)


def run_pipeline(
    args: argparse.Namespace, models: tuple[nn.Module, nn.Module], x: Tensor, stage: Stage
) -> None:
    """One batch through the pipeline."""
    with stage("model1"):
        features = models[0](x)
    with stage("cpu work"):
        cpu_work(args.cpu_size)
    with stage("model2"):
        models[1](features)


def measure(
    args: argparse.Namespace, models: tuple[nn.Module, nn.Module], x: Tensor, method: str
) -> dict[str, float]:
    """Median milliseconds of each stage by one method, and of the whole pipeline until the device is done."""

    def wait_for_device() -> None:
        if x.device.type != "cpu":
            getattr(torch, x.device.type).synchronize()

    def do_not_wait() -> None:
        pass

    host = HostClock(wait_for_device if method == "synchronize" else do_not_wait)
    events = EventTimer(x.device)
    stage: Stage = events if method == "event" else host
    unmeasured = HostClock(do_not_wait)

    totals_ns = []
    with torch.inference_mode():
        for number in range(args.warm_up + args.runs):
            wait_for_device()  # each batch starts with an idle device, as far as the whole goes
            begin_ns = perf_counter_ns()
            run_pipeline(args, models, x, stage if number >= args.warm_up else unmeasured)
            wait_for_device()
            if number >= args.warm_up:
                totals_ns.append(perf_counter_ns() - begin_ns)

    if method == "event":
        results = events.results()
        # CPU work is the host clock's; the models' is the device's where there is one.
        spreads = {
            name: times.real if name == "cpu work" else times.device or times.real
            for name, times in results.items()
        }
        times_ms = {name: spread.p50_ns / 1e6 for name, spread in spreads.items()}
    else:
        times_ms = {name: float(np.median(times)) / 1e6 for name, times in host.times_ns.items()}
    return {**times_ms, "pipeline": float(np.median(totals_ns)) / 1e6}


def parse_args() -> argparse.Namespace:
    """Reads the command line; sizes depend on the device unless they are given."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=default, help=f"where the models run (default: {default})")
    parser.add_argument("--batch-size", type=int, help="images (default: 2 on the CPU, else 32)")
    parser.add_argument("--image-size", type=int, help="pixels a side (default: 32 on the CPU, else 224)")
    parser.add_argument("--width", type=int, help="channels of model1 (default: 32 on the CPU, else 512)")
    parser.add_argument("--cpu-size", type=int, help="of the CPU work (default: 64 on the CPU, else 512)")
    parser.add_argument("--warm-up", type=int, default=5, help="batches before those timed (default: 5)")
    parser.add_argument("--runs", type=int, default=45, help="timed batches (default: 45)")
    args = parser.parse_args()
    small = torch.device(args.device).type == "cpu"
    sizes = {"batch_size": (2, 32), "image_size": (32, 224), "width": (32, 512), "cpu_size": (64, 512)}
    for key, (on_cpu, on_device) in sizes.items():
        if getattr(args, key) is None:
            setattr(args, key, on_cpu if small else on_device)
    return args


def main() -> None:
    """Prints one model alone, then the pipeline, by the three methods."""
    args = parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # on a busy machine threads wait for each other longer than this work takes
    first, second = (model.to(device) for model in make_models(args.width))
    x = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    methods: tuple[Method, ...] = ("wall", "synchronize", "event")

    print(f"model1 alone on {device}:\n{'method':>13}{'median':>12}{'p99':>12}{'fps':>12}")
    for method in methods:
        if method == "event" and device.type == "cpu":
            print(f"{method:>13}   the CPU has no device events; wall is exact there")
            continue
        times = benchmark_inference(first, x, warm_up=args.warm_up, runs=args.runs, method=method)
        fps = "unknown" if times.fps is None else f"{times.fps:.1f}"
        print(f"{method:>13}{times.p50_ns / 1e6:>9.3f} ms{times.p99_ns / 1e6:>9.3f} ms{fps:>12}")

    print(f"\nThe pipeline, median of {args.runs} batches:")
    print(f"{'method':>13}{'model1':>12}{'cpu work':>12}{'model2':>12}{'pipeline':>12}")
    for method in methods:
        times_ms = measure(args, (first, second), x, method)
        print(f"{method:>13}" + "".join(f"{ms:>9.3f} ms" for ms in times_ms.values()))

    print("\nWhat each misses:")
    print("  wall         the device's work: a model's time is that of its launches (exact on the CPU)")
    print("  synchronize  that CPU work may run beside a model: waiting makes the pipeline longer")
    print("  event        nothing of this; a model's time includes where the device waited for the host")


if __name__ == "__main__":
    main()
