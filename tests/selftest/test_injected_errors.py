"""Tests that the self-test can fail: each broken number must cause a FAIL.

Stored GPU traces and a simulated device cover what only a GPU would show.
"""

from __future__ import annotations

import json
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_modelprof.analysis import facts
from lightning_modelprof.analysis.modules import model_flops
from lightning_modelprof.analysis.steps import benchmark
from lightning_modelprof.analysis.timeline import steps as trace_steps
from lightning_modelprof.analysis.trace import device_usage, trace_facts
from lightning_modelprof.engine import step_times
from lightning_modelprof.inspect.flops import count
from lightning_modelprof.inspect.modules.module_times import ModuleTimer
from lightning_modelprof.lightning import classify
from lightning_modelprof.lightning.callback import ModelProfCallback
from lightning_modelprof.measure.steps.device_phases import DevicePhases
from lightning_modelprof.measure.steps.recorder import Recorder
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.run.memory import PhasePeak, StepMemory
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.selftest import checks_cost, checks_fit, checks_time, checks_trace
from lightning_modelprof.selftest.comparison import Skip
from lightning_modelprof.selftest.lab import Lab, layers
from lightning_modelprof.selftest.plain_trace import PlainTrace
from tests.support.bench import FakeClock, UndisturbedClock
from tests.support.traces import FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

TRACES = [FOLDER / f"h100_{name}.pt.trace.json.gz" for name in ("waits", "item")]


class Ticks:
    """Clock of a simulated device, which advances only in layers."""

    now_ns = 0


class Event:
    """Event of the simulated device."""

    def record(self):
        self.at = Ticks.now_ns

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e6


class Device:
    """The package's clock for the simulated device."""

    def mark(self):
        event = Event()
        event.record()
        return event

    def is_reached(self, mark):
        return True

    def elapsed_ns(self, begin, end):
        return end.at - begin.at

    def release(self, mark):
        pass

    def close(self):
        pass


class Passes(torch.autograd.Function):
    """Takes 3 ms in forward and 7 ms in backward."""

    @staticmethod
    def forward(ctx, x):
        Ticks.now_ns += 3_000_000
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Ticks.now_ns += 7_000_000
        return grad


class Layer(torch.nn.Linear):
    def forward(self, x):
        return Passes.apply(super().forward(x))


class FakeGpu(Lab):
    """Simulates only a GPU's events."""

    def event(self):
        return Event()


class FakeCuda(Lab):
    """Claims to be a GPU, but runs on the CPU and records no GPU work."""

    def __init__(self, folder):
        super().__init__("cpu", folder)
        self.kind, self.half = "cuda", torch.bfloat16
        self.synchronized = 0

    def tensor(self, *shape, dtype=torch.float32, pinned=True):
        return super().tensor(*shape, dtype=dtype, pinned=False)

    def trainer(self, callbacks=(), **settings):
        return super().trainer(callbacks, **settings | {"accelerator": "cpu"})

    def synchronize(self):
        self.synchronized += 1


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """Comparisons of a check, for the shortest possible training."""
    monkeypatch.setattr(checks_time, "STEPS", 18)

    def run(name):
        torch.manual_seed(0)
        if name == "stored trace":
            return [one for path in TRACES for one in checks_trace.compare_trace(path, "h100")]
        if name == "gpu phases":
            monkeypatch.setattr(step_times, "device_clock", lambda device: Device())
            return list(
                checks_time._device_phases(FakeGpu("cpu", tmp_path), "net", Layer(4, 4), torch.ones(2, 4))
            )
        if name in ("cpu phases", "modules"):  # a wait for a CPU would count on one side only
            use_clock(UndisturbedClock(), time.sleep)
        if name == "made-up cpu phases":  # only the sleeps take time
            clock = FakeClock()
            use_clock(clock, lambda seconds: clock.advance(round(seconds * 1e9)))
        return list(CHECKS[name](Lab("cpu", tmp_path)))

    def use_clock(clock, sleep):
        """Use the clock on both sides."""
        make = Lab.callback
        monkeypatch.setattr(checks_time, "time", SimpleNamespace(perf_counter_ns=clock, sleep=sleep))

        def made(*arguments, **settings):
            callback = make(*arguments, **settings)
            callback._clock = clock
            return callback

        monkeypatch.setattr(Lab, "callback", made)

    return run


