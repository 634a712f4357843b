"""Every figure of the package has its definition, on what makes it, and docs/report.md has them all."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

import lightning_modelprof
from lightning_modelprof.analysis.trace.trace_facts import analyze_trace
from lightning_modelprof.cli.compare import compare_runs, compare_stages
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.charts.all_charts import CHARTS, FLAMES, TRACE_CHARTS
from lightning_modelprof.report.compare.row_changes import changed_rows
from lightning_modelprof.report.definitions import key_of, sections
from lightning_modelprof.report.kinds import TableKind
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.rules.all_rules import RULES
from lightning_modelprof.report.tables.run.all_tables import KINDS
from lightning_modelprof.report.verdict import LEAST_SHARE
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.show.html.help.definitions import definitions_document, renderer
from lightning_modelprof.show.json import render_json
from lightning_modelprof.tensorboard_plugin.views import VIEWS, view_sections
from tests.support.fits import ROOT, loader, run_fit
from tests.support.golden import UPDATE_VARIABLE
from tests.support.reference import PAGE, with_definitions
from tests.support.traces import load

SOURCE = Path(lightning_modelprof.__file__).parent
DRAWINGS = (*CHARTS, *TRACE_CHARTS, *FLAMES)


def kinds_in_sources():
    """Every table kind that a file of reports has, by its id."""
    found = {}
    for path in sorted((SOURCE / "report").rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        if "TableKind(" in path.read_text(encoding="utf-8") and path.stem != "kinds":
            of_file = vars(importlib.import_module(name)).values()
            found |= {value.id: value for value in of_file if isinstance(value, TableKind)}
    return found


KNOWN = kinds_in_sources()


def definition_of(kind, name, label=""):
    """What ``html/help/help.js`` finds for a figure: heading, HTML and anchor; ``None`` if nothing.

    Args:
        kind: ``table``, ``chart``, ``flame``, ``figure``, ``phase``, ``rule`` or ``verdict``; ``column`` or
            ``row`` of a table.
        name: of a table, chart, flame graph, rule or verdict its id, of a phase or key figure its label.
        label: key of a column, label of a row.
    """
    document = definitions_document(tuple(view_sections()))
    figures = document["figures"]
    if kind in ("table", "column", "row"):  # one for each window, and one of changes for each table
        name = "changes" if name.endswith("_changes") else re.sub(r"_\d+$", "", name)
    if kind == "row":
        words = re.sub(r" \([^)]*\)$", "", label).split(" ")  # ips (steps/s)
        keys = [f"row:{name}:{key_of(' '.join(words[start:]))}" for start in range(len(words))]
    elif kind == "column":
        keys = [f"column:{name}:{label}"]
    else:
        keys = [f"{kind}:{key_of(name) if kind in ('figure', 'phase') else name}"]
    anchor = next((figures[key] for key in keys if key in figures), None)
    return None if anchor is None else document["sections"][anchor]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One of each kind, with every table that can be made here."""
    folders = [tmp_path_factory.mktemp("fit") for _ in range(2)]
    asked = {"flops": True, "sampling": True, "profile_memory": True, "fvcore": True, "skip_first": 6}
    found = [run_fit(folder, data=loader(200), active=3, **asked).report for folder in folders]
    paths = [[str(folder / "modelprof")] for folder in folders]
    found.append(compare_runs(*paths, tolerance=0.01)[0])
    found.append(compare_stages([one for side in paths for one in side], tolerance=0.01))
    jobs = [["sampled_2rank_rank0", "sampled_2rank_rank1"], ["a100_nccl"], ["v100_resnet50_workers0"]]
    found += [build_trace_report([analyze_trace(load(name)) for name in names]) for names in jobs]
    return found


