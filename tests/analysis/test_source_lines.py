"""Source lines: the table, the places and the advice of findings, from hand-made records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.source.hot_lines import hot_lines
from lightning_modelprof.analysis.source.source_lines import source_lines
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt, module_pace
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.all_rules import RULES
from lightning_modelprof.report.rules.engine import diagnose, judge
from lightning_modelprof.report.rules.lines import (
    slow_custom_module,
    slow_forward_outside_model,
    slow_line_in_module,
)
from lightning_modelprof.report.tables.run.source_lines import SOURCE_LINES
from lightning_modelprof.run.model_cost import OperatorCount, StepCount
from lightning_modelprof.run.sites import HOST_TENSOR, SYNCHRONISATION, LineCount, SourceSite, StepSites
from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples
from lightning_modelprof.run.steps import StepTag
from tests.support.diagnosed import SETUP, analysis_of, cost_of, only, steps_of
from tests.support.facts import tables_of

MS = 1_000_000
NET = "/home/me/net.py"
LOSS = "/home/me/loss.py"


def frame(file, line, function, function_line, *, module="me", is_users=True):
    return StackFrame(
        file=file,
        line=line,
        function=function,
        function_line=function_line,
        python_module=module,
        is_users=is_users,
    )


STEP_33 = frame(NET, 33, "Net.training_step", 30)
STEP_35 = frame(NET, 35, "Net.training_step", 30)
CALL = frame(
    "/lib/module.py", 1700, "Module._call_impl", 1650, module="torch.nn.modules.module", is_users=False
)
LAYER = frame("/lib/linear.py", 130, "Linear.forward", 129, module="torch.nn.modules.linear", is_users=False)
LOSS_7 = frame(LOSS, 7, "rows_loss", 5)


def samples_of(*stacks):
    """Stacks given as (phase, frames, samples), 5 ms per sample."""
    frames = list(dict.fromkeys(one for _, found, _ in stacks for one in found))
    return StackSamples(
        frames=tuple(frames),
        stacks=tuple(
            SampledStack(
                phase=phase,
                frames=tuple(map(frames.index, found)),
                samples=count,
                time_ns=count * 5 * MS,
            )
            for phase, found, count in stacks
        ),
        samples=sum(count for _, _, count in stacks),
    )


def line_of(file, line, function, function_line, phase="forward", calls=3, views=1, module=""):
    return LineCount(
        file=file,
        line=line,
        function=function,
        function_line=function_line,
        module=module,
        phase=phase,
        calls=calls,
        views=views,
        operators=2,
        elements=10,
        num_bytes=40,
    )


def site_of(kind, file, line, function, function_line, calls=1, num_bytes=4):
    return SourceSite(
        kind=kind,
        file=file,
        line=line,
        function=function,
        function_line=function_line,
        callers=(),
        module="",
        phase="forward",
        operator="aten::lift_fresh" if kind == HOST_TENSOR else "aten::_local_scalar_dense",
        device="cpu",
        calls=calls,
        num_bytes=num_bytes,
        is_blocking=None,
        is_pinned=None,
        is_non_blocking=None,
    )


def sites_of(lines=(), sites=()):
    return StepSites(step=6, device="cpu", sites=tuple(sites), lines=tuple(lines))


# The facts


def test_lines_by_hand():
    sites = sites_of(
        [
            line_of(NET, 33, "training_step", 30, calls=5, views=2),
            line_of(NET, 33, "training_step", 30, phase="backward", calls=4, views=0),
            line_of(LOSS, 7, "rows_loss", 5, calls=9, views=0),
            line_of(None, None, "", None, phase="optimizer", calls=50),
        ],
        [
            site_of(HOST_TENSOR, LOSS, 7, "rows_loss", 5, calls=2, num_bytes=80),
            site_of(SYNCHRONISATION, NET, 35, "training_step", 30),
        ],
    )
    # 12 samples of 5 ms: 9 and 3 of them give shares of 3/4 and 1/4.
    hot = hot_lines(
        samples_of(
            ("forward", (STEP_35, LOSS_7), 6), ("validation", (LOSS_7,), 3), ("forward", (STEP_33,), 3)
        )
    )
    lines = source_lines(sites, hot)
    assert [(one.file, one.line, one.share, one.samples) for one in lines] == [
        (LOSS, 7, 0.75, 9),
        (NET, 33, 0.25, 3),
        (NET, 35, 0.0, 0),
    ]
    loss, first, second = lines
    assert (loss.operators, loss.backward_operators, loss.host_tensors, loss.num_bytes) == (9, 0, 2, 80)
    assert (first.operators, first.backward_operators, first.waits, first.host_tensors) == (3, 4, 0, 0)
    assert (second.operators, second.waits, second.num_bytes) == (0, 1, 0)


def test_unmeasured_figures_are_none():
    only_sampled = source_lines(None, hot_lines(samples_of(("forward", (STEP_33,), 3))))
    assert [(one.operators, one.waits, one.num_bytes, one.samples) for one in only_sampled] == [
        (None, None, None, 3)
    ]
    only_counted = source_lines(sites_of([line_of(NET, 33, "training_step", 30)]), None)
    assert [(one.operators, one.share, one.samples) for one in only_counted] == [(2, None, None)]
    with pytest.raises(NotMeasured, match=r"no step was inspected .* and nothing was sampled"):
        source_lines(None, None)


def test_unknown_sizes_give_no_sum():
    unknown = site_of(HOST_TENSOR, LOSS, 7, "rows_loss", 5, num_bytes=None)
    known = site_of(HOST_TENSOR, LOSS, 7, "rows_loss", 5, num_bytes=8)
    [line] = source_lines(sites_of(sites=[unknown, known]), None)
    assert line.num_bytes is None
    assert line.host_tensors == 2


def test_table_of_source_lines():
    sites = sites_of([line_of(NET, 33, "training_step", 30)])
    stacks = samples_of(("forward", (STEP_35,), 4))
    analysis = analysis_of(steps_of(forward=10), cost=replace(cost_of(), sites=sites), stacks=stacks)
    [table] = tables_of(analysis, SOURCE_LINES)
    rows = [dict(zip([column.key for column in table.columns], row, strict=True)) for row in table.rows]
    assert [(row["place"], row["share"], row["operators"]) for row in rows] == [
        ("net.py:35", 1.0, 0),
        ("net.py:33", 0.0, 2),
    ]
    assert table.notes == ("Paths are relative to /home/me.",)


def test_no_table_without_samples_and_counts():
    assert tables_of(analysis_of(steps_of(forward=10)), SOURCE_LINES) == []


def test_empty_table_has_reason():
    [table] = tables_of(analysis_of(steps_of(forward=10), cost=cost_of()), SOURCE_LINES)
    assert table.rows == ()
    assert 'inspect={"sampling": True}' in table.absent_reason


# The lines that findings point at


def slow_step(*stacks, sites=None, forward_ms=16, modules_backward_ms=0):
    """A step of 20 ms with 2 ms in the modules, and its samples."""
    cost = cost_of(("", 10, 2, modules_backward_ms))
    return analysis_of(
        steps_of(forward=forward_ms, backward=20 - forward_ms),
        cost=replace(cost, sites=sites),
        stacks=samples_of(*stacks) if stacks else None,
    )


def finding_of(analysis, kind="slow_forward_outside_model"):
    _, findings = diagnose(analysis)
    [found] = [one for one in findings if one.kind == kind]
    return found


def test_without_samples_finding_points_at_function():
    found = finding_of(slow_step())
    assert found.locations == (Place(file=NET, line=30, function="Net.training_step"),)


def test_finding_points_at_statement_and_line_it_leads_to():
    """Time in modules isn't this finding's subject: line 33 only calls the layers."""
    analysis = slow_step(
        ("forward", (STEP_33, CALL, LAYER), 20), ("forward", (STEP_35, LOSS_7), 8), ("forward", (STEP_33,), 1)
    )
    [location] = finding_of(analysis).locations
    assert (location.line, location.is_exact) == (35, True)
    assert (location.inner.file, location.inner.line, location.inner.function) == (LOSS, 7, "rows_loss")


def test_single_sample_gives_statement():
    [location] = finding_of(slow_step(("forward", (STEP_35,), 1))).locations
    assert (location.line, location.is_exact, location.inner) == (35, True, None)


def test_function_without_samples_is_shown_by_its_def():
    [location] = finding_of(slow_step(("other", (LOSS_7,), 9))).locations
    assert (location.line, location.is_exact, location.inner) == (30, False, None)


def test_rules_about_settings_point_at_no_line():
    kinds = ("frozen_layers_computed", "optimizer_not_fused", "conv_bias_before_batchnorm")
    points_at = {rule.kind: rule.points_at for rule in RULES if rule.kind in kinds}
    assert points_at == dict.fromkeys(kinds, PointsAt.CHANGE)


def test_samples_can_overrule_module_times():
    """The machine was slow after the timed steps: nearly all samples are in the layers."""
    layers = ("forward", (STEP_33, CALL, LAYER), 95)
    assert finding_of(slow_step(layers, ("forward", (STEP_35,), 1))).status is Status.CLEAN
    assert finding_of(slow_step(layers, ("forward", (STEP_35,), 60))).status is Status.FOUND
    few = ("forward", (STEP_33, CALL, LAYER), 18)
    assert finding_of(slow_step(few, ("forward", (STEP_35,), 1))).status is Status.FOUND


# Advice


@pytest.mark.parametrize(
    ("lines", "sites", "advice"),
    [
        ([line_of(LOSS, 7, "rows_loss", 5, calls=300, views=100)], [], "runs 200 operators"),
        ([], [site_of(HOST_TENSOR, LOSS, 7, "rows_loss", 5)], "register_buffer"),
        (
            [line_of(LOSS, 7, "rows_loss", 5)],
            [site_of(SYNCHRONISATION, LOSS, 7, "rows_loss", 5)],
            "Check tensor values in the Dataset",
        ),
        ([line_of(LOSS, 7, "rows_loss", 5, calls=2, views=2)], [], "runs no torch operator"),
        ([line_of(LOSS, 7, "rows_loss", 5)], [], "Look for loops"),
        ([], [], "Look for loops"),
    ],
)
def test_advice_depends_on_what_line_runs(lines, sites, advice):
    analysis = slow_step(
        ("forward", (STEP_35, LOSS_7), 8), sites=sites_of(lines, sites) if lines or sites else None
    )
    assert advice in only(judge(slow_forward_outside_model, analysis)).action


def own_line(took_ms, calls=3, phase="forward", line=35, module=""):
    counted = line_of(NET, line, "training_step", 30, phase, calls=calls, views=0, module=module)
    return replace(counted, took_ns=round(took_ms * MS))


@pytest.mark.parametrize(
    "stacks", [(), (("forward", (STEP_35,), 90), ("forward", (STEP_33, CALL, LAYER), 10))]
)
def test_torch_work_in_step_is_not_loop(stacks):
    """2 of 16 ms of Forward are in modules and 13.9 in three sparse matmuls at one line: 0.1 ms is left."""
    sites = sites_of([own_line(13.9), own_line(3, phase="backward")])
    assert finding_of(slow_step(*stacks, sites=sites)).status is Status.CLEAN
    verdict, _ = diagnose(slow_step(*stacks, sites=sites))
    assert verdict.kind != "host_bound"
    # The same time without operators, or in many small ones, is the step's own code.
    assert finding_of(slow_step(*stacks, sites=sites_of([own_line(0)]))).status is Status.FOUND
    assert finding_of(slow_step(*stacks, sites=sites_of([own_line(4, calls=400)]))).status is Status.FOUND


def autograd(name, module="torch.autograd"):
    return frame(f"/lib/{module}.py", 594, name, 500, module=module, is_users=False)


ENGINE = autograd("_engine_run_backward", "torch.autograd.graph")
TRANSFORM = autograd("wrapper", "torch._functorch.apis")


@pytest.mark.parametrize(
    "below",
    [
        (autograd("grad"), ENGINE),
        (autograd("Tensor.backward", "torch._tensor"), autograd("backward"), ENGINE),
        (TRANSFORM,),
        (TRANSFORM, LOSS_7, autograd("_autograd_grad", "torch._functorch.eager_transforms"), ENGINE),
        (autograd("grad"), ENGINE, LOSS_7),  # a user's autograd function
    ],
    ids=["autograd.grad", "backward", "torch.func", "the gradient of torch.func", "own function's"],
)
def test_gradients_in_step_are_not_slow_code(below):
    """2 of 16 ms of Forward are in modules and 12 in gradients; another line takes the rest."""
    stacks = (
        ("forward", (STEP_35, *below), 75),
        ("forward", (STEP_33, CALL, LAYER), 13),
        ("forward", (STEP_33,), 12),
    )
    found = finding_of(slow_step(*stacks))
    assert found.status is Status.CLEAN
    assert "Code outside the model takes 2 ms" in found.summary
    # The same time in its own code is found, with its line.
    found = finding_of(slow_step(("forward", (STEP_35, *below), 10), ("forward", (STEP_33,), 90)))
    assert (found.status, found.locations[0].line) == (Status.FOUND, 33)


def test_gradients_on_device_count_by_samples_outside_modules():
    """2 of the device's 16 ms in Forward are in modules; 9 of 10 samples outside them are in gradients."""
    stacks = (
        ("forward", (STEP_35, autograd("grad"), ENGINE), 45),
        ("forward", (STEP_33,), 5),
        ("forward", (STEP_33, CALL, LAYER), 50),
    )
    cost = cost_of(("", 10, 2, 0))
    cost = replace(cost, times=replace(cost.times, clock="device"))
    steps = steps_of(forward=16, backward=4, device_ms={"forward": 16, "backward": 4})
    found = only(judge(slow_forward_outside_model, analysis_of(steps, cost=cost, stacks=samples_of(*stacks))))
    assert (found.status, found.summary) == (Status.CLEAN, "Code outside the model takes 1.4 ms per step.")


