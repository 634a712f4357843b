"""Wasted work in the counted step is found, and so are competing threads and source lines.

The models are small enough to work out by hand what each must give.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.batches import fixed_by_work
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.lines.waste import WasteWatch
from lightning_modelprof.measure.sampling.stack_probe import ThreadClocks
from lightning_modelprof.measure.setup.model_setup import calls_by_name
from lightning_modelprof.place import Place
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.batches import small_batches
from lightning_modelprof.report.rules.cpus import competing_thread
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.precision import double_precision
from lightning_modelprof.report.rules.repeats import repeated_forward
from lightning_modelprof.report.rules.torch_modules import dense_embeddings, slow_torch_module
from lightning_modelprof.report.rules.unused import unused_gradients
from lightning_modelprof.run.archive import decode_record, encode_record
from lightning_modelprof.run.model_cost import (
    DenseTable,
    ModelCost,
    ModelSize,
    RepeatedCall,
    StepCount,
    StepWaste,
    TensorSize,
    UnusedGradients,
)
from lightning_modelprof.run.sites import LineCount, StepSites
from lightning_modelprof.run.stacks import OtherThread, SampledStack, StackFrame, StackSamples
from tests.support.diagnosed import MS, SETUP, analysis_of, cost_of, only, steps_of
from tests.support.fits import fit_quietly, make_callback, make_trainer
from tests.support.scenarios import rows

LINE = Place(function="Net.forward", file="/home/me/net.py", line=40)


def watched(model, run):
    """The waste seen in a model while ``run(watch)`` runs."""
    watch = WasteWatch(model)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with FlopCounter(model, force_eager=False, watches=(watch,)):
        watch.begin()
        run(watch)
        watch.end()
    seen = watch.result()
    assert seen.notes == ()
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()], "the hooks are gone"
    return seen


def backward(watch, loss):
    watch.before_backward()
    loss.backward()


# Repeated module calls


class Heads(nn.Module):
    def __init__(self, *more):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), *more)
        self.head = nn.Linear(4, 1)


@pytest.mark.parametrize(
    ("second", "repeated"),
    [
        (lambda inputs, _: inputs, 1),
        (lambda inputs, _: inputs.clone(), 0),
        (lambda inputs, _: inputs.add_(1), 0),
        (lambda inputs, _: inputs.view(2, 4), 0),
        (lambda inputs, model: model.trunk[0].weight.data.copy_(torch.zeros(4, 4)) is not None and inputs, 1),
        (lambda inputs, model: torch.optim.SGD(model.parameters(), 0.1).step() or inputs, 1),
    ],
    ids=["the same", "a copy", "changed", "a view", "weights behind autograd's back", "nothing to step with"],
)
def test_only_same_tensors_count_as_repeated(second, repeated):
    model, inputs = Heads(), torch.ones(2, 4)

    def run(_):
        model.trunk(inputs)
        model.trunk(second(inputs, model))

    found = {one.path: (one.calls, one.repeated) for one in watched(model, run).repeated}
    assert found.get("trunk", (2, 0)) == (2, repeated)


def test_call_after_optimizer_step_is_not_repeated():
    model, inputs = Heads(), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def run(watch):
        backward(watch, model.trunk(inputs).sum())
        optimizer.step()
        model.trunk(inputs)

    assert watched(model, run).repeated == ()


@pytest.mark.parametrize(
    ("more", "is_training", "repeated"),
    [
        (nn.Dropout(0.5), True, 0),
        (nn.Dropout(0.5), False, 1),
        (nn.Dropout(0.0), True, 1),
        (nn.ReLU(), True, 1),
    ],
)
def test_random_module_is_not_repeated(more, is_training, repeated):
    model, inputs = Heads(more).train(is_training), torch.ones(2, 4)
    seen = watched(model, lambda _: (model.trunk(inputs), model.trunk(inputs)))
    assert sum(one.repeated for one in seen.repeated if one.path == "trunk") == repeated


@pytest.mark.parametrize(
    ("wrap", "repeated"),
    [
        (spectral_norm, set()),  # each call advances the estimate
        (torch.nn.utils.spectral_norm, set()),
        (weight_norm, {"trunk.0.parametrizations.weight.0"}),
    ],
)
def test_parametrized_weight_is_repeated(wrap, repeated):
    """With two different inputs the weight is computed twice, equal only if none of its buffers changes."""
    model = Heads()
    wrap(model.trunk[0])
    seen = watched(model, lambda _: (model.trunk(torch.ones(2, 4)), model.trunk(torch.zeros(2, 4))))
    assert {one.path for one in seen.repeated} == repeated
    same = torch.ones(2, 4)
    seen = watched(model, lambda _: (model.trunk(same), model.trunk(same)))
    assert ("trunk" in {one.path for one in seen.repeated}) is bool(repeated)


def test_batch_norm_only_updates_statistics():
    model, inputs = Heads(nn.BatchNorm1d(4)), torch.ones(2, 4)
    seen = watched(model, lambda _: (model.trunk(inputs), model.trunk(inputs)))
    assert {one.path: one.updates_statistics for one in seen.repeated} == {
        "trunk": True,
        "trunk.0": False,
    }


@pytest.mark.parametrize(
    ("call", "action"),
    [
        (RepeatedCall(path="trunk.parametrizations.weight.0", calls=8, repeated=7), "parametrize.cached()"),
        (RepeatedCall(path="trunk", calls=2, repeated=1, updates_statistics=True), "statistics once"),
    ],
)
def test_advice_on_repeated_call(call, action):
    cost = replace(cost_of(("", 0, 0, 0), (call.path, 10, 4, 4)), waste=StepWaste(repeated=(call,)))
    finding = only(judge(repeated_forward, analysis_of(steps_of(forward=8, backward=12), cost=cost)))
    assert action in finding.action


def test_checkpoint_recompute_is_not_repeated():
    model, inputs = Heads(), torch.ones(2, 4, requires_grad=True)
    seen = watched(
        model, lambda watch: backward(watch, checkpoint(model.trunk, inputs, use_reentrant=False).sum())
    )
    assert seen.repeated == ()


def test_call_without_gradients_is_not_repeated():
    """A target network's forward, followed by the network's own."""
    model, inputs = Heads(), torch.ones(2, 4)

    def run(_):
        with torch.no_grad():
            model.trunk(inputs)
        model.trunk(inputs)

    assert watched(model, run).repeated == ()


def test_tensors_are_not_kept_alive():
    model, freed = Heads(), []

    def run(_):
        inputs = torch.ones(2, 4)
        model.trunk(inputs)
        reference = weakref.ref(inputs)
        del inputs
        gc.collect()
        freed.append(reference() is None)

    watched(model, run)
    assert freed == [True]


def test_saving_of_repeated_call():
    """The trunk takes 3 + 5 ms in two calls, one of them wasted: 4 of 20 ms."""
    cost = replace(
        cost_of(("", 0, 0, 0), ("trunk", 10, 1, 2), ("trunk.0", 10, 2, 3)),
        waste=StepWaste(
            repeated=(
                RepeatedCall(path="trunk.0", calls=2, repeated=1),
                RepeatedCall(path="trunk", calls=2, repeated=1, lines=(replace(LINE, line=39), LINE)),
            )
        ),
    )
    finding = only(judge(repeated_forward, analysis_of(steps_of(forward=8, backward=12), cost=cost)))
    assert finding.saving_ns_per_step == 4 * MS
    assert finding.severity is Severity.CRITICAL
    assert [one.line for one in finding.locations] == [40, 39]
    assert finding.locations[0].is_exact


class Normed(LightningModule):
    """Wraps its layer, and each of 50 iterations runs some operators."""

    def __init__(self, wrap):
        super().__init__()
        self.layer = wrap(nn.Linear(8, 8), n_power_iterations=50)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [(spectral_norm, "layer.parametrizations.weight.0"), (torch.nn.utils.spectral_norm, "layer")],
)
def test_power_iterations_are_named(tmp_path, wrap, path):
    """The module and its argument, and 49 of 50 parts of its time, however long that is here."""
    callback = make_callback(tmp_path, active=0, flops=True)
    loader = DataLoader(torch.ones(160, 8), batch_size=8)
    fit_quietly(make_trainer(tmp_path, callback), Normed(wrap), loader)
    finding = only(judge(slow_torch_module, Facts(callback.run), {"warning": 0.0, "floor_ns": 0.0}))
    assert finding.locations[0].module == path
    assert "n_power_iterations=50" in finding.summary
    assert "n_power_iterations=1, " in finding.action
    assert "saves up to" in finding.action
    took_ns = next(one.value for one in finding.evidence if one.label == "forward time per step")
    assert finding.saving_ns_per_step == pytest.approx(took_ns * 49 / 50)


@pytest.mark.parametrize(
    ("arguments", "parameters", "forward_ms", "severity"),
    [
        (("n_power_iterations=50",), 0, 16, Severity.CRITICAL),  # 16 of 20 ms
        (("n_power_iterations=50",), 10, 16, Severity.CRITICAL),  # torch's hook on a layer
        (("n_power_iterations=50",), 0, 3, None),
        (("mode='bicubic'",), 0, 16, Severity.INFO),
        (("inplace=True",), 0, 6, None),  # a part that needn't be expensive because of it
        (("padding=1",), 10, 16, None),  # a layer takes as long as it must
        ((), 0, 16, None),
    ],
)
def test_torch_modules_that_dominate_step(arguments, parameters, forward_ms, severity):
    cost = cost_of(("", 0, 0, 0), ("norm", parameters, forward_ms, 0))
    modules = tuple(
        replace(one, arguments=arguments if one.path else (), parameters=parameters if one.path else 10)
        for one in cost.modules
    )
    analysis = analysis_of(steps_of(forward=18, backward=2), cost=replace(cost, modules=modules))
    assert only(judge(slow_torch_module, analysis)).severity is severity


ATTENTION = """
def forward(self, h, mask):
    attended, _ = self.attention(h, h, h)
    first = self.attention(h, h, h, key_padding_mask=mask)[0]
    out, weights = self.attention(h, h, h)
    fused, _ = self.attention(h, h, h, need_weights=False)
    early, _ = self.attention(h, h, h, mask, False)
    both = self.attention(h, h, h)
    return weights, both
