"""report.json: raw values, texts and rejected contents."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.errors import printable
from lightning_modelprof.report.definitions import column_definition, definition
from lightning_modelprof.report.model import Column, Report, Table, Unit
from lightning_modelprof.report.summary import RunSummary, Summary
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.html.head import note_lines
from lightning_modelprof.show.html.table import table_view
from lightning_modelprof.show.layout import build_layout
from lightning_modelprof.units import DASH
from tests.support.documents import raw_rows
from tests.support.golden import check_golden
from tests.support.sample_reports import (
    ALL_REPORTS,
    cpu_report,
    gpu_report,
    hostile_report,
    operators,
    wide_report,
)


def report_of(*tables: Table, **config) -> Report:
    run = RunSummary(created="", config=config)
    return Report(title="t", facts=(), tables=tables, notes=(), summary=Summary(run=run))


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def parse(data: bytes):
    return json.loads(data.decode("utf-8"), parse_constant=refuse_constant)


@pytest.mark.parametrize("name", ["empty", "cpu", "gpu", "hostile"])
def test_report_matches_golden_file(name):
    check_golden(f"json/{name}.json", render_json(ALL_REPORTS[name]()).decode("utf-8"))


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_every_cell_round_trips(name):
    report = ALL_REPORTS[name]()
    data = render_json(report)
    assert data == render_json(report)
    document = parse(data)
    assert document["schema_version"] == 2
    assert document["title"] == printable(report.title)
    assert document["notes"] == note_lines(report.notes)
    assert list(document["tables"]) == [table.id for table in report.tables]
    for table in report.tables:
        written = document["tables"][table.id]
        keys = [column.key for column in table.columns]
        assert [tuple(row[key] for key in keys) for row in raw_rows(written)] == list(table.rows)
        assert [column["unit"] for column in written["columns"]] == [
            column.unit.value for column in table.columns
        ]
        assert written["absent_reason"] == (table.absent_reason and printable(table.absent_reason))


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_texts_match_page_and_terminal(name):
    report = ALL_REPORTS[name]()
    document = parse(render_json(report))
    assert set(document["tables"]) == {table.id for table in report.tables}
    for table in (table for table in report.tables if table.rows):
        written, view = document["tables"][table.id], table_view(table)
        shown = [[cell["text"] for cell in row["cells"].values()] for row in written["rows"]]
        for place, header in enumerate(view.headers):
            column = next((at for at, one in enumerate(written["columns"]) if one["key"] == header.key), None)
            if column is not None:  # the page shows a group without numbers as one column
                texts = [(row.name, *row.cells)[place].text.strip() for row in view.rows]
                assert [row[column] for row in shown][: len(texts)] == texts
        layout = build_layout(table, max_rows=200)
        assert written["time_unit"] == layout.time_unit
        strips = [layout.names, *(strip for block in layout.blocks for strip in block.strips)]
        assert [column["label"] for column in written["columns"]] == [strip.label for strip in strips]
        for place, strip in enumerate(strips):
            assert [row[place] for row in shown][: len(strip.cells)] == list(strip.cells)


def test_requested_unit_changes_only_texts():
    asked, plain = (
        parse(render_json(report_of(table)))["tables"]["operator"]
        for table in (wide_report().tables[0], operators())
    )
    assert raw_rows(asked) == raw_rows(plain)
    assert len(asked["rows"]) == 9
    assert raw_rows(asked)[2]["name"].startswith("void at::native::vectorized")
    assert (asked["time_unit"], plain["time_unit"]) == ("us", "ms")


def test_summary_has_raw_numbers():
    benchmark = parse(render_json(gpu_report()))["summary"]["benchmark"]
    assert (benchmark["num_steps"], benchmark["reader_ratio"]["avg"]) == (87, 0.3875)


def test_missing_values_are_null():
    document = parse(render_json(cpu_report()))
    cells = [row["cells"]["gpu_total"] for row in document["tables"]["model_summary"]["rows"]]
    assert cells == [{"text": DASH, "value": None}] * len(cells)


def test_units_by_row_and_depths_are_kept():
    tables = parse(render_json(gpu_report()))["tables"]
    assert [row["unit"] for row in tables["perf_summary"]["rows"]] == ["ns", "ns", "rate", "rate", "ratio"]
    assert [row["depth"] for row in tables["model_summary"]["rows"]] == [0, 1, 1, 1, 1, 1]
    assert not any("depth" in row for row in tables["perf_summary"]["rows"])


def test_columns_and_tables_have_definitions():
    table = parse(render_json(gpu_report()))["tables"]["phases"]
    assert table["definition"] == definition("table", "phases")
    defined = {column["key"]: column["definition"] for column in table["columns"]}
    assert defined["ratio"] == column_definition("phases", "ratio") != ""


def test_non_finite_numbers_are_null():
    document = parse(render_json(hostile_report()))
    assert document["summary"]["run"]["config"]["not_finite"] == [None, {"inf": None}]


def test_repeated_keys_are_rejected():
    table = Table(id="t", title="T", columns=(Column("name", "Name"),), rows=(("a",),))
    with pytest.raises(ValueError, match=r"table ids.*'t'"):
        render_json(report_of(table, table))
    twice = Table(id="u", title="U", columns=(Column("k", "A"), Column("k", "B")), rows=(("a", "b"),))
    with pytest.raises(ValueError, match=r"column keys of table 'u'.*'k'"):
        render_json(report_of(twice))


def test_values_without_json_form_are_rejected():
    with pytest.raises(TypeError):
        render_json(report_of(device=object()))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def without_nan(value):
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(plain, st.text(st.characters(codec=None)), st.integers() | st.floats() | st.none())
def test_any_value_round_trips(value, name, cell):
    table = Table(
        id="t",
        title=name,
        columns=(Column("name", name), Column("value", "Value", Unit.COUNT)),
        rows=((name, cell),),
    )
    document = parse(render_json(report_of(table, value=value)))
    assert document["summary"]["run"]["config"] == {"value": without_nan(value)}
    assert raw_rows(document["tables"]["t"]) == [{"name": name, "value": without_nan(cell)}]
