"""Module times match known costs, exactly on a fake clock and closely on a real one."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.inspect.modules.module_times import ModuleTimer, NodeHooks
from tests.measure.test_device_phases import FakeDeviceClock
from tests.support.bench import FakeClock


class Spend(torch.autograd.Function):
    """The identity, with known cost in forward and backward."""

    @staticmethod
    def forward(ctx, x, spend, forward_cost, backward_cost):
        ctx.spend, ctx.cost = spend, backward_cost
        spend(forward_cost)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.spend(ctx.cost)
        return gradient.clone(), None, None, None


class Costly(nn.Module):
    """Spends time, then calls each of its children in turn."""

    def __init__(self, spend, forward_cost, backward_cost=0, *children, times=1, inplace=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.parts = nn.ModuleList(children)
        self.spend, self.costs, self.times = spend, (forward_cost, backward_cost), times
        self.inplace = inplace

    def forward(self, x):
        x = Spend.apply(x * self.weight, self.spend, *self.costs)
        for part in self.parts:
            for _ in range(self.times):
                x = part(x)
        return x.relu_() if self.inplace else x


@pytest.fixture
def clock():
    return FakeClock()


def run(timer, model, x, steps=1, call=None):
    for _ in range(steps):
        with timer:
            loss = (call or model)(x).sum()
            timer.on_before_backward(loss)
            loss.backward()
    return timer.times()


def by_path(times):
    return {time.path: (time.calls, time.forward_ns, time.backward_ns) for time in times.times}


X = torch.rand(3)


# ---- Exact, on a fake clock


def test_self_times_of_nested_modules(clock):
    inner = Costly(clock.advance, 7, 70)
    model = Costly(clock.advance, 100, 1_000, inner, Costly(clock.advance, 5, 50))
    times = run(ModuleTimer(model, clock), model, X, steps=3)
    assert (times.steps, times.clock, times.notes) == (3, "host", ())
    assert by_path(times) == {"": (3, 100, 1_000), "parts.0": (3, 7, 70), "parts.1": (3, 5, 50)}


def test_delayed_step_changes_nothing(clock):
    """The median of steps of 7, 700 and 9 ns counts."""
    delays = iter((7, 700, 9))
    model = nn.Sequential(Costly(lambda ns: clock.advance(next(delays) if ns == 1 else ns), 1, 0))
    with torch.no_grad():
        timer = ModuleTimer(model, clock)
        for _ in range(3):
            with timer:
                model(X)
    assert by_path(timer.times()) == {"": (3, 0, None), "0": (3, 9, None)}


def test_module_called_repeatedly_under_two_names(clock):
    shared = Costly(clock.advance, 7, 70)
    model = Costly(clock.advance, 100, 1_000, shared, shared, times=2)
    assert by_path(run(ModuleTimer(model, clock), model, X)) == {
        "": (1, 100, 1_000),
        "parts.0": (4, 28, 280),
    }


def test_modules_called_without_root_and_code_outside_modules(clock):
    model = nn.ModuleDict({"a": Costly(clock.advance, 7, 70), "b": Costly(clock.advance, 5, 50)})

    def training_step(x):
        clock.advance(10_000)
        x = model["a"](x)
        clock.advance(10_000)
        return Spend.apply(model["b"](x), clock.advance, 1, 2_000_000)

    times = run(ModuleTimer(model, clock), model, X, call=training_step)
    assert by_path(times) == {"a": (1, 7, 70), "b": (1, 5, 50)}
    assert len(times.notes) == 1
    assert "outside any module" in times.notes[0]
    assert "2 ms per step" in times.notes[0]


@pytest.mark.parametrize("inplace", [False, True], ids=["plain", "in-place"])
def test_input_without_gradient_and_in_place_activation(clock, inplace):
    """In these two cases hooks for whole modules fail."""
    model = Costly(clock.advance, 0, 0, *(Costly(clock.advance, n, 10 * n, inplace=inplace) for n in (3, 4)))
    assert not X.requires_grad
    times = by_path(run(ModuleTimer(model, clock), model, X))
    assert times["parts.0"] == (1, 3, 30)
    assert times["parts.1"] == (1, 4, 40)


def test_frozen_model_before_trainable_model(clock):
    frozen, trained = Costly(clock.advance, 3, 30), Costly(clock.advance, 4, 40)
    frozen.requires_grad_(False)
    model = nn.Sequential(frozen, trained)
    times = by_path(run(ModuleTimer(model, clock), model, X))
    assert times == {"": (1, 0, 0), "0": (1, 3, 0), "1": (1, 4, 40)}


def test_module_that_did_not_run_is_not_listed(clock):
    model = nn.ModuleList([Costly(clock.advance, 3, 30), Costly(clock.advance, 4, 40)])
    assert list(by_path(run(ModuleTimer(model, clock), model, X, call=model[0]))) == ["0"]


def test_forward_only(clock):
    model = nn.Sequential(Costly(clock.advance, 3, 30))
    timer = ModuleTimer(model, clock)
    with timer, torch.no_grad():
        model(X)
    assert by_path(timer.times()) == {"": (1, 0, None), "0": (1, 3, None)}


def test_backward_in_some_steps_is_not_measured(clock):
    model = nn.Sequential(Costly(clock.advance, 3, 30))
    timer = ModuleTimer(model, clock)
    with timer:
        model(X)
    times = run(timer, model, X)
    assert by_path(times) == {"": (2, 0, None), "0": (2, 3, None)}
    assert times.notes == ("Backward isn't measured, because it ran in only 1 of 2 timed steps.",)


def test_two_backward_passes_in_step(clock):
    model = nn.Sequential(Costly(clock.advance, 3, 30))
    timer = ModuleTimer(model, clock)
    with timer:
        loss = model(X).sum()
        timer.on_before_backward(loss)
        loss.backward(retain_graph=True)
        timer.on_before_backward(loss)
        loss.backward()
        second = model(X).sum()
        timer.on_before_backward(second)
        second.backward()
    assert by_path(timer.times())["0"] == (2, 6, 90)


def test_gradient_accumulation_belongs_to_parameter_owner(clock):
    owner = Costly(clock.advance, 0, 0)
    other = nn.Module()
    other.forward = lambda x: x * owner.weight
    model = nn.ModuleList([owner, other])
    # A hook that runs once the parameter's gradient is there costs time of the accumulating node.
    handle = owner.weight.register_post_accumulate_grad_hook(lambda parameter: clock.advance(9))
    x = torch.rand(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda parameter: clock.advance(1_000_000))
    times = run(ModuleTimer(model, clock), model, x, call=other)
    handle.remove()
    assert by_path(times) == {"1": (1, 0, 0), "0": (0, 0, 9)}
    assert "1 ms per step" in times.notes[0]


class Checkpointed(nn.Module):
    def __init__(self, part, *, use_reentrant):
        super().__init__()
        self.part, self.use_reentrant = part, use_reentrant

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=self.use_reentrant)


def test_checkpoint_counts_second_forward_once_as_backward(clock):
    part = Costly(clock.advance, 3, 30, Costly(clock.advance, 500, 7_000))
    model = Checkpointed(part, use_reentrant=False)
    x = torch.rand(3, requires_grad=True)
    with set_checkpoint_early_stop(False):  # otherwise the second forward stops at the last needed tensor
        times = by_path(run(ModuleTimer(model, clock), model, x, steps=2))
    # Each of the two has its forward, and in backward its forward again plus backward.
    assert times == {
        "": (2, 0, 0),
        "part": (2, 3, 3 + 30),
        "part.parts.0": (2, 500, 500 + 7_000),
    }


def test_reentrant_checkpoint_belongs_to_caller(clock):
    part = Costly(clock.advance, 3, 30, Costly(clock.advance, 500, 7_000))
    model = Checkpointed(part, use_reentrant=True)
    times = run(ModuleTimer(model, clock), model, torch.rand(3, requires_grad=True))
    assert by_path(times) == {
        "": (1, 0, 3 + 30 + 500 + 7_000),
        "part": (1, 3, None),
        "part.parts.0": (1, 500, None),
    }
    assert "Reentrant checkpoints" in times.notes[0]


def test_caught_exception_in_forward_is_timed(clock):
    class Fails(nn.Module):
        def forward(self, x):
            clock.advance(11)
            raise ValueError("on purpose")

    class Catches(Costly):
        def forward(self, x):
            try:
                self.parts[0](x)
            except ValueError:
                clock.advance(1)
            return super().forward(x)

    model = Catches(clock.advance, 3, 30, nn.Sequential(Fails()))
    timer = ModuleTimer(model, clock)
    with timer, pytest.raises(ValueError, match="on purpose"):
        model(X)  # the second call isn't caught
    assert {path: t[:2] for path, t in by_path(timer.times()).items()} == {
        "": (1, 4),
        "parts.0": (2, 0),
        "parts.0.0": (2, 22),
    }


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failed_step_does_not_count_and_leaves_nothing(clock, where):
    def fail(cost):
        clock.advance(cost)
        if cost == 30 and where == "backward":
            raise ValueError("on purpose")
        if cost == 3 and where == "forward":
            raise ValueError("on purpose")

    model = nn.Sequential(Costly(clock.advance, 5, 50), Costly(fail, 3, 30))
    before = hooks_of(model)
    timer = ModuleTimer(model, clock)
    with pytest.raises(ValueError, match="on purpose"):
        run(timer, model, X)
    assert hooks_of(model) == before
    assert timer.times().steps == 0
    model[1].spend = clock.advance
    assert by_path(run(timer, model, X)) == {"": (1, 0, 0), "0": (1, 5, 50), "1": (1, 3, 30)}


def test_timer_error_ends_measurement_not_step(clock):
    calls = []

    def breaks():
        calls.append(0)
        if len(calls) == 3:
            raise OSError("no clock")
        return clock()

    model = nn.Sequential(Costly(clock.advance, 5, 50), Costly(clock.advance, 3, 30))
    times = run(ModuleTimer(model, breaks), model, X)
    assert model[0].weight.grad is not None
    assert times.steps == 0
    assert times.notes == ("A step was left out: OSError: no clock.",)


def test_arming_twice_is_rejected(clock):
    timer = ModuleTimer(nn.Identity(), clock)
    timer.arm()
    with pytest.raises(ModelProfError, match="disarm"):
        timer.arm()
    timer.disarm()
    timer.disarm()
    timer.on_before_backward(torch.ones((), requires_grad=True) * 2)
    assert timer.times().steps == 1


def test_model_copy_in_armed_step_is_not_timed(clock):
    model = nn.Sequential(Costly(clock.advance, 5, 50))
    timer = ModuleTimer(model, clock)
    with timer:
        other = copy.deepcopy(model)
        other(X)
        model(X)
    other(X)
    assert by_path(timer.times()) == {"": (1, 0, None), "0": (1, 5, None)}


def test_threads_do_not_mix(clock):
    model = nn.ModuleList([Costly(lambda cost: None, 0), Costly(clock.advance, 7, 70)])
    timer = ModuleTimer(model, clock)
    with timer:
        begun, go_on = threading.Event(), threading.Event()
        model[0].spend = lambda cost: (begun.set(), go_on.wait(10))
        thread = threading.Thread(target=model[0], args=(X,))
        thread.start()
        begun.wait(10)
        model[1](X)
        go_on.set()
        thread.join()
    # Both were running while 7 passed, each in its own thread.
    assert by_path(timer.times()) == {"0": (1, 7, None), "1": (1, 7, None)}


# ---- A real clock


def test_known_sleeps_are_timed():
    """The expected times are how long each sleep took, which on a busy machine is longer than requested."""
    slept = []

    def sleep(seconds):
        begin_ns = time.perf_counter_ns()
        time.sleep(seconds)
        slept.append(time.perf_counter_ns() - begin_ns)

    model = nn.Sequential(Costly(sleep, 0.020, 0.020), Costly(sleep, 0.050, 0.050))
    more = []  # time beyond the sleeps, by repetition
    for _ in range(6):
        slept.clear()
        times = by_path(run(ModuleTimer(model), model, X))
        measured = [times["0"][1], times["1"][1], times["1"][2], times["0"][2]]
        more.append([ns - truth for ns, truth in zip(measured, slept, strict=True)] + [*times[""][1:]])
    assert min(map(min, more)) >= 0
    assert all(min(column) < 2e6 for column in zip(*more, strict=True))


# ---- The model stays unchanged


def hooks_of(model):
    names = [name for name in vars(nn.Module()) if "hooks" in name]
    tables = [list(getattr(module, name)) for module in model.modules() for name in names]
    return tables, [list(vars(module)) for module in model.modules()], pickle_of(model)


def pickle_of(model):
    try:
        return pickle.dumps(model)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def train(timer):
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 8)]
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(*layers, nn.Unflatten(0, (2, -1)), layer, nn.Linear(8, 1))
    before = hooks_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    losses, gradients = [], []
    for _ in range(3):
        if timer is not None:
            timer = ModuleTimer(model)
            timer.arm()
        loss = model(torch.rand(8, 6)).square().mean()
        if timer is not None:
            timer.on_before_backward(loss)
        optimizer.zero_grad()
        loss.backward()
        if timer is not None:
            timer.disarm()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        losses.append(loss.detach())
    assert hooks_of(model)[:2] == before[:2]
    assert before[2] is not None
    assert hooks_of(model)[2] is not None
    state = list(model.state_dict().items())
    return losses, gradients, [value for _, value in state], [key for key, _ in state], torch.rand(9), model


def test_training_is_bit_identical():
    *plain, keys, random, model = train(None)
    *timed, timed_keys, timed_random, timed_model = train(True)
    for one, other in zip(plain, timed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert keys == timed_keys
    assert torch.equal(random, timed_random)
    assert saved(model) == saved(timed_model)


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)  # pickle, with the same names for the same storages
    return buffer.getvalue()


def test_graph_is_freed_as_without_timer(clock):
    """Nothing holds a node, whether backward ran or not."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    timer = ModuleTimer(model, clock)
    for with_backward in (True, False):
        with timer:
            hidden = model(torch.rand(3, 2))
            loss = hidden.square().sum()
            alive = [weakref.ref(tensor) for tensor in (hidden, loss)]
            timer.on_before_backward(loss)
            if with_backward:
                loss.backward()
            del hidden, loss
            assert [reference() for reference in alive] == [None, None]


