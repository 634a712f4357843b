from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof.report.model import Column, Report, Table, Unit
from lightning_modelprof.report.summary import RunSummary, Summary
from lightning_modelprof.show.json import render_json
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
def test_golden(name):
    check_golden(f"json/{name}.json", render_json(ALL_REPORTS[name]()).decode("utf-8"))


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_every_cell_round_trips(name):
    report = ALL_REPORTS[name]()
    data = render_json(report)
    assert data == render_json(report)
    document = parse(data)
    assert document["schema_version"] == 1
    assert document["notes"] == list(report.notes)
    assert list(document["tables"]) == [table.id for table in report.tables]
    for table in report.tables:
        written = document["tables"][table.id]
        keys = [column.key for column in table.columns]
        assert [tuple(row[key] for key in keys) for row in written["rows"]] == list(table.rows)
        assert [column["unit"] for column in written["columns"]] == [
            column.unit.value for column in table.columns
        ]
        assert written["absent_reason"] == table.absent_reason


def test_what_a_person_is_shown_changes_nothing():
    """Neither the rows, nor the units, nor the names."""
    asked, plain = (parse(render_json(report_of(table))) for table in (wide_report().tables[0], operators()))
    assert asked == plain
    assert len(asked["tables"]["operator"]["rows"]) == 9
    assert asked["tables"]["operator"]["rows"][2]["name"].startswith("void at::native::vectorized")


def test_figures_stand_beside_the_tables():
    benchmark = parse(render_json(gpu_report()))["benchmark"]
    assert (benchmark["steps"], benchmark["reader_ratio"]) == (87, 0.3875)


def test_what_was_not_measured_is_null():
    document = parse(render_json(cpu_report()))
    assert {row["gpu_total"] for row in document["tables"]["model_summary"]["rows"]} == {None}


def test_units_by_row_and_depths_are_kept():
    tables = parse(render_json(gpu_report()))["tables"]
    assert tables["perf_summary"]["row_units"] == ["ns", "ns", "rate", "rate", "ratio"]
    assert tables["model_summary"]["depths"] == [0, 1, 1, 1, 1, 1]


def test_what_is_not_finite_is_null():
    document = parse(render_json(hostile_report()))
    assert document["run"]["config"]["not_finite"] == [None, {"inf": None}]


def test_repeated_keys_are_refused():
    table = Table(id="t", title="T", columns=(Column("name", "Name"),), rows=(("a",),))
    with pytest.raises(ValueError, match=r"table ids.*'t'"):
        render_json(report_of(table, table))
    twice = Table(id="u", title="U", columns=(Column("k", "A"), Column("k", "B")), rows=(("a", "b"),))
    with pytest.raises(ValueError, match=r"column keys of table 'u'.*'k'"):
        render_json(report_of(twice))


def test_what_json_cannot_say_is_refused():
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
def test_everything_round_trips(value, name, cell):
    table = Table(
        id="t",
        title=name,
        columns=(Column("name", name), Column("value", "Value", Unit.COUNT)),
        rows=((name, cell),),
    )
    document = parse(render_json(report_of(table, value=value)))
    assert document["run"]["config"] == {"value": without_nan(value)}
    assert document["tables"]["t"]["rows"] == [{"name": name, "value": without_nan(cell)}]