@pytest.mark.parametrize("paused", [None, 7], ids=["in nobody's line", "in the loop"])
def test_pause_in_inspected_step_is_not_torch_work(paused):
    """One of that step's operators took 97 ms once; samples of all steps show no such work."""
    loop = line_of(LOSS, 7, "rows_loss", 5, calls=400, views=0)
    pause = loop if paused else replace(loop, file=None, line=None, function_line=None, calls=7)
    lines = dict.fromkeys([loop, replace(pause, took_ns=97 * MS)])
    sites = sites_of([one for one in lines if one.took_ns or not paused])
    stacks = (("forward", (STEP_35, LOSS_7), 88), ("forward", (STEP_33, CALL, LAYER), 12))
    found = finding_of(slow_step(*stacks, sites=sites))
    assert found.status is Status.FOUND
    assert "(in rows_loss) runs 400 operators" in found.action


def test_loop_below_line_without_samples_or_operators_is_named():
    """Line 35 calls a function whose five lines take equal time, so none of them is the place."""
    at = [replace(LOSS_7, line=number) for number in range(7, 12)]
    sites = sites_of([line_of(LOSS, one.line, "rows_loss", 5, calls=100 + one.line, views=0) for one in at])
    found = finding_of(slow_step(*(("forward", (STEP_35, one), 8) for one in at), sites=sites))
    assert found.locations[0].line == 35
    assert "Line 11 (in rows_loss) runs 111 operators" in found.action


