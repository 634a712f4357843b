"""Every figure of the package has its definition, out of docs/report.md."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import lightning_modelprof
from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.trace_facts import analyze_trace
from lightning_modelprof.cli.compare import compare_runs, compare_stages
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.options import DEFAULT_OPTIONS
from lightning_modelprof.report.tables.run.all_tables import TRACE_TABLES
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.tensorboard_plugin import definitions, report_page
from lightning_modelprof.tensorboard_plugin.definitions import definitions_document
from lightning_modelprof.tensorboard_plugin.report_page import Definition, key_of
from tests.support.fits import ROOT, loader, run_fit
from tests.support.traces import FOLDER, HERE, load

SOURCE = Path(lightning_modelprof.__file__).parent
KINDS = {"Table": "table", "Chart": "chart", "FlameGraph": "flame"}

SELF_EXPLANATORY = {
    "device_usage": {"Device", "Model", "Memory", "Compute capability"},
    "source_lines": {"Line", "Function", "Module"},
    "flops_by_operator": {"Forward", "Backward"},
    "top_modules": {"Depth", "Class"},
    "forward_modules": {"Class", "Parameters"},
    "memory_peaks": {"Value"},
    "callbacks": {"Hook"},
    "slowest_modules": {"Class"},
    "all_ranks": {"Value"},
    "comparison_figures": {"before", "after"},
    "comparison_phases": {"before", "after", "difference"},
    "comparison_settings": {"before", "after"},
    "comparison_findings": {"state"},
    "comparison_tables": {"before", "after"},
    "comparison_steps": {"before", "after"},
}
"""Columns, beside the first of each table, for which the definition of their table has to do."""


def built_ids():
    """(kind, id) of everything that is built with a literal id in the sources of reports."""
    found = set()
    for path in (SOURCE / "report").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                ids = [word.value for word in node.keywords if word.arg == "id"]
                found |= {(KINDS[node.func.id], one.value) for one in ids if isinstance(one, ast.Constant)}
    return found


def trace_table_ids():
    for entry in TRACE_TABLES:
        yield "table", entry.build({0: Absent("a test")}, DEFAULT_OPTIONS).id


def definition_of(kind, name, label=""):
    """What ``static/help.js`` finds for a figure; ``None`` if nothing.

    Args:
        kind: ``table``, ``chart``, ``flame``, ``figure``, ``phase``, ``rule`` or ``verdict``; ``column`` or
            ``row`` of a table.
        name: of a table, chart, flame graph, rule or verdict its id, of a phase or key figure its label.
        label: of a column (after its group's) or a row.
    """
    document = definitions_document()
    figures = document["figures"]
    if kind in ("table", "column", "row"):  # one for each window, and one of changes for each table
        name = "changes" if name.endswith("_changes") else re.sub(r"(?<=^model_summary)_\d+$", "", name)
    if kind in ("column", "row"):
        label = re.sub(r" \([^)]*\)$", "", label) if kind == "row" else label  # ips (steps/s)
        words = label.split(" ")
        # The group's label is a part of some terms and not of others: CPU Total, Latency.
        keys = [f"{kind}:{name}:{key_of(' '.join(words[start:]))}" for start in range(len(words))]
        keys += [f"column:*:{key_of(label)}", f"column:*:{key_of(words[-1])}"] if kind == "column" else []
    else:
        keys = [f"{kind}:{key_of(name) if kind in ('figure', 'phase') else name}"]
    anchor = next((figures[key] for key in keys if key in figures), None)
    return None if anchor is None else Definition(**document["sections"][anchor], anchor=anchor)


IDS = sorted(built_ids() | set(trace_table_ids()))


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One of each kind, with every table that can be made here."""
    folders = [tmp_path_factory.mktemp("fit") for _ in range(2)]
    asked = {"flops": True, "sampling": True, "profile_memory": True, "fvcore": True, "skip_first": 6}
    found = [run_fit(folder, data=loader(200), active=3, **asked).report for folder in folders]
    paths = [[str(folder / "modelprof")] for folder in folders]
    found.append(compare_runs(*paths, tolerance=0.01)[0])
    found.append(compare_stages([one for side in paths for one in side], tolerance=0.01))
    jobs = [["sampled_2rank_rank0", "sampled_2rank_rank1"]]
    if FOLDER != HERE:
        jobs += [["a100_nccl"], ["v100_resnet50_workers0"]]
    found += [build_trace_report([analyze_trace(load(name)) for name in names]) for names in jobs]
    return found


def test_the_ids_are_found():
    assert {("table", "kernels"), ("table", "operators_by_shape"), ("flame", "modules")} <= set(IDS)
    assert {("chart", "step_time"), ("table", "comparison_figures"), ("table", "model_summary")} <= set(IDS)


@pytest.mark.parametrize(("kind", "name"), IDS)
def test_everything_that_can_be_built_is_defined(kind, name):
    definition = definition_of(kind, name)
    assert definition is not None, f"{kind} {name}: write it into docs/report.md, and into SECTIONS"
    assert len(definition.html) > 40


def test_nothing_is_mapped_that_is_not_built():
    mapped = {(kind, name) for kind in ("table", "chart", "flame") for name in definitions.SECTIONS[kind]}
    # The changes of each table have its name before theirs.
    assert mapped == set(IDS) | {("table", "changes")}
    assert definition_of("table", "kernels_changes").heading == "Changes row by row"


def test_every_column_of_real_reports(reports):
    """All but the names of rows and what explains itself have a definition of their own."""
    without = {}
    for table in (table for report in reports for table in report.tables):
        name = re.sub(r"^(model_summary)_\d+$", r"\1", table.id)
        assert definition_of("table", table.id) is not None
        for column in table.columns[1:]:
            label = f"{column.group or ''} {column.label}".strip()
            explained = column.label in SELF_EXPLANATORY.get(name, ())
            if definition_of("column", table.id, label) is None and not explained:
                without.setdefault(name, set()).add(label)
    assert without == {}


def test_every_chart_and_flame_graph_of_real_reports(reports):
    for report in reports:
        for chart in report.charts:
            assert definition_of("chart", chart.id) is not None
        for flame in report.flames:
            assert definition_of("flame", flame.id) is not None


def test_phases_rules_and_key_figures(reports):
    for phase in PHASES:
        assert definition_of("phase", phase.label) is not None, phase
        assert definition_of("row", "phases", phase.label) is not None
    for name in ("batch_cost", "ips", "Reader Ratio", "FLOP/s", "MFU"):
        assert definition_of("figure", name) is not None
    for finding in (finding for report in reports for finding in report.findings):
        assert definition_of("rule", finding.kind) is not None, finding.kind
    for bound in ("input", "host", "sync", "communication", "overhead", "device"):
        assert definition_of("verdict", f"{bound}_bound") is not None, bound
    for kind in ("balanced", "cannot_tell", "out_of_memory"):
        assert definition_of("verdict", kind) is not None, kind


@pytest.mark.parametrize(
    ("kind", "name", "label", "begins"),
    [
        ("column", "kernels", "Blocks per SM", "Blocks per SM and Occupancy: means weighted by time"),
        ("column", "kernels", "Occupancy (%)", "Blocks per SM and Occupancy: means weighted by time"),
        ("column", "operators", "CPU Self", "CPU Self: time in which neither an operator nor a runtime call"),
        ("column", "operators", "CPU Ratio(%)", "Ratio: Self / Σ Self of all operators."),
        ("column", "runtime_calls", "CPU Ratio(%)", "Runtime Calls: by function of CUDA's"),
        ("column", "launches", "Ratio(%)", "Ratio: the share of all kernels"),
        ("column", "module_tree", "Backward Latency", "Backward latency: time of the autograd"),
        ("column", "user_ranges", "GPU Avg", "Avg, Max, Min: of one call"),
        ("column", "model_summary_3", "CPU Ratio(%)", "CPU Ratio: the share of ProfileStep."),
        ("row", "idle", "rank 0 GPU 0 Host wait", "Host wait: its launch began after the gap did"),
        ("row", "perf_summary", "ips (steps/s)", "ips: steps, and samples, in a second."),
        ("row", "flops", "Recompute", "What it is"),
        ("row", "model_summary", "Gradient clipping", "configure_gradient_clipping"),
        ("phase", "Dataloader", "", "the loop waits for its next batch"),
        ("verdict", "input_bound", "", "From"),
        ("rule", "clip_cost", "", "Found if"),
    ],
)
def test_terms(kind, name, label, begins):
    assert text_of(definition_of(kind, name, label).html).startswith(begins)


def test_nobody_defines_what_is_not_there():
    assert definition_of("column", "kernels", "Nonsense") is None
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
    document = definitions_document()
    assert len(json.dumps(document).encode()) < 280_000
    assert set(document["figures"].values()) <= set(document["sections"])
    assert all(re.fullmatch(r"[a-z0-9-]+(#[a-z0-9-]+)?", anchor) for anchor in document["sections"])


def test_the_html_is_plain():
    """Tables are tables; nothing that runs, loads or leads anywhere."""
    found = set()
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attributes: found.add((tag, *(name for name, _ in attributes)))
    for section in definitions_document()["sections"].values():
        reader.feed(section["html"])
    tags = {tag for tag, *_ in found}
    assert {"table", "td", "strong", "code", "li", "dl"} <= tags
    assert tags <= {
        *("p", "strong", "em", "code", "pre", "ul", "ol", "li", "dl", "dt", "dd"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    assert {name for _, *names in found for name in names} <= {"start"}


def test_html_of_the_page_itself_is_shown_and_not_run():
    render = report_page.renderer()
    assert "<img" not in render("a <img src=x onerror=alert(1)> b\n\n<script>alert(1)</script>")
    assert "&lt;operator&gt;" in render("**in <operator>**")
    assert "href" not in render("[compare.md](compare.md) [x](javascript:alert(1))")


@pytest.mark.parametrize("pages", [{}, {"report.md": "# Something else\n\n## Words\n"}])
def test_without_the_page_there_is_no_help(tmp_path, monkeypatch, pages):
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(report_page, "PLACES", (tmp_path / "report.md",))
    definitions_document.cache_clear()
    try:
        assert definitions_document() == {"sections": {}, "figures": {}}
        assert definition_of("table", "kernels") is None
    finally:
        monkeypatch.undo()
        definitions_document.cache_clear()


def test_a_page_with_less_in_it_defines_less(tmp_path, monkeypatch):
    (tmp_path / "report.md").write_text(f"{report_page.TITLE}\n\n## Kernel Summary\n\n**Occupancy**: a. B.\n")
    monkeypatch.setattr(report_page, "PLACES", (tmp_path / "report.md",))
    definitions_document.cache_clear()
    try:
        assert (
            definition_of("column", "kernels", "Occupancy").html == "<p><strong>Occupancy</strong>: a. B.</p>"
        )
        assert definition_of("phase", "Forward") is None
    finally:
        monkeypatch.undo()
        definitions_document.cache_clear()


def test_only_two_places_are_looked_at():
    beside = Path(report_page.__file__).with_name("report.md")
    assert list(report_page.PLACES) == [beside, ROOT / "docs" / "report.md"]


def test_the_browser_makes_the_same_keys():
    """``keyOf`` of help.js is ``key_of``; the labels are those of the page and some odd ones."""
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
    source = (SOURCE / "tensorboard_plugin" / "static" / "help.js").read_text(encoding="utf-8")
    function = re.search(r"export (function keyOf.*?\n})\n", source, re.DOTALL).group(1)
    script = f"{function}; console.log(JSON.stringify({json.dumps(labels)}.map(keyOf)))"
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [key_of(label) for label in labels]


def test_the_plugin_starts_without_markdown():
    """TensorBoard imports it at its start."""
    script = (
        "import sys, lightning_modelprof.tensorboard_plugin.definitions;"
        "print('markdown' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ
    )
    assert done.stdout.split() == ["False", "False"]
