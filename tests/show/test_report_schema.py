"""The shipped JSON Schema of report.json."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from lightning_modelprof.cli.main import main
from lightning_modelprof.show.document import render_json
from tests.oracle.oracle import HERE as ORACLE
from tests.oracle.oracle import TRACES, unpacked
from tests.support.reference import SCHEMA, report_schema
from tests.support.sample_reports import ALL_REPORTS

RUNS = ["kept_tensors", "minimal", "text"]


def without_unknown_keys(schema):
    """The same schema, but rejecting unknown keys."""
    closed = json.loads(json.dumps(schema))
    for one in closed["$defs"].values():
        if one.get("type") == "object":
            one["additionalProperties"] = False
    return closed


VALIDATOR = Draft202012Validator(without_unknown_keys(json.loads(SCHEMA.read_text(encoding="utf-8"))))


def problems(written):
    return [f"{one.json_path}: {one.message}"[:300] for one in VALIDATOR.iter_errors(json.loads(written))]


def test_schema_is_up_to_date():
    """If this fails, run ``python -m tests.support.reference``."""
    Draft202012Validator.check_schema(report_schema())
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == report_schema()


@pytest.mark.parametrize("name", ALL_REPORTS)
def test_sample_reports_are_valid(name):
    assert problems(render_json(ALL_REPORTS[name]())) == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {name: str(unpacked(ORACLE / "inputs" / name, root / name)) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_run_report_is_valid(runs, name, capsys):
    assert main(["report", runs[name], "--json", "-"]) == 0
    written = capsys.readouterr().out
    assert problems(written) == []
    assert json.loads(written)["summary"]["run"]["num_steps"] > 10


TWO_RANKS = ["sampled_2rank_rank0", "sampled_2rank_rank1"]


@pytest.mark.parametrize("names", [["mi250_toy"], ["h100_item"], TWO_RANKS])
def test_trace_report_is_valid(names, capsys):
    files = [str(TRACES / f"{name}.pt.trace.json.gz") for name in names]
    assert main(["analyze", *files, "--json", "-"]) == 0
    written = capsys.readouterr().out
    assert problems(written) == []
    assert len(json.loads(written)["summary"]["traces"]) == len(names)


@pytest.mark.parametrize("names", [["minimal", "text"], RUNS], ids=["two", "stages"])
def test_comparison_report_is_valid(runs, names, capsys):
    assert main(["compare", *(runs[name] for name in names), "--json", "-"]) in (0, 3, 4)
    written = capsys.readouterr().out
    assert problems(written) == []
    assert (json.loads(written)["summary"]["comparison"] is None) == (len(names) > 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report.update(schema_version=1),
        lambda report: report.pop("tables"),
        lambda report: report.update(unknown=1),
        lambda report: report["tables"]["phases"]["rows"][0]["cells"]["total_ns"].pop("text"),
        lambda report: report["tables"]["phases"]["columns"][1].update(unit="parsecs"),
        lambda report: report["summary"]["benchmark"].update(num_steps="many"),
    ],
)
def test_invalid_reports_are_rejected(change):
    report = json.loads(render_json(ALL_REPORTS["gpu"]()))
    change(report)
    assert problems(json.dumps(report)) != []