def test_graph_that_outlives_step_does_not_hold_timer(clock):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    timer = ModuleTimer(model, clock)
    with timer:
        loss = model(torch.rand(3, 2)).sum()
        timer.on_before_backward(loss)
    reference = weakref.ref(timer)
    del timer
    gc.collect()
    assert reference() is None
    loss.backward()


def test_hooks_are_on_nodes_only_while_armed():
    x = torch.rand(3, requires_grad=True)
    loss = (x * 2).sum()
    seen = []
    nodes = NodeHooks(lambda node: node.name(), seen.append, lambda owner: None)
    assert nodes.attach(loss) == 3
    nodes.remove()
    loss.backward(retain_graph=True)
    assert seen == []
    nodes.attach(loss)
    nodes.attach(loss)  # not attached twice
    loss.backward()
    assert seen == ["SumBackward0", "MulBackward0", "torch::autograd::AccumulateGrad"]
    assert nodes.attach(torch.ones(())) == 0


def test_one_clock_read_per_module_boundary(clock):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    timer = ModuleTimer(model, clock)
    with timer, torch.no_grad():
        model(X)
    assert clock.reads == 2 * 3


def test_transformer_fast_path_is_kept(clock):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
    batch = torch.rand(2, 5, 8)

    def operators():
        with torch.no_grad(), torch.profiler.profile() as profile:
            model(batch)
        return {event.key for event in profile.key_averages()}

    fast = "aten::_transformer_encoder_layer_fwd"
    assert fast in operators()
    timer = ModuleTimer(model, clock)
    with timer:
        assert fast in operators()
    assert not torch.nn.modules.module._has_any_global_hook()
    calls = {path: calls for path, (calls, _, _) in by_path(timer.times()).items()}
    assert calls == {"": 1, "0": 1, "0.layers.0": 1, "0.layers.1": 1}
    assert fast in operators()


