"""The measured rate of matrix products: what a device without a known peak can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Final, NamedTuple

import torch

from lightning_modelprof.run.model_cost import PeakRate

CPU_SIZES: Final = (256, 512, 1024)
DEVICE_SIZES: Final = (1024, 2048, 4096)
"""Smaller products would measure the launches; the largest take 200 MB in float32."""

_MIN_PRODUCTS: Final = 3
"""Of one size, so that a best and a median mean something."""

_NS_PER_S: Final = 10**9


class _Run(NamedTuple):
    """The products of one size."""

    size: int
    durations_ns: list[int]
    flops: int

    @property
    def flops_per_s(self) -> float:
        """Of the fastest product."""
        return self.flops * _NS_PER_S / min(self.durations_ns)


def measure_matmul_rate(
    dtype: str,
    *,
    device: torch.device,
    budget_s: float = 0.3,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> PeakRate | None:
    """The best rate of square matrix products, with the threads and the precision that torch is set to.

    Each size gets a part of the budget: one product that does not count, then as many as fit, at least
    three. A size that would not fit is left out; the smallest never is. On a device every product is waited
    for. No random number is drawn, and nothing of it is part of a graph.

    Args:
        dtype: such as ``float32``; a complex product counts as four real ones, as in the counted step.
        device: where to measure.
        budget_s: about how long it may take.
        clock: nanoseconds.

    Returns:
        The rate, with the spread in its ``source``; ``None`` when torch has no such product or dtype.

    Caveats:
        A share of this rate is not MFU: it tells how well a step uses what a plain product gets out of the
        machine, while it is as busy as it was then.
    """
    found = getattr(torch, dtype, None) if dtype else None
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        return None
    sizes = CPU_SIZES if device.type == "cpu" else DEVICE_SIZES
    runs: list[_Run] = []
    end_ns = clock() + round(budget_s * _NS_PER_S)
    for position, size in enumerate(sizes):
        if runs and not _fits(runs[-1], size, end_ns - clock()):
            break
        left_ns = end_ns - clock()
        try:
            run = _products(size, found, device, left_ns // (len(sizes) - position), clock)
        except (RuntimeError, TypeError, AssertionError):  # no kernel, no device, or no memory for the larger
            break
        if min(run.durations_ns) > 0:
            runs.append(run)
    if not runs:
        return None
    best = max(runs, key=lambda run: run.flops_per_s)
    share = min(best.durations_ns) / median(best.durations_ns)
    threads = torch.get_num_threads()
    where = f"{threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else str(device)
    return PeakRate(
        dtype=dtype,
        flops_per_s=best.flops_per_s,
        source=(
            f"best of {len(best.durations_ns)} products of {best.size} x {best.size} on {where},"
            f" median {share:.0%} of it".replace("%", " %")
        ),
        is_measured=True,
    )


def _fits(last: _Run, size: int, left_ns: int) -> bool:
    """Whether the fewest products of a larger size, and the one that does not count, fit in the time left."""
    expected_ns = min(last.durations_ns) * (size / last.size) ** 3
    return expected_ns * (_MIN_PRODUCTS + 1) <= left_ns


@torch.no_grad()
def _products(
    size: int, dtype: torch.dtype, device: torch.device, budget_ns: int, clock: Callable[[], int]
) -> _Run:
    """Multiply two matrices again and again until the time is over."""
    # From 1/16 to 17/16: nothing is denormal, nothing overflows, and a device cannot profit from zeros.
    values = torch.arange(size * size, dtype=torch.int32, device=device).remainder_(17).add_(1)
    first = (values.to(torch.float32) / 16).to(dtype).reshape(size, size)
    second = first.flip(0)
    product = torch.empty_like(first)
    durations_ns: list[int] = []
    # The user may be inside of autocast, which would multiply in another dtype.
    with torch.autocast(device.type, enabled=False):
        torch.mm(first, second, out=product)
        _wait(device)
        end_ns = clock() + budget_ns
        begin_ns = clock()
        while len(durations_ns) < _MIN_PRODUCTS or begin_ns < end_ns:
            torch.mm(first, second, out=product)
            _wait(device)
            now_ns = clock()
            durations_ns.append(now_ns - begin_ns)
            begin_ns = now_ns
    return _Run(size, durations_ns, 2 * size**3 * (4 if dtype.is_complex else 1))


def _wait(device: torch.device) -> None:
    """Until the device is done; the host computes while it is called."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