"""


@pytest.mark.parametrize(
    ("line", "attention_ms", "is_found"),
    [
        (3, 16, True),
        (4, 16, True),
        (5, 16, False),
        (6, 16, False),
        (7, 16, False),
        (8, 16, False),
        (3, 4, False),
    ],
)
def test_unused_attention_weights(tmp_path, line, attention_ms, is_found):
    """Half of attention's time outside its projection; for 4 ms that's too little."""
    file = tmp_path / "net.py"
    file.write_text(ATTENTION)
    cost = cost_of(
        ("", 0, 0, 0), ("attention", 10, attention_ms / 2, attention_ms / 2), ("attention.out", 10, 1, 1)
    )
    modules = tuple(
        replace(one, type_name="MultiheadAttention") if one.path == "attention" else one
        for one in cost.modules
    )
    counted = LineCount(
        file=str(file),
        line=line,
        function="forward",
        function_line=2,
        module="attention",
        phase="forward",
        calls=9,
        views=3,
        operators=4,
        elements=1,
        num_bytes=1,
    )
    cost = replace(cost, modules=modules, sites=StepSites(step=3, device="cpu", sites=(), lines=(counted,)))
    facts = analysis_of(steps_of(forward=10, backward=10), cost=cost)
    facts = facts.replaced(info=replace(facts.info, created="2999-01-01T00:00:00+00:00"))
    found = only(judge(slow_torch_module, facts))
    assert (found.title == "Unused attention weights") == is_found
    if is_found:
        assert found.saving_ns_per_step == attention_ms / 2 * MS
        assert found.action.startswith("Pass need_weights=False")
        assert [(one.file, one.line, one.is_exact) for one in found.locations] == [(str(file), line, True)]


# Unused gradients


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
        self.critic = nn.Linear(4, 1)


def adversarial_step(model, *, detached, frozen, keep_zeros=False):
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in (model.generator, model.critic)]

    def run(watch):
        fake = model.generator(torch.ones(2, 3))
        optimizers[1].zero_grad(set_to_none=not keep_zeros)
        backward(watch, model.critic(fake.detach() if detached else fake).sum())
        optimizers[1].step()
        for parameter in model.critic.parameters():
            parameter.requires_grad_(not frozen)
        optimizers[0].zero_grad(set_to_none=not keep_zeros)
        backward(watch, model.critic(model.generator(torch.ones(2, 3))).sum())
        optimizers[0].step()

    return run


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_unused_gradients_of_two_networks(detached, frozen):
    """Not detached: the critic's pass continues into the generator. Not frozen: it has gradients, too."""
    model = Adversaries()
    seen = watched(model, adversarial_step(model, detached=detached, frozen=frozen))
    found = {one.path: (one.passes, one.beyond, one.within) for one in seen.unused}
    generator = {} if detached else {"generator.0": (2, 1, 0), "generator.2": (2, 1, 0)}
    critic = {} if frozen else {"critic": (2, 0, 1)}
    assert found == generator | critic


