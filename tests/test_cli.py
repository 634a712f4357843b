"""The command line shows what the live report showed, and ends with one line on what went wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_modelprof.cli import main, read_report
from tests.fits import report_of, run_fit


def export_as(text):
    return lambda self, path: Path(path).write_text(text)


def cut_off(self, path, export=torch.profiler.profile.export_chrome_trace):
    export(self, path)
    Path(path).write_bytes(Path(path).read_bytes()[:500])


TRACES = {
    "good": None,
    "no steps": export_as('{"traceEvents": []}'),
    "no trace": export_as("hello"),
    "empty": export_as(""),
    "cut off": cut_off,
}


@pytest.mark.parametrize("export", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("steps", [(3, 6), (20, 50)], ids=["complete", "partial"])
def test_the_saved_report_is_the_live_one(tmp_path, monkeypatch, export, steps):
    if export is not None:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    live = run_fit(tmp_path, steps=steps).report
    (table,) = (table for table in live.tables if table.id == "model_summary")
    assert bool(table.rows) == (export is None)
    saved = read_report(tmp_path / "modelprof")
    assert saved.tables == live.tables
    assert saved.notes == live.notes
    assert saved.facts == live.facts


def test_windows_without_a_trace(tmp_path):
    live = run_fit(tmp_path, steps=(40, 50)).report
    assert read_report(tmp_path / "modelprof").tables == live.tables


@pytest.mark.parametrize("steps", [(3, 6), (20, 50)], ids=["complete", "partial"])
def test_a_trace_that_was_not_saved(tmp_path, steps):
    folder = tmp_path / "modelprof"
    run_fit(tmp_path, steps=steps)
    run = json.loads((folder / "run.json").read_text())
    run["ranks"][0]["windows"][0]["trace_file"] = None
    (folder / "run.json").write_text(json.dumps(run))
    (table,) = (table for table in read_report(folder).tables if table.id == "model_summary")
    assert table.absent_reason == "its trace was not saved"
    run["ranks"][0]["windows"][0]["note"] = "torch could not write the trace: disk full"
    (folder / "run.json").write_text(json.dumps(run))
    (table,) = (table for table in read_report(folder).tables if table.id == "model_summary")
    assert table.absent_reason == "torch could not write the trace: disk full"


def test_prints_and_writes(tmp_path, capsys):
    run_fit(tmp_path, steps=(3, 6))
    folder = tmp_path / "modelprof"
    assert main(["report", str(folder / "run.json")]) == 0
    assert "Model Summary (steps 3 to 5)" in capsys.readouterr().out
    assert main(["report", str(folder), "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text()) == report_of(tmp_path)


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lightning-modelprof: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("asked", [".", "modelprof", "modelprof/run.json", "modelprof/report.json"])
def test_a_run_is_found_from_its_folder_or_the_one_above(tmp_path, capsys, asked):
    run_fit(tmp_path, active=0)
    assert main(["report", str(tmp_path / asked), "--json", "-"]) == 0
    assert capsys.readouterr().out.encode() == (tmp_path / "modelprof" / "report.json").read_bytes()


# Traces of anybody


def test_a_trace_of_ours_gives_the_live_figures(tmp_path, capsys):
    callback = run_fit(tmp_path, steps=(3, 6))
    (window,) = callback.run.ranks[0].windows
    assert main(["analyze", str(tmp_path / "modelprof" / window.trace_file), "--json", "-"]) == 0
    offline = json.loads(capsys.readouterr().out)
    live = report_of(tmp_path)
    assert offline["tables"]["model_summary"]["rows"] == live["tables"]["model_summary"]["rows"]
    assert offline["traces"][0]["steps"] == [3, 4, 5]
    breakdown = offline["tables"]["step_breakdown"]
    steps = [row for row in breakdown["rows"] if row["name"].startswith("step ")]
    assert len(steps) == 3
    for row in steps:
        parts = [row[column["key"]] for column in breakdown["columns"][2:]]
        assert sum(part for part in parts if part is not None) == row["total_ns"]
        assert row["kernel_ns"] is None  # no device


def test_several_traces_of_a_folder_are_told_apart(tmp_path, capsys):
    run_fit(tmp_path, active=2, wait=1, warmup=0, repeat=2)
    assert main(["analyze", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Model Summary of trace 0 (steps 1 to 2)" in shown
    assert "Model Summary of trace 1 (steps 4 to 5)" in shown


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "cannot be opened"),
        ("empty.json", b"", "empty file"),
        ("text.json", b"hello", "expected a Chrome trace in JSON"),
        ("other.json", b'{"a": 1}', "traceEvents"),
        ("cut.json.gz", b"\x1f\x8b\x08", "cut off or damaged"),
        (".", None, "expected a folder with trace files"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["analyze", str(tmp_path / name)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lightning-modelprof: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_a_trace_without_steps_says_so(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 2}]}'
    )
    assert main(["analyze", str(trace)]) == 0
    assert "the trace has no ProfilerStep ranges" in capsys.readouterr().out
