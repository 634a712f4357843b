"""Check FLOPs against formulas and torch's counter, FLOP/s and MFU, and memory against torch's counters."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any, Final

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_modelprof.inspect.flops.count import FlopCount, count_flops
from lightning_modelprof.run.memory import StepMemory
from lightning_modelprof.selftest.comparison import Compared, Skip, there
from lightning_modelprof.selftest.lab import Lab, Net, layers, pictures, row
from lightning_modelprof.units import Unit

_FLOPS: Final = Unit.FLOPS


def flops(lab: Lab) -> Iterator[Compared]:
    """Check FLOPs of layers, convolutions, attention, recurrent nets and one step of a fit."""
    width, count = lab.pick(1024, 64), lab.pick(256, 16)
    net = layers(width, 3).to(lab.device)
    by_hand = 2 * count * width**2 * 3
    counted = _counted(net, torch.randn(count, width, device=lab.device))
    yield Compared("layers, forward", counted.flops["forward"], by_hand, unit=_FLOPS)
    backward = 2 * by_hand - 2 * count * width**2  # the batch has no gradient
    yield Compared("layers, backward", counted.flops["backward"], backward, unit=_FLOPS)
    net, batch = pictures(8).to(lab.device), torch.randn(4, 3, 32, 32, device=lab.device)
    counted = _counted(net, batch)
    with FlopCounterMode(display=False) as by_torch:
        net(batch).sum().backward()
    both = counted.flops["forward"] + counted.flops["backward"]
    yield Compared("convolutions, forward and backward", both, by_torch.get_total_flops(), unit=_FLOPS)
    yield Compared("convolutions, operators not counted", len(counted.uncounted), 0)
    yield from _attention(lab)
    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3)):
        recurrent = kind(64, 64, batch_first=True).to(lab.device)
        counted = _counted(_First(recurrent), torch.randn(8, 16, 64, device=lab.device))
        by_hand = 2 * 8 * 16 * gates * 64 * 128
        yield Compared(f"{kind.__name__}, forward", counted.flops["forward"], by_hand, unit=_FLOPS)
    callback = lab.callback("flops", active=0, flops=True)
    lab.fit(Net(layers(width, 3)), [lab.tensor(count, width)], 40, [callback])
    assert callback.report is not None
    by_hand = 2 * count * width**2 * (3 * 3 - 1)
    of_step = row(callback.report, "flops", "Model")
    yield Compared("a training step", of_step.get("flops"), by_hand, unit=_FLOPS)


def _counted(net: nn.Module, *batch: Tensor) -> FlopCount:
    return count_flops(net, *batch, loss_fn=lambda out: out.float().sum())


class _First(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)[0]


class _Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention(lab: Lab) -> Iterator[Compared]:
    """Check each attention kernel available here; causal attention counts in full."""
    batch, heads, length, width = lab.pick((2, 8, 512, 64), (1, 2, 32, 16))
    by_hand = 4 * batch * heads * length**2 * width
    names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    for kernel in (one for one in names if hasattr(SDPBackend, one)):
        parts = [
            torch.randn(batch, heads, length, width, device=lab.device, dtype=lab.half, requires_grad=True)
            for _ in range(3)
        ]
        net, backend = _Attention(), getattr(SDPBackend, kernel)
        try:
            with sdpa_kernel(backend):
                net(*parts).sum().backward()
        except RuntimeError:
            if kernel == "MATH":
                raise
            continue  # torch has no such kernel for this device
        with sdpa_kernel(backend):
            counted = _counted(net, *parts)
        name = kernel.lower().replace("_", " ")
        yield Compared(f"{name}, forward", counted.flops["forward"], by_hand, 0.001, _FLOPS)
        yield Compared(f"{name}, backward", counted.flops["backward"], 2 * by_hand, 0.001, _FLOPS)


class _Products(nn.Module):
    def __init__(self, size: int, depth: int, dtype: torch.dtype) -> None:
        super().__init__()
        one = torch.randn(size, size).to(dtype) / size**0.5
        self.weights = nn.ParameterList(nn.Parameter(one.clone()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def mfu(lab: Lab) -> Iterator[Compared]:
    """Check FLOP/s and MFU of large 16-bit matrix products."""
    size, depth = (8192 if lab.product_ns(4096) < 2e6 else 4096), 4
    needed = size**2 * 2 * (3 * depth + 8)
    if torch.cuda.mem_get_info()[0] < 2 * needed:
        raise Skip("too little free GPU memory")
    by_hand = 2 * size**3 * (3 * depth - 1)
    batch = [lab.tensor(size, size, dtype=lab.half)]
    times: list[float] = []
    ours: list[dict[str, Any]] = []
    for has in (False, True, True, False):  # a GPU gets slower as it warms up
        net = Net(_Products(size, depth, lab.half))
        if not has:
            times.append(lab.step_ns(net, batch, 40))
            continue
        callback = lab.callback(f"mfu {len(ours)}", active=0, flops=True)
        lab.fit(net, batch, 40, [callback])
        ours.append(row(callback.report, "flops", "Model") if callback.report else {})
    yield Compared("FLOPs per step", ours[0].get("flops"), by_hand, 0.001, _FLOPS)
    speed = by_hand * 1e9 / mean(times)
    our_speed = mean(one.get("flops_per_s") or 0 for one in ours)
    yield Compared("FLOP/s", our_speed, speed, 0.1, Unit.FLOPS_PER_S)
    peak = _BF16_PEAKS.get(torch.cuda.get_device_name(0))
    if peak is None or lab.half is not torch.bfloat16:
        raise Skip("MFU is not comparable here")
    share = mean(one.get("share_of_peak") or 0 for one in ours)
    yield Compared("MFU", share, speed / peak, 0.1, Unit.RATIO)


_BF16_PEAKS: Final = {
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989e12),
}
"""Dense FLOP/s, from the data sheets of NVIDIA's A100, H100 (SXM) and H200 Tensor Core GPUs."""


