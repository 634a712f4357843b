"""The lines that take a function's time: hand-made stacks with hand-derived answers."""

from __future__ import annotations

import math

import pytest

from lightning_modelprof.analysis.source.hot_lines import HotLines, hot_lines
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import at_exact_lines
from lightning_modelprof.report.advice.loader import sampler_advice
from lightning_modelprof.report.model import Finding, Status
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from tests.support.facts import why_not

FIRST_LINES = {"step": 10, "loss": 20, "row": 30, "again": 40, "<listcomp>": 12}


def frame(text):
    """``step:12`` is a user's line; ``torch.nn.functional.relu:5`` is in a library's module."""
    name, _, line = text.partition(":")
    module, _, function = name.rpartition(".")
    return StackFrame(
        file=f"{module}.py" if module else "train.py",
        line=int(line),
        function=function,
        function_line=FIRST_LINES.get(function, 1),
        python_module=module or "train",
        is_users=not module,
    )


def stacks_of(*stacks):
    """(phase, "step:12 loss:22", samples, nanoseconds), outermost first."""
    frames = {}
    sampled = []
    for phase, text, samples, time_ns in stacks:
        numbers = tuple(frames.setdefault(one, len(frames)) for one in text.split())
        sampled.append(SampledStack(phase=phase, frames=numbers, samples=samples, time_ns=time_ns))
    return StackSamples(
        frames=tuple(map(frame, frames)),
        stacks=tuple(sampled),
        samples=sum(stack.samples for stack in sampled),
    )


def hot_of(*stacks):
    return HotLines(samples=stacks_of(*stacks))


def inside(hot, **kwargs):
    return hot.inside("train.py", FIRST_LINES["step"], **kwargs)


CALL = "torch.nn.modules.module._call_impl:9"


def test_line_with_most_time():
    hot = hot_of(
        ("forward", "step:12", 6, 600),
        ("forward", f"step:13 {CALL}", 3, 300),
        ("forward", "step:14", 1, 100),
    )
    line = inside(hot)
    assert (line.file, line.line, line.function, line.function_line) == ("train.py", 12, "step", 10)
    assert (line.share, line.samples, line.time_ns, line.inner) == (0.6, 6, 600, None)


def test_called_functions_count_for_their_line():
    hot = hot_of(("forward", "step:12 torch.relu:5", 2, 200), ("forward", "step:12", 1, 100))
    line = inside(hot)
    assert (line.line, line.samples, line.time_ns, line.share, line.inner) == (12, 3, 300, 1.0, None)


@pytest.mark.parametrize(
    "stacks",
    [
        [("forward", "step:12", 2, 900)],
        [("forward", f"step:{line}", 3, 100) for line in (12, 13, 14)],
        # Most of the time but few samples, and vice versa.
        [("forward", "step:12", 4, 900), ("forward", "step:13", 5, 100)],
        [("forward", "step:12", 5, 300), ("forward", "step:13", 2, 200), ("forward", "step:14", 2, 200)],
        [("forward", "loss:22", 9, 900)],
    ],
    ids=["two samples", "thirds", "few samples", "little time", "another function"],
)
def test_few_samples_or_less_than_half_give_no_line(stacks):
    assert inside(hot_of(*stacks)) is None


def test_half_of_time_is_enough():
    hot = hot_of(("forward", "step:12", 3, 300), ("forward", "step:13", 3, 300))
    assert inside(hot).share == 0.5


def test_only_requested_phases_count():
    hot = hot_of(("forward", "step:12", 3, 100), ("validation", "step:15", 9, 900))
    assert inside(hot).line == 15
    assert inside(hot, phases=["forward"]).line == 12
    assert inside(hot, phases=["forward"]).share == 1.0
    assert inside(hot, phases=["backward"]) is None


def test_time_in_modules_can_be_excluded():
    hot = hot_of(
        ("forward", f"step:12 {CALL} torch.nn.modules.linear.forward:3", 9, 900),
        ("forward", "step:13 loss:22", 4, 400),
        ("forward", f"{CALL} step:14", 1, 100),  # a module called the step, so this isn't time in a module
    )
    assert inside(hot).line == 12
    line = inside(hot, outside_modules=True)
    assert (line.line, line.share, line.inner.line) == (13, 0.8, 22)


def test_innermost_line_with_half_of_time():
    hot = hot_of(
        ("forward", "step:12 torch.wrap:1 loss:22 row:33 torch.relu:5", 5, 500),
        ("forward", "step:12 loss:22 row:34", 2, 200),
        ("forward", "step:12 loss:23", 2, 200),
        ("forward", "step:12", 1, 100),
    )
    line = inside(hot)
    inner = line.inner
    assert (line.line, line.time_ns, inner.line, inner.function) == (12, 1000, 33, "row")
    assert (inner.share, inner.samples, inner.time_ns, inner.inner) == (0.5, 5, 500, None)


