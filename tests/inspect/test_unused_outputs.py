"""Output rows that the loss doesn't depend on are found by their gradients, with their cost."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_modelprof.place import Place
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.report.rules.unused import unused_outputs
from lightning_modelprof.run.archive import decode_record, encode_record
from lightning_modelprof.run.model_cost import StepWaste, UnusedOutput
from tests.inspect.test_waste import backward, watched
from tests.support.diagnosed import MS, SETUP, analysis_of, cost_of, only, steps_of
from tests.support.fits import run_fit


def outputs_of(model, loss):
    """Path → rows, unused rows, samples, unused samples of the modules that ``loss(model)`` runs."""
    seen = watched(model, lambda watch: backward(watch, loss(model)))
    assert not any(module._forward_hooks for module in model.modules()), "the hooks are gone"
    return {
        one.path: (one.rows, one.unused, one.samples, one.unused_samples) for one in seen.outputs if one.rows
    }


def test_padding_ignored_by_loss_is_unused():
    """Only 3 of 2 x 5 places have a label; one sample has none."""
    labels = torch.tensor([[1, 2, 0, -100, -100], [-100] * 5])
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))

    def loss(model):
        return F.cross_entropy(model(torch.ones(2, 5, 4)).flatten(0, 1), labels.flatten())

    assert outputs_of(model, loss) == {"0": (10, 7, 2, 1), "1": (10, 7, 2, 1)}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(4))
        self.head = nn.Linear(2, 1)

    def forward(self, inputs, chosen):
        every = torch.stack([expert(inputs) for expert in self.experts])
        return self.head(every[chosen, torch.arange(len(inputs))])


def test_experts_without_routed_samples_are_unused():
    found = outputs_of(
        Experts(), lambda model: model(torch.ones(8, 3), torch.tensor([0] * 6 + [1] * 2)).sum()
    )
    assert [found[f"experts.{n}"] for n in range(4)] == [
        (8, 2, 8, 2),
        (8, 6, 8, 6),
        (8, 8, 8, 8),
        (8, 8, 8, 8),
    ]
    assert found["head"] == (8, 0, 8, 0)


@pytest.mark.parametrize(("weight", "unused"), [(0.0, 6), (0.5, 0)])
def test_branch_with_zero_loss_weight_is_unused(weight, unused):
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "side": nn.Conv1d(3, 2, 1)})

    def loss(model):
        hidden = model["body"](torch.ones(6, 3))
        return hidden.sum() + weight * model["side"](hidden[:, :, None]).sum()

    found = outputs_of(model, loss)
    assert found == {"body": (6, 0, 6, 0), "side": (6, unused, 6, unused)}


def test_output_outside_loss_is_unused():
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "side": nn.Linear(3, 2)})

    def loss(model):
        hidden = model["body"](torch.ones(6, 3))
        model["side"](hidden)
        return hidden.sum()

    assert outputs_of(model, loss)["side"] == (6, 6, 6, 6)


def test_rows_used_by_either_loss_are_used():
    model = nn.Sequential(nn.Linear(3, 3))

    def run(watch):
        out = model(torch.ones(4, 3))
        watch.before_backward()
        out[0].sum().backward(retain_graph=True)
        backward(watch, out[1].sum())

    [one] = watched(model, run).outputs
    assert (one.rows, one.unused) == (4, 2)


def test_recurrent_layer_needs_its_steps():
    """The loss uses only the last step, and each earlier step leads to it."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 2, batch_first=True), nn.Linear(2, 1)

        def forward(self, inputs):
            return self.head(self.rnn(inputs)[0][:, -1])

    assert outputs_of(Last(), lambda model: model(torch.ones(4, 7, 3)).sum()) == {"head": (4, 0, 4, 0)}


def test_nan_gradients_count_as_used():
    model = nn.Sequential(nn.Linear(3, 3))
    assert outputs_of(model, lambda model: (model(torch.ones(4, 3)) * torch.nan).sum())["0"][1] == 0


def test_watching_changes_no_gradient():
    def gradients(is_watched):
        torch.manual_seed(0)
        model, inputs = Experts(), torch.randn(8, 3)

        def run(watch):
            loss = model(inputs, torch.tensor([0, 1, 2, 3] * 2)).square().sum()
            backward(watch, loss) if is_watched else loss.backward()

        if is_watched:
            watched(model, run)
        else:
            run(None)
        return [one.grad for one in model.parameters()]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_no_outputs_without_backward_pass():
    assert watched(Experts(), lambda _: None).outputs == ()


