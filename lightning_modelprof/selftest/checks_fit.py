"""Check that the callback changes no training, saves consistent files and finds planted faults."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any, Final

import torch
from torch import nn

from lightning_modelprof.reading import read_report
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.selftest.comparison import Compared, Skip, there
from lightning_modelprof.selftest.lab import (
    Lab,
    Net,
    differing,
    layers,
    loader_of,
    row,
    rows,
    weights,
)
from lightning_modelprof.selftest.machine import scrubbed, told
from lightning_modelprof.selftest.plain_trace import PlainTrace
from lightning_modelprof.units import Unit


def training(lab: Lab) -> Iterator[Compared]:
    """Compare weights with and without the callback, and check the saved files."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    size = lab.pick(512, 64)

    def trained(*callbacks: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(layers(size, 2), nn.Dropout(0.1), nn.Linear(size, 8))
        batches = [lab.tensor(16, size) for _ in range(3)]
        lab.fit(Net(net), batches, 50, callbacks)
        return weights(net)

    plain = trained()
    yield Compared("differing weights of two fits without the callback", differing(plain, trained()), 0)
    everything = {"active": 3, "flops": True, "profile_memory": True, "record_shapes": True}
    for name, arguments in (("everything on", everything), ("stacks", {"active": 2, "with_stack": True})):
        callback = lab.callback(name, **arguments)
        after = trained(callback)
        yield Compared(f"{name}: differing weights", differing(plain, after), 0)
        run, report = callback.run, callback.report
        assert run is not None
        assert report is not None
        yield Compared(f"{name}: status", run.info.status, "finished")
        yield Compared(f"{name}: steps", len(run.ranks[0].steps), 50)
        yield Compared(f"{name}: window", run.ranks[0].windows[0].status.value, "complete")
        folder = lab.folder / name
        saved = load_run(folder / "run.json")
        yield Compared(f"{name}: time of all saved steps", int(saved.ranks[0].steps.duration_ns.sum()),
                         int(run.ranks[0].steps.duration_ns.sum()), unit=Unit.DURATION_NS)  # fmt: skip
        file = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        yield Compared(f"{name}: verdict in report.json", file["verdict"]["kind"], _verdict(report))
        again, now = (row(one, "phases", "Forward").get("total_ns") for one in (read_report(folder), report))
        yield Compared(f"{name}: forward, read again", again, now, unit=Unit.DURATION_NS)
    said = "; ".join(scrubbed(one) for one in lab.warnings)
    yield Compared("warnings of the profiler", said or "none", "none")
    for loop in ("validate", "predict"):
        callback = lab.callback(loop, active=2)
        trainer, loader = lab.trainer([callback]), loader_of([lab.tensor(16, size)], 30)
        getattr(trainer, loop)(Net(nn.Linear(size, 8)), loader)
        assert callback.run is not None
        yield Compared(f"{loop}: steps", len(callback.run.ranks[0].steps), 30)


def _verdict(report: Report) -> str | None:
    return None if report.verdict is None else report.verdict.kind


def variants(lab: Lab) -> Iterator[Compared]:
    """Check training that needs a GPU: 16-bit with scaling, and CUDA graphs."""
    size = 512

    def graphed() -> nn.Module:
        net = layers(size, 4).to(lab.device)
        batch = torch.randn(128, size, device=lab.device)
        return torch.cuda.make_graphed_callables(net, (batch,))  # type: ignore

    yield from _unchanged(
        lab, "16-mixed", lambda: layers(size, 4), precision="16-mixed", gradient_clip_val=1.0
    )
    yield from _unchanged(lab, "CUDA graphs", graphed)


def compiled(lab: Lab) -> Iterator[Compared]:
    """Check FLOPs and kernels of a compiled model."""
    yield from _unchanged(lab, "compiled", lambda: torch.compile(layers(512, 4)))  # type: ignore[arg-type,return-value]


def _unchanged(lab: Lab, name: str, make: Callable[[], nn.Module], **settings: Any) -> Iterator[Compared]:
    found = []
    callback = lab.callback(name, active=3, flops=True)
    for callbacks in ([], [callback]):
        torch.manual_seed(0)
        try:
            net = make()
            lab.fit(Net(net), [lab.tensor(128, 512)], 50, callbacks, **settings)
        except Exception as error:
            if callbacks:
                raise
            raise Skip(f"{name}: fails without the profiler too, {told(error)}") from error
        found.append(weights(net))
    run, report = callback.run, callback.report
    assert run is not None
    assert report is not None
    if name != "compiled":  # hooks may give the compiler other graphs, which round differently
        yield Compared(f"{name}: differing weights", differing(*found), 0)
    yield Compared(f"{name}: status", run.info.status, "finished")
    [recorded] = run.ranks[0].windows
    yield Compared(f"{name}: window", recorded.status.value, "complete")
    kernels = sum(one["calls"] for one in rows(report, "kernels"))
    plain = PlainTrace(lab.folder / name / str(recorded.trace_file))
    yield there(f"{name}: kernels in the trace", len(plain.kernels))
    yield Compared(f"{name}: kernels in the window", kernels, len(plain.kernels))
    if name != "CUDA graphs":  # their operators are invisible
        by_hand = 2 * 128 * 512**2 * (3 * 4 - 1)
        counted = row(report, "flops", "Model").get("flops")
        yield Compared(f"{name}: FLOPs per step", counted, by_hand, unit=Unit.FLOPS)


def ddp(lab: Lab) -> Iterator[Compared]:
    """Check DDP over two GPUs, or over two CPU processes."""
    if lab.is_gpu and (lab.kind != "cuda" or torch.cuda.device_count() < 2):
        raise Skip("needs two GPUs")
    size, steps = lab.pick(512, 32), 40
    callback = lab.callback("ddp", active=3, flops=True)
    net = layers(size, 3)
    lab.fit(
        Net(net), loader_of([lab.tensor(16, size)], 2 * steps), steps, [callback], strategy="ddp", devices=2
    )
    run, report = callback.run, callback.report
    if run is None or report is None or int(os.environ.get("LOCAL_RANK", "0")):
        return  # the other rank
    yield Compared("ranks", run.info.world_size, 2)
    yield Compared("ranks with steps", len(run.rank_steps), 2)
    yield Compared("ranks without numbers", len(run.absent_ranks), 0)
    for one in run.rank_steps:
        yield Compared(f"rank {one.rank}: steps", one.num_steps, steps)
    by_hand = 2 * 16 * size**2 * (3 * 3 - 1)
    yield Compared(
        "FLOPs per step and rank", row(report, "flops", "Model").get("flops"), by_hand, unit=Unit.FLOPS
    )
    [recorded] = run.ranks[0].windows
    yield Compared("window", recorded.status.value, "complete")
    if lab.is_gpu:
        plain = PlainTrace(lab.folder / "ddp" / str(recorded.trace_file))
        talks = sum("nccl" in one.name.lower() for one in plain.kernels)
        yield there("NCCL kernels in the trace", talks)
        yield Compared("NCCL kernels", sum(one["calls"] for one in rows(report, "collectives")), talks)


# Faults

_STEPS: Final = 50

_FAULTS: Final = """
import time
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import Dataset


class Slow(Dataset):
    def __init__(self, batch, count):
        self.batch, self.count, self.took = batch, count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        begin = time.perf_counter_ns()
        time.sleep(0.02)  # fault: input_bound
        self.took.append(time.perf_counter_ns() - begin)
        return self.batch


class Waits(LightningModule):
    def __init__(self, net, fault):
        super().__init__()
        self.net, self.fault = net, fault

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).float().square().mean()
        if self.fault == "item":
            self.seen = loss.item()  # fault: item
        if self.fault == "copy":
            loss = loss * torch.tensor([0.1, 0.2]).to(loss.device).sum()  # fault: copy
        end = time.perf_counter() + 0.004
        while self.fault != "sleep" and time.perf_counter() < end:
            pass
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)
"""
"""Written to a file, as findings only name lines of user files."""


def findings(lab: Lab) -> Iterator[Compared]:
    """Plant faults, and compare each finding's line and saving with the fault's own time."""
    planted = _planted(lab)
    slow = planted.Slow(lab.tensor(64, 64), _STEPS)
    loader = torch.utils.data.DataLoader(slow, batch_size=None)
    net = planted.Waits(layers(64, 2), "sleep")
    yield from _found(lab, "input_bound", "input_bound", net, loader)
    if not lab.is_gpu:
        return
    # The CPU waits for the GPU even without a fault, as the GPU is busy four times as long as the CPU spins.
    depth = max(2, math.ceil(4 * 4e6 / (3 * lab.product_ns(4096))))
    batch = [lab.tensor(4096, 4096, dtype=lab.half)]
    for fault, kind in (("item", "host_device_sync"), ("copy", "host_to_device_copy")):
        nets = [planted.Waits(layers(4096, depth, lab.half), one) for one in (fault, "", fault)]
        with_fault, without = (lab.step_ns(net, batch, _STEPS) for net in nets[:2])
        gain = with_fault - without
        if gain < 1e6:
            raise Skip(f"{fault} takes less than 1 ms here")
        yield from _found(lab, fault, kind, nets[2], batch, gain_ns=gain)


def _planted(lab: Lab) -> Any:
    path = lab.folder / "planted.py"
    path.write_text(_FAULTS, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _found(
    lab: Lab, fault: str, kind: str, net: Any, batches: Any, *, gain_ns: float | None = None
) -> Iterator[Compared]:
    """Train with a fault; compare its saving with ``gain_ns``, else with its dataset's measurements."""
    callback = lab.callback(fault, active=3, flops=True)
    lab.fit(net, batches, _STEPS, [callback])
    assert callback.report is not None
    found = [one for one in callback.report.findings if one.status.value == "found" and one.kind == kind]
    yield Compared(f"{fault}: finding", kind if found else None, kind)
    lines = [at.line for one in found for at in one.locations if str(at.file).endswith("planted.py")]
    marked = next(n for n, text in enumerate(_FAULTS.split("\n"), 1) if text.endswith(f"# fault: {fault}"))
    yield Compared(f"{fault}: line", marked if marked in lines else next(iter(lines), None), marked)
    saving = sum(one.saving_ns_per_step or 0 for one in found)
    truth, limit = (mean(batches.dataset.took[10:]), 0.25) if gain_ns is None else (gain_ns, 0.8)
    yield Compared(f"{fault}: saving per step", saving, truth, limit, Unit.DURATION_NS, 500_000)