def test_descent_stops_if_no_line_has_half():
    hot = hot_of(
        ("forward", "step:12 loss:22 row:33", 4, 400),
        ("forward", "step:12 loss:22 row:34", 3, 300),
        ("forward", "step:12 loss:23", 3, 300),
    )
    assert (inside(hot).inner.line, inside(hot).inner.share) == (22, 0.7)


def test_library_lines_are_never_inner_line():
    hot = hot_of(("forward", "step:12 torch.slow:5 torch.slower:6", 9, 900))
    assert inside(hot).inner is None


def test_comprehension_belongs_to_its_line():
    hot = hot_of(("forward", "step:12 <listcomp>:12", 9, 900))
    assert (inside(hot).line, inside(hot).inner) == (12, None)
    hot = hot_of(("forward", "step:12 <listcomp>:12 loss:22", 9, 900))
    assert (inside(hot).line, inside(hot).inner.line) == (12, 22)


def test_innermost_call_of_recursion_counts():
    hot = hot_of(
        ("forward", "again:45 again:45 again:42", 5, 500),
        ("forward", "again:45 again:42", 3, 300),
        ("forward", "again:43", 1, 100),
    )
    line = hot.inside("train.py", FIRST_LINES["again"])
    assert (line.line, line.samples, line.time_ns, line.inner) == (42, 8, 800, None)


def test_recursion_below_line():
    hot = hot_of(("forward", "step:12 again:45 again:45 again:42", 5, 500))
    assert (inside(hot).inner.line, inside(hot).inner.time_ns) == (42, 500)


def test_line_that_mostly_calls_is_recognized():
    """Line 12 is in a called function in 6 of 8 samples, line 13 in 1 of 4 (library frames don't count)."""
    hot = hot_of(
        ("forward", "step:12 row:31", 3, 300),
        ("forward", "step:12 row:32", 3, 300),
        ("forward", "step:12 <listcomp>:12", 2, 200),
        ("forward", f"step:13 {CALL}", 3, 300),
        ("forward", "step:13 row:31", 1, 100),
    )
    assert hot.is_call("train.py", 12)
    assert not hot.is_call("train.py", 13)
    assert not hot.is_call("train.py", 99)


def test_finding_lists_slowest_line_first():
    """The dataset was not sampled, but ``collate_fn`` was, so its statement comes first."""
    dataset, collate = (Place(file="train.py", line=line) for line in (99, FIRST_LINES["step"]))
    finding = Finding(kind="k", status=Status.FOUND, title="t", summary="s", locations=(dataset, collate))
    found = at_exact_lines(finding, hot_of(("dataloader", "step:12", 5, 500)))
    assert [(one.line, one.is_exact) for one in found.locations] == [(12, True), (99, False)]


def lines_of(found):
    return [(one.line, one.share) for one in found]


def test_fewest_statements_with_half_of_time_are_named():
    """40, 35 and 25% of the function: the first has less than half, the first two have more."""
    hot = hot_of(("forward", "step:12", 4, 40), ("forward", "step:13", 7, 35), ("forward", "step:14", 9, 25))
    assert lines_of(hot.statements("train.py", FIRST_LINES["step"])) == [(12, 0.4), (13, 0.35)]
    assert hot.statements("train.py", FIRST_LINES["loss"]) == ()


def test_any_user_line_can_be_place_in_phase():
    """A user's scheduler and a function called by a library: 60 and 10 of 100 ns."""
    hot = hot_of(
        ("lr_scheduler", "torch.step:3 loss:22 row:33", 6, 60),
        ("lr_scheduler", "torch.step:3 again:42", 1, 10),
        ("lr_scheduler", "torch.step:3", 3, 30),
        ("forward", "step:12", 9, 900),
    )
    [line] = hot.statements_in(["lr_scheduler"])
    assert (line.line, line.share, line.inner.line) == (22, 0.6, 33)


def test_phase_mostly_in_library_has_no_place():
    hot = hot_of(("transfer", "torch.to:3", 6, 60), ("transfer", "torch.to:3 loss:22", 4, 40))
    assert hot.statements_in(["transfer"]) == ()
    assert hot.statements_in(["clip"]) == ()


def test_user_line_below_library_function_is_place():
    """One of Lightning's callbacks calls the user's logger, another does its own work."""
    hot = hot_of(
        ("callbacks", "lightning.monitor:3 lightning.log:9 loss:22", 6, 60),
        ("callbacks", "lightning.stats:3 torch.stats:4", 6, 60),
    )
    monitor, stats = Place(function="monitor"), Place(function="stats")
    finding = Finding(kind="k", status=Status.FOUND, title="t", summary="s", locations=(monitor, stats))
    line, name = at_exact_lines(finding, hot).locations
    assert (line.file, line.line, line.is_exact) == ("train.py", 22, True)
    assert name == stats


