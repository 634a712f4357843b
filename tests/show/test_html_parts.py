"""Pieces of HTML for other pages: the same as in report.html, escaped, with ids that can differ."""

from __future__ import annotations

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
from lightning_modelprof.show.html.page import SHARED_FILES, SHARED_FOLDER, render_html
from tests.show.test_show_html import Page, hostile_everywhere, report_of
from tests.support.sample_flames import flame_of
from tests.support.sample_reports import ALL_REPORTS, benchmark_of, flame_report, gpu_report


def pieces(report, prefix=""):
    """All parts of a report, as a page would put them together."""
    return [
        html_parts.verdict_html(report),
        html_parts.findings_html(report, id_prefix=prefix),
        html_parts.figures_html(report),
        html_parts.facts_html(report),
        *(html_parts.chart_html(chart, id_prefix=prefix) for chart in report.charts),
        *(html_parts.flame_html(flame, id_prefix=prefix) for flame in report.flames),
        *(
            html_parts.table_html(table, is_open=not table.is_detail, id_prefix=prefix)
            for table in report.tables
            if table.rows
        ),
        html_parts.absent_html(report.tables, id_prefix=prefix),
        html_parts.notes_html(report, id_prefix=prefix),
    ]


def squeezed(text):
    return re.sub(r"\s+", " ", text).strip()


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_pieces_are_those_of_the_page(name):
    report = ALL_REPORTS[name]()
    page = squeezed(render_html(report).decode())
    written = [squeezed(piece) for piece in pieces(report) if piece]
    assert bool(written) == (name != "empty")
    for piece in written:
        assert piece in page


def test_headings_have_their_definitions_as_titles():
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
    page = Page(render_html(report))
    tags = ("strong", "h2", "dt", "th")
    headings = [one for one in page.elements if one["tag"] in tags]
    rows = [one for one in headings if one["attributes"].get("scope") == "row"]
    titles = {one["text"]: one["attributes"].get("title", "") for one in headings if one not in rows}
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
    assert [one["attributes"].get("title", "") for one in rows] == ["", forward, "", ""] != [""] * 4


def test_nothing_of_an_empty_report():
    assert "".join(pieces(report_of())) == ""


def ids(html):
    return [one["attributes"]["id"] for one in Page(html.encode()).elements if "id" in one["attributes"]]


def test_two_reports_fit_on_one_page():
    """Each with a prefix of its own, no id is there twice, and each is what it was behind the prefix."""
    report = replace(hostile_everywhere(), flames=flame_report().flames)
    plain, before, after = ("".join(pieces(report, prefix)) for prefix in ("", "before-", "after-"))
    assert len(ids(plain)) > 20
    assert ids(before) == [f"before-{one}" for one in ids(plain)]
    both = ids(before + after)
    assert len(set(both)) == len(both)


def test_a_table_is_open_or_folded():
    table = gpu_report().tables[1]
    assert Page(html_parts.table_html(table).encode()).all("details") == []
    folded = Page(html_parts.table_html(table, is_open=False).encode())
    assert "open" not in folded.one("details")["attributes"]
    assert folded.rows(table.id) == Page(html_parts.table_html(table).encode()).rows(table.id)


def test_a_table_without_rows_says_why():
    table = Table(
        id="t", title="<T>", columns=(Column("n", "N"),), rows=(), absent_reason="no <b>", notes=("Note.",)
    )
    page = Page(html_parts.table_html(table, id_prefix="x-").encode())
    section = page.one("section", class_="table")
    assert (section["attributes"]["id"], section["text"]) == ("x-table-t", "<T>no <b>. Note.")
    assert page.all("b") == []


def test_absent_tables_leave_out_those_with_rows():
    table = Table(id="t", title="There", columns=(Column("n", "N", Unit.COUNT),), rows=((1,),))
    assert html_parts.absent_html([table]) == ""
    missing = replace(table, title="Missing", rows=(), absent_reason="nobody looked")
    text = Page(html_parts.absent_html([table, missing]).encode()).one("section")["text"]
    assert text == "Not availableMissing: nobody looked."


def test_the_modules_that_are_shared_exist_and_import_those_before_them():
    names = [name for name in SHARED_FILES if name.endswith(".js")]
    assert "parts.js" in names
    for name in names:
        text = (SHARED_FOLDER / name).read_text()
        imported = re.findall(r'^import .* from "(.*)";$', text, re.MULTILINE)
        before = names[: names.index(name)]  # one after the other they are the script of report.html
        assert {normpath(f"{Path(name).parent}/{one}") for one in imported} <= set(before)
        assert "innerHTML" not in text


def test_joined_modules_have_no_lines_between_files():
    script = Page(render_html(report_of())).all("script")[-1]["text"]
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert script.count("class SortableTable") == script.count("class FlameGraph") == 1