# ---- Compiled


class Compiled:
    """A backend that runs the graph unchanged and counts graphs and runs."""

    def __init__(self):
        self.graphs = self.runs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def call(*args):
            self.runs += 1
            return graph(*args)

        return call


@pytest.fixture
def backend():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield Compiled()
    torch._dynamo.reset()


def small():
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3)))


class Method(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()

    def forward(self, x):
        return self.body(x)


def compiled_by_wrapper(backend):
    return torch.compile(small(), backend=backend)


def compiled_in_place(backend):
    module = Method()
    module.compile(backend=backend)
    return module


def compiled_method(backend):
    module = Method()
    module.forward = torch.compile(module.forward, backend=backend)
    return module


@pytest.mark.parametrize("is_warm", [True, False], ids=["compiled before", "compiled while armed"])
@pytest.mark.parametrize("compiled", [compiled_by_wrapper, compiled_in_place, compiled_method])
def test_compiled_region_is_timed_as_whole_and_unchanged(backend, compiled, is_warm):
    model = nn.Sequential(nn.Linear(3, 3), compiled(backend), nn.Linear(3, 3))
    batch = torch.rand(4, 3)
    if is_warm:
        model(batch).sum().backward()
    keys = [list(vars(module)) for module in model.modules()]
    times = run(ModuleTimer(model), model, batch, steps=2)
    assert [list(vars(module)) for module in model.modules()] == keys
    assert sorted(by_path(times)) == ["", "0", "1", "2"]
    assert all(calls == 2 and ns > 0 and back > 0 for calls, ns, back in by_path(times).values() if back)
    assert by_path(times)["1"][2] > 0
    assert "Compiled modules are timed as a whole: 1." in times.notes
    model(batch).sum().backward()
    assert backend.graphs == 1
    assert backend.runs == 3 + is_warm
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("is_warm", [True, False], ids=["compiled before", "compiled while armed"])
def test_compiled_function_that_calls_modules(backend, is_warm):
    """The model doesn't show that its modules are compiled; the hooks must not be compiled."""
    model = small()

    @torch.compile(backend=backend)
    def training_step(batch):
        return model(batch).sum()

    batch = torch.rand(4, 3)
    if is_warm:
        training_step(batch).backward()
    times = run(ModuleTimer(model), model, batch, steps=2, call=training_step)
    assert by_path(times).keys() <= {"", "0", "1.1"}  # parameters' owners: their gradients are accumulated
    assert all(calls == 0 for calls, _, _ in by_path(times).values())
    training_step(batch)
    assert not torch._dynamo.utils.counters["graph_break"]
    if is_warm:  # otherwise Dynamo has to look at the hooks, which come and go
        assert backend.graphs == 1


def test_model_compiled_as_whole(backend):
    model = torch.compile(small(), backend=backend)
    times = run(ModuleTimer(model), model, torch.rand(4, 3))
    assert list(by_path(times)) == [""]
    assert "timed as a whole: OptimizedModule" in times.notes[0]


def test_fast_path_next_to_compiled_modules_has_no_hooks(backend):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.ModuleList([layer, torch.compile(small(), backend=backend)]).eval()
    timer = ModuleTimer(model)
    with timer, torch.no_grad():
        assert not torch.nn.modules.module._has_any_global_hook()
        layer(torch.rand(2, 5, 8))
    assert timer.times().times == ()
    assert any("fast path" in note for note in timer.times().notes)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.rand(1, 3))])
