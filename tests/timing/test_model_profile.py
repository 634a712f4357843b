"""profile_model on real models: hand-derived figures, clear errors, and an unchanged model."""

from __future__ import annotations

import io
import random
import time

import numpy as np
import pytest
import torch
from torch import nn

from lightning_modelprof.analysis.modules.module_tree import module_tree
from lightning_modelprof.errors import ModelProfError
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.tables.run.all_tables import module_tables
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.terminal.terminal import print_report
from lightning_modelprof.timing.model_profile import profile_model
from tests.analysis.test_module_tree import COST


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.linear(x)).relu()


class Net(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.drop = nn.Dropout()
        self.head = nn.Linear(8, 2)
        self.fails = fails

    def forward(self, x, scale=1.0):
        random.random()
        np.random.rand()
        x = self.first(x) * scale
        for block in self.blocks:
            x = block(x)
        if self.fails:
            self.eval()
            raise OSError("the disk is on fire")
        return self.head(self.drop(x))


BATCH = torch.rand(16, 4)
# Multiply-adds of 16 samples.
FIRST, LINEAR, HEAD = 16 * 4 * 8, 16 * 8 * 8, 16 * 8 * 2
FORWARD = FIRST + 2 * LINEAR + HEAD
PARAMETERS = (4 * 8 + 8) + 2 * (8 * 8 + 8 + 2 * 8) + (8 * 2 + 2)


def quiet(model, *args, **kwargs):
    return profile_model(model, *args, print_profile=False, **kwargs)


def square(output):
    return output.square().mean()


def table(profile, key):
    return next(table for table in profile.report.tables if table.id == key)


def column(profile, key, of="module_tree"):
    found = table(profile, of)
    position = [one.key for one in found.columns].index(key)
    return {row[0]: row[position] for row in found.rows}


def test_figures_of_forward():
    profile = quiet(Net(), BATCH, scale=2.0)
    assert (profile.flops, profile.macs, profile.params) == (2 * FORWARD, FORWARD, PARAMETERS)
    macs = column(profile, "forward_macs")
    assert macs["blocks (ModuleList)"] == 2 * LINEAR
    assert macs["first (Linear)"] == FIRST
    assert macs["drop (Dropout)"] == 0
    facts = dict(profile.report.facts)
    assert facts["Parameters"] == f"{PARAMETERS}, all trainable"
    assert facts["Batch"] == "16 × 4 float32"
    assert facts["Call"] == "Net, training mode"
    assert facts["Forward"] == "2.82 kMAC = 5.63 kFLOP"
    assert "Backward" not in facts
    assert "mean of 3 calls" in facts["Forward latency"]


def test_backward_with_loss():
    profile = quiet(Net(), BATCH, loss_fn=square, steps=1)
    assert profile.macs == FORWARD
    # The batch needs no gradient, so the first layer computes only its weight's.
    assert dict(profile.report.facts)["Backward"].startswith(f"{(2 * FORWARD - FIRST) / 1000:.2f} kMAC")
    assert all(ns > 0 for name, ns in column(profile, "backward_ns").items() if "Linear" in name)
    assert dict(profile.report.facts)["Backward latency"].endswith("1 call")


def test_shape_replaces_batch():
    """Like DeepSpeed: dtype of the first parameter, same figures as for a batch of that shape."""
    seen = []
    net = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).double()
    net.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    by_shape = profile_model(net, input_shape=(3, 6), print_profile=False)
    by_batch = profile_model(net, torch.rand(3, 6, dtype=torch.float64), print_profile=False)
    assert (by_shape.flops, by_shape.macs, by_shape.params) == (
        by_batch.flops,
        by_batch.macs,
        by_batch.params,
    )
    assert torch.equal(seen[0], torch.ones(3, 6, dtype=torch.float64))
    assert profile_model(nn.ReLU(), input_shape=[2, 2], print_profile=False).params == 0