class _Peaks(Callback):
    """Record torch's allocated memory at each step's start, and its peak per phase, by resetting it."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, str], int] = {}
        self.step = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.step = batch_idx
        self.bytes[batch_idx, "start"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.bytes[self.step, "forward"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.bytes[self.step, "backward"] = torch.cuda.max_memory_allocated()

    def growth(self, ours: StepMemory) -> Iterator[Compared]:
        """Compare growth since the step's start, as torch also counts cuBLAS's older workspaces."""
        for phase in ("forward", "backward"):
            our = next((one.num_bytes - ours.begin_bytes for one in ours.peaks if one.phase == phase), None)
            truth = self.bytes[ours.step, phase] - self.bytes[ours.step, "start"]
            yield Compared(f"{phase}: growth to its peak", our, truth, 0.1, Unit.BYTES)


def memory(lab: Lab) -> Iterator[Compared]:
    """Check peaks of a fit and of its phases, and a report after running out of memory."""
    batch = [lab.tensor(8192, 1024)]
    callback = lab.callback("peak", active=3)
    lab.fit(Net(layers(1024, 6)), batch, 60, [callback])
    assert callback.run is not None
    record = callback.run.ranks[0].memory
    assert record is not None
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    yield Compared("peak allocated", record.peak_allocated_bytes, allocated, unit=Unit.BYTES)
    yield Compared("peak reserved", record.peak_reserved_bytes, reserved, unit=Unit.BYTES)
    yield Compared("GPU memory", record.total_bytes, torch.cuda.mem_get_info()[1], 0.01, Unit.BYTES)
    peaks, callback = _Peaks(), lab.callback("phases", active=0, flops=True, profile_memory=True)
    lab.fit(Net(layers(1024, 6)), batch, 60, [peaks, callback])
    assert callback.run is not None
    record = callback.run.ranks[0].memory
    of_step = None if record is None else record.step_memory
    yield Compared("memory by phase is there", int(of_step is not None), 1)
    if of_step is not None:
        yield from peaks.growth(of_step)
    yield from _out_of_memory(lab)


class _Grows(Net):
    def __init__(self) -> None:
        super().__init__(layers(512, 3))
        self.blocks: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx > 8:
            self.blocks.append(torch.ones(2**26, device=self.device))
        return super().training_step(batch, batch_idx)


def _out_of_memory(lab: Lab) -> Iterator[Compared]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 3 * 2**30) / total))
    net, callback, raised = _Grows(), lab.callback("out of memory", active=0), ""
    try:
        lab.fit(net, [lab.tensor(256, 512)], 60, [callback])
    except torch.cuda.OutOfMemoryError as error:
        raised = type(error).__name__
    finally:
        net.blocks.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    yield Compared("out of memory: raised", raised, "OutOfMemoryError")
    report, run = callback.report, callback.run
    verdict = None if report is None else report.verdict
    yield Compared("out of memory: verdict", None if verdict is None else verdict.kind, "out_of_memory")
    memory_record = None if run is None else run.ranks[0].memory
    event = None if memory_record is None else memory_record.out_of_memory
    yield Compared("out of memory: phase", None if event is None else event.phase, "forward")
    asked = None if event is None else event.requested_bytes
    yield Compared("out of memory: requested", asked, 2**28, 0.01, Unit.BYTES)
    counted = row(report, "memory_peaks", "Allocator out-of-memory errors") if report else {}
    yield there("out of memory: errors in the report", counted.get("value"))
