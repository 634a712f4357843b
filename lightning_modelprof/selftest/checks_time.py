"""Check phases, modules and overhead against manual clocks and events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import mean, median, stdev
from typing import Any, Final

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.selftest.comparison import Compared, there
from lightning_modelprof.selftest.lab import Batches, Lab, Net, layers, middle, pictures, row
from lightning_modelprof.selftest.plain_trace import PlainTrace, covered, spans
from lightning_modelprof.units import Unit, format_amount

_NS: Final = Unit.DURATION_NS

STEPS: Final = 48
"""Steps of the training with sleeping phases."""


def cpu_phases(lab: Lab) -> Iterator[Compared]:
    """Check CPU times of phases, step time and speed; each phase sleeps for a different time."""
    hand = _Hand()
    net = _Paced(hand)
    loader = DataLoader(_PacedBatches(hand, [lab.tensor(16, 32)], STEPS), batch_size=None)
    callback = lab.callback("paced", active=0, flops=True)
    lab.fit(net, loader, STEPS, [callback, _PacedCallback(hand)])
    run, report = callback.run, callback.report
    assert run is not None
    assert report is not None
    timings = run.ranks[0].steps
    yield Compared("steps", len(timings), STEPS)
    sums = timings.phases_ns.sum(axis=1) - timings.duration_ns
    yield Compared("steps whose phases don't add up to the step", int(np.count_nonzero(sums)), 0)
    numbers = timings.clean().step.tolist()
    for phase, by_step in hand.ns.items():
        our = dict(zip(timings.step.tolist(), timings.phases_ns[:, PHASE_INDEX[phase]].tolist(), strict=True))
        for part in (0, 1):  # every other step takes longer, to reveal an offset of one step
            which = [one for one in numbers if one % 2 == part]
            truth = median(by_step[one] for one in which)
            ours = median(our[one] for one in which)
            kind = "odd steps" if part else "even steps"
            yield Compared(f"{phase}, {kind}", ours, truth, 0.05, _NS, 1_000_000)
    step_ns = mean(hand.starts[one + 1] - hand.starts[one] for one in numbers)
    cost = row(report, "perf_summary", "batch_cost").get("avg")
    yield Compared("step time", cost, step_ns, 0.02, _NS)
    fetched = mean(hand.ns["dataloader"][one] for one in numbers)
    reader = row(report, "perf_summary", "reader_cost").get("avg")
    yield Compared("waiting for data", reader, fetched, 0.05, _NS, 1_000_000)
    speed = row(report, "perf_summary", "ips (samples/s)").get("avg")
    yield Compared("samples per second", speed, 16 * 1e9 / step_ns, 0.02, Unit.RATE)
    by_hand = 2 * (2 * 16 * 32 * 8)  # forward, and backward of the weights
    speed = row(report, "flops", "Model").get("flops_per_s")
    yield Compared("FLOP/s", speed, by_hand * 1e9 / step_ns, 0.02, Unit.FLOPS_PER_S)
    share = sum(hand.ns["backward"].values()) / (hand.starts[STEPS] - hand.starts[0])
    yield Compared(
        "backward, share of all steps",
        row(report, "phases", "Backward").get("ratio"),
        share,
        0.05,
        Unit.RATIO,
    )


class _Hand:
    """Manually measured CPU-clock spans: phase → step → ns."""

    def __init__(self) -> None:
        self.ns: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.starts: dict[int, int] = {}

    @contextmanager
    def span(self, phase: str, step: int, sleep_ms: float) -> Iterator[None]:
        """Sleep, half as long again in odd steps, then run the body."""
        begin = time.perf_counter_ns()
        time.sleep(sleep_ms * (1.5 if step % 2 else 1) / 1e3)
        yield
        self.ns[phase][step] += time.perf_counter_ns() - begin


class _PacedBatches(Batches):
    def __init__(self, hand: _Hand, batches: list[Tensor], count: int) -> None:
        super().__init__(batches, count)
        self.hand = hand

    def __getitem__(self, index: int) -> Any:
        self.hand.starts[index] = time.perf_counter_ns()
        with self.hand.span("dataloader", index, 6):
            return super().__getitem__(index)


class _PacedOptimizer(torch.optim.SGD):
    def __init__(self, net: _Paced) -> None:
        super().__init__(net.parameters(), lr=1e-4)
        self.net = [net]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with self.net[0].hand.span("optimizer", self.net[0].step_number, 15):
            super().step()
        return loss


class _Paced(Net):
    def __init__(self, hand: _Hand) -> None:
        super().__init__(nn.Linear(32, 8))
        self.hand = hand

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.hand.span("forward", batch_idx, 9):
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.hand.span("backward", self.step_number, 12):
            super().backward(loss, *args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _PacedOptimizer(self)


class _PacedCallback(Callback):
    def __init__(self, hand: _Hand) -> None:
        self.hand = hand

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with self.hand.span("callbacks", batch_idx, 3):
            pass

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.hand.starts[STEPS] = time.perf_counter_ns()


# The device's clock


def device_phases(lab: Lab) -> Iterator[Compared]:
    """Check device times of phases against manual events and a window's kernels."""
    width = lab.pick(2048, 256)
    yield from _device_phases(lab, "layers", layers(width, 6), lab.tensor(width, width))
    batch = lab.tensor(lab.pick(128, 4), 3, 64, 64)
    yield from _device_phases(lab, "convolutions", pictures(lab.pick(128, 4)), batch)
    yield from _device_phases(
        lab, "accumulation", layers(width, 6), lab.tensor(width, width), accumulate_grad_batches=4
    )


