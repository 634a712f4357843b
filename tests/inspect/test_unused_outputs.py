"""Rows that the loss does not depend on: seen by their gradients, and what they cost."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.waste import UnusedOutputs
from lightning_modelprof.run.archive import decode_record, encode_record
from lightning_modelprof.run.model_cost import StepWaste, UnusedOutput
from lightning_modelprof.run.setup import CodePlace
from tests.inspect.test_waste import backward, watched
from tests.support.diagnosed import MS, analysis_of, cost_of, only, steps_of


def outputs_of(model, loss):
    """Path → rows, unused rows, samples, unused samples of what ``loss(model)`` goes through."""
    seen = watched(model, lambda watch: backward(watch, loss(model)))
    assert not any(module._forward_hooks for module in model.modules()), "the hooks are gone"
    return {
        one.path: (one.rows, one.unused, one.samples, one.unused_samples) for one in seen.outputs if one.rows
    }


def test_padding_that_the_loss_ignores():
    """Of 2 x 5 places 3 have a label; one sample has none."""
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


def test_experts_that_a_sample_was_not_sent_to():
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
def test_a_branch_whose_loss_has_no_weight(weight, unused):
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "side": nn.Conv1d(3, 2, 1)})

    def loss(model):
        hidden = model["body"](torch.ones(6, 3))
        return hidden.sum() + weight * model["side"](hidden[:, :, None]).sum()

    found = outputs_of(model, loss)
    assert found == {"body": (6, 0, 6, 0), "side": (6, unused, 6, unused)}


def test_what_is_only_looked_at_gets_no_gradient():
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "side": nn.Linear(3, 2)})

    def loss(model):
        hidden = model["body"](torch.ones(6, 3))
        model["side"](hidden)
        return hidden.sum()

    assert outputs_of(model, loss)["side"] == (6, 6, 6, 6)


def test_two_losses_use_what_either_uses():
    model = nn.Sequential(nn.Linear(3, 3))

    def run(watch):
        out = model(torch.ones(4, 3))
        watch.before_backward()
        out[0].sum().backward(retain_graph=True)
        backward(watch, out[1].sum())

    [one] = watched(model, run).outputs
    assert (one.rows, one.unused) == (4, 2)


def test_a_recurrent_layer_needs_its_steps():
    """The loss takes the last step alone, and each step before leads to it."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 2, batch_first=True), nn.Linear(2, 1)

        def forward(self, inputs):
            return self.head(self.rnn(inputs)[0][:, -1])

    assert outputs_of(Last(), lambda model: model(torch.ones(4, 7, 3)).sum()) == {"head": (4, 0, 4, 0)}


def test_gradients_that_are_no_number_are_used():
    model = nn.Sequential(nn.Linear(3, 3))
    assert outputs_of(model, lambda model: (model(torch.ones(4, 3)) * torch.nan).sum())["0"][1] == 0


def test_the_step_stays_what_it_is():
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


def test_without_a_backward_pass_nothing_is_said():
    assert watched(Experts(), lambda _: None).outputs == ()


# What is said


def cost_with(*outputs):
    """Two experts of 2 + 4 ms each and a head of 1 + 1 ms; a step takes 20 ms."""
    line = CodePlace(name="Net.forward", file="/home/me/net.py", line=40)
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
    return only(UnusedOutputs().evaluate(analysis_of(steps, cost=cost_with(*outputs))))


def test_whole_samples():
    """Half of one expert and three quarters of the other: 3 + 4.5 of 20 ms."""
    found = found_with(("moe.0", 8, 4, 4), ("moe.1", 8, 6, 6), ("head", 8, 0, 0))
    assert found.saving_ns_per_step == pytest.approx(7.5 * MS)
    assert found.severity is Severity.CRITICAL
    assert found.title == "62% of moe's output is unused"
    assert "only with the samples that need it" in found.action
    assert [(one.line, one.module) for one in found.locations] == [(40, "moe")]


def test_rows_within_samples():
    found = found_with(("moe.0", 80, 40, 0), ("head", 8, 0, 0))
    assert found.title == "50% of moe.0's output is unused"
    assert found.saving_ns_per_step == pytest.approx(3 * MS)
    assert "For padding, batch samples of similar length" in found.action


def test_all_of_it():
    found = found_with(("moe.0", 8, 8, 8), ("head", 8, 0, 0))
    assert "Don't call moe" in found.action


def test_samples_that_are_in_no_layer_are_not_wasted():
    """A hinge loss leaves out what is right already, and that is known only afterwards."""
    assert found_with(("moe.0", 8, 6, 6), ("moe.1", 8, 6, 6), ("head", 8, 6, 6)).status is Status.CLEAN


def test_little_of_it_is_left():
    assert found_with(("moe.0", 8, 2, 2), ("head", 8, 0, 0)).status is Status.CLEAN
    assert found_with().status is Status.NOT_EVALUATED


def test_it_is_saved():
    waste = cost_with(("moe.0", 8, 2, 2)).waste
    assert decode_record(encode_record(waste), StepWaste) == waste
