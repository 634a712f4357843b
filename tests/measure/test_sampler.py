"""The sampling thread samples on schedule, sees the right code and does not affect training."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader

from lightning_modelprof.analysis.source.hot_lines import hot_lines
from lightning_modelprof.engine.instruments import Sampling, _memory_look
from lightning_modelprof.measure.sampling import stack_probe as stack_look_module
from lightning_modelprof.measure.sampling.sampler import Sampler
from lightning_modelprof.measure.sampling.stack_probe import StackProbe
from lightning_modelprof.measure.steps.ledger import PROFILER
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.phases import PHASE_INDEX
from tests.support.bench import MS, FakeClock
from tests.support.fits import (
    Net,
    Numbers,
    fit_quietly,
    loader,
    make_callback,
    make_trainer,
    run_fit,
    run_script,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

HERE = __file__
NAME = "modelprof-sampler"


def line_of(mark):
    """The line that ends with a mark."""
    lines = Path(HERE).read_text().splitlines()
    [found] = [number for number, line in enumerate(lines, 1) if line.endswith(f"# @{mark}")]
    return found


def sampling_threads():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def until(condition, timeout_s=10):
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


@contextmanager
def running(looks, **kwargs):
    sampler = Sampler(looks, **kwargs)
    sampler.resume()
    try:
        yield sampler
    finally:
        sampler.pause()


# ---- Schedule


class FakeWait:
    """A lock held until ``end_ns``; waiting for it advances the clock."""

    def __init__(self, clock, end_ns):
        self.clock = clock
        self.end_ns = end_ns

    def acquire(self, timeout):
        self.clock.advance(round(timeout * 1e9))
        return self.clock.now_ns >= self.end_ns


def looks_within(seconds):
    """The weights of all samples within a time, and the sampler."""
    clock, weights = FakeClock(), []
    sampler = Sampler({"it": weights.append}, clock)
    sampler._run(FakeWait(clock, clock.now_ns + round(seconds * 1e9)))
    return weights, sampler


def test_samples_become_less_frequent():
    """200 in the first 4 s, and 200 more each time the elapsed time grows by a factor of e."""
    e = 2.718281828
    assert len(looks_within(4)[0]) == pytest.approx(200, rel=0.05)
    assert len(looks_within(4 * e)[0]) == pytest.approx(400, rel=0.05)
    weights, sampler = looks_within(4 * e**4)
    assert len(weights) == pytest.approx(1000, rel=0.05)
    assert sampler.interval_ns == pytest.approx(4e9 * e**4 / 200, rel=0.02)


def test_weight_is_time_since_previous_sample():
    weights, _ = looks_within(100)
    assert sum(weights) == pytest.approx(100e9, rel=0.01)
    assert all(10 * MS <= weight <= 30 * MS for weight in weights[:150])


def test_pause_ends_thread_and_adds_no_weight():
    weights = []
    with running({"it": weights.append}) as sampler:
        until(lambda: len(weights) > 2)
        sampler.pause()
        assert not sampling_threads()
        begin, seen = time.perf_counter_ns(), len(weights)
        time.sleep(0.1)
        assert len(weights) == seen
        sampler.resume()
        sampler.resume()
        assert len(sampling_threads()) == 1
        until(lambda: len(weights) > seen)
        waited_ns = time.perf_counter_ns() - begin
        assert weights[seen] <= waited_ns - 100 * MS + MS
    assert not sampling_threads()
    assert sampler.cost_ns > 0
    sampler.pause()


def test_failing_probe_ends_alone():
    weights, errors = [], []

    def wrong(elapsed_ns):
        errors.append(elapsed_ns)
        raise ValueError("no such thing")

    with running({"a": wrong, "b": weights.append}) as sampler:
        until(lambda: len(weights) > 3)
    assert len(errors) == 1
    assert sampler.notes == ["Sampling a ended early: ValueError: no such thing."]


def test_thread_ends_if_all_probes_failed():
    with running({"a": lambda _: 1 / 0}) as sampler:
        until(lambda: not sampling_threads())
        sampler.pause()
        sampler.resume()
        assert not sampling_threads()
    assert len(sampler.notes) == 1


def test_switch_interval_is_restored():
    usual = sys.getswitchinterval()
    seen = []
    with running({"it": lambda _: seen.append(sys.getswitchinterval())}):
        until(lambda: len(seen) > 3)
    assert sys.getswitchinterval() == usual
    assert set(seen) == {usual}


def test_code_between_short_operators_is_seen():
    """Operators that briefly release the interpreter must not hide the code before them."""
    seen, thread, numbers = [], threading.get_ident(), [1.0] * 50

    def computes():
        begin = time.thread_time_ns()
        while time.thread_time_ns() - begin < 150_000:
            pass

    def look(_):
        frame, names = sys._current_frames()[thread], []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        seen.append("computes" in names)

    with running({"it": look}):
        deadline = time.monotonic() + 30
        while len(seen) < 50 and time.monotonic() < deadline:
            for _ in range(60):
                computes()
                torch.tensor(numbers)
            time.sleep(0.001)
    assert sum(seen) >= 0.3 * len(seen)  # of about 9 ms in 10; it used to be 3 in 100


def test_user_switch_interval_stays():
    usual = sys.getswitchinterval()
    seen = []
    try:
        with running({"it": seen.append}):
            until(lambda: seen)
            sys.setswitchinterval(0.003)
            until(lambda: len(seen) > 3)
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(usual)


def test_short_interval_set_back_while_sampling_is_not_kept():
    usual, read, seen = sys.getswitchinterval(), [], []
    with running({"it": seen.append}):
        until(lambda: (short := sys.getswitchinterval()) < usual and (read.append(short) or True))
        sys.setswitchinterval(0.003)
        number = len(seen)
        until(lambda: len(seen) > number + 1)
        sys.setswitchinterval(usual)
        until(lambda: len(seen) > number + 3)
        for _ in range(20):  # some fall between two samples, some in a short interval
            sys.setswitchinterval(read[0])
            time.sleep(0.003)
    assert sys.getswitchinterval() == usual


def test_short_interval_set_after_last_sample_is_not_kept():
    usual, read, seen = sys.getswitchinterval(), [], []
    with running({"it": seen.append}):
        until(lambda: (short := sys.getswitchinterval()) < usual and (read.append(short) or True))
    sampler = Sampler({"it": seen.append}, interval_ns=10**13)
    sampler.resume()
    sys.setswitchinterval(read[0])
    sampler.pause()
    assert sys.getswitchinterval() == usual


def test_ctrl_c_during_start_leaves_no_thread(monkeypatch):
    start = threading.Thread.start

    def interrupted(self):
        start(self)
        raise KeyboardInterrupt

    sampler = Sampler({"it": print})
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.resume()
    until(lambda: not sampling_threads())
    sampler.pause()


def test_no_sampling_without_gil(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with running({"it": print}) as sampler:
        assert not sampling_threads()
    assert sampler.notes == [
        "Nothing was sampled, because this Python runs without a global interpreter lock."
    ]


def test_thread_start_failure_loses_only_samples(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with running({"it": print}) as sampler:
        pass
    assert sampler.notes == ["Sampling ended, because no thread could be started (can't start new thread)."]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_leaves_thread_in_parent_only():
    weights = []
    with running({"it": weights.append}) as sampler:
        until(lambda: weights)
        child = os.fork()
        if child == 0:
            sampler.pause()  # must not wait for a thread that doesn't exist
            os._exit(len(sampling_threads()))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        seen = len(weights)
        until(lambda: len(weights) > seen)
        sampler.pause()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert not sampling_threads()  # still paused after a fork


def test_interpreter_exits_while_sampling(tmp_path):
    source = """
        import time
        from lightning_modelprof.measure.sampling.sampler import Sampler
        sampler = Sampler({"it": lambda _: None})
        sampler.resume()
        time.sleep(0.05)
    """
    result = run_script(source, cwd=tmp_path, fresh=True)
    assert (result.returncode, result.stderr) == (0, "")


# ---- Stacks


class Standing:
    """A thread that stops at one place until told to continue."""

    def __init__(self, stand, phase="forward", **state):
        self.arrived, self.go_on = threading.Event(), threading.Event()
        self.ledger = SimpleNamespace(current=PHASE_INDEX[phase], inspection=None, ranges=None, **state)
        self.stand = stand
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        assert self.arrived.wait(10)

    def run(self):
        self.look = StackProbe(self.ledger, UserCode())
        self.stand(self.wait)

    def wait(self):
        self.arrived.set()
        self.go_on.wait(10)  # @wait

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self.thread.join()


def plain(wait):
    wait()  # @plain


def generating(wait):
    def numbers():
        yield 1
        wait()  # @generator

    for _ in numbers():  # @consumer
        pass


def decorated(wait):
    @torch.no_grad()  # @decorator
    def inner():
        wait()  # @decorated

    inner()


@pytest.mark.parametrize("is_on", [True, False], ids=["as usual", "turned off by the user"])
def test_no_garbage_collection_while_sampling(monkeypatch, is_on):
    """In Python 3.11 a collection let the other thread run in the middle of ``f_back``; the process crashed.

    Here each new object would start a collection if collections were allowed.
    """
    monkeypatch.setattr(stack_look_module, "_COLLECTS_ANYWHERE", True)
    began, in_walk = [], []

    def note(when, info):
        began.append(when)

    def follow(self, frame, phase):
        began.clear()
        place = walk(self, frame, phase)
        in_walk.append(tuple(began))
        return place

    walk = StackProbe._follow
    monkeypatch.setattr(StackProbe, "_follow", follow)
    usual = gc.get_threshold()
    with Standing(plain) as standing:
        gc.callbacks.append(note)
        gc.set_threshold(1)
        if not is_on:
            gc.disable()
        try:
            standing.look.look(5)
            assert gc.isenabled() is is_on
        finally:
            gc.enable()
            gc.set_threshold(*usual)
            gc.callbacks.remove(note)
    assert in_walk == [()]


def test_garbage_collection_resumes_after_failed_sample(monkeypatch):
    monkeypatch.setattr(stack_look_module, "_COLLECTS_ANYWHERE", True)
    monkeypatch.setattr(StackProbe, "_follow", lambda *_: 1 / 0)
    with Standing(plain) as standing, pytest.raises(ZeroDivisionError):
        standing.look.look(5)
    assert gc.isenabled()


def places(samples):
    [stack] = samples.stacks
    frames = [samples.frames[index] for index in stack.frames]
    return [(frame.function.rpartition(">.")[2], frame.line) for frame in frames if frame.file == HERE]


@pytest.mark.parametrize(
    ("stand", "expected"),
    [
        (plain, [("plain", "plain")]),
        (lambda wait: wait(), [("<lambda>", None)]),
        (generating, [("generating", "consumer"), ("numbers", "generator")]),
        (decorated, [("decorated", None), ("inner", "decorated")]),
    ],
    ids=["function", "lambda", "generator", "decorated"],
)
def test_lines_of_stack(stand, expected):
    with Standing(stand) as standing:
        standing.look.look(5)
        standing.look.look(7)
    samples = standing.look.samples(cost_ns=3)
    found = places(samples)
    expected = [("Standing.run", None), *expected, ("Standing.wait", "wait")]
    has_names = hasattr(plain.__code__, "co_qualname")
    for (name, line), (expected_name, mark) in zip(found, expected, strict=True):
        assert name == (expected_name if has_names else expected_name.rpartition(".")[2])
        assert mark is None or line == line_of(mark)
    assert [(s.phase, s.samples, s.time_ns) for s in samples.stacks] == [("forward", 2, 12)]
    assert (samples.samples, samples.dropped, samples.cost_ns, samples.notes) == (2, 0, 3, ())


def test_frame_has_owner_and_first_line():
    with Standing(decorated) as standing:
        standing.look.look(1)
    samples = standing.look.samples()
    inner = next(frame for frame in samples.frames if frame.line == line_of("decorated"))
    assert (inner.file, inner.function_line, inner.is_users) == (HERE, line_of("decorator"), True)
    assert inner.python_module == __name__
    innermost = samples.frames[samples.stacks[0].frames[-1]]
    assert (innermost.python_module, innermost.is_users) == ("threading", False)


@pytest.mark.parametrize(
    "state",
    [{"inspection": object()}, {"ranges": object()}, {"current": PROFILER}],
    ids=["inspection", "window", "profiler"],
)
def test_own_work_is_not_sampled(state):
    with Standing(plain) as standing:
        vars(standing.ledger).update(state)
        standing.look.look(5)
    assert standing.look.samples().samples == 0


def test_ended_thread_yields_no_sample():
    with Standing(plain) as standing:
        pass
    standing.look.look(5)
    assert standing.look.samples().samples == 0


def run_in(source, module, **names):
    """Run source whose functions claim to be in another module."""
    names["__name__"] = module
    exec(compile(source, f"{module}.py", "exec"), names)
    return names


def test_stack_omits_loop_and_its_callers():
    run = run_in("def run(step): step()", "lightning.pytorch.loops.fit_loop")["run"]
    fetch = run_in("def fetch(step): step()", "lightning.pytorch.loops.fetchers")["fetch"]
    with Standing(lambda wait: run(lambda: fetch(lambda: plain(wait)))) as standing:
        standing.look.look(5)
    samples = standing.look.samples()
    functions = [samples.frames[index].function for index in samples.stacks[0].frames]
    assert functions[0].endswith("<lambda>")
    assert functions[1] == "fetch"
    assert "run" not in functions


def test_files_stay_absolute_after_chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_in("def stand(wait): wait()", "train")
    with Standing(names["stand"]) as standing:
        standing.look.look(5)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        [frame] = [frame for frame in standing.look.samples().frames if frame.python_module == "train"]
    assert (frame.file, frame.is_users) == (str(tmp_path / "train.py"), True)


def descend(depth, wait):
    if depth:
        descend(depth - 1, wait)  # @descend
    else:
        wait()


def test_deep_stack_keeps_innermost_functions():
    with Standing(lambda wait: descend(200, wait)) as standing:
        standing.look.look(5)
    samples = standing.look.samples()
    [stack] = samples.stacks
    assert len(stack.frames) == 80
    assert samples.frames[stack.frames[0]].line == line_of("descend")
    assert samples.frames[stack.frames[-1]].python_module == "threading"
    assert samples.notes == ("1 samples keep only their innermost 80 functions.",)


@pytest.mark.parametrize(("limit", "value", "kept"), [("MOST_STACKS", 1, 1), ("MOST_FRAMES", 2, 0)])
def test_excess_stacks_are_counted_and_dropped(monkeypatch, limit, value, kept):
    monkeypatch.setattr(stack_look_module, limit, value)
    with Standing(plain) as standing:
        standing.look.look(5)
        standing.ledger.current = PHASE_INDEX["backward"]
        standing.look.look(5)
    samples = standing.look.samples()
    assert (len(samples.stacks), samples.dropped, samples.samples) == (kept, 2 - kept, 2)
    assert "too many different stacks" in samples.notes[0]


def test_sampling_keeps_no_variable_alive():
    held = []

    class Thing:
        pass

    def stand(wait):
        thing = Thing()
        held.append(weakref.ref(thing))
        wait()

    gc.disable()
    try:
        with Standing(stand) as standing:
            standing.look.look(5)
            assert held[0]() is not None
        assert held[0]() is None
    finally:
        gc.enable()


def test_memory_is_sampled_every_100_ms_at_most():
    steps = []
    look = _memory_look(SimpleNamespace(look=steps.append), SimpleNamespace(steps_ended=3))
    for _ in range(41):
        look(5 * MS)
    assert steps == [3, 3, 3]  # immediately, then after 100 and 200 ms


# ---- In a fit


LOOKS = [0]
"""How often a sampler has sampled."""


def work(kind, ms=10):
    """Take some time, with or without the interpreter, until a sample was taken."""
    looks, end = LOOKS[0], time.perf_counter_ns() + ms * MS
    last = end + 10_000 * MS
    if kind == "sleep":
        while LOOKS[0] == looks and time.perf_counter_ns() < last:
            time.sleep(ms / 1e3)  # @sleep
        return
    while (LOOKS[0] == looks or time.perf_counter_ns() < end) and time.perf_counter_ns() < last:  # @busy
        pass


class SlowNumbers(Numbers):
    kind = "busy"

    def __getitem__(self, index):
        item = super().__getitem__(index)
        work(self.kind)  # @dataset
        return item


class SlowCallback(Callback):
    def __init__(self, kind):
        self.kind = kind

    def on_train_batch_end(self, *args):
        sum(range(100))
        work(self.kind)  # @callback


class SlowNet(Net):
    kind = "busy"

    def training_step(self, batch, batch_idx):
        work(self.kind)  # @training_step
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        work(self.kind)  # @validation_step
        return loss


@pytest.mark.parametrize(("one", "other"), [("busy", "sleep"), ("sleep", "busy")])
def test_hot_lines_in_fit(tmp_path, monkeypatch, one, other):
    look_with = Sampler._look_with

    def look(sampler, name, *args):
        look_with(sampler, name, *args)
        LOOKS[0] += name == "the stack"

    monkeypatch.setattr(Sampler, "_look_with", look)
    module, data = SlowNet(), SlowNumbers(30)
    module.kind, data.kind = one, other
    validation = loader(30, batch_size=1)
    callback = run_fit(
        tmp_path,
        module=module,
        data=DataLoader(data, batch_size=1),
        val=validation,
        others=[SlowCallback(other)],
        trainer={"num_sanity_val_steps": 0},
        active=0,
        sampling=True,
    )
    stacks = callback.run.ranks[0].stacks
    assert load_run(tmp_path).ranks[0].stacks == stacks
    assert stacks.notes == ()
    hot = hot_lines(stacks)
    for method, kind, phase in (
        (SlowNet.training_step, one, "forward"),
        (SlowNet.validation_step, one, "validation"),
        (SlowNumbers.__getitem__, other, "dataloader"),
        (SlowCallback.on_train_batch_end, other, "callbacks"),
    ):
        code = method.__code__
        mark = {"__getitem__": "dataset", "on_train_batch_end": "callback"}.get(code.co_name, code.co_name)
        line = hot.inside(HERE, code.co_firstlineno, phases=[phase])
        assert (line.file, line.line) == (HERE, line_of(mark)), mark
        assert line.function_line == code.co_firstlineno
        assert line.share > 0.6
        assert line.inner.line - line_of(kind) in ((0,) if kind == "sleep" else (0, 1))
        assert line.samples >= 25  # of 30 calls, each lasting until it was sampled
        assert line.time_ns > 150 * MS  # of at least 300
    assert not sampling_threads()


def weights_of(tmp_path, **kwargs):
    seed_everything(3)
    module = Net(dropout=0.3)
    run_fit(tmp_path, module=module, data=loader(shuffle=True), active=0, **kwargs)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_sampling_changes_no_bit_of_weights(tmp_path):
    without = weights_of(tmp_path / "a")
    assert torch.equal(weights_of(tmp_path / "b", sampling=True), without)


def test_two_fits_in_a_row(tmp_path):
    callback = make_callback(tmp_path, active=0, sampling=True)
    seen = []
    for _ in range(2):
        net = Net(lambda _: time.sleep(0.01))
        fit_quietly(make_trainer(tmp_path, callback), net, loader(40))
        seen.append(callback.run.ranks[0].stacks)
        assert not sampling_threads()
    assert all(one.samples > 5 for one in seen)
    assert seen[0] != seen[1]


def test_exception_ends_thread_and_keeps_samples(tmp_path):
    def at_batch(batch_idx):
        time.sleep(0.01)
        assert sampling_threads()
        if batch_idx == 10:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_fit(tmp_path, module=Net(at_batch), active=0, sampling=True)
    assert not sampling_threads()
    assert load_run(tmp_path).ranks[0].stacks.samples >= 3


@pytest.mark.parametrize("with_stack", [False, True])
def test_no_sampling_thread_while_window_records(tmp_path, with_stack):
    alive = {}
    net = Net(lambda batch_idx: alive.update({batch_idx: bool(sampling_threads())}))
    callback = run_fit(
        tmp_path, module=net, data=loader(20), steps=(3, 5), with_stack=with_stack, sampling=True
    )
    assert callback.run.ranks[0].windows[0].recorded_steps == (3, 4)
    assert alive == {step: step not in (2, 3, 4) for step in range(10)}  # step 2 warms up
    assert not sampling_threads()


class Counting(Numbers):
    """Its targets hold the number of sampling threads where it's read."""

    def __getitem__(self, index):
        return self.data[index], torch.tensor(float(len(sampling_threads())))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("workers", [False, True])