def test_script_modules_take_no_hooks(clock, make):
    model = nn.Sequential(make(small()), Costly(clock.advance, 5, 50))
    times = run(ModuleTimer(model, clock), model, torch.rand(4, 3))
    assert by_path(times) == {"": (1, 0, 0), "1": (1, 5, 50)}
    assert "TorchScript" in times.notes[0]


# ---- On a device


def test_device_marks_are_read_once_reached():
    device = FakeDeviceClock()
    model = Costly(device.advance, 100, 1_000, Costly(device.advance, 7, 70))
    timer = ModuleTimer(model, device=device)
    device.reached_ns = -1
    run(timer, model, X)
    waiting = timer.times()
    assert (waiting.steps, waiting.times, waiting.clock) == (0, (), "device")
    assert waiting.notes == ("1 steps are left out, because the device hadn't finished them.",)
    device.reached_ns = None
    times = run(timer, model, X)
    assert by_path(times) == {"": (2, 100, 1_000), "parts.0": (2, 7, 70)}
    assert times.notes == ()
    assert {mark.times_released for mark in device.marks} == {1}
    assert by_path(timer.times()) == by_path(times)


def test_device_without_events_is_timed_by_host(clock):
    model = nn.Sequential(Costly(clock.advance, 5, 50))
    times = run(ModuleTimer(model, clock, torch.device("cpu")), model, X)
    assert (times.clock, by_path(times)["0"]) == ("host", (1, 5, 50))


