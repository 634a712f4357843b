"""Check a trace's tables against plain sums over its file, and count calls that wait for the device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_modelprof.reading_traces import analyze
from lightning_modelprof.selftest.comparison import Compared, there
from lightning_modelprof.selftest.lab import Lab, Net, layers, pictures, row, rows
from lightning_modelprof.selftest.plain_trace import PlainTrace, covered, spans
from lightning_modelprof.units import Unit

_NS: Final = Unit.DURATION_NS


def window(lab: Lab) -> Iterator[Compared]:
    """Check three recorded steps of three trainings."""
    size = lab.pick(512, 64)
    trainings: tuple[tuple[str, nn.Module, Any], ...] = (
        ("layers", layers(size, 4), lab.tensor(size, size)),
        ("convolutions", pictures(lab.pick(64, 4)), lab.tensor(lab.pick(32, 2), 3, 32, 32)),
        ("waits", layers(size, 2), lab.tensor(size, size, pinned=False)),
    )
    for name, net, batch in trainings[: lab.pick(3, 2)]:
        callback = lab.callback(name, active=3, flops=False)
        lab.fit(_Waits(net) if name == "waits" else Net(net), [batch], 40, [callback])
        run, report = callback.run, callback.report
        assert run is not None
        assert report is not None
        [recorded] = run.ranks[0].windows
        yield Compared(f"{name}: window status", recorded.status.value, "complete")
        path = lab.folder / name / str(recorded.trace_file)
        plain = PlainTrace(path)
        if lab.kind == "cuda":
            yield there(f"{name}: kernels in the trace", len(plain.kernels))
        numbers = [int(one.name.partition("#")[2]) for one in plain.steps]
        yield Compared(f"{name}: recorded steps", len(recorded.recorded_steps), 3)
        yield Compared(f"{name}: first recorded step", recorded.recorded_steps[0], numbers[0])
        fit_operators = sum(one["calls"] or 0 for one in rows(report, "operators"))
        yield Compared(f"{name}: operator calls in the fit's report", fit_operators, plain.operators.total())
        yield from compare_trace(path, name)


class _Waits(Net):
    """Read a value in each step, copy from pageable memory and use a second stream."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        weights = torch.tensor([0.1] * 8).to(self.device)
        if self.device.type == "cuda":
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                batch.square().sum().cpu()
            torch.cuda.current_stream().wait_stream(side)
        self.last = loss.item()
        return loss * weights.sum()