def test_backward_of_loop_is_in_its_saving():
    """14 ms of Forward, plus 300 of 310 equal operators in 4 ms of Backward: 3.87 ms."""
    small = 5 / 1000
    sites = sites_of(
        [
            own_line(300 * small, calls=300),
            own_line(300 * small, calls=300, phase="backward"),
            own_line(10 * small, calls=10, phase="backward", line=33, module="layer"),
            own_line(0, calls=3, line=36),
        ]
    )
    found = finding_of(slow_step(sites=sites))
    assert found.saving_ns_per_step == pytest.approx((14 + 4 * 300 / 310) * MS)
    assert found.phases == ("forward", "backward")
    assert "about 3.87 ms of it in backward" in found.summary
    # At most the time that the modules' own backward leaves.
    found = finding_of(slow_step(sites=sites, modules_backward_ms=3))
    assert found.saving_ns_per_step == pytest.approx((14 + 1) * MS)


@pytest.mark.parametrize(("calls", "status"), [(300, Status.FOUND), (20, Status.CLEAN)])
def test_loop_mostly_in_backward_is_found(calls, status):
    """1.5 of 20 ms are in Forward, too little on their own, and as many operators in Backward."""
    sites = sites_of([own_line(0.5, calls=calls), own_line(4, calls=calls, phase="backward")])
    found = finding_of(slow_step(sites=sites, forward_ms=3.5, modules_backward_ms=12))
    assert found.status is status
    if status is Status.FOUND:
        assert found.saving_ns_per_step == pytest.approx((1.5 + 4.5) * MS)


