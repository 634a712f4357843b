"""fvcore's forward pass: figures, notes, and differences from the counted step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_modelprof.analysis.modules.forward_check import forward_facts
from lightning_modelprof.inspect.flops.fvcore_table import forward_table
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.run.forward_table import FORWARD_MODULES, FORWARD_OPERATORS
from lightning_modelprof.run.model_cost import (
    ForwardCount,
    ForwardTable,
    ModelCost,
    ModuleRecord,
    OperatorCount,
    StepCount,
)
from tests.support.diagnosed import analysis_of, steps_of
from tests.support.facts import tables_of, why_not

# A difference of one multiply-add in 1000 is within the tolerance, two are not.
MACS = {"encoder.a": 1000, "encoder.b": 3000, "head": 4000}


def operator(module, macs, *, phase="forward", name="aten::addmm"):
    flops = None if macs is None else 2 * macs
    return OperatorCount(phase=phase, module=module, operator=name, dtype="float32", calls=1, flops=flops)


def counted(*operators):
    return StepCount(step=0, samples=4, on_fake_tensors=False, operators=operators)


def table(macs=MACS, **options):
    paths = ["", "encoder", "encoder.a", "encoder.b", "head", "act"]
    known = {
        "counts": tuple(ForwardCount(module=m, operator="linear", macs=n) for m, n in macs.items()),
        "activations": dict.fromkeys(paths, 0),
        "parameters": dict.fromkeys(paths, 0),
        "unsupported": {},
    }
    return ForwardTable(**(known | options))


def forward_tables(forward, depth=None):
    facts = analysis_of(steps_of(), cost=ModelCost()).replaced(forward=forward)
    return tables_of(facts, FORWARD_MODULES, FORWARD_OPERATORS, options=TableOptions(module_depth=depth))


def facts_of(ours, theirs=MACS, extra=(), **options):
    count = counted(*(operator(module, macs) for module, macs in ours.items()), *extra)
    return forward_facts(ModelCost(count=count, forward_table=table(theirs, **options)))


def differences(facts):
    return [(found.module, found.ours_macs, found.fvcore_macs) for found in facts.disagreements]


def test_counts_agree():
    backward = operator("head", 8000, phase="backward")
    transform = operator("head", 5000, name="aten::_fft_r2c")
    facts = facts_of(MACS, extra=(backward, transform))
    assert (facts.agrees, facts.disagreements, facts.placed_differently) == (True, (), ())
    assert (facts.macs, facts.check_note) == (8000, "")
    assert {module.path: (module.macs, module.share) for module in facts.modules} == {
        "": (8000, 1.0),
        "encoder": (4000, 0.5),
        "encoder.a": (1000, 0.125),
        "encoder.b": (3000, 0.375),
        "head": (4000, 0.5),
        "act": (0, 0.0),
    }


@pytest.mark.parametrize(
    ("ours", "agrees"), [(1000, True), (1001, True), (1002, False), (999, True), (998, False)]
)
def test_tolerance_is_one_thousandth(ours, agrees):
    facts = facts_of(MACS | {"encoder.a": ours})
    assert facts.agrees is agrees
    assert differences(facts) == ([] if agrees else [("encoder.a", ours, 1000)])


def test_only_innermost_modules_are_named():
    facts = facts_of(MACS | {"encoder.b": 3500})
    assert differences(facts) == [("encoder.b", 3500, 3000)]
    facts = facts_of(MACS | {"encoder.b": 3500, "encoder": 700, "": 900})
    assert differences(facts) == [("encoder.b", 3500, 3000), ("encoder", 5200, 4000), ("", 10100, 8000)]


def test_differences_that_cancel_are_found():
    facts = facts_of({"encoder.a": 1100, "encoder.b": 3000, "head": 3903})
    assert differences(facts) == [("encoder.a", 1100, 1000), ("head", 3903, 4000)]


def test_same_work_in_other_module_is_not_difference():
    facts = facts_of({"encoder": 4000, "head": 4000})
    assert (facts.agrees, facts.disagreements) == (True, ())
    assert facts.placed_differently == ("encoder",)
    notes = forward_tables(facts)[0].notes
    assert "Both counts assign the same work to different modules inside encoder." in notes


def test_missing_count_has_reason():
    cost = ModelCost(forward_table_note="fvcore failed: a reason")
    assert why_not(forward_facts, cost) == "fvcore failed: a reason"
    (absent,) = tables_of(analysis_of(steps_of(), cost=cost), FORWARD_MODULES, FORWARD_OPERATORS)
    assert (absent.rows, absent.absent_reason) == ((), "fvcore failed: a reason")
    facts = forward_facts(ModelCost(forward_table=table(), count_note="counting is off"))
    assert (facts.agrees, facts.check_note, facts.disagreements) == (None, "counting is off", ())
    notes = forward_tables(facts)[0].notes
    assert "Not checked against the step count: counting is off." in notes
    assert not any("agree" in note for note in notes)


def test_model_without_contractions():
    facts = forward_facts(ModelCost(forward_table=table({}), count=counted()))
    assert (facts.macs, facts.agrees) == (0, True)
    assert all(module.share is None for module in facts.modules)
    modules, operators = forward_tables(facts)
    assert modules.rows == (("(model)", None, 0, 0, None, 0),)
    assert operators.absent_reason == "fvcore counted no multiply-adds"


# ---- The tables of a small model, cell by cell


def small():
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten()))
    model.add_module("head", nn.Linear(40, 5))
    model.add_module("norm", nn.BatchNorm1d(5))
    x = torch.ones(6, 2, 10)
    # Convolution: 6 x 4 channels x 10 positions x 2 channels x 3; linear: 6 x 40 x 5.
    records = tuple(
        ModuleRecord(path=path, type_name=type(module).__name__, parameters=0, trainable=0)
        for path, module in model.named_modules()
    )
    operators = operator("body.0", 1440, name="aten::convolution"), operator("head", 1200)
    return ModelCost(
        forward_table=forward_table(model, lambda copied, batch: copied(*batch), (x,)),
        modules=records,
        count=counted(*operators),
    )


def test_tables_of_small_model():
    modules, operators = forward_tables(forward_facts(small()))
    total = 1440 + 1200
    assert [column.label for column in modules.columns] == [
        *("Module", "Class", "Parameters", "MACs", "MACs(%)", "Activations")
    ]
    assert [column.unit for column in modules.columns[2:]] == [
        *(Unit.COUNT, Unit.MACS, Unit.RATIO, Unit.COUNT)
    ]
    assert modules.rows == (
        ("(model)", "Sequential", 28 + 205 + 10, total, 1.0, 240 + 30),
        ("body", "Sequential", 28, 1440, 1440 / total, 240),
        ("0", "Conv1d", 28, 1440, 1440 / total, 240),
        ("head", "Linear", 205, 1200, 1200 / total, 30),
        ("norm", "BatchNorm1d", 10, 0, 0.0, 0),
    )
    assert modules.depths == (0, 1, 2, 1, 1)
    assert modules.notes == (
        "The result agrees with the forward FLOPs of a real step within 0.1% in every module.",
        "Operators that fvcore doesn't support (calls): aten::add_ (1).",
    )
    assert operators.rows == (("conv", 1440, 1440 / total), ("linear", 1200, 1200 / total))


@pytest.mark.parametrize(("depth", "names"), [(0, 1), (1, 4), (2, 5), (None, 5)])
def test_depth_of_rows(depth, names):
    modules, operators = forward_tables(forward_facts(small()), depth)
    assert len(modules.rows) == len(modules.depths) == names
    assert modules.rows[0][3] == 2640
    assert len(operators.rows) == 2


def test_notes_name_differences_and_gaps():
    facts = facts_of(
        MACS | {"head": 4700},
        unsupported={"mine::product": 2},
        uncalled=("spare", "spare.inside", "other"),
    )
    assert facts.uncalled == ("spare", "other")
    assert forward_tables(facts)[0].notes == (
        "head: the counted step has 4700 MACs, fvcore 4000.",
        "Operators that fvcore doesn't support (calls): mine::product (2).",
        "Not called: spare, other. Work that uses their weights counts at their parents.",
    )


def test_many_differences_are_counted_instead_of_named():
    paths = [f"layer{index}" for index in range(20)]
    theirs = dict.fromkeys(paths, 1000)
    ours = {path: 1100 + 7 * index for index, path in enumerate(paths)}
    facts = facts_of(ours, theirs)
    notes = forward_tables(facts)[0].notes
    assert len(facts.disagreements) == 20
    assert sum("the counted step has" in note for note in notes) == 8
    assert "12 more modules differ." in notes