def _device_phases(lab: Lab, name: str, net: nn.Module, batch: Tensor, **settings: Any) -> Iterator[Compared]:
    steps, first, floor = 60, 25, lab.pick(100_000, 500_000)
    marks: list[tuple[int, str, Any]] = []

    def mark(step: int, border: str) -> None:
        event = lab.event()
        event.record()
        marks.append((step, border, event))

    callback = lab.callback(name, active=4, flops=False)
    lab.fit(Net(net, mark), [batch], steps, [callback], **settings)
    lab.synchronize()
    assert callback.run is not None
    timings = callback.run.ranks[0].steps
    known = {
        int(n): one for n, one in zip(timings.step, timings.device_phases_ns, strict=True) if one.min() >= 0
    }
    yield Compared(f"{name}: steps without device time", len(timings) - len(known), 0, floor=2)
    hand: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    starts: dict[int, Any] = {}
    for (step, begin, start), (_, end, stop) in pairwise(marks):
        if begin == "forward":
            starts.setdefault(step, start)
        phase = {"forward": "forward", "backward": "backward", "backward end": "optimizer"}.get(begin)
        if phase and end != "forward":
            hand[phase][step] += start.elapsed_time(stop) * 1e6
    clean = [step for step in range(first, steps - 2) if step in known]
    for phase, parts in (
        ("forward", ["forward"]),
        ("backward", ["backward"]),
        ("optimizer", ["optimizer", "clip"]),
    ):
        which = [step for step in clean if step in hand[phase]]
        ours = median(sum(int(known[step][PHASE_INDEX[part]]) for part in parts) for step in which)
        yield Compared(
            f"{name}: {phase}", ours, median(hand[phase][step] for step in which), 0.03, _NS, floor
        )
    whole = [starts[step].elapsed_time(starts[step + 1]) * 1e6 for step in clean]
    ours = median(int(known[step].sum()) for step in clean)
    yield Compared(f"{name}: whole step", ours, median(whole), 0.03, _NS, floor)
    [recorded] = callback.run.ranks[0].windows
    if lab.kind != "cuda":
        return
    plain = PlainTrace(lab.folder / name / str(recorded.trace_file))
    yield from _with_kernels(name, plain, known)


def _with_kernels(name: str, plain: PlainTrace, known: dict[int, Any]) -> Iterator[Compared]:
    """A phase takes as long as its kernels, with or without the gaps between them."""
    for phase in ("forward", "backward"):
        busy, whole, elapsed = [], [], []
        ranges = [one for one in plain.ranges if one.name == f"modelprof: {phase}"]
        for span in plain.steps[1:]:
            inside = [one for one in ranges if span.begin <= one.begin and one.end <= span.end]
            of_step = known.get(int(span.name.partition("#")[2]))
            if of_step is not None:
                work = spans([w for one in inside for w in plain.launched_in(one)])
                busy.append(covered(work))
                whole.append(max((end for _, end in work), default=0) - min(work, default=(0, 0))[0])
                elapsed.append(int(of_step[PHASE_INDEX[phase]]))
        note = f"{name}: {phase} in the window, and its kernels"
        least, most, our = (middle(one) or 0 for one in (busy, whole, elapsed))
        yield there(f"{name}: {phase}, kernels in the window", least)
        yield Compared(note, our, min(max(our, least), most), 0.06, _NS, 150_000)


