"""Attributes that grow from step to step are found, with the lines that add to them."""

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_modelprof.analysis.steps.memory import memory_use
from lightning_modelprof.measure.resources.growing import GrowthWatch
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import advice_for
from lightning_modelprof.run.memory import GrowingAttribute, MemoryRecord
from tests.support.diagnosed import analysis_of, steps_of
from tests.support.fits import Net, loader, run_fit


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.kept = []
        self.joined = torch.empty(0)
        self.by_name = {"loss": []}
        self.last = deque(maxlen=3)
        self.count = 0
        self.warm = []

    def step(self, number):
        self.kept.append(number)  # @kept
        self.joined = torch.cat([self.joined, torch.ones(4)])  # @joined
        self.by_name["loss"].append(number)
        self.last.append(number)
        self.count += 1
        if number < 5:
            self.warm.append(number)


def line_of(mark):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# @{mark}"))


def grown(keeper, steps=100):
    watch = GrowthWatch(lambda: (keeper,))
    looks = 0
    for number in range(steps):
        if number >= watch.next_step:
            watch.look(number)
            looks += 1
        keeper.step(number)
    return {one.name: one for one in watch.result()}, looks


def test_growth_per_step_is_found():
    found, looks = grown(Keeper())
    assert list(found) == ["joined", "kept", "by_name"]  # fastest first
    one = found["kept"]
    assert (one.owner, one.last_size - one.first_size) == ("Keeper", one.last_step - one.first_step)
    assert looks < 16, "seldom"


def test_lines_that_add_are_found():
    found, _ = grown(Keeper())
    assert [(one.function, one.line) for one in found["kept"].lines] == [("Keeper.step", line_of("kept"))]
    assert found["joined"].lines[-1].line == line_of("joined")


class Holder:
    def __init__(self, *first):
        self.held = list(first)


@pytest.mark.parametrize(
    ("element", "most"),
    [
        pytest.param(lambda: 1.5, 60, id="a number"),
        pytest.param(lambda: torch.zeros(1000), 4100, id="a tensor"),
        pytest.param(lambda: torch.zeros(1000)[:1], 4100, id="a view, which holds the whole"),
        pytest.param(lambda: torch.ones(1, requires_grad=True) * 2, None, id="a tensor with its graph"),
        pytest.param(object, None, id="anything"),
    ],
)
def test_bytes_per_element(element, most):
    holder = Holder()
    watch = GrowthWatch(lambda: (holder,))
    for number in range(100):
        watch.look(number)
        holder.held.append(element())
    [one] = watch.result()
    assert one.element_bytes is None if most is None else most / 2 < one.element_bytes <= most


class Cleared(Keeper):
    def step(self, number):
        if number % 50 == 0:  # an epoch
            self.kept.clear()
        super().step(number)


def test_growth_within_epoch_is_found():
    assert "kept" in grown(Cleared())[0]


def test_unreadable_objects_are_skipped():
    class Odd:
        @property
        def __dict__(self):
            raise RuntimeError

    watch = GrowthWatch(lambda: (Odd(), None, 3))
    watch.look(1)
    watch.look(2)
    assert watch.result() == ()


class Collects(Net):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


def test_growing_attribute_in_fit(tmp_path):
    record = run_fit(tmp_path, module=Collects(), data=loader(40)).run.ranks[0].memory
    [one] = record.growing
    assert (one.owner, one.name) == ("Collects", "losses")
    assert [line.function for line in one.lines] == ["Collects.training_step"]


SOURCE = """
class Net:
    def training_step(self, batch):
        self.seen.append(batch)
        self.penalty()
        self.slow(len(self.seen))

    def penalty(self):
        return sum(self.seen)

    def slow(self, number):
        return sorted(range(number))


class Other:
    def slow(self):
        return sum(self.seen)

    def of_net(self, net):
        return sum(net.seen)
"""


@pytest.mark.parametrize(
    ("line", "is_said"),
    [
        pytest.param("sum(self.seen)", True, id="reads all of it"),
        pytest.param("self.seen.append(batch)", False, id="adds to it, and asks how long it is"),
        pytest.param("sorted(", False, id="has nothing to do with it"),
        pytest.param("class Other:", False, id="in no function"),
        pytest.param("sum(net.seen)", True, id="another object's"),
    ],
)
def test_advice_names_growth_if_function_reads_attribute(tmp_path, line, is_said):
    advice = advice_at(tmp_path, next(n for n, one in enumerate(SOURCE.splitlines(), 1) if line in one))
    assert ("which grows every step (line 4; 99 elements" in advice) == is_said


def test_same_name_in_another_class_is_ignored(tmp_path):
    assert "self.seen" not in advice_at(tmp_path, SOURCE.splitlines().index("class Other:") + 3)


def test_file_changed_after_run_is_not_read(tmp_path):
    advice = advice_at(tmp_path, 9, created="2001-01-01T00:00:00+00:00")
    assert "self.seen" not in advice


def advice_at(folder, line, created="2999-01-01T00:00:00+00:00"):
    file = folder / "net.py"
    file.write_text(SOURCE)
    adds = Place(function="Net.training_step", file=str(file), line=4)
    one = GrowingAttribute(
        owner="Net", name="seen", first_step=1, last_step=99, first_size=1, last_size=99, lines=(adds,)
    )
    analysis = analysis_of(steps_of(forward=10))
    analysis = analysis.replaced(
        memory=memory_use(MemoryRecord(growing=(one,))),
        info=replace(analysis.info, created=created),
    )
    return advice_for(analysis, str(file), line, "training_step")


@pytest.mark.parametrize("steps", [3, 4])
def test_few_steps_report_no_growth(steps):
    assert grown(Keeper(), steps)[0] == {}