def test_loop_in_function_is_named_if_no_line_dominates():
    """Line 35 takes the time but runs no operator; the samples in its callee are at lines 7 and 8."""
    other = replace(LOSS_7, line=8)
    sites = sites_of([line_of(LOSS, line, "rows_loss", 5, calls=200, views=0) for line in (7, 8)])
    samples = (
        ("forward", (STEP_35, LOSS_7), 8),
        ("forward", (STEP_35, other), 8),
        ("forward", (STEP_35,), 4),
    )
    action = only(judge(slow_forward_outside_model, slow_step(*samples, sites=sites))).action
    assert "(in rows_loss) runs 200 operators" in action


# Modules without layers


def with_criterion(forward_ms=6, *, parameters=0, flops=0, is_users=True):
    """A model with one layer of 4 ms and a module ``criterion``, in a step of 20 ms."""
    cost = cost_of(("", 0, 0, 0), ("layer", 10, 4, 4), ("criterion", 0, forward_ms, 1))
    place = Place(function="MyLoss.forward", file=LOSS, line=5)
    modules = tuple(
        replace(one, parameters=parameters, trainable=parameters, forward=place if is_users else None)
        if one.path == "criterion"
        else one
        for one in cost.modules
    )
    operators = [
        OperatorCount(
            phase="forward", module="layer", operator="aten::mm", dtype="float32", flops=100, calls=1
        )
    ]
    if flops:
        operators.append(replace(operators[0], module="criterion", flops=flops))
    count = StepCount(step=6, samples=None, on_fake_tensors=False, operators=tuple(operators))
    return analysis_of(steps_of(forward=12, backward=8), cost=replace(cost, modules=modules, count=count))


