"""Tests that every figure is defined where it is built, and that docs/report.md has all definitions."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import lightning_modelprof
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.cli.compare import compare_runs, compare_stages
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.charts.all_charts import CHARTS, FLAMES, TRACE_CHARTS
from lightning_modelprof.report.compare.row_changes import changed_rows
from lightning_modelprof.report.definitions import column_definition, definition, row_definition, sections
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.rules.all_rules import RULES
from lightning_modelprof.report.specs import TableSpec
from lightning_modelprof.report.tables.run.all_tables import KINDS
from lightning_modelprof.report.verdict import LEAST_SHARE
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.show.document import render_json
from lightning_modelprof.tensorboard_plugin.views import VIEWS
from tests.support.fits import ROOT, loader, run_fit
from tests.support.golden import UPDATE_VARIABLE
from tests.support.reference import PAGE, with_definitions
from tests.support.traces import load

SOURCE = Path(lightning_modelprof.__file__).parent
DRAWINGS = (*CHARTS, *TRACE_CHARTS, *FLAMES)


def kinds_in_sources():
    """Every table kind in the report sources, by id."""
    found = {}
    for path in sorted((SOURCE / "report").rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        if "TableSpec(" in path.read_text(encoding="utf-8") and path.stem != "specs":
            of_file = vars(importlib.import_module(name)).values()
            found |= {value.id: value for value in of_file if isinstance(value, TableSpec)}
    return found


KNOWN = kinds_in_sources()


def definition_of(kind, name, label=""):
    """Definition of a figure as shown on a page; ``""`` if it has none.

    Args:
        kind: ``table``, ``chart``, ``flame``, ``figure``, ``rule`` or ``verdict``; ``column`` or ``row`` of a
            table.
        name: id of a table, chart, flame graph, rule or verdict; label of a key figure.
        label: column key or row label.
    """
    if kind == "column":
        return column_definition(name, label)
    return row_definition(name, label) if kind == "row" else definition(kind, name)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One report of each kind, with every table that this machine can produce."""
    folders = [tmp_path_factory.mktemp("fit") for _ in range(2)]
    asked = {"flops": True, "sampling": True, "profile_memory": True, "fvcore": True, "skip_first": 6}
    found = [run_fit(folder, data=loader(200), active=3, **asked).report for folder in folders]
    paths = [[str(folder / "modelprof")] for folder in folders]
    found.append(compare_runs(*paths, tolerance=0.01)[0])
    found.append(compare_stages([one for side in paths for one in side], tolerance=0.01))
    jobs = [["sampled_2rank_rank0", "sampled_2rank_rank1"], ["a100_nccl"], ["v100_resnet50_workers0"]]
    found += [build_trace_report([TraceFacts(load(name)) for name in names]) for names in jobs]
    return found


