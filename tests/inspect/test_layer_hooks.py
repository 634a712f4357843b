"""Hooks on layers are found by how torch calls them, with the time they take."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_modelprof.analysis.source.hot_lines import layer_hooks
from lightning_modelprof.measure.sampling.stack_probe import StackProbe
from lightning_modelprof.measure.user_code import UserCode
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.callbacks import slow_layer_hooks
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from tests.support.diagnosed import MS, analysis_of, only, steps_of

HOOK = StackFrame(
    file="train.py", line=7, function="watch", function_line=5, python_module="train", is_users=True
)
CALL = StackFrame(
    file="torch.py", line=1, function="Module._call_impl", function_line=0,
    python_module="torch.nn.modules.module", is_users=False,
)  # fmt: skip
FORWARD_CALL = StackFrame(
    file="torch.py", line=2, function="Module._call_impl", function_line=0,
    python_module="torch.nn.modules.module", is_users=False,
)  # fmt: skip
FORWARD = StackFrame(
    file="train.py", line=20, function="Net.forward", function_line=19, python_module="train", is_users=True
)
OF_LIGHTNING = StackFrame(
    file="l.py", line=3, function="hook", function_line=2, python_module="lightning.pytorch.x", is_users=False
)
FRAMES = (HOOK, CALL, FORWARD_CALL, FORWARD, OF_LIGHTNING)


def samples_of(*stacks, calls=(1,)):
    """Samples from (phase, frames from the outermost, number of samples)."""
    return StackSamples(
        frames=FRAMES,
        stacks=tuple(
            SampledStack(
                phase=phase, frames=tuple(FRAMES.index(one) for one in path), samples=n, time_ns=n * MS
            )
            for phase, path, n in stacks
        ),
        samples=sum(n for _, _, n in stacks),
        hook_calls=calls,
    )


def found(samples):
    return only(judge(slow_layer_hooks, analysis_of(steps_of(forward=17, backward=3), stacks=samples)))


def test_time_in_hooks():
    """15 of 100 samples, in steps of 20 ms: 3 ms, at line 7."""
    finding = found(
        samples_of(
            ("forward", (FORWARD_CALL, FORWARD, CALL, HOOK), 15),
            ("forward", (FORWARD_CALL, FORWARD), 85),
        )
    )
    assert (finding.status, finding.severity) == (Status.FOUND, Severity.WARNING)
    assert finding.saving_ns_per_step == pytest.approx(3 * MS)
    assert [(one.file, one.line, one.is_exact) for one in finding.locations] == [("train.py", 7, True)]
    assert "modules or tensors (watch) take" in finding.summary


@pytest.mark.parametrize(
    ("what", "path"),
    [
        ("a forward is none", (FORWARD_CALL, FORWARD)),
        ("what a hook calls modules for is theirs", (CALL, HOOK, FORWARD_CALL, FORWARD)),
        ("Lightning's own belong to the training", (CALL, OF_LIGHTNING)),
        ("a function of the user's is called like a hook, elsewhere", (FORWARD, HOOK)),
    ],
)
def test_other_calls_are_not_hooks(what, path):
    assert layer_hooks_share(path) == 0.0, what
    assert found(samples_of(("forward", path, 100))).status is Status.CLEAN


def layer_hooks_share(path):
    analysis = analysis_of(steps_of(forward=20), stacks=samples_of(("forward", path, 100)))
    return layer_hooks(analysis.hot_lines).share


def test_few_samples_are_not_evaluated():
    """9 of 30 are three standard errors above zero, yet fewer than 10, which is too few to tell."""
    stacks = [("forward", (CALL, HOOK), 9), ("forward", (FORWARD_CALL, FORWARD), 21)]
    assert found(samples_of(*stacks)).status is Status.NOT_EVALUATED
    assert found(samples_of(("backward", (CALL, HOOK), 10), *stacks[1:])).status is Status.FOUND


def test_no_samples_are_not_evaluated():
    assert found(None).status is Status.NOT_EVALUATED


# torch's own calls, in any torch version


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


def seen_in(register):
    """Sample from inside a hook; return the functions that count as hooks."""
    net, seen = Net(), []
    ledger = SimpleNamespace(
        current=PHASE_INDEX["forward"], inspection=None, ranges=None, in_validation=False, validation=None
    )
    look = StackProbe(ledger, UserCode((Net,)))

    def hook(*args, **kwargs):
        if not seen:
            seen.append(True)
            look_from_another_thread(look)

    register(net, hook)
    net(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert seen
    samples = look.samples(first_interval_ns=1, last_interval_ns=1, cost_ns=0, notes=())
    calls = {samples.frames[number] for number in samples.hook_calls}
    [stack] = samples.stacks
    path = [samples.frames[number] for number in stack.frames]
    return [after.function for before, after in pairwise(path) if before in calls]


def look_from_another_thread(look):
    thread = threading.Thread(target=look.look, args=(5 * MS,))
    thread.start()
    end = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.01)


@pytest.mark.parametrize(
    "register",
    [
        lambda net, hook: net.layer.register_forward_hook(hook),
        lambda net, hook: net.layer.register_forward_pre_hook(hook),
        lambda net, hook: net.layer.register_forward_hook(hook, with_kwargs=True),
        lambda net, hook: net.layer.register_full_backward_hook(hook),
        lambda net, hook: net.layer.register_full_backward_pre_hook(hook),
        lambda net, hook: net.layer.weight.register_hook(hook),
        lambda net, hook: net.layer.weight.register_post_accumulate_grad_hook(hook),
    ],
)
def test_torch_hooks_are_recognized(register):
    assert any(name.endswith("hook") for name in seen_in(register))


def test_forward_is_not_hook():
    def register(net, hook):
        net.layer.forward = lambda x: hook() or x

    names = seen_in(register)
    assert names == []