def test_step_waits_for_device_mark_of_lagging_stream():
    device = FakeDeviceClock()
    model = Costly(device.advance, 100, 1_000)
    timer = ModuleTimer(model, device=device)
    with timer:
        loss = model(X).sum()
        timer.on_before_backward(loss)
        loss.backward()
    device.overtaken = {device.marks[1]}
    assert timer.times().steps == 0
    device.overtaken.clear()
    assert by_path(timer.times()) == {"": (1, 100, 1_000)}


def test_device_step_with_negative_time_is_left_out():
    device = FakeDeviceClock()
    model = Costly(device.advance, 100, 1_000)
    timer = ModuleTimer(model, device=device)
    run(timer, model, X)
    with timer:
        model(X)
    device.marks[-1].ns -= 10**9
    times = timer.times()
    assert times.steps == 1
    assert times.notes == ("1 steps are left out, because their streams overlapped.",)


def test_timer_does_not_synchronize(monkeypatch):
    def refuse(*args):
        raise AssertionError("waited for the device")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    device = FakeDeviceClock()
    model = Costly(device.advance, 100, 1_000)
    assert run(ModuleTimer(model, device=device), model, X).steps == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_times_on_cuda_device():
    large = nn.Linear(4_096, 4_096, device="cuda")
    model = nn.Sequential(large, nn.Linear(4_096, 16, device="cuda"))
    batch = torch.rand(4_096, 4_096, device="cuda")
    model(batch).sum().backward()
    timer = ModuleTimer(model, device=torch.device("cuda"))
    run(timer, model, batch, steps=3)
    torch.cuda.synchronize()
    times = timer.times()
    assert times.steps == 3
    assert times.clock == "device"
    found = by_path(times)
    assert found["0"][1] > found["1"][1] > 0
    assert found["0"][2] > found["1"][2] > 0
