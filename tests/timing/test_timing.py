"""Inference timing: exact figures on fake clocks, and known sleeps on the real one."""

from __future__ import annotations

import random
import time
from collections import UserDict
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from lightning_modelprof import ConfigError, EventTimer, benchmark_inference
from lightning_modelprof.measure.clock import CpuTime
from lightning_modelprof.timing import event_timer
from lightning_modelprof.timing import inference as inference_benchmark
from lightning_modelprof.timing import spans as device_spans
from tests.measure.test_device_phases import FakeDeviceClock
from tests.support.bench import FakeClock

MS = 1_000_000

PARTS = (device_spans, event_timer, inference_benchmark)


def patch_all(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """Replace ``name`` by ``value`` in every timing module that has it."""
    having = [part for part in PARTS if hasattr(part, name)]
    assert having, name
    for part in having:
        monkeypatch.setattr(part, name, value)


class World:
    """A host and an asynchronous device: launching advances the host, working advances the device.

    Attributes:
        waits: how often the host waited for the device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = FakeClock()
        self.device = FakeDeviceClock()
        self.device.reached_ns = 0
        self.waits = 0
        self.cpu = CpuTime(0, 0)
        patch_all(monkeypatch, "host_clock", self.host)
        patch_all(monkeypatch, "wait_for", self.wait_for)
        patch_all(monkeypatch, "cpu_time", lambda: self.cpu)
        self.patch = monkeypatch

    def has_events(self) -> World:
        patch_all(self.patch, "device_clock", lambda device: self.device)
        return self

    def timer(self) -> EventTimer:
        self.has_events()
        return EventTimer("cpu")

    def wait_for(self, device: torch.device) -> None:
        self.waits += 1
        behind_ns = max(0, self.device.now_ns - (self.device.reached_ns or 0))
        self.host.advance(behind_ns)  # the host stands still until the device catches up
        self.device.reached_ns = self.device.now_ns

    def work(self, *, launch_ns: int, device_ns: int) -> None:
        self.host.advance(launch_ns)
        self.device.advance(device_ns)

    def compute(self, ns: int, *, user_ns: int = 0, system_ns: int = 0) -> None:
        self.host.advance(ns)
        self.cpu = CpuTime(self.cpu.user_ns + user_ns, self.cpu.system_ns + system_ns)

    def check_marks(self) -> None:
        """Every mark was released exactly once."""
        assert {mark.times_released for mark in self.device.marks} == {1}


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


class Launches(nn.Module):
    """Run n costs the host 10 and the device 1000 * (n + 1); warm-up runs count."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        assert not self.training
        self.calls += 1
        self.world.work(launch_ns=10, device_ns=1_000 * self.calls)
        return x


BATCH = torch.zeros(4, 3)


def test_event_method_times_device_with_two_waits(world):
    times = benchmark_inference(Launches(world.has_events()), BATCH, warm_up=5, runs=5, tokens=90)
    # Runs 6 to 10: 6000, 7000, 8000, 9000, 10000.
    assert times.method == "event"
    assert times.runs == 5
    assert times.avg_ns == 8_000
    assert times.p50_ns == 8_000
    assert times.p90_ns == pytest.approx(9_600)  # 0.9 * 4 = 3.6: between 9000 and 10000
    assert times.p99_ns == pytest.approx(9_960)
    assert (times.min_ns, times.max_ns) == (6_000, 10_000)
    assert times.samples_per_s == times.fps == 4 / 8e-6
    assert times.tokens_per_s == 90 / 8e-6
    assert world.waits == 2  # before and after the runs
    assert times.real_ns == 5 * 10 + 40_000  # the launches, then the wait for all device work
    world.check_marks()


def test_wall_method_times_launches_without_throughput(world, monkeypatch):
    # Only the batch's device matters, so a fake one is enough.
    patch_all(monkeypatch, "devices_of", lambda module, batch: (torch.device("cuda:0"),))
    patch_all(monkeypatch, "random_states_kept", lambda devices: nullcontext())
    times = benchmark_inference(Launches(world), BATCH, warm_up=0, runs=4, method="wall", tokens=1)
    assert times.device == "cuda:0"
    assert times.avg_ns == times.min_ns == times.max_ns == 10
    assert times.samples_per_s is times.fps is times.tokens_per_s is None
    assert world.waits == 2
    assert times.real_ns == 40 + 10_000


def test_synchronize_method_times_device_with_two_waits_per_run(world):
    times = benchmark_inference(Launches(world), BATCH, warm_up=0, runs=4, method="synchronize")
    # The wait for the fake device starts when the launch ends: 10 + 1000 n.
    assert (times.min_ns, times.max_ns, times.avg_ns) == (1_010, 4_010, 2_510)
    assert world.waits == 2 * 4 + 2


def test_user_and_system_time_cover_only_runs(world):
    def model(x):
        world.compute(100, user_ns=70, system_ns=20)

    times = benchmark_inference(model, BATCH, warm_up=3, runs=10)
    assert times.method == "wall"
    assert times.device == "cpu"
    assert (times.real_ns, times.user_ns, times.system_ns) == (1_000, 700, 200)
    assert times.samples_per_s == 4 * 1e7


def test_overtaking_marks_are_dropped(world):
    world.has_events()
    patch_all(world.patch, "wait_for", lambda device: None)
    world.device.reached_ns = None  # all are reached immediately
    x = iter([1_000, -5_000, 3_000])
    times = benchmark_inference(lambda _: world.device.advance(next(x)), BATCH, warm_up=0, runs=3)
    assert times.runs == 2
    assert times.avg_ns == 2_000


def test_sleep_on_real_clock():
    times = benchmark_inference(lambda x: time.sleep(0.01), BATCH, warm_up=1, runs=5)
    assert times.min_ns >= 10 * MS
    assert times.real_ns >= 50 * MS
    assert times.min_ns <= times.p50_ns <= times.p90_ns <= times.p99_ns <= times.max_ns <= times.real_ns
    assert 0 < times.samples_per_s <= 4 / 0.01


def test_work_is_user_time_but_sleep_is_not():
    def spin(x):
        end = time.process_time_ns() + 50 * MS
        while time.process_time_ns() < end:
            pass

    worked = benchmark_inference(spin, BATCH, warm_up=0, runs=2)
    assert worked.user_ns + worked.system_ns >= 80 * MS  # 100, less the ticks of the coarsest clock
    slept = benchmark_inference(lambda x: time.sleep(0.2), BATCH, warm_up=0, runs=2)
    assert slept.user_ns + slept.system_ns < 0.5 * slept.real_ns


class Mixed(nn.Module):
    """In training mode except one child; splits its weight for training and merges it for eval, like LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dropout(0.5)
        self.frozen = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.1))
        self.last = nn.Linear(3, 2)
        self.is_merged = False
        self.frozen.eval()

    def train(self, mode: bool = True) -> nn.Module:
        self.is_merged = not mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.is_merged
        assert not any(child.training for child in self.modules())
        torch.rand(1)
        np.random.rand()
        random.random()
        return self.last(self.frozen(self.first(x)))


def flags(model):
    return [child.training for child in model.modules()]


def states():
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


@pytest.mark.parametrize("grad", [True, False])
def test_benchmark_leaves_model_and_process_unchanged(grad):
    model = Mixed()
    before = flags(model), states(), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.set_grad_enabled(grad):
        benchmark_inference(model, BATCH, warm_up=1, runs=2)
        assert torch.is_grad_enabled() == grad
    assert not torch.is_inference_mode_enabled()
    assert (flags(model), states()) == before[:2]
    assert True in flags(model)
    assert False in flags(model)
    assert not model.is_merged
    assert all(torch.equal(before[2][key], value) for key, value in model.state_dict().items())
    model.eval()(BATCH).sum().backward()
    assert model.last.weight.grad is not None  # still trainable


def test_everything_is_restored_when_model_fails():
    class Failing(Mixed):
        def forward(self, x):
            super().forward(x)
            raise ZeroDivisionError("of the model's own")

    model = Failing()
    before = flags(model), states()
    with pytest.raises(ZeroDivisionError, match="of the model's own"):
        benchmark_inference(model, BATCH)
    assert (flags(model), states()) == before
    assert not torch.is_inference_mode_enabled()


def test_bound_method_sets_its_model_to_eval():
    class Generator(nn.Module):
        def generate(self, x):
            assert not self.training
            return x

    model = Generator()
    assert benchmark_inference(model.generate, BATCH, warm_up=0, runs=1, tokens=8).tokens_per_s > 0
    assert model.training


@pytest.mark.parametrize(
    ("batch", "expected", "samples"),
    [
        (BATCH, ((BATCH,), {}), 4),
        ((BATCH, 2), ((BATCH, 2), {}), 4),
        ({"x": BATCH, "y": 2}, ((), {"x": BATCH, "y": 2}), 4),
        (UserDict(x=BATCH), ((), {"x": BATCH}), 4),
        ([BATCH], (([BATCH],), {}), 4),
        (({"x": BATCH},), (({"x": BATCH},), {}), 4),
        ("text", (("text",), {}), None),
    ],
    ids=["tensor", "tuple", "dict", "mapping", "list", "dict as it is", "no tensor"],
)
def test_batch_is_passed_by_its_type(world, batch, expected, samples):
    seen = []

    def model(*args, **kwargs):
        seen.append((args, kwargs))
        world.host.advance(1_000)

    times = benchmark_inference(model, batch, warm_up=1, runs=1)
    assert seen == [expected] * 2
    assert times.samples_per_s == (None if samples is None else samples * 1e6)
    assert benchmark_inference(model, batch, runs=1, samples=7).samples_per_s == 7e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "event"}, "device with events.*got one on the CPU.* use 'wall', which is exact"),
        ({"method": "cuda"}, r"\(method\): expected one of event, synchronize, wall.*got 'cuda'"),
        ({"runs": 0}, r"\(runs\): expected a whole number of at least 1, got 0"),
        ({"warm_up": -1}, r"\(warm_up\): expected a whole number of at least 0, got -1"),
        ({"runs": 2.5}, r"\(runs\): .*got 2.5"),
        ({"runs": True}, r"\(runs\): .*got True"),
        ({"runs": None}, r"\(runs\): .*got None"),
        ({"samples": 0}, r"\(samples\): .*got 0"),
        ({"tokens": "many"}, r"\(tokens\): .*got 'many'"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ConfigError, match=message):
        benchmark_inference(nn.Linear(3, 2), BATCH, **arguments)


def test_invalid_models_and_batches_are_rejected():
    with pytest.raises(ConfigError, match=r"\(model\): expected a callable, got 3"):
        benchmark_inference(3, BATCH)
    with pytest.raises(ConfigError, match=r"passed as the keyword arguments x, z. A mapping is passed"):
        benchmark_inference(nn.Linear(3, 2), {"x": BATCH, "z": 1})
    with pytest.raises(ConfigError, match="lazy layers"):
        benchmark_inference(nn.LazyLinear(2), BATCH)
    with pytest.raises(ConfigError, match="meta device"):
        benchmark_inference(nn.Linear(3, 2, device="meta"), BATCH)


def test_all_devices_are_waited_for(world, monkeypatch):
    devices = (torch.device("cuda:0"), torch.device("cuda:1"))
    patch_all(monkeypatch, "devices_of", lambda module, batch: devices)
    patch_all(monkeypatch, "random_states_kept", lambda devices: nullcontext())
    times = benchmark_inference(Launches(world), BATCH, warm_up=0, runs=3)
    assert (times.method, times.device) == ("synchronize", "cuda:0, cuda:1")
    assert world.waits == 2 * (2 * 3 + 2)
    with pytest.raises(ConfigError, match=r"cuda:0, cuda:1.* use 'synchronize'"):
        benchmark_inference(Launches(world), BATCH, method="event")


def test_pipeline_stages_are_timed_without_waits(world):
    timer = world.timer()
    for _ in range(50):
        with timer("model1"):
            world.work(launch_ns=230, device_ns=47_000)
        with timer("cpu work"):
            world.compute(10_000, user_ns=9_000, system_ns=500)
        with timer("model2"):
            world.work(launch_ns=120, device_ns=1_000)
    assert world.waits == 0
    results = timer.results()
    assert world.waits == 1
    assert timer.results() == results
    assert world.waits == 1  # nothing left to wait for
    assert list(results) == ["model1", "cpu work", "model2"]
    for name, real_ns, device_ns in (
        ("model1", 230, 47_000),
        ("cpu work", 10_000, 0),
        ("model2", 120, 1_000),
    ):
        stage = results[name]
        assert (stage.name, stage.calls, stage.device_calls) == (name, 50, 50)
        assert (stage.real.min_ns, stage.real.avg_ns, stage.real.max_ns) == (real_ns, real_ns, real_ns)
        assert (stage.device.min_ns, stage.device.p99_ns, stage.device.max_ns) == (device_ns,) * 3
    assert (results["cpu work"].user_ns, results["cpu work"].system_ns) == (450_000, 25_000)
    assert results["model1"].user_ns == results["model1"].system_ns == 0
    world.check_marks()


def test_marks_are_reused_while_pipeline_runs(world):
    timer = world.timer()
    for number in range(10):
        with timer("model"):
            world.work(launch_ns=1, device_ns=100)
        world.device.reached_ns = world.device.now_ns - 50  # half a run behind
        held = sum(mark.times_released == 0 for mark in world.device.marks)
        assert held <= 4, number
    assert world.waits == 0
    assert timer.results()["model"].device_calls == 10


def test_nested_and_repeated_stages(world):
    timer = world.timer()
    with timer("whole"):
        for device_ns in (100, 300):
            with timer("model"):
                world.work(launch_ns=1, device_ns=device_ns)
        world.work(launch_ns=5, device_ns=40)
        with timer("whole"):
            world.work(launch_ns=2, device_ns=20)
        assert "whole" in timer.results()  # the inner call
        assert timer.results()["whole"].calls == 1
    results = timer.results()
    assert list(results) == ["whole", "model"]
    assert (results["model"].calls, results["model"].device.avg_ns) == (2, 200)
    assert (results["whole"].calls, results["whole"].device.max_ns, results["whole"].device.min_ns) == (
        2,
        460,
        20,
    )
    world.check_marks()


def test_exception_closes_its_stages(world):
    timer = world.timer()

    def run():
        with timer("outer"), timer("inner"):
            world.work(launch_ns=3, device_ns=70)
            raise KeyError("of the pipeline's own")

    with pytest.raises(KeyError):
        run()
    results = timer.results()
    assert [(stage.calls, stage.device.avg_ns) for stage in results.values()] == [(1, 70), (1, 70)]
    world.check_marks()


def test_device_failure_does_not_hide_error_of_stage(world, monkeypatch):
    timer = world.timer()

    def fail():
        raise RuntimeError("CUDA error")

    def run(error):
        with timer("model"):
            world.host.advance(5)
            monkeypatch.setattr(world.device, "mark", fail)
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        run(KeyError("of the pipeline's own"))
    monkeypatch.undo()
    stage = timer.results()["model"]
    assert (stage.calls, stage.real.avg_ns, stage.device, stage.device_calls) == (1, 5, None, 0)


def test_marks_that_cannot_be_compared_are_not_measured(world, monkeypatch):
    timer = world.timer()
    elapsed_ns = world.device.elapsed_ns
    with timer("other"):
        world.work(launch_ns=1, device_ns=10)
    foreign = world.device.marks[0]
    monkeypatch.setattr(
        world.device, "elapsed_ns", lambda begin, end: None if begin is foreign else elapsed_ns(begin, end)
    )
    with timer("model"):
        world.work(launch_ns=1, device_ns=20)
    results = timer.results()
    assert (results["other"].calls, results["other"].device) == (1, None)
    assert results["model"].device.avg_ns == 20
    assert world.waits == 1


def test_cpu_timer_uses_only_host_clock():
    timer = EventTimer("cpu")
    assert timer.results() == {}
    for seconds in (0.01, 0.03):
        with timer("sleep"):
            time.sleep(seconds)
    stage = timer.results()["sleep"]
    assert (stage.calls, stage.device, stage.device_calls) == (2, None, 0)
    assert 10 * MS <= stage.real.min_ns <= stage.real.avg_ns <= stage.real.max_ns
    assert stage.real.max_ns >= 30 * MS
    assert stage.real.avg_ns >= 20 * MS


@pytest.mark.parametrize("device", ["meta", "a toaster", 3.5, "cuda"])
def test_invalid_devices_are_rejected(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"expected a|no such device"):
        EventTimer(device)


def test_stages_are_never_synchronized(monkeypatch):
    """Checked with torch's own functions, in case a clock is replaced."""
    calls = []
    for namespace in (torch.cuda, torch.mps, torch.xpu):
        monkeypatch.setattr(namespace, "synchronize", lambda *args: calls.append(args))
    monkeypatch.setattr(torch.cuda.Event, "synchronize", calls.append)
    device = FakeDeviceClock()
    patch_all(monkeypatch, "device_clock", lambda _: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    timer = EventTimer("cuda")
    device.reached_ns = -1
    for _ in range(20):
        with timer("model"):
            device.advance(100)
    assert calls == []
    timer.results()
    assert calls == [(torch.device("cuda"),)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_three_methods_on_device():
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).cuda()
    batch = torch.randn(4096, 4096, device="cuda")
    event, synchronize, wall = (
        benchmark_inference(model, batch, warm_up=10, runs=30, method=method)
        for method in ("event", "synchronize", "wall")
    )
    assert event.p50_ns == pytest.approx(synchronize.p50_ns, rel=0.2)
    assert wall.p50_ns < 0.5 * event.p50_ns