@pytest.mark.parametrize("shape", [3, (), (1, -1), (2.0, 3), "3", (True, 2), torch.ones(2)])
def test_invalid_shape_is_rejected(shape):
    with pytest.raises(ModelProfError, match=r"profile_model\(input_shape\): expected a tensor shape"):
        profile_model(nn.Linear(2, 2), input_shape=shape)
    with pytest.raises(ModelProfError, match="expected a shape or a batch, got both"):
        profile_model(nn.Linear(2, 2), torch.ones(1, 2), input_shape=(1, 2))


def test_known_costs_are_attributed():
    slept = {}  # by seconds; longer on a busy machine

    class Sleeps(nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.seconds = seconds

        def forward(self, x):
            begin_ns = time.perf_counter_ns()
            time.sleep(self.seconds)
            slept[self.seconds] = time.perf_counter_ns() - begin_ns
            return x

    model = nn.Sequential(Sleeps(0.004), Sleeps(0.010))
    more = []  # on top of the sleeps of the last pass, which times modules
    for _ in range(5):
        latency = column(quiet(model, BATCH, steps=1), "forward_ns")
        truth = {"0 (Sleeps)": slept[0.004], "1 (Sleeps)": slept[0.010], "Sequential": sum(slept.values())}
        more.append([latency[name] - ns for name, ns in truth.items()])
    assert min(map(min, more)) >= 0
    assert all(min(row) < 1e6 for row in zip(*more, strict=True))


def test_number_of_calls():
    calls = []

    class Counts(nn.Module):
        def forward(self, x):
            calls.append(torch.is_grad_enabled())
            return x

    model = Counts()
    quiet(model, BATCH, warm_up=4, steps=5)
    assert calls == [False] * (1 + 4 + 2 * 5)  # one counted, five timed as a whole, five by module
    calls.clear()
    quiet(model, torch.rand(2, requires_grad=True), loss_fn=square, warm_up=0, steps=1)
    assert calls == [True] * 3


def test_latency_of_whole_call_excludes_hooks():
    hooked = []

    class Looks(nn.Module):
        def forward(self, x):
            hooked.append(bool(self._forward_hooks))
            return x

    quiet(nn.Sequential(Looks()), BATCH, warm_up=1, steps=2)
    assert hooked == [True, False, False, False, True, True]  # counted, warm-up, whole twice, modules twice


@pytest.mark.parametrize("ignored", ["Block", Block, ["blocks"], {nn.ModuleList}, ("blocks.0", "blocks.1")])
def test_totals_exclude_ignored_modules(ignored):
    profile = quiet(Net(), BATCH, ignore_modules=ignored)
    assert profile.macs == FIRST + HEAD
    assert profile.params == PARAMETERS - 2 * (8 * 8 + 8 + 2 * 8)
    assert "ignore_modules" in profile.report.notes[0]


def test_strings_depth_and_top():
    profile = quiet(Net(), BATCH, as_string=True, module_depth=1, top_modules=1)
    assert (profile.flops, profile.macs, profile.params) == ("5.63 kFLOP", "2.82 kMAC", str(PARAMETERS))
    assert set(table(profile, "module_tree").depths) == {0, 1}
    assert len(table(profile, "top_modules").rows) == 2
    shown = [one.id for one in quiet(Net(), BATCH, detailed=False).report.tables]
    assert shown == ["slowest_modules", "top_modules"]


def test_custom_formulas():
    profile = quiet(nn.Linear(4, 8), BATCH, formulas={"aten::addmm": lambda *args, out_val, **options: 100})
    assert profile.flops == 100
    broken = quiet(nn.Linear(4, 8), BATCH, formulas={"aten::addmm": lambda *args, **options: 1 / 0})
    assert (broken.flops, broken.macs) == (None, None)
    assert "ZeroDivisionError" in broken.report.notes[0]
    assert quiet(nn.Linear(4, 8), BATCH, formulas={"aten::addmm": max}, as_string=True).flops == "–"


# ---- Output


def test_profile_is_printed_or_written(capsys, tmp_path):
    profile_model(Net(), BATCH)
    printed = capsys.readouterr().out
    assert "Profile of Net" in printed
    assert "blocks (ModuleList)" in printed
    path = tmp_path / "profile.txt"
    profile = profile_model(Net(), BATCH, output_file=path)
    assert capsys.readouterr().out == ""
    assert path.read_text(encoding="utf-8").startswith("Profile of Net\n====")
    assert b"Top modules by depth" in render_json(profile.report)
    quiet(Net(), BATCH, output_file=tmp_path / "none.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["profile.txt"]
    assert capsys.readouterr().out == ""


def test_table_fits_120_columns(monkeypatch):
    """Uses given times because those of a busy machine may have more digits."""
    for name, value in (("COLUMNS", "120"), ("FORCE_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    tables = module_tables(module_tree(COST))
    report = Report(title="A model", facts=(), tables=tables, notes=())
    print_report(report, drawn := io.StringIO())
    text = drawn.getvalue()
    assert max(map(len, text.splitlines())) <= 120
    # Both tables are in one piece: the first column appears once.
    assert text.count("body (Sequential)") == 1
    assert text.count("\nDepth") == 1


# ---- The model is unchanged


def state_of(model):
    return (
        [value.clone() for value in model.state_dict().values()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [module.training for module in model.modules()],
        [
            (len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module)))
            for module in model.modules()
        ],
        (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()),
    )


def assert_same(before, after):
    for one, other in zip(before, after, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("how", ["forward", "backward", "fails", "loss fails", "backward fails"])
def test_model_is_untouched(how):
    model = Net(fails=how == "fails")
    model.head.eval()
    model.head.weight.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = state_of(model)
    gradient = model.head.weight.grad

    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no way back")

    loss_fn = {
        "backward": square,
        "loss fails": lambda output: output.loss,
        "backward fails": NoBackward.apply,
    }.get(how)
    if how.endswith("fails"):
        with pytest.raises(ModelProfError):
            quiet(model, BATCH, loss_fn=loss_fn)
    else:
        quiet(model, BATCH, loss_fn=loss_fn)
    assert_same(before, state_of(model))
    assert model.head.weight.grad is gradient
    assert torch.is_grad_enabled()


# ---- Invalid arguments


class Generates(Net):
    def generate(self, x, steps=3):
        with torch.no_grad():
            for _ in range(steps):
                self(x)
        return x


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Net(), {"mode": "generat"}, "got 'generat'. Did you mean 'generate'"),
        (Net(), {"mode": "train"}, "expected one of forward, generate, got 'train'"),
        (Net(), {"mode": "generate"}, "Net has no generate method"),
        (Generates(), {"mode": "generate", "loss_fn": square}, "has no backward"),
        (Net(), {"warm_up": -1}, "warm_up.: expected a whole number of at least 0, got -1"),
        (Net(), {"warm_up": True}, "whole number of at least 0, got True"),
        (Net(), {"steps": 0}, "steps.: expected a whole number of at least 1, got 0"),
        (Net(), {"top_modules": 1.5}, "top_modules.: expected a whole number"),
        (Net(), {"module_depth": -1}, "module_depth.: expected a whole number of at least 0, got -1"),
        (
            Net(),
            {"ignore_modules": ["Lineer"]},
            "'Lineer' is no class or module path in this model. Did you mean 'Linear'",
        ),
        (Net(), {"ignore_modules": "blocks.2"}, "Did you mean 'blocks."),
        (Net(), {"ignore_modules": "zzz"}, "Its classes are BatchNorm1d, Block, Dropout, Linear"),
        (Net(), {"ignore_modules": [nn.Conv2d]}, "'Conv2d' is no class or module path"),
        (Net(), {"ignore_modules": [nn.Linear(1, 1)]}, "expected classes, class names or module paths"),
        (Net(), {"ignore_modules": nn.Module}, "no modules are left"),
        (Net(), {"formulas": {"aten::nothing": max}}, "expected an operator"),
        (Net(), {"output_file": "/no/such/folder/file"}, "no such directory: /no/such/folder"),
        (Net(), {"loss_fn": lambda output: output}, "one element and a gradient, got 16 × 2 float32"),
        (Net(), {"loss_fn": lambda output: 3.0}, "got float"),
        (Net(), {"loss_fn": lambda output: output.detach().sum()}, "without a gradient"),
        (Net(), {"loss_fn": lambda output: output.loss}, "failed on the model's output"),
        (Net(), {"speed": 3}, "batch: TypeError: .*unexpected keyword argument 'speed'.*speed=int"),
        (nn.Linear(5, 2), {}, "the model can't take this batch: RuntimeError.*16 × 4 float32"),
        (Net(fails=True), {}, "batch: OSError: the disk is on fire"),
        (nn.LazyLinear(3), {}, "got lazy weight, bias"),
        (nn.Linear(4, 2, device="meta"), {}, "on the meta device"),
        (lambda x: x, {}, "expected a torch.nn.Module, got function"),
    ],
)
def test_errors_name_problem(model, options, message):
    with pytest.raises(ModelProfError, match=message):
        quiet(model, BATCH, **options)


def test_arguments_are_checked_before_model_runs():
    class NeverRuns(nn.Module):
        def forward(self, x):
            raise AssertionError("ran")

    with pytest.raises(ModelProfError, match="ignore_modules"):
        quiet(NeverRuns(), BATCH, ignore_modules="Other")


# ---- Other calls and models


def test_profile_of_generate():
    profile = quiet(Generates().eval(), BATCH, mode="generate", steps=1)
    assert profile.macs == 3 * FORWARD
    facts = dict(profile.report.facts)
    assert facts["Call"] == "generate, eval mode"
    assert "Generate latency" in facts
    assert "one call of generate" in profile.report.notes[0]


def test_profile_of_generating_transformer():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(2, 50, (1, 4))
    options = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "pad_token_id": 0}
    profile = quiet(model, tokens, mode="generate", max_new_tokens=3, **options)
    # 12 E² + 2 · keys · E per token and layer; then the head, for the last position only.
    lengths = [(4, 4), (1, 5), (1, 6)]
    layers = 2 * sum(queries * (12 * 8 * 8 + 2 * keys * 8) for queries, keys in lengths)
    assert profile.macs == layers + 3 * 8 * 50
    assert column(profile, "forward_macs")["lm_head (Linear)"] == 3 * 8 * 50
    assert column(profile, "forward_ns")["h (ModuleList)"] > 0


def test_compiled_model_is_timed_as_whole():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), torch.compile(Block(8), backend="eager"), nn.Linear(8, 2))
    profile = quiet(model, BATCH)
    assert profile.macs == FIRST + LINEAR + HEAD
    latency = column(profile, "forward_ns")
    assert latency["1 (Block)"] > 0
    assert latency["linear (Linear)"] is None
    assert column(profile, "forward_flops_per_s")["Sequential"] > 0
    assert any("Compiled" in note for note in table(profile, "module_tree").notes)
    torch._dynamo.reset()


def test_inputs_keep_their_gradients():
    x = torch.rand(16, 4, requires_grad=True)
    x.grad = torch.full((16, 4), 7.0)
    quiet(Net(), x, loss_fn=square)
    assert torch.equal(x.grad, torch.full((16, 4), 7.0))


@pytest.mark.filterwarnings("ignore")  # torch.ao warns that it is deprecated
def test_parameters_of_quantized_model_are_not_trainable():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    profile = profile_model(model, torch.ones(2, 8), print_profile=False, as_string=False)
    assert profile.params == 8 * 4 + 4
    assert dict(profile.report.facts)["Parameters"] == "36, 0 trainable"