def test_slow_loss_module_is_found():
    found = only(judge(slow_custom_module, with_criterion()))
    assert found.status is Status.FOUND
    assert found.severity is Severity.CRITICAL  # 6 of 20 ms
    assert found.saving_ns_per_step == 6 * MS
    assert found.locations == (Place(file=LOSS, line=5, function="MyLoss.forward", module="criterion"),)


def test_long_operators_of_module_are_torch_work():
    """5.9 of the criterion's 6 ms are in three operators."""
    analysis = with_criterion()
    line = replace(line_of(LOSS, 7, "forward", 5, views=0, module="criterion"), took_ns=round(5.9 * MS))
    cost = replace(analysis.cost, sites=sites_of([line]))
    changed = analysis_of(steps_of(forward=12, backward=8), cost=cost)
    assert only(judge(slow_custom_module, changed)).status is Status.CLEAN


@pytest.mark.parametrize(
    ("below", "child", "status"),
    [
        ((autograd("grad"), ENGINE), None, Status.CLEAN),
        ((autograd("grad"), ENGINE), "criterion.distance", Status.CLEAN),
        ((CALL, LAYER), None, Status.CLEAN),
        ((CALL, LAYER), "criterion.distance", Status.FOUND),
        ((frame(LOSS, 20, "pairs", 19),), None, Status.FOUND),
    ],
    ids=["gradients", "gradients, with a child", "another module", "its child", "its own code"],
)
def test_gradient_penalty_is_not_slow_module(below, child, status):
    """5.4 of its 6 ms are in gradients, or in a critic passed to it: its own are 0.6 of 20."""
    analysis = with_criterion()
    cost = analysis.cost
    if child:
        part = replace(cost.modules[-1], path=child, forward=None)
        times = (*cost.times.times, replace(cost.times.times[-1], path=child))
        cost = replace(cost, modules=(*cost.modules, part), times=replace(cost.times, times=times))
    stacks = samples_of(
        ("forward", (STEP_35, CALL, LOSS_7, *below), 90), ("forward", (STEP_35, CALL, LOSS_7), 10)
    )
    changed = analysis_of(steps_of(forward=12, backward=8), cost=cost, stacks=stacks)
    assert only(judge(slow_custom_module, changed)).status is status


