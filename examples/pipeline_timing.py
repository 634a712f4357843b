"""Time two models in a pipeline with CPU work in three ways, and see what each misses.

    python examples/pipeline_timing.py        # a few seconds, on a GPU if there is one, else on the CPU
    python examples/pipeline_timing.py --device cuda --batch-size 32 --image-size 224

The pipeline runs model1, then CPU work, then model2. A GPU runs asynchronously, so the methods differ:

    wall         A CPU clock around each model only times the launches.
    synchronize  Waiting for the device around each model gives correct times but blocks the CPU. CPU work no
                 longer overlaps with model1, so the pipeline takes longer.
    event        Device events give the same times without waiting.

On the CPU nothing is asynchronous, so all three agree.
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
    """Make convolutions that extract features, and a head that scores them."""
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
    """Stand in for the pipeline's CPU work, with random numbers."""
    (np.random.randn(1, 3, size, size).astype(np.float32) * 1024**0.5).sum()


class HostClock:
    """Times stages with the CPU clock, waiting for the device or not."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.times_ns: dict[str, list[int]] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager for one call of a stage."""
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
    """Run one batch through the pipeline."""
    with stage("model1"):
        features = models[0](x)
    with stage("cpu work"):
        cpu_work(args.cpu_size)
    with stage("model2"):
        models[1](features)


def measure(
    args: argparse.Namespace, models: tuple[nn.Module, nn.Module], x: Tensor, method: str
) -> dict[str, float]:
    """Return the median milliseconds of each stage and of the whole pipeline, by one method."""

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
            wait_for_device()  # each batch starts with an idle device
            begin_ns = perf_counter_ns()
            run_pipeline(args, models, x, stage if number >= args.warm_up else unmeasured)
            wait_for_device()
            if number >= args.warm_up:
                totals_ns.append(perf_counter_ns() - begin_ns)

    if method == "event":
        results = events.results()
        # CPU work uses the CPU clock, the models the device's clock if there is one.
        spreads = {
            name: times.real if name == "cpu work" else times.device or times.real
            for name, times in results.items()
        }
        times_ms = {name: spread.p50_ns / 1e6 for name, spread in spreads.items()}
    else:
        times_ms = {name: float(np.median(times)) / 1e6 for name, times in host.times_ns.items()}
    return {**times_ms, "pipeline": float(np.median(totals_ns)) / 1e6}


def parse_args() -> argparse.Namespace:
    """Parse the command line; default sizes depend on the device."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=default, help=f"device for the models (default: {default})")
    parser.add_argument("--batch-size", type=int, help="images per batch (default: 2 on the CPU, else 32)")
    parser.add_argument("--image-size", type=int, help="pixels per side (default: 32 on the CPU, else 224)")
    parser.add_argument("--width", type=int, help="model1's channels (default: 32 on the CPU, else 512)")
    parser.add_argument(
        "--cpu-size", type=int, help="size of the CPU work (default: 64 on the CPU, else 512)"
    )
    parser.add_argument("--warm-up", type=int, default=5, help="warm-up batches (default: 5)")
    parser.add_argument("--runs", type=int, default=45, help="timed batches (default: 45)")
    args = parser.parse_args()
    small = torch.device(args.device).type == "cpu"
    sizes = {"batch_size": (2, 32), "image_size": (32, 224), "width": (32, 512), "cpu_size": (64, 512)}
    for key, (on_cpu, on_device) in sizes.items():
        if getattr(args, key) is None:
            setattr(args, key, on_cpu if small else on_device)
    return args


def main() -> None:
    """Time one model alone, then the pipeline, with all three methods."""
    args = parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(
            1
        )  # on a busy machine, threads would wait for each other longer than the work takes
    first, second = (model.to(device) for model in make_models(args.width))
    x = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    methods: tuple[Method, ...] = ("wall", "synchronize", "event")

    print(f"model1 alone on {device}:\n{'method':>13}{'median':>12}{'p99':>12}{'fps':>12}")
    for method in methods:
        if method == "event" and device.type == "cpu":
            print(f"{method:>13}   no device events on the CPU; wall is exact")
            continue
        times = benchmark_inference(first, x, warm_up=args.warm_up, runs=args.runs, method=method)
        fps = "unknown" if times.fps is None else f"{times.fps:.1f}"
        print(f"{method:>13}{times.p50_ns / 1e6:>9.3f} ms{times.p99_ns / 1e6:>9.3f} ms{fps:>12}")

    print(f"\nPipeline, median of {args.runs} batches:")
    print(f"{'method':>13}{'model1':>12}{'cpu work':>12}{'model2':>12}{'pipeline':>12}")
    for method in methods:
        times_ms = measure(args, (first, second), x, method)
        print(f"{method:>13}" + "".join(f"{ms:>9.3f} ms" for ms in times_ms.values()))

    print("\nWhat each method misses:")
    print("  wall         device work: it only times a model's launches (exact on the CPU)")
    print("  synchronize  overlap of CPU work and models: waiting makes the pipeline longer")
    print("  event        none of this; a model's time includes the device's waits for the CPU")


if __name__ == "__main__":
    main()