# Modules that mix rows


class Attention(nn.Module):
    """Hand-written attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, inputs):
        q, k, v = self.qkv(inputs).chunk(3, dim=-1)
        return self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)


class Does(nn.Module):
    """Calls ``call(inputs, linear)``."""

    def __init__(self, call):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call = call

    def forward(self, inputs):
        return self.call(inputs, self.linear)


def with_rms_norm(inputs, linear):
    return linear(inputs) * inputs.pow(2).mean(-1, keepdim=True).rsqrt()


def with_pooling(inputs, linear):
    return linear(inputs) * linear(inputs).softmax(1)


def of_neighbours(inputs, linear):
    return linear(torch.eye(5) @ inputs[0])


@pytest.mark.parametrize(
    ("module", "mixes"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 4)), ""),
        (Does(with_rms_norm), ""),
        (Does(lambda inputs, linear: F.softmax(linear(inputs), dim=-1)[:, -1:]), ""),
        (Does(lambda inputs, linear: F.linear(inputs, linear.weight / linear.weight.norm())), ""),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(5).eval()), ""),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(5)), "rows"),
        (nn.Conv1d(5, 5, 1), "places"),
        (Attention(), "rows"),
        (nn.MultiheadAttention(4, 2, batch_first=True), "rows"),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), "rows"),
        (nn.GRU(4, 4, batch_first=True), "rows"),
        (nn.LSTM(4, 4, batch_first=True), "rows"),
        (Does(with_pooling), "rows"),
        (Does(lambda inputs, linear: linear(inputs) + inputs.mean(1, keepdim=True)), "rows"),
        (Does(lambda inputs, linear: linear(inputs).cumsum(1)), "rows"),
        (Does(lambda inputs, linear: linear(inputs.transpose(1, 2)[..., :4]).transpose(1, 2)), "rows"),
        (Does(of_neighbours), "rows"),
    ],
    ids=[
        *("MLP", "RMSNorm", "softmax of features", "weights that are computed", "BatchNorm of its averages"),
        *(
            "BatchNorm of the batch",
            "convolution",
            "attention by hand",
            "attention",
            "transformer",
            "GRU",
            "LSTM",
        ),
        *("attention pooling", "mean", "cumsum", "token mixer", "graph"),
    ],
)
def test_which_modules_mix_rows(module, mixes):
    model = nn.ModuleDict({"part": module})

    def loss(model):
        inputs = torch.randn(3, 5, 4).requires_grad_() * 1
        made = model["part"](*[inputs] * (3 if isinstance(module, nn.MultiheadAttention) else 1))
        return (made[0] if isinstance(made, tuple) else made).square().sum()

    seen = watched(model, lambda watch: backward(watch, loss(model)))
    assert {one.path: one.mixes for one in seen.outputs}["part"] == mixes


class Reader(LightningModule):
    """Reads tokens, where 0 is padding; ``take`` turns the encoder's output into the vector for the loss."""

    def __init__(self, take):
        super().__init__()
        self.tokens = nn.Embedding(9, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 1)
        self.take = take

    def training_step(self, batch, batch_idx):
        tokens = batch
        padding = tokens == 0
        read = self.encoder(self.tokens(tokens), src_key_padding_mask=padding)
        return self.head(self.take(read, (~padding)[..., None].float())).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def judged_fit(folder, take, width=12):
    """The finding for a fit in which each module that ran takes 1 ms."""
    tokens = torch.zeros(48, width, dtype=torch.long)
    tokens[::2, :4], tokens[1::2, :5] = 3, 5
    callback = run_fit(folder, module=Reader(take), data=DataLoader(tokens, batch_size=2), flops=True)
    waste = callback.run.ranks[0].model_cost.waste
    times = [("", 0, 0, 0)] + [(one.path, 10, 1 if one.rows else 0, 0) for one in waste.outputs]
    cost = replace(cost_of(*times), waste=waste)
    return only(judge(unused_outputs, analysis_of(steps_of(forward=20), cost=cost)))