def test_module_times_are_scaled_to_other_steps():
    """Forward takes 12 ms, but 24 in the steps where the criterion took 6, so it takes 3 in the others."""
    analysis = with_criterion()
    forward = [24 if step in (7, 8, 9) else 12 for step in range(20)]
    tags = [int(StepTag.INSPECTED) if step in (7, 8, 9) else 0 for step in range(20)]
    times = replace(analysis.cost.times, step_numbers=(7, 8, 9))
    cost = replace(analysis.cost, times=times)
    scaled = analysis_of(steps_of(forward=forward, backward=8, tags=tags), cost=cost)
    assert module_pace(analysis) == 1.0
    assert module_pace(scaled) == 0.5
    assert only(judge(slow_custom_module, scaled)).saving_ns_per_step == 3 * MS
    # The timing itself may have slowed these steps, so the modules' 10 ms stay 10 of the 12 ms.
    assert only(judge(slow_forward_outside_model, scaled)).saving_ns_per_step == 2 * MS
    # The machine was twice as slow in the other steps: the modules' 10 ms are 20 of the 24 ms.
    forward = [12 if step in (7, 8, 9) else 24 for step in range(20)]
    slower = analysis_of(steps_of(forward=forward, backward=8, tags=tags), cost=cost)
    assert module_pace(slower) == 2.0
    assert only(judge(slow_forward_outside_model, slower)).saving_ns_per_step == 4 * MS


@pytest.mark.parametrize(
    "changes",
    [{"forward_ms": 1}, {"parameters": 3}, {"flops": 10}, {"is_users": False}],
    ids=["short", "has parameters", "multiplies", "of a library"],
)
def test_other_modules_are_clean(changes):
    assert only(judge(slow_custom_module, with_criterion(**changes))).status is Status.CLEAN


def test_custom_modules_need_times_and_counts():
    finding = only(judge(slow_custom_module, analysis_of(steps_of(forward=10))))
    assert finding.status is Status.NOT_EVALUATED
    finding = only(judge(slow_custom_module, slow_step()))
    assert finding.status is Status.NOT_EVALUATED


# Lines in modules with parameters


def with_loop(calls=300, *, samples=40, module="cell", sites=(), module_line=11, parameters=10):
    """A step of 20 ms; ``samples`` of 100 are at line 13 in the forward of ``cell``, which starts at 11."""
    cost = cost_of(("", 0, 0, 0), ("cell", parameters, 8, 4))
    place = Place(function="Cell.forward", file=NET, line=module_line)
    modules = tuple(replace(one, forward=place) if one.path == "cell" else one for one in cost.modules)
    line = line_of(NET, 13, "forward", 11, calls=calls, views=0, module=module)
    cost = replace(cost, modules=modules, sites=sites_of([line], sites))
    return analysis_of(steps_of(forward=12, backward=8), cost=cost, stacks=analysis_stacks(samples))


def analysis_stacks(samples):
    at = frame(NET, 13, "Cell.forward", 11)
    return samples_of(("forward", (STEP_33, CALL, at), samples), ("backward", (STEP_33,), 100 - samples))


def test_loop_in_layer_is_found():
    """40 of 100 samples of a step of 20 ms: 8 ms."""
    found = only(judge(slow_line_in_module, with_loop()))
    assert (found.status, found.severity) == (Status.FOUND, Severity.CRITICAL)
    assert found.saving_ns_per_step == pytest.approx(8 * MS)
    assert found.locations == (
        Place(file=NET, line=13, function="Cell.forward", module="cell", is_exact=True),
    )
    assert "runs 300 operators" in found.summary


