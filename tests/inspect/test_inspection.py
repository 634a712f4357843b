"""Counted and timed steps of real fits give the right numbers and leave nothing behind on other steps."""

from __future__ import annotations

import copy
import csv
import math
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import library, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_modelprof.analysis.modules.module_tree import module_tree
from lightning_modelprof.errors import ConfigError
from lightning_modelprof.reading import read_report
from lightning_modelprof.run.archive import load_run
from lightning_modelprof.run.steps import StepTag
from tests.support import fits
from tests.support.bench import MS, FakeClock
from tests.support.fits import Manual, Net, fit_quietly, loader, make_trainer, steps_of

pytestmark = pytest.mark.slow

make_callback = partial(fits.make_callback, flops=True)
run_fit = partial(fits.run_fit, flops=True)

# Net on a batch of 2: 8 → 16 → 1; the first layer computes no gradient of the data.
FORWARD = 2 * (8 * 16 + 16 * 1)
BACKWARD = 2 * FORWARD - 2 * 8 * 16
PARAMETERS = 8 * 16 + 16 + 16 + 1


def flops_of(callback):
    """MACs by phase."""
    section = callback.report.summary.flops
    return {phase: section.phases[phase] // 2 for phase in ("forward", "backward") if phase in section.phases}


def cost_of(callback):
    return callback.run.ranks[0].model_cost


def table(callback, key):
    return next(table for table in callback.report.tables if table.id == key)


class Watch(Callback):
    """Records what is installed on the model and in torch while each step runs."""

    def __init__(self):
        self.steps = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):  # after forward, before backward or step
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in pl_module.modules())
        self.steps.append((hooks > 0, _get_current_dispatch_mode() is not None))


def test_count_matches_hand_derivation(tmp_path):
    callback = run_fit(tmp_path, active=0, skip_first=10)
    assert flops_of(callback) == {"forward": FORWARD, "backward": BACKWARD}
    section = callback.report.summary.flops
    assert (section.step, section.samples, section.on_fake_tensors) == (6, 2, False)
    assert (section.params, section.uncounted, section.mfu) == (PARAMETERS, (), None)
    step_s = callback.report.summary.benchmark.batch_cost_ns.avg / 1e9
    assert section.flops_per_s == pytest.approx(2 * (FORWARD + BACKWARD) / step_s)


def test_other_steps_have_no_hooks_or_modes(tmp_path):
    watch = Watch()
    callback = run_fit(tmp_path, active=2, skip_first=10, others=[watch])
    assert [step for step, (hooks, _) in enumerate(watch.steps) if hooks] == [6, 7, 8, 9, 31]
    counted = [step for step, (_, mode) in enumerate(watch.steps) if mode]
    assert counted == [6, 31]
    tagged = steps_of(callback).step[(steps_of(callback).tags & int(StepTag.INSPECTED)) != 0].tolist()
    assert tagged == [6, 7, 8, 9, 10, 31]  # sizes were taken in step 10
    assert _get_current_dispatch_mode() is None


def test_flops_switched_off(tmp_path):
    watch = Watch()
    callback = run_fit(tmp_path, active=0, flops=False, others=[watch])
    assert cost_of(callback) is None
    assert callback.report.summary.flops is None
    assert not any(hooks or mode for hooks, mode in watch.steps)
    assert not {"flops", "model_size", "module_tree"} & {table.id for table in callback.report.tables}


def test_sizes_after_step(tmp_path):
    """Parameters, gradients and SGD's momentum have 161 floats each."""
    callback = run_fit(tmp_path, active=0, skip_first=10)
    sizes = {size.kind: (size.elements, size.num_bytes) for size in cost_of(callback).size.sizes}
    one = (PARAMETERS, 4 * PARAMETERS)
    assert sizes == {"trainable parameters": one, "gradients": one, "optimizer state": one}


def test_modules_are_timed(tmp_path):
    callback = run_fit(tmp_path, active=0, skip_first=10)
    times = cost_of(callback).times
    assert times.steps == 3
    assert {time.path: time.calls for time in times.times}["layers.0"] == 3
    assert all(time.forward_ns > 0 for time in times.times if time.calls)
    rows = {row[0]: row for row in table(callback, "module_tree").rows}
    assert rows["layers (Sequential)"][1] == PARAMETERS
    assert rows["layers (Sequential)"][3] == FORWARD


class Sleepy(Net):
    """Forward of the first layer takes 20 ms, backward of the last layer 50 ms."""

    def __init__(self, clock):
        super().__init__()
        self.layers[0] = nn.Sequential(self.layers[0], Sleep(clock, forward_ms=20))
        self.layers[3] = nn.Sequential(self.layers[3], Sleep(clock, backward_ms=50))


class SleepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward_ms, backward_ms):
        ctx.clock, ctx.backward_ms = clock, backward_ms
        clock.advance(forward_ms * MS)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.advance(ctx.backward_ms * MS)
        return gradient, None, None, None


class Sleep(nn.Module):
    """Advances a clock."""

    def __init__(self, clock, forward_ms=0, backward_ms=0):
        super().__init__()
        self.clock, self.forward_ms, self.backward_ms = clock, forward_ms, backward_ms

    def forward(self, x):
        return SleepFunction.apply(x, self.clock, self.forward_ms, self.backward_ms)


def test_known_sleeps_are_attributed(tmp_path):
    """The callback's clock advances only in these two layers."""
    callback = make_callback(tmp_path, active=0, skip_first=10)
    callback._clock = clock = FakeClock()
    fit_quietly(make_trainer(tmp_path, callback), Sleepy(clock), loader(24))
    modules = {module.path: module for module in callback_modules(callback)}
    slow = {"layers.0.1": (20 * MS, 0), "layers.3.1": (0, 50 * MS), "layers.0.0": (0, 0)}
    slow |= {"layers.0": (20 * MS, 0), "layers.3": (0, 50 * MS), "layers": (20 * MS, 50 * MS)}
    for path, times in slow.items():
        assert (modules[path].forward_ns, modules[path].backward_ns or 0) == times, path


def callback_modules(callback):
    tree = module_tree(cost_of(callback))
    return tree.modules


@pytest.mark.parametrize(
    ("module", "trainer"),
    [
        (Manual, {}),
        (Net, {"accumulate_grad_batches": 4}),
        (Net, {"precision": "bf16-mixed"}),
        (Net, {"precision": "bf16-true"}),
        (Net, {"gradient_clip_val": 0.1}),
    ],
    ids=["manual", "accumulating", "bf16-mixed", "bf16-true", "clipping"],
)
def test_every_training_mode_is_counted(tmp_path, module, trainer):
    callback = run_fit(tmp_path, module=module(), trainer=trainer, active=0, skip_first=10)
    assert flops_of(callback) == {"forward": FORWARD, "backward": BACKWARD}
    dtypes = {entry.dtype for entry in cost_of(callback).count.operators if entry.flops}
    assert dtypes == ({"bfloat16"} if "bf16" in str(trainer) else {"float32"})


class Targets(Net):
    """Computes its targets as a matrix product without gradients, outside any module."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            batch[0] @ torch.ones(8, 3)
        return self.loss(batch)


def test_work_without_gradients_in_training_step_is_forward(tmp_path):
    """Lightning runs training_step inside the optimizer's step, which runs without gradients too."""
    callback = run_fit(tmp_path, module=Targets(), active=0, skip_first=10)
    assert flops_of(callback) == {"forward": FORWARD + 2 * 8 * 3, "backward": BACKWARD}
    assert "optimizer" not in callback.report.summary.flops.phases


class Multiplying(torch.optim.SGD):
    """Squares the first layer's weight of 16 x 8: 16 * 8 * 16 multiply-adds."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        weight = self.param_groups[0]["params"][0]
        weight @ weight.t()
        return loss


class Squares(Net):
    def configure_optimizers(self):
        return Multiplying(self.parameters(), lr=0.01)


def test_accumulation_splits_optimizer_flops_over_steps(tmp_path):
    """About a quarter of them: the run's tags tell in which steps the optimizer stepped."""
    callback = run_fit(
        tmp_path,
        module=Squares(),
        data=loader(120),
        trainer={"accumulate_grad_batches": 4},
        active=0,
        skip_first=10,
        peak_flops_per_s=1e12,
    )
    section, clean = callback.report.summary.flops, steps_of(callback).clean()
    share = float(((clean.tags & int(StepTag.NO_OPTIMIZER_STEP)) == 0).mean())
    assert 0.2 < share < 0.3
    assert section.optimizer_share == pytest.approx(share)
    assert section.phases["optimizer"] == 2 * 16 * 8 * 16
    step_s = callback.report.summary.benchmark.batch_cost_ns.avg / 1e9
    mean_flops = 2 * (FORWARD + BACKWARD + share * 16 * 8 * 16)
    assert section.hfu == pytest.approx(mean_flops / 1e12 / step_s)
    assert section.hardware_flops == 2 * (FORWARD + BACKWARD + 16 * 8 * 16)