def test_one_optimizer_uses_all_gradients():
    model = Adversaries()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def run(watch):
        backward(watch, model.critic(model.generator(torch.ones(2, 3))).sum())
        optimizer.step()

    assert watched(model, run).unused == ()


@pytest.mark.parametrize("in_closure", [True, False])
def test_gradients_outside_optimizer_are_unused(in_closure):
    """The backbone's gradients come last, in no optimizer; Lightning runs backward in the closure."""
    model = Adversaries()
    optimizer = torch.optim.SGD(model.critic.parameters(), 0.01)

    def run(watch):
        def closure():
            backward(watch, model.critic(model.generator(torch.ones(2, 3))).sum())

        if in_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    seen = watched(model, run)
    assert {one.path: (one.passes, one.beyond, one.within) for one in seen.unused} == {
        "generator.0": (1, 1, 0),
        "generator.2": (1, 1, 0),
    }
    assert seen.follows_gradients


def test_backbone_outside_optimizer_in_fit(tmp_path):
    """The optimizer has only the head, so the backbone's gradients are wasted."""

    class Named(LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 8), Sleeper(5))
            self.head = nn.Linear(8, 1)

        def training_step(self, batch, batch_idx):
            return self.head(self.backbone(batch)).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.head.parameters(), 0.01)

    callback = make_callback(tmp_path, active=0, flops=True)
    fit_quietly(make_trainer(tmp_path, callback), Named(), DataLoader(torch.ones(160, 8), batch_size=8))
    finding = next(one for one in callback.report.findings if one.kind == "unused_gradients")
    assert finding.status is Status.FOUND
    assert finding.action.startswith("Freeze backbone with requires_grad_(False)")
    assert finding.saving_ns_per_step >= 4 * MS