def test_backward_of_loop_in_layer_counts_too():
    """All 600 operators of backward belong to the line: at least 3 of its 8 ms."""
    analysis = with_loop()
    sites = analysis.cost.sites
    backward = line_of(NET, 13, "forward", 11, "backward", calls=600, views=0, module="cell")
    cost = replace(analysis.cost, sites=replace(sites, lines=(*sites.lines, backward)))
    stacks = analysis_stacks(40)
    found = only(
        judge(slow_line_in_module, analysis_of(steps_of(forward=12, backward=8), cost=cost, stacks=stacks))
    )
    assert found.saving_ns_per_step == pytest.approx(11 * MS)
    assert "at least 3 ms of it in backward" in found.summary


def test_tensor_created_in_layer_is_found():
    site = site_of(HOST_TENSOR, NET, 13, "forward", 11)
    found = only(judge(slow_line_in_module, with_loop(3, sites=[replace(site, module="cell")])))
    assert found.status is Status.FOUND
    assert "register_buffer" in found.action


def test_loop_that_also_calls_layers_is_found():
    """160 of the line's 320 operators are its own: half, and more than 64."""
    analysis = with_loop(160)
    sites = analysis.cost.sites
    of_layer = line_of(NET, 13, "forward", 11, calls=160, views=0, module="cell.linear")
    cost = replace(analysis.cost, sites=replace(sites, lines=(*sites.lines, of_layer)))
    stacks = analysis.hot_lines.samples
    found = only(judge(slow_line_in_module, analysis_of(steps_of(forward=20), cost=cost, stacks=stacks)))
    assert (found.status, found.locations[0].module) == (Status.FOUND, "cell")
    # A residual stack: 100 additions of its own among 3,000 operators of the layers it calls.
    of_layers = replace(of_layer, calls=3000)
    cost = replace(analysis.cost, sites=replace(sites, lines=(replace(sites.lines[0], calls=100), of_layers)))
    clean = only(judge(slow_line_in_module, analysis_of(steps_of(forward=20), cost=cost, stacks=stacks)))
    assert clean.status is Status.CLEAN


def test_loop_in_function_called_by_forward_is_found():
    """The forward starts at line 90; the line is in a function that starts at line 11."""
    found = only(judge(slow_line_in_module, with_loop(module_line=90)))
    assert (found.status, found.locations[0].line, found.locations[0].module) == (Status.FOUND, 13, "cell")


@pytest.mark.parametrize(
    "changes",
    [{"calls": 63}, {"samples": 9}, {"samples": 15}, {"module": "cell.linear"}],
    ids=["few operators", "few samples", "not sure", "of the modules it calls"],
)
def test_other_lines_in_layers_are_clean(changes):
    assert only(judge(slow_line_in_module, with_loop(**changes))).status is Status.CLEAN


def stepped(calls=100, *, per_call=8, samples=40, by_hand=(), path="cell", step_line=None, forward=12):
    """A cell that calls its child this often at line 13 of its forward; ``by_hand``: its own lines."""
    cost = cost_of((path, 10, 2, 2), (f"{path}.gate" if path else "gate", 10, 8, 4))
    cost = cost if not path else replace(cost, modules=(cost_of(("", 0, 0, 0)).modules[0], *cost.modules))
    owner, child = cost.times.times
    times = replace(cost.times, times=(owner, replace(child, calls=calls)))
    place = Place(function="Cell.forward", file=NET, line=11)
    modules = tuple(replace(one, forward=place) if one.path == path else one for one in cost.modules)
    first = 11 if step_line is None else step_line
    lines = [
        line_of(NET, 13, "forward", first, calls=calls * per_call, views=0, module=child.path),
        *(line_of(NET, at, "forward", 11, calls=number, views=0, module=path) for at, number in by_hand),
    ]
    at = [frame(NET, number, "Cell.forward", first) for number in (13, *(number for number, _ in by_hand))]
    stacks = samples_of(
        *(("forward", (STEP_33, CALL, one), samples) for one in at),
        ("backward", (STEP_33,), 100 - samples * len(at)),
    )
    cost = replace(cost, modules=modules, times=times, sites=sites_of(lines, ()))
    setup = SETUP if step_line is None else replace(
        SETUP, module_hooks={"training_step": Place(function="Net.training_step", file=NET, line=step_line)}
    )  # fmt: skip
    analysis = analysis_of(steps_of(forward=forward, backward=8), cost=cost, stacks=stacks, setup=setup)
    return only(judge(slow_line_in_module, analysis))