def test_docs_have_the_definitions():
    """``python -m tests.support.reference`` brings the page up to date."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = with_definitions(page)
    if os.environ.get(UPDATE_VARIABLE):
        PAGE.write_text(wanted, encoding="utf-8")
    else:
        assert page == wanted, "run python -m tests.support.reference"
    keys = [section.key for section in (*sections(), *view_sections())]
    assert sorted(re.findall(r"<!-- generated: (\S+) -->", page)) == sorted(keys)


def test_a_new_table_gets_its_section():
    page = PAGE.read_text(encoding="utf-8")
    block = re.search(r"## Kernel Summary\n.*?<!-- end -->\n\n", page, re.DOTALL).group()
    again = with_definitions(page.replace(block, ""))
    assert block.strip() in again
    assert again.index("## Operator Summary\n") < again.index(block.strip())


@pytest.mark.parametrize("kind", KNOWN.values(), ids=KNOWN)
def test_every_kind_of_table_is_defined(kind):
    definition = definition_of("table", kind.id)
    assert len(definition["html"]) > 40
    keys = [column.key for column in kind.columns]
    assert len(set(keys)) == len(keys)
    without = [key for key in keys[1:] if definition_of("column", kind.id, key) is None]
    assert without == []
    for label in kind.rows:
        assert definition_of("row", kind.id, label) is not None


def test_the_registry_has_every_kind_of_run_and_traces():
    comparisons = {one for one in KNOWN if one.startswith(("comparison_", "stages", "changes"))}
    assert comparisons
    assert set(KINDS) == set(KNOWN) - comparisons


def test_every_table_of_real_reports_is_of_its_kind(reports):
    """All columns but the first, the names of rows, are those of the kind, with a definition each."""
    without = {}
    for table in (table for report in reports for table in report.tables):
        kind = KNOWN[re.sub(r"_\d+$", "", table.id)]
        assert not any(column.help for column in table.columns)
        for column in table.columns[1:]:
            if definition_of("column", table.id, column.key) is None:
                without.setdefault(kind.id, set()).add(column.key)
    assert without == {}


def test_nothing_of_it_is_stored(reports):
    """So a report that was stored before has its help as well, and compares."""
    for report in reports:
        assert b'"help"' not in render_json(report)
    first, second = reports[:2]
    stored = msgspec.json.encode(first)
    older = stored.replace(b',"help":""', b"")
    assert b'"help"' not in older
    for packed in (stored, older):
        opened = msgspec.json.decode(packed, type=Report)
        assert changed_rows(opened, second) == changed_rows(first, second) != ()


def test_every_view_that_is_named_exists():
    known = {view.key for view in VIEWS}
    named = {view for one in (*KNOWN.values(), *DRAWINGS) for view in one.views}
    assert named <= known
    assert {"overview", "steps", "kernels", "modules", "memory", "distributed", "operators"} <= named


def test_every_chart_and_flame_graph_of_real_reports(reports):
    by_id = {("chart", one.id) for one in (*CHARTS, *TRACE_CHARTS)} | {("flame", one.id) for one in FLAMES}
    drawn = {("chart", one.id) for report in reports for one in report.charts}
    drawn |= {("flame", one.id) for report in reports for one in report.flames}
    assert drawn <= by_id
    assert len(drawn) > 8
    for kind, name in by_id:
        assert definition_of(kind, name) is not None


def test_ids_of_drawings_are_those_of_what_they_draw():
    """Also of those that no report here has."""
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


def test_phases_rules_and_key_figures():
    for phase in PHASES:
        assert definition_of("phase", phase.label) is not None, phase
        assert definition_of("row", "phases", phase.label) is not None
    for name in ("batch_cost", "ips", "Reader Ratio", "FLOP/s", "MFU"):
        assert definition_of("figure", name) is not None
    for rule in RULES:
        assert len(definition_of("rule", rule.kind)["html"]) > 40, rule.kind
    for kind in ("device_bound", *LEAST_SHARE, "balanced", "cannot_tell", "out_of_memory"):
        assert definition_of("verdict", kind) is not None, kind


def test_levels_of_a_rule_are_its_fields():
    by_kind = {rule.kind: rule for rule in RULES}
    assert by_kind["input_bound"].levels == "5%, 20%"
    assert by_kind["slow_callback"].levels == "3%, 15% of the loop"
    assert by_kind["memory_fragmentation"].levels == "30% and 1 GiB"
    assert by_kind["conv_bias_before_batchnorm"].levels == ""


@pytest.mark.parametrize(
    ("kind", "name", "label", "begins"),
    [
        ("column", "kernels", "blocks_per_sm", "Blocks per SM: mean over the calls"),
        ("column", "kernels", "occupancy", "Occupancy: mean over the calls"),
        ("column", "operators", "host_self_ns", "CPU Self: time with no nested operator or runtime call"),
        ("column", "operators", "host_ratio", "CPU Ratio(%): Self / Σ Self of all operators."),
        ("column", "runtime_calls", "host_ratio", "CPU Ratio(%): share of the time in all runtime calls"),
        ("column", "launches", "ratio", "Ratio(%): share of all kernels"),
        ("column", "module_tree", "backward_ns", "Backward Latency: time of the autograd"),
        ("column", "user_ranges", "device_avg_ns", "Avg: per call"),
        ("column", "model_summary_3", "host_ratio", "CPU Ratio(%): share of ProfileStep."),
        ("column", "kernels_changes", "ratio", "change: difference relative to before."),
        ("row", "idle", "rank 0 GPU 0 Waiting for CPU", "Waiting for CPU: nothing was queued"),
        ("row", "perf_summary", "ips (steps/s)", "ips: steps (batches in evaluation loops) and samples"),
        ("row", "flops", "Recompute", "Recompute: forward work done again"),
        ("row", "model_summary", "Gradient clipping", "Gradient clipping: configure_gradient_clipping"),
        ("phase", "Dataloader", "", "Dataloader: time waiting for the next batch"),
        ("verdict", "input_bound", "", "INPUT-BOUND: these findings take at least 20%"),
        ("rule", "clip_cost", "", "Criterion"),
    ],
)
def test_terms(kind, name, label, begins):
    assert text_of(definition_of(kind, name, label)["html"]).startswith(begins)


def test_nobody_defines_what_is_not_there():
    assert definition_of("column", "kernels", "nonsense") is None
    assert definition_of("table", "nonsense") is None
    assert definition_of("row", "kernels", "aten::add") is None


def text_of(html):
    """What a reader sees, blanks as one."""
    reader = HTMLParser()
    parts = []
    reader.handle_data = parts.append
    reader.feed(html)
    return " ".join("".join(parts).split())


def test_the_document_is_small_whole_and_plain():
    document = definitions_document(tuple(view_sections()))
    assert len(json.dumps(document).encode()) < 300_000
    assert set(document["figures"].values()) <= set(document["sections"])
    assert all(re.fullmatch(r"[a-z0-9-]+(#[a-z0-9-]+)?", anchor) for anchor in document["sections"])


def test_the_html_is_plain():
    """Tables are tables; nothing that runs, loads or leads anywhere."""
    found = set()
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attributes: found.add((tag, *(name for name, _ in attributes)))
    for section in definitions_document(tuple(view_sections()))["sections"].values():
        reader.feed(section["html"])
    tags = {tag for tag, *_ in found}
    assert {"table", "td", "strong", "code", "li"} <= tags
    assert tags <= {
        *("p", "strong", "em", "code", "pre", "ul", "ol", "li"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    assert {name for _, *names in found for name in names} <= {"start"}


def test_html_of_the_page_itself_is_shown_and_not_run():
    render = renderer()
    assert "<img" not in render("a <img src=x onerror=alert(1)> b\n\n<script>alert(1)</script>")
    assert "&lt;operator&gt;" in render("**in <operator>**")
    assert "href" not in render("[compare.md](compare.md) [x](javascript:alert(1))")


def test_the_browser_makes_the_same_keys():
    """``helpKey`` of help.js is ``key_of``; the labels are those of the page and some odd ones."""
    node = subprocess.run(["which", "node"], capture_output=True, text=True, check=False).stdout.strip()
    if not node:
        pytest.skip("node is not installed")
    labels = [
        "Ratio(%)",
        "%",
        "Occupancy 0 (%)",
        "CPU(Process)",
        "FLOP/s",
        " Größe, ß ",
        "",
        "a_b",
        "MFU / HFU",
    ]
    source = (SOURCE / "show" / "html" / "help" / "help.js").read_text(encoding="utf-8")
    function = re.search(r"export (function helpKey.*?\n})\n", source, re.DOTALL).group(1)
    script = f"{function}; console.log(JSON.stringify({json.dumps(labels)}.map(helpKey)))"
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [key_of(label) for label in labels]


def test_the_plugin_starts_without_markdown():
    """TensorBoard imports it at its start."""
    script = (
        "import sys, lightning_modelprof.tensorboard_plugin.answers;"
        "print('markdown' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ
    )
    assert done.stdout.split() == ["False", "False"]