class Sleeper(nn.Module):
    """Computes its gradient slowly."""

    def __init__(self, ms):
        super().__init__()
        self.ms = ms

    def forward(self, inputs):
        return SleepsInBackward.apply(inputs, self.ms)


class SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, ms):
        ctx.ms = ms
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.ms / 1000)
        return gradient, None


def test_unfollowed_gradients_are_not_evaluated():
    cost = replace(cost_of(("", 0, 0, 0), ("layer", 10, 4, 8)), waste=StepWaste())
    steps = steps_of(forward=8, backward=12)
    assert only(judge(unused_gradients, analysis_of(steps, cost=cost))).status is Status.NOT_EVALUATED
    cost = replace(cost, waste=StepWaste(follows_gradients=True))
    assert only(judge(unused_gradients, analysis_of(steps, cost=cost))).status is Status.CLEAN


def test_accumulated_gradients_are_not_unused():
    """After two passes without a step, nothing is known to be wasted."""
    model = Adversaries()

    def run(watch):
        for _ in range(2):
            backward(watch, model.critic(model.generator(torch.ones(2, 3))).sum())

    assert watched(model, run).unused == ()


def test_summed_gradients_are_used():
    """Two losses of one network, one backward each, one step."""
    model = Adversaries()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def run(watch):
        for _ in range(2):
            backward(watch, model.critic(model.generator(torch.ones(2, 3))).sum())
        optimizer.step()

    assert watched(model, run).unused == ()


