"""Findings on the time that certain operators take on a line, from samples and the inspected step.

Steps have 20 ms of forward and 20 ms of backward, and all samples have the same weight.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.lines import slow_forward_outside_model
from lightning_modelprof.report.rules.precision import double_precision
from lightning_modelprof.report.rules.repeats import many_calls
from lightning_modelprof.run.model_cost import ModelSize, TensorSize
from lightning_modelprof.run.sites import LineCount, StepSites
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from tests.support.diagnosed import MS, analysis_of, cost_of, only, steps_of

NET = "/home/me/net.py"


def frame(line):
    return StackFrame(
        file=NET, line=line, function="training_step", function_line=30, python_module="net", is_users=True
    )


def library(module, function):
    return StackFrame(
        file="/lib.py", line=9, function=function, function_line=5, python_module=module, is_users=False
    )


STEP, LINE = frame(33), frame(40)
GRAD, ENGINE = library("torch.autograd", "grad"), library("torch.autograd.graph", "_engine_run_backward")
TORCH = library("torch.autograd", "backward")


def samples_of(*stacks):
    """(phase, frames, samples), of 1 ms each."""
    frames = tuple(dict.fromkeys(one for _, path, _ in stacks for one in path))
    return StackSamples(
        frames=frames,
        stacks=tuple(
            SampledStack(phase=phase, frames=tuple(map(frames.index, path)), samples=n, time_ns=n * MS)
            for phase, path, n in stacks
        ),
        samples=sum(n for _, _, n in stacks),
    )


def line_of(line, phase="forward", took_ms=0.0, calls=12, **counts):
    return LineCount(
        file=NET,
        line=line,
        function="training_step",
        function_line=30,
        module="",
        phase=phase,
        calls=calls,
        views=0,
        operators=3,
        elements=1,
        num_bytes=1,
        took_ns=round(took_ms * MS),
        **counts,
    )


def evaluated(rule, lines, *stacks, below=(), device="cpu", model_ms=6, limits=None, **kwargs):
    """A rule's finding; by default 40 of forward's 100 samples are at line 40, and backward has 100 too."""
    if not stacks:
        stacks = (("forward", (LINE, *below), 40), ("forward", (STEP,), 60), ("backward", (TORCH,), 100))
    cost = replace(
        cost_of(("", 10, model_ms, 10)),
        sites=StepSites(step=3, device=device, sites=(), lines=tuple(lines)),
        size=ModelSize(
            sizes=(
                TensorSize(
                    kind="trainable parameters", dtype="float32", tensors=2, elements=100, num_bytes=400
                ),
            ),
        ),
    )
    steps = steps_of(forward=20, backward=20)
    return only(judge(rule, analysis_of(steps, cost=cost, stacks=samples_of(*stacks), **kwargs), limits))


# float64

DOUBLE = (
    line_of(40, took_ms=8, double=12, double_ns=8 * MS, to_double=1),
    line_of(33, took_ms=8),
    line_of(40, "backward", 12, double=12, double_ns=12 * MS),
    line_of(33, "backward", 12),
)


def test_float64_in_float32_model_is_found():
    """40 of 200 samples over 40 ms, and half of the 20 ms of backward."""
    found = evaluated(double_precision, DOUBLE)
    assert found.saving_ns_per_step == pytest.approx(18 * MS)
    assert (found.saving_is, found.severity) == ("up to", Severity.CRITICAL)
    assert [(one.file, one.line, one.is_exact) for one in found.locations] == [(NET, 40, True)]
    assert "float64" in found.title


def test_half_float64_line_counts_half():
    lines = [replace(one, double_ns=one.double_ns // 2) for one in DOUBLE]
    assert evaluated(double_precision, lines).saving_ns_per_step == pytest.approx(9 * MS, rel=0.01)


def test_pause_in_small_backward_is_not_float64():
    """The line's forward takes 1.6 ms by samples, so its backward counts at most three times that."""
    lines = [*DOUBLE[:2], line_of(40, "backward", 900, calls=1, double=1, double_ns=900 * MS)]
    stacks = (("forward", (LINE,), 40), ("forward", (STEP,), 960))
    found = evaluated(double_precision, lines, *stacks)
    assert found.saving_ns_per_step == pytest.approx(4 * 1.6 * MS)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cuda"},
        {"lines": [replace(one, double_ns=0) for one in DOUBLE]},
        {"stacks": (("forward", (LINE,), 9), ("forward", (STEP,), 9))},
        {"stacks": (("forward", (LINE,), 12), ("forward", (STEP,), 988))},
    ],
    ids=["a device's time is unknown", "none", "few samples", "little"],
)
def test_unimportant_float64_is_clean(changes):
    changes = {"lines": DOUBLE, "stacks": (), **changes}
    stacks = changes.pop("stacks")
    assert evaluated(double_precision, changes.pop("lines"), *stacks, **changes).status is Status.CLEAN