CHECKS = {
    "cpu phases": checks_time.cpu_phases,
    "made-up cpu phases": checks_time.cpu_phases,
    "modules": checks_time.module_times,
    "flops": checks_cost.flops,
    "windows": checks_trace.window,
    "training": checks_fit.training,
    "findings": checks_fit.findings,
}


@pytest.mark.parametrize("name", [*CHECKS, "stored trace", "gpu phases"])
def test_correct_numbers_pass(name, compared):
    found = compared(name)
    assert [one.sentence() for one in found if not one.passes] == []
    assert len(found) >= 3


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("h100_*.json.gz")), ids=lambda path: path.name.split(".")[0]
)
def test_stored_gpu_traces_pass(path):
    found = list(checks_trace.compare_trace(path, "h100"))
    assert [one.sentence() for one in found if not one.passes] == []
    assert len(found) > 20


# Numbers, each broken in one place


def swap_phases(patch):
    swapped = PHASE_INDEX | {"forward": PHASE_INDEX["backward"], "backward": PHASE_INDEX["forward"]}
    patch.setattr(classify, "PHASE_INDEX", swapped)


def shift_steps(patch):
    add, before = Recorder.add, []

    def one_late(self, step):
        before.append(step)
        add(self, (before[-2:][0][0], *step[1:]))

    patch.setattr(Recorder, "add", one_late)


def microseconds(patch):
    cost = benchmark._cost
    patch.setattr(benchmark, "_cost", lambda *args: replace(cost(*args), avg=cost(*args).avg / 1000))


def rate_of_all_time(patch):
    quotient = benchmark._quotient

    def wrong(above, below, totals, scale=1.0):
        return quotient(above, below, (totals[0], totals[1] * 1.05), scale)

    patch.setattr(benchmark, "_quotient", wrong)


def share_of_phases(patch):
    times = facts.phase_times

    def wrong(totals):
        found = times(totals)
        some = sum(one.total_ns for one in found if one.key != "dataloader")
        return tuple(replace(one, ratio=one.total_ns / some) for one in found)

    patch.setattr(facts, "phase_times", wrong)


