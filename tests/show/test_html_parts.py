"""Report parts for other pages are the same as in report.html."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from os.path import normpath
from pathlib import Path

import pytest

from lightning_modelprof.report.definitions import column_definition, definition, row_definition
from lightning_modelprof.report.model import (
    Chart,
    Column,
    Finding,
    Series,
    Severity,
    Status,
    Table,
    Unit,
    Verdict,
)
from lightning_modelprof.report.summary import Summary
from lightning_modelprof.show.html import parts as html_parts
from lightning_modelprof.show.html.document import encode, page_document, table_data
from lightning_modelprof.show.html.page import SHARED_FILES, SHARED_FOLDER, render_html
from tests.show.test_show_html import Page, report_of
from tests.support.page_document import document_of
from tests.support.sample_flames import flame_of
from tests.support.sample_reports import ALL_REPORTS, benchmark_of


def pieces(report):
    """The report's head and the text in place of absent tables."""
    return [
        html_parts.verdict_html(report),
        html_parts.findings_html(report),
        html_parts.figures_html(report),
        html_parts.facts_html(report),
        html_parts.absent_html(report.tables),
        html_parts.notes_html(report),
    ]


def drawn(report):
    tables = (table_data(table, is_folded=table.is_detail) for table in report.tables if table.rows)
    return page_document(report.charts, report.flames, tables)


def squeezed(text):
    return re.sub(r"\s+", " ", text).strip()


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_parts_match_page(name):
    report = ALL_REPORTS[name]()
    data = render_html(report)
    page = squeezed(data.decode())
    written = [squeezed(piece) for piece in pieces(report) if piece]
    for piece in written:
        assert piece in page
    document = document_of(data)
    assert document == json.loads(encode(drawn(report)))
    assert (bool(written) or any(document.values())) == (name != "empty")


def test_headings_have_definitions_as_titles():
    columns = (Column("name", "Name"), Column("blocks_per_sm", "Blocks per SM", Unit.RATE), Column("x", "X"))
    phases = Table(id="phases", title="P", columns=(Column("p", "p"),), rows=(("Forward",), ("mine",)))
    steps = Series(key="s", label="S", values=(1.0,))
    report = report_of(
        Table(id="kernels_2", title="Kernels", columns=columns, rows=(("gemm", 1.0, "y"),)),
        phases,
        Table(id="own", title="Own", columns=columns[:1], rows=(("Backward",),)),
        charts=(
            Chart(
                id="step_time",
                title="Times",
                kind="line",
                x_label="x",
                x=(0.0,),
                unit=Unit.COUNT,
                series=(steps,),
            ),
        ),
        flames=(flame_of([("f", 1.0, True, [])], id="modules", title="F"),),
        verdict=Verdict(kind="host_bound", summary="", accounted_ratio=None),
        findings=(
            Finding(
                kind="launch_bound", status=Status.FOUND, severity=Severity.WARNING, title="Late", summary=""
            ),
        ),
        summary=Summary(benchmark=benchmark_of(1.0)),
    )
    data = render_html(report)
    headings = [one for one in Page(data).elements if one["tag"] in ("strong", "h2", "dt")]
    titles = {one["text"]: one["attributes"].get("title", "") for one in headings}
    document = document_of(data)
    tables = document["tables"]
    for one in (*document["charts"], *document["flames"], *tables):
        titles[one["title"]] = one["about"]
    for header in (header for table in tables for header in table["headers"]):
        titles[header["label"]] = titles.get(header["label"]) or header["about"]
    assert titles == {
        "Kernels": definition("table", "kernels"),
        "Name": "",
        "Blocks per SM": column_definition("kernels", "blocks_per_sm"),
        "X": "",
        "P": definition("table", "phases"),
        "p": "",
        "Own": "",
        "Times": definition("chart", "step_time"),
        "Flame graph": "",
        "F": definition("flame", "modules"),
        "HOST-BOUND": definition("verdict", "host_bound"),
        "Late": definition("rule", "launch_bound"),
        "batch_cost": definition("figure", "batch_cost"),
    }
    assert len([title for title in titles.values() if title]) == 8
    forward = row_definition("phases", "Forward")
    assert [table["abouts"] for table in tables] == [{}, {"0": forward}, {}]
    assert forward


def test_empty_report_has_no_parts():
    assert "".join(pieces(report_of())) == ""
    assert drawn(report_of()) == {"charts": [], "flames": [], "tables": []}


def test_table_without_rows_gives_reason():
    table = Table(
        id="t", title="<T>", columns=(Column("n", "N"),), rows=(), absent_reason="no <i>", notes=("Note.",)
    )
    page = Page(html_parts.absent_html([table]).encode())
    assert page.one("li")["text"] == "<T>: no <i>. Note."
    assert page.all("i") == []


def test_absent_section_omits_tables_with_rows():
    table = Table(id="t", title="There", columns=(Column("n", "N", Unit.COUNT),), rows=((1,),))
    assert html_parts.absent_html([table]) == ""
    missing = replace(table, title="Missing", rows=(), absent_reason="nobody looked")
    text = Page(html_parts.absent_html([table, missing]).encode()).one("section")["text"]
    assert text == "Not availableMissing: nobody looked."


def test_shared_modules_import_only_earlier_ones():
    names = [name for name in SHARED_FILES if name.endswith(".js")]
    assert "document.js" in names
    for name in names:
        text = (SHARED_FOLDER / name).read_text()
        imported = re.findall(r'^import .* from "(.*)";$', text, re.MULTILINE)
        before = names[: names.index(name)]  # joined in order, they are the script of report.html
        assert {normpath(f"{Path(name).parent}/{one}") for one in imported} <= set(before)
        assert "innerHTML" not in text


def test_joined_script_has_no_imports_or_exports():
    script = Page(render_html(report_of())).all("script")[-1]["text"]
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert script.count("class SortableTable") == script.count("class FlameGraph") == 1