def test_saving_of_unused_gradients():
    """Half of 8 ms in the generator is wasted, and a quarter of 6 in the critic: 5.5 of 20 ms."""
    cost = replace(
        cost_of(("", 0, 0, 0), ("generator", 0, 1, 2), ("generator.0", 10, 1, 6), ("critic", 10, 1, 6)),
        waste=StepWaste(
            unused=(
                UnusedGradients(path="generator.0", passes=2, beyond=1, within=0, lines=(LINE,)),
                UnusedGradients(path="critic", passes=2, beyond=0, within=1),
            )
        ),
    )
    finding = only(judge(unused_gradients, analysis_of(steps_of(forward=4, backward=16), cost=cost)))
    assert finding.saving_ns_per_step == pytest.approx(5.5 * MS)
    assert "Detach the output of generator" in finding.action
    assert "generator" in finding.action
    assert finding.locations[0].line == 40


# Large tables


@pytest.mark.parametrize(("sparse", "tables"), [(False, 1), (True, 0)])
def test_dense_embedding_table_is_found(sparse, tables):
    model = nn.Sequential(nn.Embedding(100, 8, sparse=sparse))
    seen = watched(model, lambda watch: backward(watch, model(torch.tensor([[1, 2, 3], [1, 5, 9]])).sum()))
    assert len(seen.tables) == tables
    if tables:
        assert seen.tables[0] == DenseTable(path="0", rows=100, columns=8, used=6)


@pytest.mark.parametrize(
    ("used", "severity"), [(100, Severity.CRITICAL), (250, Severity.WARNING), (251, None), (1000, None)]
)
def test_saving_of_unused_table_rows(used, severity):
    """900 of 1,000 rows of 2 in 4,000 parameters: 45% of 8 + 2 ms of 20."""
    cost = replace(
        cost_of(("", 0, 0, 0), ("users", 10, 1, 1)),
        waste=StepWaste(tables=(DenseTable(path="users", rows=1000, columns=2, used=used),)),
    )
    cost = replace(cost, modules=tuple(replace(one, trainable=2000) for one in cost.modules))
    steps = steps_of(forward=10, optimizer=8, zero_grad=2)
    finding = only(judge(dense_embeddings, analysis_of(steps, cost=cost, device_type="cpu")))
    assert finding.severity is severity
    if severity is not None:
        assert finding.saving_ns_per_step == pytest.approx((1000 - used) * 2 / 4000 * 10 * MS)


def test_dense_table_on_device_is_not_evaluated():
    cost = replace(cost_of(("", 0, 0, 0)), waste=StepWaste())
    analysis = analysis_of(steps_of(forward=10), cost=cost, device_type="cuda")
    assert only(judge(dense_embeddings, analysis)).status is Status.NOT_EVALUATED


# float64


def sized(**elements):
    sizes = tuple(
        TensorSize(kind="trainable parameters", dtype=dtype, tensors=1, elements=number, num_bytes=8 * number)
        for dtype, number in elements.items()
    )
    return replace(cost_of(("", 0, 0, 0)), size=ModelSize(sizes=sizes))


