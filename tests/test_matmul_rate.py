"""The measured rate of matrix products, with a clock that only products move."""

from __future__ import annotations

import random
from itertools import chain, repeat

import numpy as np
import pytest
import torch

from lightning_modelprof.flops import matmul_rate
from lightning_modelprof.flops.matmul_rate import measure_matmul_rate

CPU = torch.device("cpu")
MS = 1_000_000


class Machine:
    """torch.mm that computes nothing, and takes the time that it is told to on a clock of its own."""

    def __init__(self, monkeypatch, durations_ns):
        self.now_ns = 0
        self.calls = []
        self.durations_ns = {size: iter(values) for size, values in durations_ns.items()}
        monkeypatch.setattr(torch, "mm", self.multiply)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def multiply(self, first, second, *, out):
        assert first.shape == second.shape == out.shape
        assert first.shape[0] == first.shape[1]
        self.calls.append(first.shape[0])
        self.now_ns += next(self.durations_ns[first.shape[0]])

    def clock(self):
        return self.now_ns


def test_the_best_of_all_sizes(monkeypatch):
    machine = Machine(
        monkeypatch,
        {
            256: repeat(5 * MS),
            # The first does not count.
            512: chain([1, 40 * MS, 20 * MS], repeat(25 * MS)),
            1024: repeat(400 * MS),
        },
    )
    rate = measure_matmul_rate("float32", device=CPU, budget_s=0.3, clock=machine.clock)
    # 2 x 512^3 = 268,435,456 FLOPs in the best time, 20 ms.
    assert rate.flops_per_s == 268_435_456 * 50
    assert rate.dtype == "float32"
    assert rate.is_measured
    # The first size gets a third, 100 ms: 20 products after the one that does not count. 195 ms are left,
    # enough for the four of 40 ms that are expected of 512, which gets half of it, 97 ms: 40 + 20 + 25 leave
    # 12, so 25 more. In the 85 ms left 1024 would take 4 x 160.
    assert machine.calls == [256] * 21 + [512] * 5
    # Of 40, 20, 25 and 25 ms the median is 25.
    assert rate.source == "best of 4 products of 512 x 512 on 2 threads, median 80 % of it"


def test_a_size_needs_the_time_of_four_products(monkeypatch):
    machine = Machine(monkeypatch, {256: repeat(10 * MS)})
    rate = measure_matmul_rate("float32", device=CPU, budget_s=0.42, clock=machine.clock)
    # 150 ms are gone. Of 512, 270 ms would be enough for three of 80 ms, but one more does not count.
    assert machine.calls == [256] * 15
    assert rate.flops_per_s == 3_355_443_200


def test_the_smallest_size_runs_on_the_slowest_machine(monkeypatch):
    machine = Machine(monkeypatch, {256: repeat(1000 * MS)})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    rate = measure_matmul_rate("float32", device=CPU, budget_s=0.1, clock=machine.clock)
    assert machine.calls == [256] * 4
    assert rate.flops_per_s == 33_554_432
    assert rate.source == "best of 3 products of 256 x 256 on 1 thread, median 100 % of it"


def test_a_size_that_fails_leaves_the_smaller_ones(monkeypatch):
    def no_memory():
        raise RuntimeError("out of memory")
        yield

    machine = Machine(monkeypatch, {256: repeat(10 * MS), 512: no_memory()})
    rate = measure_matmul_rate("float32", device=CPU, budget_s=1, clock=machine.clock)
    assert rate.flops_per_s == 3_355_443_200


def test_a_clock_too_coarse_measures_nothing(monkeypatch):
    # Products that take no time: after three of each size the budget of nothing is used up.
    machine = Machine(monkeypatch, {size: repeat(0) for size in matmul_rate.CPU_SIZES})
    assert measure_matmul_rate("float32", device=CPU, budget_s=0, clock=machine.clock) is None
    assert machine.calls == [256] * 4 + [512] * 4 + [1024] * 4


def test_a_complex_product_is_four(monkeypatch):
    machine = Machine(monkeypatch, {256: repeat(10 * MS), 512: repeat(10**12)})
    rate = measure_matmul_rate("complex64", device=CPU, budget_s=0.05, clock=machine.clock)
    assert rate.flops_per_s == 4 * 3_355_443_200


@pytest.mark.parametrize("dtype", ["", "int8", "bool", "no_such_dtype", "mm", "quint8"])
def test_what_has_no_rate(dtype):
    assert measure_matmul_rate(dtype, device=CPU, budget_s=0.01) is None


def test_a_dtype_without_a_kernel(monkeypatch):
    def no_kernel(*args, **kwargs):
        raise NotImplementedError('"addmm_impl_cpu_" not implemented for')

    monkeypatch.setattr(torch, "mm", no_kernel)
    assert measure_matmul_rate("float8_e4m3fn", device=CPU, budget_s=0.01) is None


def test_a_device_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    # A torch without CUDA says so with an AssertionError, one with it and no driver with a RuntimeError.
    assert measure_matmul_rate("float32", device=torch.device("cuda"), budget_s=0.01) is None


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_on_this_machine(dtype):
    rate = measure_matmul_rate(dtype, device=CPU, budget_s=0.05)
    assert rate.is_measured
    assert 1e6 < rate.flops_per_s < 1e16  # from a microcontroller to the largest servers
    assert rate.source.startswith("best of ")


def test_the_operands_are_ordinary_numbers(monkeypatch):
    seen = []
    multiply = torch.mm

    def watch(first, second, *, out):
        seen.append((first, second, multiply(first, second, out=out)))

    monkeypatch.setattr(torch, "mm", watch)
    monkeypatch.setattr(matmul_rate, "CPU_SIZES", (64, 1024))
    for dtype in ("float16", "bfloat16", "float32"):
        measure_matmul_rate(dtype, device=CPU, budget_s=1)
    assert {first.shape[0] for first, _, _ in seen} >= {64}
    for tensors in seen[:: max(1, len(seen) // 50)]:
        for tensor in tensors:
            assert torch.isfinite(tensor).all()
            assert tensor.abs().min() >= 1 / 16
            assert not tensor.requires_grad


def test_nothing_of_the_user_is_touched():
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with torch.autocast("cpu", torch.bfloat16):
        measure_matmul_rate("float32", device=CPU, budget_s=0.01)
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert (threads, precision) == (torch.get_num_threads(), torch.get_float32_matmul_precision())


def test_autocast_does_not_change_what_is_measured(monkeypatch):
    kept = []
    multiply = torch.mm

    def watch(first, second, *, out):
        kept.append(torch.is_autocast_enabled("cpu"))
        return multiply(first, second, out=out)

    monkeypatch.setattr(torch, "mm", watch)
    with torch.autocast("cpu", torch.bfloat16):
        assert measure_matmul_rate("float32", device=CPU, budget_s=0.01) is not None
    assert kept
    assert not any(kept)
