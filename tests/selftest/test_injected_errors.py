"""The self-test can fail: numbers of the package are broken one at a time, and each break is a FAIL.

What only a GPU shows is covered by stored traces of GPUs, and by a device whose clock is the CPU's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_modelprof.analysis import analyze
from lightning_modelprof.analysis.steps import benchmark
from lightning_modelprof.analysis.timeline import steps as trace_steps
from lightning_modelprof.analysis.trace import device_usage, trace_facts
from lightning_modelprof.inspect.flops import count
from lightning_modelprof.inspect.modules.module_times import ModuleTimer
from lightning_modelprof.lightning import classify
from lightning_modelprof.lightning.callback import ModelProfCallback
from lightning_modelprof.loop import step_timing
from lightning_modelprof.measure.steps.device_phases import DevicePhases
from lightning_modelprof.measure.steps.recorder import Recorder
from lightning_modelprof.measure.window.capture import Capture
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.selftest import checks_cost, checks_fit, checks_time, checks_trace
from lightning_modelprof.selftest.lab import Lab
from tests.support.traces import FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

TRACES = [FOLDER / f"h100_{name}.pt.trace.json.gz" for name in ("waits", "item")]


class Ticks:
    """The time of a device, which passes in layers alone."""

    now_ns = 0


class Event:
    """An event of that device."""

    def record(self):
        self.at = Ticks.now_ns

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e6


class Device:
    """The package's clock of that device."""

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
    """3 ms in forward, 7 ms in backward."""

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
    """A GPU for what asks for its events alone."""

    def event(self):
        return Event()


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """A check's comparisons, of a training as short as it may be."""
    monkeypatch.setattr(checks_time, "STEPS", 18)

    def run(name):
        torch.manual_seed(0)
        if name == "stored trace":
            return [one for path in TRACES for one in checks_trace.compare_trace(path, "h100")]
        if name == "gpu phases":
            monkeypatch.setattr(step_timing, "device_clock", lambda device: Device())
            return list(
                checks_time._device_phases(FakeGpu("cpu", tmp_path), "net", Layer(4, 4), torch.ones(2, 4))
            )
        return list(CHECKS[name](Lab("cpu", tmp_path)))

    return run


CHECKS = {
    "cpu phases": checks_time.cpu_phases,
    "modules": checks_time.module_times,
    "flops": checks_cost.flops,
    "windows": checks_trace.window,
    "training": checks_fit.training,
    "findings": checks_fit.findings,
}


@pytest.mark.parametrize("name", [*CHECKS, "stored trace", "gpu phases"])
def test_numbers_that_are_right_pass(name, compared):
    found = compared(name)
    assert [one.sentence() for one in found if not one.passes] == []
    assert len(found) >= 3


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("h100_*.json.gz")), ids=lambda path: path.name.split(".")[0]
)
def test_our_traces_of_a_gpu_pass(path):
    found = list(checks_trace.compare_trace(path, "h100"))
    assert [one.sentence() for one in found if not one.passes] == []
    assert len(found) > 20


# Ten numbers and more, each broken in one place


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
    times = analyze.phase_times

    def wrong(totals):
        found = times(totals)
        some = sum(one.total_ns for one in found if one.key != "dataloader")
        return tuple(replace(one, ratio=one.total_ns / some) for one in found)

    patch.setattr(analyze, "phase_times", wrong)


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


def draw_random_numbers(patch):
    hook = ModelProfCallback.setup

    def wrong(self, *args, **kwargs):
        torch.rand(1)
        return hook(self, *args, **kwargs)

    patch.setattr(ModelProfCallback, "setup", wrong)


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
    "forward and backward swapped": ("cpu phases", swap_phases, "forward"),
    "phases of the step before": ("cpu phases", shift_steps, "odd steps"),
    "step time in microseconds": ("cpu phases", microseconds, "step time"),
    "samples per second of other time": ("cpu phases", rate_of_all_time, "samples per second"),
    "share of the phases without data": ("cpu phases", share_of_phases, "share of all steps"),
    "multiply-adds counted once": ("flops", macs_for_flops, "layers, forward"),
    "module times of the other direction": ("modules", swap_directions, "0 (Linear)"),
    "window a step late": ("windows", window_one_late, "first recorded step"),
    "a random number drawn": ("training", draw_random_numbers, "differing weights"),
    "a kernel lost": ("stored trace", changed_fact("summarize_kernels", without_last), "kernels"),
    "half of the bytes": ("stored trace", changed_fact("summarize_copies", half_the_bytes), "copied"),
    "steps without their GPU work": ("stored trace", host_steps, "time"),
    "busy share of a longer time": ("stored trace", busy_of_kernels, "GPU busy"),
    "GPU time in microseconds": ("gpu phases", device_microseconds, "forward"),
    "GPU time of the phase before": ("gpu phases", device_phase_before, "backward"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_broken_number_fails(error, compared, monkeypatch):
    check, break_it, name = ERRORS[error]
    break_it(monkeypatch)
    wrong = [one.name for one in compared(check) if not one.passes]
    assert any(name in one for one in wrong), wrong