def test_workers_have_own_sampling_thread_or_none(tmp_path, workers):
    seen, in_training = [], []

    class Reading(Net):
        def training_step(self, batch, batch_idx):
            seen.extend(batch[1].tolist())
            in_training.append(len(sampling_threads()))
            return self.loss(batch)

    data = DataLoader(Counting(16), batch_size=2, num_workers=2, multiprocessing_context="fork")
    run_fit(
        tmp_path,
        module=Reading(),
        data=data,
        active=0,
        sampling=True,
        workers=workers,
        trainer={"max_epochs": 2},
    )
    assert set(seen) == {float(workers)}
    assert set(in_training) == {1}
    assert not sampling_threads()


def test_internal_error_does_not_reach_training(tmp_path, monkeypatch):
    def fail(self, elapsed_ns):
        raise RuntimeError("ours")

    monkeypatch.setattr(StackProbe, "look", fail)
    net = Net(lambda _: time.sleep(0.005))
    callback = run_fit(tmp_path, module=net, data=loader(20), active=0, sampling=True)
    assert callback.run.info.status == "finished"
    note = "Sampling the stack ended early: RuntimeError: ours."
    assert callback.run.ranks[0].stacks.notes == (note,)
    assert note in callback.report.notes


def test_work_between_steps_is_not_sampled(tmp_path, monkeypatch):
    seen = []
    fields = Sampling.fields

    def slow(self):
        seen.append(self._stack._ledger.current)
        return fields(self)

    monkeypatch.setattr("lightning_modelprof.engine.plan._MIN_INTERVAL_NS", 0)
    monkeypatch.setattr("lightning_modelprof.engine.plan._INTERVAL_FACTOR", 0)
    monkeypatch.setattr(Sampling, "fields", slow)
    run_fit(tmp_path, data=loader(20), active=0, sampling=True)
    assert len(seen) > 3
    assert set(seen[:-1]) == {PROFILER}  # the last one is taken after the loop