@pytest.mark.parametrize(
    ("elements", "precision", "severity"),
    [
        ({"float64": 100}, "32-true", Severity.CRITICAL),
        ({"float64": 51, "float32": 49}, "32-true", Severity.CRITICAL),
        ({"float64": 50, "float32": 50}, "32-true", None),
        ({"float32": 100}, "32-true", None),
        ({"float64": 100}, "64-true", Severity.INFO),
    ],
)
def test_float64_parameters(elements, precision, severity):
    """Half of 4 + 8 + 4 of 20 ms."""
    steps = steps_of(dataloader=4, forward=4, backward=8, optimizer=4)
    analysis = analysis_of(steps, cost=sized(**elements), precision=precision)
    finding = only(judge(double_precision, analysis))
    assert finding.severity is severity
    if severity is not None:
        assert finding.saving_ns_per_step == 8 * MS


# Batches of one size


def one_size(**phases_ms):
    steps = steps_of(**phases_ms)
    steps.samples[:] = 8
    return steps


def test_fixed_time_per_step():
    """4 MFLOP at 4 GFLOP/s take 1 ms, 1 MB at 2 GB/s 0.5 ms: of 6 ms 4.5 are the same for any batch."""
    steps = one_size(dataloader=2, forward=2, backward=3, optimizer=1)
    found = fixed_by_work(steps, operators=1000, flops=4_000_000, num_bytes=1_000_000)
    assert found.fixed_ns == pytest.approx(4.5 * MS)
    assert found.step_ns == 8 * MS


def test_equal_batch_sizes_promise_no_saving():
    """A loss over all pairs takes four times as long for twice the batch; one batch size can't show that."""
    steps = one_size(dataloader=1, forward=2, backward=3, optimizer=1)
    line = LineCount(
        file="/home/me/net.py",
        line=30,
        function="Net.forward",
        function_line=29,
        module="",
        phase="forward",
        calls=1000,
        views=0,
        operators=1,
        elements=0,
        num_bytes=1_000_000,
    )
    sites = StepSites(step=2, device="cpu", sites=(), lines=(line,))
    count = StepCount(step=2, samples=8, on_fake_tensors=False, operators=())
    finding = only(judge(small_batches, analysis_of(steps, cost=ModelCost(count=count, sites=sites))))
    assert finding.status is Status.FOUND
    assert "(5.5 ms)" in finding.summary
    assert finding.action == ""
    told = finding.summary + "".join(one.label for one in finding.evidence)
    assert not re.search(r"twice|epoch|batches of", told)


def test_fixed_time_longer_than_operators_is_not_measured():
    """100 operators take 3 ms at most; 4.5 ms must have another cause."""
    steps = one_size(forward=2, backward=3, optimizer=1)
    with pytest.raises(NotMeasured, match="longer than calling its operators"):
        fixed_by_work(steps, operators=100, flops=4_000_000, num_bytes=1_000_000)


# Other threads


def spin(seconds):
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def test_clocks_of_other_threads():
    """One thread computes for 0.2 s of CPU time, one waits, and a third has ended when clocks are read."""
    clocks = ThreadClocks(threading.get_ident())
    waits, may_end, was_seen = threading.Event(), threading.Event(), threading.Event()

    def work_and_go():
        spin(0.1)
        was_seen.wait()

    def work():
        spin(0.2)
        may_end.wait()

    threads = [
        threading.Thread(target=work, name="busy"),
        threading.Thread(target=waits.wait, name="idle"),
        threading.Thread(target=work_and_go, name="gone"),
    ]
    for thread in threads:
        thread.start()
    while threads[2].is_alive():
        clocks.look(sys._current_frames())
        clocks.learn_names()
        if clocks._took_ns.get(threads[2].ident, 0) >= 0.1e9:
            was_seen.set()
        time.sleep(0.001)
    while clocks._took_ns.get(threads[0].ident, 0) < 0.2e9:
        clocks.look(sys._current_frames())
        time.sleep(0.001)
    took = dict(clocks.read()[0].values())
    waits.set()
    may_end.set()
    for thread in threads:
        thread.join()
    assert 0.2e9 <= took["busy"] <= 0.22e9
    assert 0.1e9 <= took["gone"] <= 0.11e9
    assert "idle" not in took