# A loop over the parameters

PENALTY = (line_of(40, took_ms=8, reductions=4), line_of(40, "backward", 10), line_of(33, "backward", 10))


def test_penalty_loop_is_found():
    """Each operator takes 0.7 ms, so Python isn't slow, and the rest of the step is short."""
    found = evaluated(slow_forward_outside_model, PENALTY, model_ms=12)
    assert found.saving_ns_per_step == pytest.approx(18 * MS)
    assert (found.saving_is, found.locations[0].line) == ("", 40)
    assert "weight_decay" in found.action
    assert found.verdict_ns == 0


def test_norm_without_backward_gets_norm_advice():
    found = evaluated(slow_forward_outside_model, PENALTY[:1], model_ms=12)
    assert found.saving_ns_per_step == pytest.approx(8 * MS)
    assert "weight_decay" not in found.action
    assert "torch.nn.utils.get_total_norm" in found.action


def test_many_small_parameters_get_reduction_advice():
    lines = [line_of(40, took_ms=4, calls=400, reductions=130), *PENALTY[1:]]
    stacks = (("forward", (LINE,), 70), ("forward", (STEP,), 30))
    found = evaluated(slow_forward_outside_model, lines, *stacks)
    assert found.saving_is == ""
    assert "reduces 130 parameters" in found.action


@pytest.mark.parametrize("reductions", [0, 1])
def test_other_long_operators_are_clean(reductions):
    lines = [replace(PENALTY[0], reductions=reductions), *PENALTY[1:]]
    assert evaluated(slow_forward_outside_model, lines, model_ms=12).status is Status.CLEAN


# Gradients in a loop


def test_gradient_loop_is_found():
    """40 of 200 samples over 40 ms, in 20 calls; one batched call may cost as much as one of them."""
    found = evaluated(many_calls, [line_of(40, gradients=20)], below=(GRAD, ENGINE), limits={"warning": 0.1})
    assert found.saving_ns_per_step == pytest.approx(0.95 * 8 * MS)
    assert (found.saving_is, found.severity) == ("up to", Severity.WARNING)
    assert found.title == "torch.autograd.grad called 20 times per step"
    assert [(one.line, one.is_exact) for one in found.locations] == [(40, True)]


def test_gradient_loop_needs_no_module_times():
    cost = replace(
        cost_of(),
        times=None,
        sites=StepSites(step=3, device="cpu", sites=(), lines=(line_of(40, gradients=20),)),
    )
    stacks = samples_of(("forward", (LINE, GRAD), 60), ("forward", (STEP,), 40))
    analysis = analysis_of(steps_of(forward=20), cost=cost, stacks=stacks)
    assert only(judge(many_calls, analysis)).status is Status.FOUND


@pytest.mark.parametrize(
    ("calls", "below"),
    [(2, (GRAD, ENGINE)), (20, ()), (20, (TORCH, ENGINE))],
    ids=["second derivatives", "other code", "backward"],
)
def test_other_gradient_calls_are_clean(calls, below):
    lines = [line_of(40, gradients=calls)]
    assert evaluated(many_calls, lines, below=below, limits={"warning": 0.1}).status is Status.CLEAN