class Layers(nn.Sequential):
    """torch.compile skips the forward of torch's own containers."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Compiled(Net):
    """Compiles part of the model; ``graphs`` counts compilations, ``runs`` counts runs of compiled graphs."""

    graphs = 0
    runs = 0

    def __init__(self, how):
        super().__init__(dropout=0.5)
        if how == "part":
            self.layers = torch.compile(self.layers, backend=self.backend)
        elif how == "in place":
            self.layers = Layers(*self.layers)
            self.layers.compile(backend=self.backend)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)  # Dynamo can't follow Lightning's log

    def backend(self, graph, inputs):
        type(self).graphs += 1

        def run(*arguments):
            type(self).runs += 1
            return graph(*arguments)

        return run


@pytest.mark.parametrize("how", ["part", "in place", "whole"])
def test_compiled_model_stays_compiled(tmp_path, how):
    seen = {}
    for flops in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(5)
        Compiled.graphs = Compiled.runs = 0
        module = Compiled(how)
        if how == "whole":
            module = torch.compile(module, backend=module.backend)
        callback = make_callback(tmp_path / str(flops), active=0, skip_first=10, flops=flops)
        fit_quietly(make_trainer(tmp_path, callback), module, loader())
        plain = getattr(module, "_orig_mod", module)
        seen[flops] = (
            Compiled.graphs,
            Compiled.runs,
            [parameter.detach().clone() for parameter in plain.parameters()],
            torch.get_rng_state(),
        )
    assert seen[True][:2] == seen[False][:2]
    assert seen[True][1] >= 32
    assert all(torch.equal(a, b) for a, b in zip(seen[True][2], seen[False][2], strict=True))
    assert torch.equal(seen[True][3], seen[False][3])
    assert callback.report.summary.flops.on_fake_tensors
    assert flops_of(callback) == {"forward": FORWARD, "backward": BACKWARD}
    note = table(callback, "flops").notes[0]
    assert (
        "on a copy of the model without data and without the optimizer because torch.compile wraps " in note
    )


class DataDependent(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else 2 * loss


class CompiledManual(Manual):
    def __init__(self):
        super().__init__()
        self.layers.compile(backend="eager")


def test_note_on_compiled_model_with_manual_optimization(tmp_path):
    callback = run_fit(tmp_path, module=CompiledManual(), active=0, skip_first=10)
    reason = table(callback, "flops").absent_reason
    assert "torch.compile wraps layers, and a copy" in reason
    assert "manual optimization" in reason
    assert "profile a short run without torch.compile" in reason


def test_note_on_compiled_model_that_needs_values(tmp_path):
    module = DataDependent()
    module.layers.compile(backend="eager")
    callback = run_fit(tmp_path, module=module, active=0, skip_first=10)
    assert callback.report.summary.flops is None
    assert "needs their values" in table(callback, "flops").absent_reason
    assert table(callback, "model_size").rows  # other tables are there


@library.custom_op("modelprof_inspection::product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def own_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


class WithOwnOperator(Net):
    def loss(self, batch):
        own_product(batch[0], batch[0].T.contiguous())
        return super().loss(batch)


def test_unknown_operators_are_listed_and_formulas_count_them(tmp_path):
    callback = run_fit(tmp_path / "a", module=WithOwnOperator(), active=0)
    assert cost_of(callback).count_note == ""
    (entry,) = callback.report.summary.flops.uncounted
    assert (entry.operator, entry.calls) == ("modelprof_inspection::product", 1)
    assert "make these figures too low" in " ".join(table(callback, "flops").notes)
    formulas = {"modelprof_inspection::product": lambda a, b, *, out_val: 2 * a.numel() * b.shape[-1]}
    callback = run_fit(tmp_path / "b", module=WithOwnOperator(), active=0, flop_formulas=formulas)
    assert cost_of(callback).count_note == ""
    assert flops_of(callback)["forward"] == FORWARD + 2 * 8 * 2


def test_formula_that_raises_is_noted(tmp_path):
    formulas = {"aten::addmm": lambda *args, **kwargs: 1 / 0}
    callback = run_fit(tmp_path, active=0, flop_formulas=formulas)
    text = " ".join(table(callback, "flops").notes)
    assert "A formula failed: aten::addmm: ZeroDivisionError" in text
    assert flops_of(callback)["backward"] == BACKWARD


def test_formula_for_unknown_operator_is_rejected_early(tmp_path):
    with pytest.raises(ConfigError, match=r"flop_formulas: expected an operator.*aten::addmn"):
        run_fit(tmp_path, flop_formulas={"aten::addmn": lambda *args, **kwargs: 1})


def test_user_peaks_yield_mfu(tmp_path):
    callback = run_fit(tmp_path, active=0, skip_first=10, peak_flops_per_s={"float32": 1e9})
    section = callback.report.summary.flops
    assert section.mfu == pytest.approx(section.flops_per_s / 1e9)
    assert section.peaks[0].flops_per_s == 1e9


def test_flops_are_logged(tmp_path):
    logger = CSVLogger(tmp_path)
    run_fit(tmp_path, active=0, skip_first=10, peak_flops_per_s=1e9, trainer={"logger": logger})
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row.get("modelprof/flops_per_s")]
    assert logged
    for row in logged:
        rate = 2 * (FORWARD + BACKWARD) * 1e3 / float(row["modelprof/batch_cost_ms"])
        assert float(row["modelprof/flops_per_s"]) == pytest.approx(rate)
        assert float(row["modelprof/mfu"]) == pytest.approx(rate / 1e9)


def test_fvcore_table_agrees_with_count(tmp_path):
    module = Net()
    callback = run_fit(tmp_path, module=module, active=0, skip_first=10, fvcore=True)
    facts = cost_of(callback).forward_table
    assert sum(entry.macs for entry in facts.counts) == FORWARD
    assert "agrees with the forward FLOPs" in " ".join(table(callback, "forward_modules").notes)
    pickle.dumps(copy.deepcopy(module))


def test_flops_survive_saving(tmp_path):
    callback = run_fit(tmp_path, active=0, skip_first=10, fvcore=True)
    assert load_run(tmp_path / "modelprof").ranks[0].model_cost == cost_of(callback)
    again = read_report(tmp_path / "modelprof")
    assert {t.id: t for t in again.tables} == {t.id: t for t in callback.report.tables}
    assert again.summary.flops == callback.report.summary.flops


def test_ignored_modules_count_in_no_figure(tmp_path):
    callback = run_fit(tmp_path, active=0, skip_first=10, ignore_modules=["layers.0"])
    rows = table(callback, "module_tree").rows
    assert rows[0][1] == 16 + 1
    assert rows[0][3] == 2 * 16


class Failing(Net):
    def __init__(self, at):
        super().__init__(self.fail)
        self.fail_at, self.batches = at, 0

    def fail(self, batch_idx):
        if batch_idx == self.fail_at:
            raise RuntimeError("the user's own")


@pytest.mark.parametrize("at", [6, 7])
def test_exception_in_inspected_step_leaves_nothing(tmp_path, at):
    module = Failing(at)
    callback = make_callback(tmp_path, active=0, skip_first=10)
    with pytest.raises(RuntimeError, match="the user's own"):
        fit_quietly(make_trainer(tmp_path, callback), module, loader())
    assert _get_current_dispatch_mode() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert (callback.report.summary.flops is None) == (at == 6)
    assert cost_of(callback).times is None or not cost_of(callback).times.times


class Skipping(Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 6 else super().training_step(batch, batch_idx)


def test_step_without_loss_counts_no_flops(tmp_path):
    callback = run_fit(tmp_path, module=Skipping(), active=0, skip_first=10)
    assert flops_of(callback) == {}
    assert table(callback, "flops").absent_reason == "no operator with FLOPs ran in the counted step"


@pytest.mark.parametrize("batches", [1, 3])
def test_short_fits_are_counted(tmp_path, batches):
    callback = run_fit(tmp_path, data=loader(2 * batches), active=0, skip_first=10)
    assert flops_of(callback)["forward"] == FORWARD
    assert callback.report.summary.flops.flops_per_s is None  # no clean step


def test_no_step_outside_windows(tmp_path):
    callback = run_fit(tmp_path, active=4, wait=0, warmup=0, repeat=0)
    assert table(callback, "flops").absent_reason.startswith("profiler windows cover every step")


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_evaluation_loops_count_forward(tmp_path, loop):
    class Evaluating(Net):
        def predict_step(self, batch, batch_idx):
            return self.layers(batch[0])

        test_step = Net.validation_step

    callback = make_callback(tmp_path, active=0, skip_first=10, fvcore=True)
    trainer = make_trainer(tmp_path, callback)
    getattr(trainer, loop)(Evaluating(), loader(), verbose=False) if loop != "predict" else trainer.predict(
        Evaluating(), loader()
    )
    assert flops_of(callback) == {"forward": FORWARD}
    rows = {row[0]: row for row in table(callback, "module_tree").rows}
    assert rows["layers (Sequential)"][3] == FORWARD
    # A validation step returns nothing; fvcore counts what it ran.
    assert "agrees with the forward FLOPs" in " ".join(table(callback, "forward_modules").notes)


def test_cpu_has_flops_rate_but_no_mfu(tmp_path):
    callback = run_fit(tmp_path, active=0, skip_first=10)
    section = callback.report.summary.flops
    assert math.isfinite(section.flops_per_s)
    assert (section.mfu, section.hfu, section.peaks) == (None, None, ())
    assert "No peak is known for 'cpu'; set inspect={\"peak_flops_per_s\"" in " ".join(
        table(callback, "flops").notes
    )