def mean_of_tokens(read, kept):
    return (read * kept).sum(1) / kept.sum(1)


def test_padding_of_attention_is_found(tmp_path):
    """9 of 24 places hold a token; each encoder layer has five modules."""
    found = judged_fit(tmp_path, mean_of_tokens)
    assert found.title == "62% of encoder.layers's output is unused"
    assert found.action.startswith("Pad each batch only to its longest sample.")
    assert "x[mask]" not in found.action
    assert found.saving_ns_per_step == pytest.approx(0.625 * 10 * MS)


def test_rows_read_by_attention_are_used(tmp_path):
    """The loss uses the first place, and attention mixes all others into it."""
    assert judged_fit(tmp_path, lambda read, kept: read[:, 0], width=5).status is Status.CLEAN


# The finding


def cost_with(*outputs):
    """Two experts of 2 + 4 ms each and a head of 1 + 1 ms; a step takes 20 ms."""
    line = Place(function="Net.forward", file="/home/me/net.py", line=40)
    return replace(
        cost_of(
            ("", 0, 0, 0), ("moe", 10, 0, 0), ("moe.0", 10, 2, 4), ("moe.1", 10, 2, 4), ("head", 10, 1, 1)
        ),
        waste=StepWaste(
            outputs=tuple(
                UnusedOutput(
                    path=path, rows=rows, unused=unused, samples=8, unused_samples=samples, lines=(line,)
                )
                for path, rows, unused, samples in outputs
            )
        ),
    )


def found_with(*outputs):
    steps = steps_of(forward=8, backward=12)
    return only(judge(unused_outputs, analysis_of(steps, cost=cost_with(*outputs))))


def test_saving_if_whole_samples_are_unused():
    """Half of one expert and three quarters of the other: 3 + 4.5 of 20 ms."""
    found = found_with(("moe.0", 8, 4, 4), ("moe.1", 8, 6, 6), ("head", 8, 0, 0))
    assert found.saving_ns_per_step == pytest.approx(7.5 * MS)
    assert found.severity is Severity.CRITICAL
    assert found.title == "62% of moe's output is unused"
    assert "only with the samples that need it" in found.action
    assert [(one.line, one.module) for one in found.locations] == [(40, "moe")]


def test_saving_if_rows_in_samples_are_unused():
    found = found_with(("moe.0", 80, 40, 0), ("head", 8, 0, 0))
    assert found.title == "50% of moe.0's output is unused"
    assert found.saving_ns_per_step == pytest.approx(3 * MS)
    assert "For padding, batch samples of similar length" in found.action


def test_entirely_unused_module():
    found = found_with(("moe.0", 8, 8, 8), ("head", 8, 0, 0))
    assert "Don't call moe" in found.action


def test_samples_unused_in_all_layers_are_clean():
    """A hinge loss ignores samples that are already right, which is known only afterwards."""
    assert found_with(("moe.0", 8, 6, 6), ("moe.1", 8, 6, 6), ("head", 8, 6, 6)).status is Status.CLEAN


def test_few_unused_rows_are_clean():
    assert found_with(("moe.0", 8, 2, 2), ("head", 8, 0, 0)).status is Status.CLEAN
    assert found_with().status is Status.NOT_EVALUATED


def mixing(path, *, inputs=(80, 0), rows=80, unused=64, **more):
    return UnusedOutput(
        path=path, rows=rows, unused=unused, samples=8, unused_samples=more.pop("samples", 0), mixes="rows",
        input_rows=inputs[0], unused_inputs=inputs[1], **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "action"),
    [
        ({"inputs": (80, 0)}, None),
        ({"inputs": (0, 0)}, None),
        (
            {"inputs": (80, 64), "places": 10, "unused_places": 4},
            "Pad each batch only to its longest sample. Then batch samples of similar length.",
        ),
        ({"inputs": (80, 64), "places": 10}, "Batch samples of similar length."),
        ({"inputs": (80, 64), "samples": 6}, "Leave the unused rows out of the input of moe.0."),
    ],
    ids=["inputs are used", "inputs aren't known", "padding", "padding to the longest", "samples"],
)
def test_unused_rows_of_mixing_module(given, action):
    """4.8 of 20 ms, if no other row depends on them."""
    cost = replace(cost_with(), waste=StepWaste(outputs=(mixing("moe.0", **given), mixing("head", unused=0))))
    found = only(judge(unused_outputs, analysis_of(steps_of(forward=8, backward=12), cost=cost)))
    assert found.action == (action or "")
    assert found.saving_ns_per_step == (action and pytest.approx(4.8 * MS))