def module_times(lab: Lab) -> Iterator[Compared]:
    """Check each module's time against clocks or events around it in the same steps."""
    width = lab.pick(4096, 512)
    net = nn.Sequential(
        *(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width // 4)),
        *(nn.ReLU(), nn.Linear(width // 4, width)),
    )
    clock = _ModuleClock(lab, net)
    callback = lab.callback("modules", active=0, flops=True)
    lab.fit(_NeedsGradients(net, clock.next_step), [lab.tensor(width, width)], 40, [callback])
    lab.synchronize()
    assert callback.run is not None
    cost = callback.run.ranks[0].model_cost
    times = None if cost is None else cost.times
    if times is None:
        yield Compared("timed modules", None, 5)
        return
    yield Compared("clock", times.clock, "device" if lab.is_gpu else "host")
    ours = {one.path: one for one in times.times}
    for name, child in net.named_children():
        its, what = ours.get(f"net.{name}"), f"{name} ({type(child).__name__})"
        for direction, limit in (("forward", 0.05), ("backward", 0.15)):
            our = None if its is None else getattr(its, f"{direction}_ns")
            truth = clock.median_ns(name, direction, times.step_numbers)
            yield Compared(f"{what}, {direction}", our, truth, limit, _NS, lab.pick(100_000, 500_000))


class _NeedsGradients(Net):
    """Give the batch a gradient, without which torch skips the first child's backward hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch.requires_grad_(), batch_idx)


class _ModuleClock:
    def __init__(self, lab: Lab, net: nn.Module) -> None:
        self.lab, self.step = lab, 0
        self.times: dict[tuple[str, str, int], list[Any]] = defaultdict(list)
        for name, child in net.named_children():
            child.register_forward_pre_hook(self.hook(name, "forward"))
            child.register_forward_hook(self.hook(name, "forward"))
            child.register_full_backward_pre_hook(self.hook(name, "backward"))
            child.register_full_backward_hook(self.hook(name, "backward"))

    def next_step(self, step: int, border: str) -> None:
        self.step = step

    def hook(self, name: str, direction: str) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            times = self.times[name, direction, self.step]
            if self.lab.is_gpu:
                times.append(self.lab.event())
                times[-1].record()
            else:
                times.append(time.perf_counter_ns())

        return mark

    def median_ns(self, name: str, direction: str, steps: tuple[int, ...]) -> float:
        pairs = [self.times[name, direction, step] for step in steps]
        if self.lab.is_gpu:
            return float(median(a.elapsed_time(b) * 1e6 for a, b in pairs))
        return float(median(b - a for a, b in pairs))


def overhead(lab: Lab) -> Iterator[Compared]:
    """Time steps with and without the callback in turns; on a CPU only CPU time counts."""
    # GPU marks may take 50 ms of any fit, so spread them over 600 steps.
    steps, width = lab.pick(600, 200), lab.pick(256, 32)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(lab.pick(7, 6)):
        for has in (False, True) if turn % 2 else (True, False):
            quiet = {"files": False}
            callbacks = [lab.callback(f"turn {turn}", active=0, flops=False, report=quiet)] if has else []
            times[has].append(
                lab.step_ns(Net(layers(width, 4)), [lab.tensor(width, width)], steps, callbacks=callbacks)
            )
    more = [ours - bare for ours, bare in zip(times[True], times[False], strict=True)]
    bare = min(times[False])  # other programs only make steps longer
    floor = max(250_000, 0.05 * bare, 3 * stdev(more) / len(more) ** 0.5)
    name = f"added to a step of {format_amount(bare, _NS)}"
    yield Compared(name, min(times[True]) - bare, 0, unit=_NS, floor=floor, at_most=True)