def macs_for_flops(patch):
    operator = count._operator
    patch.setattr(count, "_operator", lambda place, calls, flops: operator(place, calls, (flops or 0) // 2))


def swap_directions(patch):
    times = ModuleTimer.times

    def wrong(self):
        found = times(self)
        swapped = [
            replace(one, forward_ns=one.backward_ns or 0, backward_ns=one.forward_ns) for one in found.times
        ]
        return replace(found, times=tuple(swapped))

    patch.setattr(ModuleTimer, "times", wrong)


def window_one_late(patch):
    record = Capture._record

    def wrong(self, *args, **kwargs):
        found = record(self, *args, **kwargs)
        return replace(found, recorded_steps=tuple(one + 1 for one in found.recorded_steps))

    patch.setattr(Capture, "_record", wrong)


def half_the_rate(patch):
    right = model_flops._utilization
    patch.setattr(model_flops, "_utilization", lambda flops, peaks, ns: right(flops, peaks, ns and ns * 2))


def before_setup(act):
    def patch_it(patch):
        hook = ModelProfCallback.setup

        def wrong(self, *args, **kwargs):
            act()
            return hook(self, *args, **kwargs)

        patch.setattr(ModelProfCallback, "setup", wrong)

    return patch_it


def warn_of_a_file():
    warnings.warn("ModelProfCallback: it isn't in /home/ann/my project", RuntimeWarning, stacklevel=1)


def changed_fact(name, change):
    def patch_it(patch):
        right = getattr(trace_facts, name)
        patch.setattr(trace_facts, name, lambda timeline: change(right(timeline)))

    return patch_it


def without_last(facts):
    return replace(facts, by_name=facts.by_name[:-1])


def half_the_bytes(facts):
    return replace(facts, kinds=tuple(replace(one, size_bytes=one.size_bytes // 2) for one in facts.kinds))


def host_steps(patch):
    patch.setattr(trace_steps, "_bounds", lambda trace, steps, launching: steps.copy())


def busy_of_kernels(patch):
    share = device_usage.share
    patch.setattr(device_usage, "share", lambda part, whole: share(part, whole and whole * 1.01))


def device_microseconds(patch):
    patch.setattr(Device, "elapsed_ns", lambda self, begin, end: (end.at - begin.at) // 1000)


def device_phase_before(patch):
    mark = DevicePhases.mark

    def wrong(self, phase):
        self.before, phase = phase, getattr(self, "before", phase)
        mark(self, phase)

    patch.setattr(DevicePhases, "mark", wrong)


ERRORS = {
    "forward and backward swapped": ("made-up cpu phases", swap_phases, "forward"),
    "phases of the step before": ("made-up cpu phases", shift_steps, "odd steps"),
    "step time in microseconds": ("made-up cpu phases", microseconds, "step time"),
    "samples per second of other time": ("made-up cpu phases", rate_of_all_time, "samples per second"),
    "FLOP/s halved": ("made-up cpu phases", half_the_rate, "FLOP/s"),
    "share of the phases without data": ("made-up cpu phases", share_of_phases, "share of all steps"),
    "multiply-adds counted once": ("flops", macs_for_flops, "layers, forward"),
    "module times of the other direction": ("modules", swap_directions, "0 (Linear)"),
    "window a step late": ("windows", window_one_late, "first recorded step"),
    "a random number drawn": ("training", before_setup(lambda: torch.rand(1)), "differing weights"),
    "a kernel lost": ("stored trace", changed_fact("summarize_kernels", without_last), "kernels"),
    "half of the bytes": ("stored trace", changed_fact("summarize_copies", half_the_bytes), "copied"),
    "steps without their GPU work": ("stored trace", host_steps, "time"),
    "busy share of a longer time": ("stored trace", busy_of_kernels, "GPU busy"),
    "GPU time in microseconds": ("gpu phases", device_microseconds, "forward"),
    "GPU time of the phase before": ("gpu phases", device_phase_before, "backward"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_broken_number_fails(error, compared, monkeypatch):
    check, break_it, name = ERRORS[error]
    break_it(monkeypatch)
    wrong = [one.name for one in compared(check) if not one.passes]
    assert any(name in one for one in wrong), wrong


# Checks that need a GPU, with a fake one


def failed(comparisons):
    return [one.name for one in comparisons if not one.passes]


def test_warning_fails_and_is_shown_without_private_names(compared, monkeypatch):
    before_setup(warn_of_a_file)(monkeypatch)
    [said] = [one for one in compared("training") if one.name == "warnings of the profiler"]
    assert not said.passes
    assert said.ours.startswith("ModelProfCallback: it isn't in <removed>; ModelProf")


MIB = 2**20
WORKSPACES = 64 * MIB


def of_phase(phase, num_bytes):
    return PhasePeak(phase=phase, num_bytes=num_bytes, by_category={}, operator="", module="")


@pytest.mark.parametrize(
    ("forward", "backward", "wrong"),
    [
        (300, 400, []),
        (300 - 16, 400 + 24, []),
        (300 + 64, 400, ["forward: growth to its peak"]),
        (300, 400 - 64, ["backward: growth to its peak"]),
        (300, None, ["backward: growth to its peak"]),
    ],
)
def test_phase_peaks_are_compared_without_workspaces(forward, backward, wrong):
    peaks = checks_cost._Peaks()
    of_torch = {"start": 100, "forward": 300, "backward": 400}
    peaks.bytes = {(6, name): num * MIB + WORKSPACES for name, num in of_torch.items()}
    ours = {"forward": forward, "backward": backward}
    of_phases = tuple(of_phase(name, num * MIB) for name, num in ours.items() if num is not None)
    step = StepMemory(step=6, device="cuda", begin_bytes=100 * MIB, begin_by_category={}, peaks=of_phases)
    assert failed(peaks.growth(step)) == wrong


def test_out_of_memory_fails_if_report_has_no_errors(tmp_path, monkeypatch):
    def run_out(self, batch, batch_idx):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")

    monkeypatch.setattr(checks_cost._Grows, "training_step", run_out)
    for name in ("empty_cache", "set_per_process_memory_fraction", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    one = SimpleNamespace(total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: one)
    of_report = "out of memory: errors in the report"
    assert failed(checks_cost._out_of_memory(FakeCuda(tmp_path))) == [of_report]
    monkeypatch.setattr(checks_cost, "row", lambda *_: {"value": 1})
    assert failed(checks_cost._out_of_memory(FakeCuda(tmp_path))) == []


def test_traces_without_kernels_fail(tmp_path):
    lab = FakeCuda(tmp_path)
    lab.is_gpu = False
    assert failed(checks_trace.window(lab)) == [
        f"{n}: kernels in the trace" for n in ("layers", "convolutions")
    ]
    assert failed(checks_fit._unchanged(lab, "graphs", lambda: layers(512, 4))) == [
        "graphs: kernels in the trace"
    ]


def test_waiting_calls_fail_without_kernels(tmp_path):
    lab = FakeCuda(tmp_path)
    found = failed(checks_trace.waiting_calls(lab))
    assert found == [f"{name}: kernels without the callback" for name in ("clipping", "16-mixed")]
    assert lab.synchronized == 8  # before and after each of four measurements


def test_counter_error_is_not_missing_kernel(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("in our counter")

    monkeypatch.setattr(checks_cost, "count_flops", broken)
    with pytest.raises(RuntimeError, match="in our counter"):
        list(checks_cost._attention(Lab("cpu", tmp_path)))


def test_attention_fails_without_its_plain_kernel(tmp_path, monkeypatch):
    @contextmanager
    def absent(backend):
        raise RuntimeError("no available kernel")
        yield

    monkeypatch.setattr(checks_cost, "sdpa_kernel", absent)
    with pytest.raises(RuntimeError, match="no available kernel"):
        list(checks_cost._attention(Lab("cpu", tmp_path)))


@pytest.mark.parametrize("fails_at", [1, 2])
def test_model_that_fails_without_callback_is_skipped(tmp_path, fails_at):
    made = []

    def make():
        made.append(1)
        if len(made) == fails_at:
            raise OSError("Failed to find C compiler of Ann")
        return layers(512, 4)

    said = "compiled: fails without the profiler too, OSError: Failed to find C compiler$"
    kind, said = (Skip, said) if fails_at == 1 else (OSError, "of Ann$")
    with pytest.raises(kind, match=said):
        list(checks_fit._unchanged(Lab("cpu", tmp_path), "compiled", make))


def fake_mfu(patch, card, **ours):
    """One-second steps on an A100 that performs as its data sheet says."""
    size = 4096
    flops = 2 * size**3 * 11
    model = {"flops": flops, "flops_per_s": flops, "share_of_peak": flops / 312e12} | ours
    patch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    patch.setattr(torch.cuda, "get_device_name", lambda _: card)
    patch.setattr(checks_cost, "row", lambda *_: model)
    patch.setattr(checks_cost, "_Products", lambda *_: torch.nn.Identity())
    lab = SimpleNamespace(
        half=torch.bfloat16,
        product_ns=lambda _: 3e6,
        tensor=lambda *_, **__: None,
        step_ns=lambda *_: 1e9,
        callback=lambda *_, **__: SimpleNamespace(report=True),
        fit=lambda *_: None,
    )
    return checks_cost.mfu(lab)


@pytest.mark.parametrize(
    ("ours", "wrong"),
    [
        ({}, []),
        ({"share_of_peak": 0.5}, ["MFU"]),
        ({"share_of_peak": None}, ["MFU"]),
        ({"flops_per_s": 1e12}, ["FLOP/s"]),
    ],
    ids=str,
)
def test_mfu_is_compared_with_data_sheet(monkeypatch, ours, wrong):
    assert failed(fake_mfu(monkeypatch, "NVIDIA A100-SXM4-80GB", **ours)) == wrong


def test_mfu_of_unknown_card_is_not_compared(monkeypatch):
    with pytest.raises(Skip, match="not comparable"):
        list(fake_mfu(monkeypatch, "NVIDIA H100 80GB HBM3 MIG 1g.10gb"))


@pytest.mark.parametrize(("product_ns", "depth"), [(100_000, 54), (10_000_000, 2)])
def test_planted_faults_scale_with_gpu_and_need_gain(tmp_path, monkeypatch, product_ns, depth):
    lab, depths = FakeCuda(tmp_path), []
    lab.is_gpu, lab.product_ns, lab.step_ns = True, lambda _: product_ns, lambda *_: 20e6
    lab.tensor = lambda *_, **__: None
    monkeypatch.setattr(checks_fit, "loader_of", None)
    monkeypatch.setattr(torch.utils.data, "DataLoader", lambda *_, **__: None)
    monkeypatch.setattr(checks_fit, "_found", lambda *_, **__: iter(()))
    monkeypatch.setattr(checks_fit, "layers", lambda width, deep, *_: depths.append(deep))
    with pytest.raises(Skip, match="item takes less than 1 ms"):
        list(checks_fit.findings(lab))
    assert depths[1:] == [depth] * 3


def trace_with_gap(path):
    """Two steps: forward has two 1 ms kernels with a gap of 2 ms, backward has one kernel."""
    events = []

    def add(kind, name, begin_ms, end_ms, **args):
        times = {"ts": begin_ms * 1e3, "dur": (end_ms - begin_ms) * 1e3}
        events.append({"ph": "X", "cat": kind, "name": name, "args": args} | times)

    for step in (7, 8):
        at = step * 100
        add("user_annotation", f"ProfilerStep#{step}", at, at + 50)
        add("user_annotation", "modelprof: forward", at, at + 20)
        add("user_annotation", "modelprof: backward", at + 20, at + 40)
        for number, launched in enumerate((1, 2, 21)):
            correlation = 10 * step + number
            add(
                "cuda_runtime",
                "cudaLaunchKernel",
                at + launched,
                at + launched + 0.1,
                correlation=correlation,
            )
            begin = at + (30, 33, 34)[number]
            add("kernel", "k", begin, begin + 1, correlation=correlation, device=0, stream=7)
    path.write_text(json.dumps({"traceEvents": events}))
    return PlainTrace(path)


@pytest.mark.parametrize(
    ("forward_ms", "is_right"), [(1.5, False), (2, True), (3, True), (4, True), (4.5, False)]
)
def test_phase_time_is_kernel_time_with_or_without_gaps(tmp_path, forward_ms, is_right):
    phases = [0] * len(PHASE_INDEX)
    phases[PHASE_INDEX["forward"]], phases[PHASE_INDEX["backward"]] = forward_ms * 1e6, 1e6
    wrong = failed(checks_time._with_kernels("net", trace_with_gap(tmp_path / "t.json"), {8: phases}))
    assert wrong == [] if is_right else wrong == ["net: forward in the window, and its kernels"]


def test_slow_callback_counts_as_overhead(tmp_path, monkeypatch):
    hook = ModelProfCallback.on_train_batch_start

    def slow(self, *args):
        end = time.thread_time_ns() + 450_000
        while time.thread_time_ns() < end:
            pass
        hook(self, *args)

    monkeypatch.setattr(ModelProfCallback, "on_train_batch_start", slow)
    [one] = checks_time.overhead(Lab("cpu", tmp_path))
    assert not one.passes
    assert one.ours > 400_000