def test_only_slow_lines_of_phase_are_named():
    """The sampler takes the fetch time; the dataset, which the setup names, takes almost none."""
    hot = hot_of(
        ("dataloader", "torch.utils.data.dataloader._next_index:5 again:42", 9, 90),
        ("dataloader", "torch.fetch:5 loss:22", 1, 10),
    )
    dataset = Place(file="train.py", line=FIRST_LINES["loss"], function="Rows.__getitem__")
    finding = Finding(kind="k", status=Status.FOUND, title="t", summary="s", locations=(dataset,))
    [place] = at_exact_lines(finding, hot, phases=["dataloader"]).locations
    assert (place.line, place.is_exact) == (42, True)
    assert hot.share_in("dataloader", "torch.utils.data.dataloader", "_next_index") == 0.9
    advice = sampler_advice(hot, 10.0)
    assert "The sampler takes 90%" in advice.told
    assert advice.saving_ns == 9.0, "the rest of the wait stays"
    assert sampler_advice(hot_of(("dataloader", "torch.fetch:5 loss:22", 9, 90)), 10.0) is None


NEXT = "torch.utils.data.dataloader._next_index:5"


@pytest.mark.parametrize(
    ("below", "action"),
    [
        ("again:42", "Do the work of again once per epoch, not per batch."),
        ("again:42 loss:22", "Do the work of loss once per epoch, not per batch."),
        ("again:42 loss:22 numpy.where:3", "Do the work of loss once per epoch, not per batch."),
        ("again:42 random.shuffle:376", "Shuffle the indices of a whole epoch with one array operation."),
        (
            "torch.utils.data.sampler.__iter__:160",
            "Shuffle the indices of a whole epoch with one array operation.",
        ),
    ],
    ids=["own", "own function", "own function with an array", "shuffles", "torch's"],
)
def test_sampler_advice_depends_on_its_code(below, action):
    """A search per batch isn't a shuffle, but it can be done once."""
    hot = hot_of(("dataloader", f"{NEXT} {below}", 9, 90), ("dataloader", "torch.fetch:5 loss:22", 1, 10))
    advice = sampler_advice(hot, 10.0)
    assert advice.action == action
    assert "It runs in the main process with any num_workers." in advice.told


GRADIENTS = "torch.autograd.grad:594 torch.autograd.graph._engine_run_backward:979"


def test_gradients_are_not_own_code():
    """40 of 100 ns are its own: a transform's f counts, but autograd's and the transform's code doesn't."""
    hot = hot_of(
        ("forward", f"step:12 {GRADIENTS}", 30, 30),
        ("forward", f"step:13 torch._functorch.apis.wrapper:9 loss:22 {GRADIENTS}", 10, 10),
        ("forward", "step:13 torch._functorch.apis.wrapper:9", 10, 10),
        ("forward", "step:13 torch._functorch.apis.wrapper:9 loss:22", 15, 15),
        ("forward", "step:14 torch.autograd.graph.pack_to_cpu:5", 15, 15),
        ("forward", "step:15", 10, 10),
        ("forward", f"step:16 {CALL} {GRADIENTS}", 10, 10),
    )
    assert hot.gradient_share("train.py", 10) == (0.5, pytest.approx(0.05))
    assert hot.share_outside_modules("train.py", 10) == (pytest.approx(0.4), 100)
    assert {one.line for one in hot.statements("train.py", 10, outside_modules=True)} == {13, 14}
    assert hot.gradient_share("train.py", 99) == (0.0, 0.0)


def test_upper_bound_for_share_of_line():
    """60 of 100 samples are at line 22, 40 without a user's line, none at line 9."""
    hot = hot_of(("forward", "step:12 loss:22", 60, 60), ("forward", "lightning.loop:3", 40, 40))
    most = hot.most_at_lines("forward")
    assert most("train.py", 22) == pytest.approx((0.62 + 2 * math.sqrt(0.0024 + 0.0001)) / 1.04)
    assert most(None, None) == pytest.approx((0.42 + 2 * math.sqrt(0.0024 + 0.0001)) / 1.04)
    assert most("train.py", 9) == pytest.approx(0.04 / 1.04)
    assert hot.most_at_lines("backward") is None
    assert hot_of(("forward", "step:12", 19, 60)).most_at_lines("forward") is None


def test_top_lines():
    hot = hot_of(
        ("forward", "step:12 loss:22 torch.relu:5", 10, 500),
        ("forward", "step:13 loss:22", 5, 100),
        ("validation", "loss:22", 2, 300),
        ("backward", "torch.backward:7", 2, 50),
        ("other", "", 1, 50),
    )
    top = hot.top(10)
    assert [(line.phase, line.line, line.samples, line.time_ns) for line in top] == [
        ("forward", 22, 15, 600),
        ("validation", 22, 2, 300),
    ]
    # 600 of 1000 ns; 20 samples
    assert top[0].share == 0.6
    assert hot.top(1) == top[:1]
    [line] = hot.lines
    assert (line.phase, line.share, line.samples, line.time_ns) == (None, 0.9, 17, 900)


def test_reason_without_samples():
    assert why_not(hot_lines, None) == 'not measured (set inspect={"sampling": True})'
    assert why_not(hot_lines, StackSamples()) == "the loop ended before the first sample"
    samples = stacks_of(("forward", "step:12", 1, 5))
    assert hot_lines(samples).samples is samples