def test_cell_stepped_by_hand_is_found():
    """100 calls of 8 operators: 8 of 20 ms, 10 µs each."""
    found = stepped()
    assert found.saving_ns_per_step == pytest.approx(8 * MS)
    assert "Line 13 of Cell.forward in cell runs 800 operators per step" in found.summary
    assert "nn.LSTM" in found.action
    assert [(one.line, one.module) for one in found.locations] == [(13, "cell")]


def test_repeated_calls_are_found_in_model_forward_and_step():
    assert "in the model runs 800" in stepped(path="").summary
    in_step = stepped(step_line=40)
    assert (in_step.status, in_step.locations[0].line) == (Status.FOUND, 13)


def test_lines_of_one_loop_count_together():
    """Three lines with 40 operators each; one alone wouldn't be enough."""
    found = stepped(0, samples=16, by_hand=((14, 40), (15, 40), (16, 40)))
    assert found.status is Status.FOUND
    assert "Lines 14, 15 and 16 of Cell.forward in cell run 120 operators" in found.summary
    assert found.saving_ns_per_step == pytest.approx(0.48 * 20 * MS)


@pytest.mark.parametrize(
    "changes",
    [
        {"calls": 12, "per_call": 60},
        {"forward": 1000},
        {"calls": 7},
        {"calls": 0, "by_hand": ((14, 15),) * 1},
    ],
    ids=["a layer shared by twelve", "operators that compute for long", "few calls", "no loop"],
)
def test_other_repeated_calls_are_clean(changes):
    assert stepped(**changes).status is Status.CLEAN


def test_lines_need_samples_and_counts():
    unsampled = analysis_of(steps_of(forward=10), cost=cost_of(("", 10, 2, 2)))
    assert only(judge(slow_line_in_module, unsampled)).status is Status.NOT_EVALUATED
    unseen = slow_step(("forward", (STEP_33,), 50))
    assert only(judge(slow_line_in_module, unseen)).status is Status.NOT_EVALUATED


def test_without_samples_line_with_most_operators_is_named():
    """The loss line runs 200 operators; a line in the dataset runs more, but not in forward."""
    sites = sites_of(
        [
            line_of(LOSS, 7, "rows_loss", 5, calls=300, views=100),
            line_of(NET, 90, "__getitem__", 80, phase="batch_start", calls=900, views=0),
            line_of(NET, 33, "training_step", 30, calls=500, views=0, module="layers"),
        ]
    )
    action = only(judge(slow_forward_outside_model, slow_step(sites=sites))).action
    assert "Line 7 (in rows_loss) runs 200 operators" in action


def test_function_belongs_to_module_that_runs_it():
    """For example, one that steps recurrent cells: its top line by samples is only in the cells."""
    cost = cost_of(("", 0, 0, 0), ("enc", 10, 2, 2), ("enc.cell", 10, 2, 2), ("head", 10, 2, 2))
    in_cells, own, of_the_step = (
        line_of(NET, number, "run", 7, calls=300, views=0, module=module)
        for number, module in ((9, "enc.cell"), (8, "enc"), (30, ""))
    )
    stacks = samples_of(
        ("forward", (STEP_33, CALL, frame(NET, 9, "run", 7)), 50),
        ("forward", (STEP_33, CALL, frame(NET, 8, "run", 7)), 40),
    )

    def judged(*lines):
        facts = analysis_of(steps_of(forward=20), cost=replace(cost, sites=sites_of(lines)), stacks=stacks)
        return only(judge(slow_line_in_module, facts))

    assert [(one.line, one.module) for one in judged(in_cells, own).locations] == [(8, "enc")]
    assert judged(in_cells, own, of_the_step).status is Status.CLEAN