def stacks_with(thread_ns, *, module="app", is_users=True):
    frames = (
        StackFrame(
            file="/home/me/net.py",
            line=30,
            function="step",
            function_line=30,
            python_module="app",
            is_users=True,
        ),
        StackFrame(
            file="/home/me/watch.py",
            line=7,
            function="walk",
            function_line=5,
            python_module=module,
            is_users=is_users,
        ),
    )
    stack = SampledStack(phase="forward", frames=(0,), samples=50, time_ns=1000 * MS)
    other = replace(stack, frames=(1,), samples=12)
    return StackSamples(
        frames=frames,
        stacks=(stack,),
        samples=50,
        loop_ns=1000 * MS,
        others=(OtherThread(name="watcher", cpu_ns=thread_ns, stacks=(other,)),),
    )


@pytest.mark.parametrize(
    ("thread_ms", "severity"), [(600, Severity.CRITICAL), (200, Severity.WARNING), (90, None)]
)
def test_computing_thread_is_found(thread_ms, severity):
    """The thread's share of steps of 10 ms."""
    analysis = analysis_of(steps_of(forward=10), stacks=stacks_with(thread_ms * MS))
    finding = only(judge(competing_thread, analysis))
    assert finding.severity is severity
    if severity is not None:
        assert finding.saving_ns_per_step == pytest.approx(thread_ms / 100 * MS)
        assert (finding.locations[0].file, finding.locations[0].line) == ("/home/me/watch.py", 7)


def test_library_thread_is_named_by_module_and_function():
    stacks = stacks_with(600 * MS, module="tracker.sync", is_users=False)
    finding = only(judge(competing_thread, analysis_of(steps_of(forward=10), stacks=stacks)))
    assert [one.function for one in finding.locations] == ["tracker.sync.walk"]


def test_torch_threads_are_not_reported():
    stacks = stacks_with(600 * MS, module="torch.utils.data._utils.pin_memory", is_users=False)
    assert (
        only(judge(competing_thread, analysis_of(steps_of(forward=10), stacks=stacks))).status is Status.CLEAN
    )


# Source lines


def test_calls_are_found_by_name(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "import numpy as np\n"
        "from torch.utils.data import DataLoader\n"
        "class Data:\n"
        "    def loader(self):\n"
        "        return DataLoader(\n"
        "            self,\n"
        "        )\n"
        "def main(torch):\n"
        "    torch.nn.Embedding(3, 4).double()\n"
        "    x = np.float64\n"
        "    DataLoader\n"
    )
    found = calls_by_name([str(file)])
    assert {name: [(one.line, one.function) for one in places] for name, places in found.items()} == {
        "DataLoader": [(5, "Data.loader")],
        "Embedding": [(9, "main")],
        "double": [(9, "main")],
        "float64": [(10, "main")],
    }


def test_unreadable_files_have_no_calls(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("DataLoader(\n")
    assert calls_by_name([str(broken), str(tmp_path / "none.py"), "<stdin>"]) == {}


# All waste in a fit


class Wasteful(LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.table = nn.Embedding(1000, 8)

    def training_step(self, batch, batch_idx):
        found = self.table(torch.tensor([1, 2]))
        return self.trunk(batch).mean() + self.trunk(batch).sum() + found.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_waste_in_fit(tmp_path):
    callback = make_callback(tmp_path, active=0, flops=True)
    fit_quietly(make_trainer(tmp_path, callback), Wasteful(), rows())
    cost = callback.run.ranks[0].model_cost
    waste = cost.waste
    assert [(one.path, one.calls, one.repeated) for one in waste.repeated] == [("trunk", 2, 1)]
    assert [(one.path, one.rows, one.used) for one in waste.tables] == [("table", 1000, 2)]
    [line] = {one.line for one in waste.repeated[0].lines}
    assert "self.trunk(batch).mean() + self.trunk" in Path(__file__).read_text().split("\n")[line - 1]
    assert decode_record(encode_record(cost), type(cost)) == cost
    calls = callback.run.ranks[0].setup.calls
    assert any(one.file == __file__ for one in calls["Embedding"])
    assert SETUP.calls == {}