COLLATE = """
def collate(samples, longest=256):
    texts = list(samples)
    count = len(texts)
    most = max(map(len, texts))
    {}
    return tokens
"""


@pytest.mark.parametrize(
    ("statement", "is_named"),
    [
        ("tokens = torch.full((len(texts), MAX_LENGTH), PAD)", True),
        ("tokens = np.zeros((count, 3, 256))", True),
        ("tokens = [F.pad(one, (0, longest - len(one)), value=0) for one in texts]", True),
        ("tokens = tokenizer(texts, padding='max_length', truncation=True)", True),
        ("tokens = torch.full((len(texts), most), PAD)", False),
        ("tokens = texts[0].new_zeros(count, most, 80)", False),
        ("tokens = torch.zeros(count, max(map(len, texts)), 80)", False),
        ("tokens = [F.pad(one, (0, most - len(one))) for one in texts]", False),
        ("tokens = pad_sequence(texts, batch_first=True, padding_value=PAD)", False),
        ("tokens = tokenizer(texts, padding='longest')", False),
        ("tokens = torch.zeros(count)", False),
    ],
)
def test_line_that_pads_to_fixed_length_is_named(tmp_path, statement, is_named):
    file = tmp_path / "data.py"
    file.write_text(COLLATE.format(statement))
    collate = Place(function="collate", file=str(file), line=2)
    setup = replace(SETUP, loaders=(replace(SETUP.loaders[0], collate=collate),))
    call = Place(function="Net.forward", file="/home/me/net.py", line=40)
    padded = mixing("moe.0", inputs=(80, 64), places=10, unused_places=4, lines=(call,))
    facts = analysis_of(
        steps_of(forward=8, backward=12),
        cost=replace(cost_with(), waste=StepWaste(outputs=(padded, mixing("head", unused=0)))),
        setup=setup,
    )
    facts = facts.replaced(info=replace(facts.info, created="2999-01-01T00:00:00+00:00"))
    first, *others = only(judge(unused_outputs, facts)).locations
    assert ((first.file, first.line, first.is_exact) == (str(file), 6, True)) is is_named
    assert len(others) == is_named


def test_layer_next_to_mixing_layer_is_named():
    """A row of logits depends on one row, whatever the attention before it reads."""
    outputs = (mixing("moe.0"), replace(mixing("moe.1", unused=72), mixes=""), mixing("head", unused=0))
    cost = replace(cost_with(), waste=StepWaste(outputs=outputs))
    found = only(judge(unused_outputs, analysis_of(steps_of(forward=8, backward=12), cost=cost)))
    assert found.title == "90% of moe.1's output is unused"
    assert found.action.startswith("Select the needed rows before moe.1")
    assert found.saving_ns_per_step == pytest.approx(0.9 * 6 * MS)


@pytest.mark.parametrize(
    ("kind", "status"),
    [("MultiheadAttention", Status.CLEAN), ("BatchNorm1d", Status.CLEAN), ("Linear", Status.FOUND)],
)
def test_run_without_mixing_data_uses_module_types(kind, status):
    cost = cost_with(("moe.0", 80, 64, 0), ("head", 80, 0, 0))
    modules = tuple(replace(one, type_name=kind if one.path == "moe.0" else "Linear") for one in cost.modules)
    cost = replace(cost, modules=modules)
    steps = steps_of(forward=8, backward=12)
    assert only(judge(unused_outputs, analysis_of(steps, cost=cost))).status is status


def test_entirely_unused_mixing_module():
    cost = replace(
        cost_with(), waste=StepWaste(outputs=(mixing("moe.0", unused=80), mixing("head", unused=0)))
    )
    found = only(judge(unused_outputs, analysis_of(steps_of(forward=8, backward=12), cost=cost)))
    assert "Don't call moe.0" in found.action


def test_unused_outputs_are_saved():
    waste = cost_with(("moe.0", 8, 2, 2)).waste
    assert decode_record(encode_record(waste), StepWaste) == waste