def compare_trace(path: Path, name: str) -> Iterator[Compared]:
    """Compare the tables of any trace, with at most one device, with sums over its events."""
    report, plain = analyze(path), PlainTrace(path)

    def total(table: str, column: str) -> float:
        return sum(one[column] or 0 for one in rows(report, table))

    calls = {one["name"]: one["calls"] for one in rows(report, "operators")}
    calls.pop("(no operator)", None)
    yield Compared(f"{name}: operators", len(calls), len(plain.operators))
    wrong = sum(calls.get(key) != count for key, count in plain.operators.items())
    yield Compared(f"{name}: operators with another number of calls", wrong, 0)
    steps = [one for one in rows(report, "step_breakdown") if one["name"].startswith("step ")]
    yield Compared(f"{name}: steps", len(steps), len(plain.steps))
    bounds = plain.step_bounds() if plain.steps else []
    for number, one, (begin, end) in zip(plain.steps, steps, bounds, strict=False):
        its = f"{name}: {one['name']}"
        yield Compared(f"{its}, number", one["name"].split()[-1], number.name.partition("#")[2])
        yield Compared(f"{its}, time", one["total_ns"], end - begin, 1e-5, _NS)
        if plain.kernels and not any(step["communication_ns"] for step in steps):
            busy = covered(spans(plain.kernels), begin, end)
            yield Compared(f"{its}, kernel time", one["kernel_ns"], busy, 1e-5, _NS)
    if not plain.work:
        return
    yield Compared(f"{name}: kernels", total("kernels", "calls"), len(plain.kernels))
    kernel_ns = sum(one.ns for one in plain.kernels)
    yield Compared(f"{name}: time of all kernels", total("kernels", "device_total_ns"), kernel_ns, 1e-5, _NS)
    yield Compared(f"{name}: copies", total("copies", "calls"), len(plain.copies))
    copy_ns = sum(one.ns for one in plain.copies)
    yield Compared(f"{name}: time of all copies", total("copies", "device_total_ns"), copy_ns, 1e-5, _NS)
    num_bytes = sum(int(one.more.get("bytes", one.more.get("size", 0))) for one in plain.copies)
    yield Compared(f"{name}: copied", total("copies", "size_bytes"), num_bytes, unit=Unit.BYTES)
    called = row(report, "runtime_calls", "All calls").get("calls", 0)
    yield Compared(f"{name}: calls of the device's runtime", called, len(plain.calls))
    if len({one.where[0] for one in plain.work}) > 1:
        return
    idle, work = {one["name"]: one for one in rows(report, "idle")}, spans(plain.work)
    span = max(end for _, end in work) - min(begin for begin, _ in work)
    yield Compared(f"{name}: busy time", idle["Busy"]["total_ns"], covered(work), 1e-5, _NS)
    both = idle["Busy"]["total_ns"] + idle["Idle"]["total_ns"]
    yield Compared(f"{name}: busy and idle time", both, span, 1e-5, _NS)
    causes = sum(one["total_ns"] for key, one in idle.items() if key not in ("Busy", "Idle"))
    yield Compared(f"{name}: causes of idle time", causes, idle["Idle"]["total_ns"], 1e-5, _NS)
    if bounds:
        low, high = bounds[0][0], bounds[-1][1]
        busy_share = covered(work, low, high) / (high - low)
        shares = [one["busy"] for one in rows(report, "device_usage") if one["name"].startswith("GPU")]
        yield Compared(f"{name}: GPU busy", shares[0] if shares else None, busy_share, 1e-5, Unit.RATIO)


_WAITS: Final = re.compile(r"Synchronize|^(cuda|hip)Memcpy(2D)?$|^(cu|cuda|hip)(Malloc|Free)|HostAlloc")
"""Runtime calls that wait for the device, or may wait."""


def waiting_calls(lab: Lab) -> Iterator[Compared]:
    """Check that the callback adds no call that waits for the device outside windows."""
    for name, settings in (
        ("clipping", {"gradient_clip_val": 1.0}),
        ("16-mixed", {"precision": "16-mixed", "accumulate_grad_batches": 2}),
    ):
        counts = []
        for callbacks in ([], [lab.callback(name, active=0, flops=False)]):
            traced = _Traced(lab)
            torch.manual_seed(0)
            net = Net(layers(256, 8))
            lab.fit(net, [lab.tensor(64, 256)], 80, [*callbacks, traced], **settings)
            counts.append(traced)
        bare, ours = counts
        yield there(f"{name}: kernels without the callback", bare.kernels)
        waits = [sum(n for call, n in one.calls.items() if _WAITS.search(call)) for one in (ours, bare)]
        yield Compared(f"{name}: calls that wait, in 30 steps", waits[0], waits[1], at_most=True)
        yield Compared(f"{name}: kernels in 30 steps", ours.kernels, bare.kernels)


class _Traced(Callback):
    def __init__(self, lab: Lab) -> None:
        self.lab, self.calls, self.kernels = lab, Counter[str](), 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 40:
            self.lab.synchronize()
            self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.profiler.start()

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if batch_idx == 69:
            self.lab.synchronize()
            self.profiler.stop()
            path = self.lab.folder / "plain.json"
            self.profiler.export_chrome_trace(str(path))
            plain = PlainTrace(path)
            self.calls, self.kernels = Counter(one.name for one in plain.calls), len(plain.kernels)
