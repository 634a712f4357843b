"""The module tree: sums by hand, and a brute-force comparison on generated models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.modules.module_tree import module_tree
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.tables.run.module_tree import (
    MODULE_TREE,
    SLOWEST_MODULES,
    TOP_MODULES,
    module_tables,
)
from lightning_modelprof.run.model_cost import (
    ModelCost,
    ModuleRecord,
    ModuleTime,
    ModuleTimes,
    OperatorCount,
    StepCount,
)
from lightning_modelprof.show.text import render_text
from tests.support.diagnosed import analysis_of, steps_of
from tests.support.facts import tables_of, why_not


def record(path, kind, parameters=0, trainable=None):
    trainable = parameters if trainable is None else trainable
    return ModuleRecord(path=path, type_name=kind, parameters=parameters, trainable=trainable)


def operator(module, flops, phase="forward", name="aten::mm"):
    return OperatorCount(phase=phase, module=module, operator=name, dtype="float32", calls=1, flops=flops)


def count(*operators):
    return StepCount(step=3, samples=8, on_fake_tensors=False, operators=operators)


def timed(*times, steps=2, clock="host", notes=()):
    """Times in one step."""
    rows = tuple(ModuleTime(path=p, calls=c, forward_ns=f, backward_ns=b) for p, c, f, b in times)
    return ModuleTimes(steps=steps, clock=clock, times=rows, notes=notes)


MODULES = (
    record("", "Net", 10),
    record("body", "Sequential"),
    record("body.0", "Linear", 600),
    record("body.1", "ReLU"),
    record("body.2", "Linear", 200, 0),
    record("head", "Linear", 190),
)
COST = ModelCost(
    modules=MODULES,
    count=count(
        operator("body.0", 1_000),
        operator("body.2", 600),
        operator("head", 400),
        operator("", 2_000),
        operator("body.0", 1_000, "backward"),
        operator("body.2", 700, "backward"),
        operator("body.2", 600, "recompute"),
        operator("body.1", 99_999, name="aten::_fft_c2c"),
    ),
    times=timed(
        ("", 2, 500, 250),
        ("body", 2, 50, 0),
        ("body.0", 2, 2_000, 4_000),
        ("body.1", 2, 150, 200),
        ("body.2", 4, 300, 1_000),
        ("head", 2, 1_000, 50),
    ),
)


def by_path(tree):
    return {module.path: module for module in tree.modules}


def test_module_figures_include_submodules():
    tree = module_tree(COST)
    found = by_path(tree)
    root, body = found[""], found["body"]
    assert [module.path for module in tree.modules] == [r.path for r in MODULES]
    assert [module.depth for module in tree.modules] == [0, 1, 2, 2, 2, 1]
    assert (root.parameters, root.trainable) == (1_000, 800)
    assert (body.parameters, body.trainable, body.parameters_share) == (800, 600, 0.8)
    assert (root.forward_flops, root.forward_macs, body.forward_flops, body.macs_share) == (
        4_000,
        2_000,
        1_600,
        0.4,
    )
    assert (root.backward_flops, root.recompute_flops) == (1_700, 600)
    assert (root.forward_ns, root.backward_ns) == (4_000, 5_500)
    assert (root.forward_ns, body.forward_ns, body.backward_ns) == (4_000, 2_500, 5_200)
    assert body.forward_share == 5_000 / 8_000
    # 1600 FLOPs in 2500 ns; backward recomputes 600 of them in its time.
    assert body.forward_flops_per_s == 1_600 / 2_500e-9
    assert body.backward_flops_per_s == (1_700 + 600) / 5_200e-9
    assert found["body.1"].forward_flops == 0
    assert found["body.1"].forward_flops_per_s == 0
    assert found["head"].backward_flops == 0
    assert found["body.2"].name == "2"
    assert (tree.steps, tree.clock) == (2, "host")


def test_classes_by_depth():
    tree = module_tree(COST)
    deepest = tree.by_class(2)
    assert set(deepest) == {"Linear", "ReLU"}
    linear = deepest["Linear"]
    assert (linear.modules, linear.parameters, linear.trainable) == (2, 800, 600)
    assert (linear.forward_flops, linear.forward_ns) == (1_600, 2_300)
    assert linear.forward_flops_per_s == 1_600 / 2_300e-9
    assert tree.top_classes(1, "parameters", 1) == [("Sequential", 800)]
    assert tree.top_classes(1, "forward_ns", 5) == [("Sequential", 2_500), ("Linear", 1_000)]
    assert tree.top_classes(2, "forward_macs", 5) == [("Linear", 800), ("ReLU", 0)]
    assert tree.by_class(7) == {}


@pytest.mark.parametrize("ignore", [{"Sequential"}, ["body"]])
def test_totals_exclude_ignored_modules(ignore):
    tree = module_tree(COST, ignore)
    assert [module.path for module in tree.modules] == ["", "head"]
    root = tree.root
    assert (root.parameters, root.forward_flops, root.backward_flops) == (200, 2_400, 0)
    assert (root.forward_ns, root.backward_ns) == (1_500, 300)
    assert root.forward_flops_per_s == 2_400 / 1_500e-9


def test_ignored_class_inside_kept_modules():
    tree = module_tree(COST, {"Linear"})
    assert [module.path for module in tree.modules] == ["", "body", "body.1"]
    assert tree.root.parameters == 10
    assert tree.root.forward_ns == 700
    assert why_not(module_tree, COST, {"Net"}) == "all modules are ignored"


def test_note_about_ignored_modules():
    tree = module_tree(COST, ["head", "haed"])
    assert tree.notes[:2] == (
        "1 of 6 modules are ignored. FLOPs, Model size and the fvcore tables include them.",
        "No module to ignore has this class or path: haed.",
    )


def test_unmeasured_figures_are_none():
    tree = module_tree(ModelCost(modules=MODULES, count_note="switched off", times_note="too short"))
    root = tree.root
    assert root.parameters == 1_000
    assert (root.forward_flops, root.forward_macs, root.backward_flops, root.recompute_flops) == (None,) * 4
    assert (root.forward_ns, root.backward_ns) == (None,) * 2
    assert (root.forward_flops_per_s, root.macs_share, root.forward_share) == (None,) * 3
    assert tree.notes == (
        "FLOPs weren't measured: switched off.",
        "Latency wasn't measured: too short.",
    )
    assert why_not(module_tree, ModelCost()) == "the model's modules weren't recorded"


@pytest.mark.parametrize(("calls", "is_said"), [(0, True), (2, False)])
def test_note_if_model_itself_was_not_called(calls, is_said):
    """Lightning calls training_step, so no module's latency includes the LightningModule's own work."""
    times = timed(("", calls, 5, None), ("head", 2, 30, None))
    tree = module_tree(ModelCost(modules=MODULES, times=times))
    assert any("The model itself wasn't called" in note for note in tree.notes) == is_said


def test_forward_without_backward():
    forward = ModelCost(
        modules=MODULES,
        count=count(operator("head", 400)),
        times=timed(("", 1, 5, None), ("head", 1, 7, None)),
    )
    root = module_tree(forward).root
    assert (root.forward_flops, root.backward_flops, root.recompute_flops) == (400, None, None)
    assert (root.forward_ns, root.backward_ns, root.backward_flops_per_s) == (12, None, None)


def test_model_without_contractions_has_zero_flops():
    root = module_tree(ModelCost(modules=MODULES, count=count())).root
    assert (root.forward_flops, root.backward_flops, root.macs_share) == (0, None, None)


def test_lazy_parameters_make_totals_unknown():
    lazy = record("body.0", "LazyLinear")
    lazy = replace(lazy, parameters=None, trainable=None)
    tree = module_tree(replace(COST, modules=(*MODULES[:2], lazy, *MODULES[3:])))
    found = by_path(tree)
    assert (found["body.0"].parameters, found["body"].parameters, found[""].parameters) == (None,) * 3
    assert (found["head"].parameters, found["head"].parameters_share) == (190, None)
    assert tree.top_classes(2, "parameters", 5) == [("Linear", 200), ("ReLU", 0)]


def test_compiled_region_includes_time_of_its_modules():
    times = timed(("", 2, 500, 250), ("body", 2, 2_500, 4_500), ("head", 2, 1_000, 50))
    tree = module_tree(replace(COST, times=times))
    found = by_path(tree)
    assert (found["body.0"].forward_ns, found["body.0"].forward_flops_per_s) == (None, None)
    assert found["body.0"].forward_flops == 1_000
    assert found["body"].forward_flops_per_s == 1_600 / 2_500e-9
    assert found[""].forward_flops_per_s == 4_000 / 4_000e-9
    assert tree.by_class(2)["Linear"].forward_ns is None
    # Its time can't be separated from the region's.
    ignoring = by_path(module_tree(replace(COST, times=times), {"body.0"}))
    assert (ignoring["body"].forward_ns, ignoring[""].forward_ns) == (None, None)
    assert ignoring["head"].forward_ns == 1_000


def test_class_with_untimed_module_is_not_measured():
    times = timed(("body.0", 2, 2_000, 4_000), ("body.1", 2, 5, 5))
    tree = module_tree(replace(COST, times=times))
    assert tree.by_class(2)["Linear"].forward_ns is None  # body.2 has FLOPs, so it ran
    assert tree.by_class(2)["ReLU"].forward_ns == 5
    root = tree.root
    assert root.forward_ns == 2_005
    assert root.forward_flops_per_s is None  # the root's own 2000 FLOPs ran in no measured time


def test_operators_without_formula():
    unknown = operator("body.1", None, name="my::op")
    tree = module_tree(replace(COST, count=count(unknown, operator("head", 400), operator("head", None))))
    found = by_path(tree)
    assert found["body.1"].forward_flops is None
    assert (found["head"].forward_flops, found[""].forward_flops) == (400, 400)
    assert tree.notes == ("Operators without a formula, not included in FLOPs: aten::mm, my::op.",)


def test_modules_inside_torchscript_are_unknown():
    modules = (
        record("", "Net"),
        record("a", "RecursiveScriptModule", 4),
        record("a.0", "RecursiveScriptModule", 2),
    )
    found = by_path(module_tree(ModelCost(modules=modules, count=count(operator("", 40)))))
    assert (found["a.0"].forward_flops, found["a"].parameters, found[""].forward_flops) == (None, 6, 40)


def test_unrecorded_module_belongs_to_its_parent():
    cost = replace(COST, count=count(operator("body.9.x", 10)), times=timed(("body.9", 2, 30, 40)))
    body = by_path(module_tree(cost))["body"]
    assert (body.forward_flops, body.forward_ns, body.backward_ns) == (10, 30, 40)


# ---- Compared with brute force


@st.composite
def costs(draw):
    paths = [""]
    for _ in range(draw(st.integers(0, 9))):
        parent = draw(st.sampled_from(paths))
        name = str(len(paths))
        paths.append(f"{parent}.{name}" if parent else name)
    # In the order of named_modules: parents before children, depth first.
    paths.sort(key=lambda path: [int(part) for part in path.split(".")] if path else [])
    number = st.integers(0, 2**60)
    kinds = st.sampled_from(["A", "B", "C"])
    modules = tuple(record(p, draw(kinds), draw(number), draw(number)) for p in paths)
    some = st.sampled_from(paths)
    phases = st.sampled_from(["forward", "backward", "recompute", "optimizer"])
    operators = draw(st.lists(st.builds(operator, some, number, phases), max_size=12))
    times = draw(
        st.none() | st.lists(st.tuples(some, st.just(1), number, number), unique_by=lambda row: row[0])
    )
    return ModelCost(
        modules=modules,
        count=count(*operators),
        times=None if times is None else timed(*times),
    )


def inside(path, root):
    return path == root or root == "" or path.startswith(f"{root}.")


@settings(max_examples=200, deadline=None)
@given(costs(), st.sets(st.sampled_from(["A", "B", "1", "2.3"])))
def test_sums_match_brute_force(cost, ignore):
    dropped = [m.path for m in cost.modules if m.type_name in ignore or m.path in ignore]
    kept = [m for m in cost.modules if not any(inside(m.path, path) for path in dropped)]
    if not kept:
        assert why_not(module_tree, cost, ignore) == "all modules are ignored"
        return
    tree = module_tree(cost, ignore)
    paths = {m.path for m in kept}
    operators = [entry for entry in cost.count.operators if entry.module in paths]
    has_backward = {"backward"} & {entry.phase for entry in cost.count.operators}
    assert [module.path for module in tree.modules] == [m.path for m in kept]
    for module in tree.modules:
        mine = [m for m in kept if inside(m.path, module.path)]
        assert module.parameters == sum(m.parameters for m in mine)
        assert module.trainable == sum(m.trainable for m in mine)
        flops = {
            phase: sum(e.flops for e in operators if e.phase == phase and inside(e.module, module.path))
            for phase in ("forward", "backward")
        }
        assert module.forward_flops == flops["forward"]
        assert module.backward_flops == (flops["backward"] if has_backward else None)
        if cost.times is None:
            assert module.forward_ns is None
            continue
        rows = [t for t in cost.times.times if t.path in paths and inside(t.path, module.path)]
        if not dropped:
            assert module.forward_ns == (sum(t.forward_ns for t in rows) if rows else None)
            assert module.backward_ns == (sum(t.backward_ns for t in rows) if rows else None)
        elif module.forward_ns is not None:
            assert module.forward_ns == sum(t.forward_ns for t in rows)
        if module.forward_flops_per_s is not None:
            timed_paths = {t.path for t in rows}
            for entry in operators:
                if entry.phase == "forward" and entry.flops and inside(entry.module, module.path):
                    assert any(inside(entry.module, path) for path in timed_paths)
    for depth in range(tree.depth + 1):
        members = [module for module in tree.modules if module.depth == depth]
        classes = tree.by_class(depth)
        assert sum(one.modules for one in classes.values()) == len(members)
        assert sum(one.parameters for one in classes.values()) == sum(m.parameters for m in members)
        assert sum(one.forward_flops for one in classes.values()) == sum(m.forward_flops for m in members)


# ---- Tables


def render(*tables):
    return render_text(Report(title="A model", facts=(), tables=tables, notes=()))


def test_module_tables():
    slowest, top, tree = module_tables(module_tree(COST))
    assert (slowest.id, top.id, tree.id) == ("slowest_modules", "top_modules", "module_tree")
    # Of 4000 and 5500 ns, excluding submodules: the model itself has 500 and 250.
    assert slowest.rows == (
        ("body.0", "Linear", 2_000, 4_000, 6_000 / 9_500),
        ("body.2", "Linear", 300, 1_000, 1_300 / 9_500),
        ("head", "Linear", 1_000, 50, 1_050 / 9_500),
        ("Net", "Net", 500, 250, 750 / 9_500),
        ("body.1", "ReLU", 150, 200, 350 / 9_500),
    )
    assert tree.depths == (0, 1, 2, 2, 2, 1)
    assert [row[0] for row in tree.rows] == [
        "Net",
        "body (Sequential)",
        "0 (Linear)",
        "1 (ReLU)",
        "2 (Linear)",
        "head (Linear)",
    ]
    assert tree.rows[1][1:8] == (800, 0.8, 800, 0.4, 2_500, 0.625, 1_600 / 2_500e-9)
    assert [row[:3] for row in top.rows] == [
        ("0", "Net", 1_000),
        ("1", "Sequential", 800),
        ("1", "Linear", 190),
        ("2", "Linear", 800),
        ("2", "ReLU", 0),
    ]
    assert "body (Sequential)" in render(top, tree)


def test_depth_and_top_limit_tables():
    _, top, tree = module_tables(module_tree(COST), module_depth=1, top_modules=1)
    assert tree.depths == (0, 1, 1)
    assert [row[1] for row in top.rows] == ["Net", "Sequential"]
    assert any("depth 1 of 2" in note for note in tree.notes)
    assert [table.id for table in module_tables(module_tree(COST), detailed=False)] == [
        "slowest_modules",
        "top_modules",
    ]
    assert len(module_tables(module_tree(COST), module_depth=99)[2].rows) == len(MODULES)
    assert len(module_tables(module_tree(COST), module_depth=0)[2].rows) == 1


def test_unmeasured_figures_have_note_instead_of_columns():
    top, tree = module_tables(module_tree(ModelCost(modules=MODULES, count_note="off", times_note="off")))
    assert [column.key for column in tree.columns] == ["module", "parameters", "parameters_ratio"]
    assert [column.key for column in top.columns] == ["depth", "parameters_class", "parameters"]
    assert "Latency wasn't measured: off." in tree.notes


def test_absent_tree_has_reason():
    tables = tables_of(analysis_of(steps_of(), cost=ModelCost()), SLOWEST_MODULES, TOP_MODULES, MODULE_TREE)
    assert [table.absent_reason for table in tables] == ["the model's modules weren't recorded"] * 2
    assert "weren't recorded" in render(*tables)