def test_docs_have_all_definitions():
    """``python -m tests.support.reference`` updates the page."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = with_definitions(page)
    if os.environ.get(UPDATE_VARIABLE):
        PAGE.write_text(wanted, encoding="utf-8")
    else:
        assert page == wanted, "run python -m tests.support.reference"
    keys = [section.key for section in sections()]
    assert sorted(re.findall(r"<!-- generated: (\S+) -->", page)) == sorted(keys)


def test_new_table_gets_its_section():
    page = PAGE.read_text(encoding="utf-8")
    block = re.search(r"## Kernel Summary\n.*?<!-- end -->\n\n", page, re.DOTALL).group()
    again = with_definitions(page.replace(block, ""))
    assert block.strip() in again
    assert again.index("## Operator Summary\n") < again.index(block.strip())


@pytest.mark.parametrize("kind", KNOWN.values(), ids=KNOWN)
def test_every_table_kind_is_defined(kind):
    assert len(definition_of("table", kind.id)) > 30
    keys = [column.key for column in kind.columns]
    assert len(set(keys)) == len(keys)
    without = [key for key in keys[1:] if not definition_of("column", kind.id, key)]
    assert without == []
    for label in kind.rows:
        assert definition_of("row", kind.id, label)


def test_registry_has_every_kind_of_run_and_trace_tables():
    comparisons = {one for one in KNOWN if one.startswith(("comparison_", "stages", "changes"))}
    assert comparisons
    assert set(KINDS) == set(KNOWN) - comparisons


def test_tables_of_real_reports_match_their_kinds(reports):
    """Every column has a definition, except the first, which holds row names."""
    without = {}
    for table in (table for report in reports for table in report.tables):
        kind = KNOWN[re.sub(r"_\d+$", "", table.id)]
        assert not any(hasattr(column, "help") for column in table.columns)
        for column in table.columns[1:]:
            if not definition_of("column", table.id, column.key):
                without.setdefault(kind.id, set()).add(column.key)
    assert without == {}


def test_definitions_are_not_stored_in_reports(reports):
    """So older stored reports also get help texts, and can be compared."""
    for report in reports:
        assert b'"help"' not in render_json(report)
    first, second = reports[:2]
    stored = msgspec.json.encode(first)
    older = stored.replace(b',"help":""', b"")
    assert b'"help"' not in older
    for packed in (stored, older):
        opened = msgspec.json.decode(packed, type=Report)
        assert changed_rows(opened, second) == changed_rows(first, second) != ()


def test_named_views_exist():
    known = {view.key for view in VIEWS}
    named = {view for one in (*KNOWN.values(), *DRAWINGS) for view in one.views}
    assert named <= known
    assert {"overview", "steps", "kernels", "modules", "memory", "distributed", "operators"} <= named


def test_charts_and_flame_graphs_of_real_reports_are_defined(reports):
    by_id = {("chart", one.id) for one in (*CHARTS, *TRACE_CHARTS)} | {("flame", one.id) for one in FLAMES}
    drawn = {("chart", one.id) for report in reports for one in report.charts}
    drawn |= {("flame", one.id) for report in reports for one in report.flames}
    assert drawn <= by_id
    assert len(drawn) > 8
    for kind, name in by_id:
        assert definition_of(kind, name)


def test_drawing_ids_match_their_charts():
    """Includes drawings that none of these reports has."""
    built = set()
    for path in (SOURCE / "report").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("Chart", "FlameGraph")
            ):
                ids = [word.value for word in node.keywords if word.arg == "id"]
                built |= {one.value for one in ids if isinstance(one, ast.Constant)}
    assert built == {one.id for one in DRAWINGS}


def test_phases_rules_key_figures_and_verdicts_are_defined():
    for phase in PHASES:
        assert definition_of("row", "phases", phase.label), phase
    for name in ("batch_cost", "ips", "Reader Ratio", "FLOP/s", "MFU"):
        assert definition_of("figure", name)
    for rule in RULES:
        assert len(definition_of("rule", rule.kind)) > 30, rule.kind
    for kind in ("device_bound", *LEAST_SHARE, "balanced", "cannot_tell", "out_of_memory"):
        assert definition_of("verdict", kind), kind


def test_rule_levels_show_their_thresholds():
    by_kind = {rule.kind: rule for rule in RULES}
    assert by_kind["input_bound"].levels == "5%, 20%"
    assert by_kind["slow_callback"].levels == "3%, 15% of the loop"
    assert by_kind["memory_fragmentation"].levels == "30% and 1 GiB"
    assert by_kind["conv_bias_before_batchnorm"].levels == ""


@pytest.mark.parametrize(
    ("kind", "name", "label", "begins"),
    [
        ("column", "kernels", "blocks_per_sm", "mean over the calls"),
        ("column", "kernels", "occupancy", "mean over the calls"),
        ("column", "operators", "host_self_ns", "time with no nested operator or runtime call"),
        ("column", "operators", "host_ratio", "Self / Σ Self of all operators."),
        ("column", "runtime_calls", "host_ratio", "share of the time in all runtime calls"),
        ("column", "launches", "ratio", "share of all kernels"),
        ("column", "module_tree", "backward_ns", "time of the autograd"),
        ("column", "user_ranges", "device_avg_ns", "per call"),
        ("column", "model_summary_3", "host_ratio", "share of ProfileStep."),
        ("column", "kernels_changes", "ratio", "difference relative to before."),
        ("row", "idle", "rank 0 GPU 0 CPU", "nothing was queued"),
        ("row", "perf_summary", "ips (steps/s)", "steps (batches in evaluation loops) and samples"),
        ("row", "flops", "Recompute", "forward work done again"),
        ("row", "model_summary", "Gradient clipping", "configure_gradient_clipping"),
        ("row", "phases", "Dataloader", "time waiting for the next batch"),
        ("verdict", "input_bound", "", "these findings take at least 20%"),
    ],
)
def test_definitions_start_as_expected(kind, name, label, begins):
    assert definition_of(kind, name, label).startswith(begins)


def test_unknown_names_have_no_definition():
    assert definition_of("column", "kernels", "nonsense") == ""
    assert definition_of("table", "nonsense") == ""
    assert definition_of("row", "kernels", "aten::add") == ""


def test_definitions_on_a_page_are_plain_text():
    markdown = {one.text for section in sections() for one in (section, *section.terms)}
    assert any("`" in one for one in markdown)
    assert any("**" in one for one in markdown)
    tables = [definition_of("table", name) for name in KNOWN]
    columns = [definition_of("column", kind.id, one.key) for kind in KNOWN.values() for one in kind.columns]
    drawings = [definition_of("chart", one.id) or definition_of("flame", one.id) for one in DRAWINGS]
    shown = [*tables, *columns, *drawings, *(definition_of("rule", rule.kind) for rule in RULES)]
    assert [one for one in shown if re.search(r"\*\*|`|\]\(", one)] == []
    assert definition_of("rule", "input_bound").endswith(
        "Warning, critical: 5%, 20%\n\nWhere: data set, collate_fn; with workers, their busiest statement"
        "\n\nOther thresholds: least_samples=10"
    )


def test_plugin_answers_without_torch():
    """TensorBoard imports the plugin at its first request."""
    script = "import sys, lightning_modelprof.tensorboard_plugin.answers; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ
    )
    assert done.stdout.split() == ["False"]
