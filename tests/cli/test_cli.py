"""The command line shows what the live report showed, and ends with one line on what went wrong."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_modelprof.analysis.trace import trace_facts
from lightning_modelprof.cli.main import main
from lightning_modelprof.reading import read_report
from lightning_modelprof.report.tables.run.all_tables import TABLES, TRACE_TABLES
from lightning_modelprof.run.records import WindowStatus
from lightning_modelprof.show.document import render_json
from tests.support.documents import raw_rows
from tests.support.fits import Net, Numbers, report_of, run_fit
from tests.support.traces import real_file

pytestmark = pytest.mark.slow


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
    assert main(["report", str(folder / "run.json"), "--full"]) == 0
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


# A run has "num_workers" once a fetch takes over 1% of a step, so any of these may be there.
RUN_TABLES = {kind.id for entry in TABLES for kind in entry.kinds}


class SlowNumbers(Numbers):
    """Fetches that get a prediction of the number of workers."""

    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)


EVERYTHING = {"record_shapes": True, "with_stack": True, "profile_memory": True}


ON_THE_HOST = {"device_usage", "overview", "model_summary", "operators", "operators_by_shape"}
ON_THE_HOST |= {"user_ranges", "memory", "step_breakdown", "dataloader"}


def own_range(batch_idx):
    with torch.profiler.record_function("my own range"):
        torch.ones(100).sum()


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        pytest.param({"steps": (3, 6)}, {"memory", "operators_by_shape"}, id="by default"),
        pytest.param(
            {"steps": (3, 6), "data": DataLoader(SlowNumbers(), batch_size=2)},
            {"memory", "operators_by_shape"},
            id="slow fetches",
        ),
        pytest.param({"steps": (3, 6), **EVERYTHING}, set(), id="all that can be recorded"),
        pytest.param({"steps": (20, 50), **EVERYTHING}, set(), id="partial"),
        pytest.param({"active": 2, "repeat": 2, **EVERYTHING}, set(), id="second of two windows"),
    ],
)
def test_every_table_is_the_same_live_from_the_run_and_from_the_trace(tmp_path, capsys, arguments, missing):
    """Online and offline differ in titles, ids and in notes on the window, and in no figure."""
    callback = run_fit(tmp_path, module=Net(own_range), **arguments)
    *_, window = callback.run.ranks[0].windows
    live = json.loads(render_json(callback.report))
    assert "num_workers" in live["tables"] or "data" not in arguments
    folder = tmp_path / "modelprof"
    assert main(["report", str(folder), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == live
    assert live == report_of(tmp_path)

    assert main(["analyze", str(folder / window.trace_file), "--json", "-"]) == 0
    offline = json.loads(capsys.readouterr().out)
    assert offline["summary"]["traces"][0]["steps"] == list(window.recorded_steps)
    assert len(offline["tables"]) == len(TRACE_TABLES)
    found = dict(live["tables"])
    for name in RUN_TABLES:
        found.pop(name, None)
    if window.index:  # each of the newest windows has a Model Summary
        del found["model_summary"]
        found["model_summary"] = found.pop(f"model_summary_{window.index}")
        assert found["operators"]["title"] == f"Operator Summary of window {window.index}"
    assert found.keys() == offline["tables"].keys()
    for name, table in offline["tables"].items():
        for key in table.keys() - {"id", "title", "notes", "is_detail"}:
            assert table[key] == found[name][key], (name, key)
        more = [note for note in found[name]["notes"] if note not in table["notes"]]
        assert found[name]["notes"] == table["notes"] + more, name
        is_partial = name == "model_summary" and window.status is WindowStatus.PARTIAL
        assert [note.startswith("The window is partial") for note in more] == [True] * is_partial
    with_rows = {name for name, table in offline["tables"].items() if table["rows"]}
    assert with_rows & (ON_THE_HOST | missing) == ON_THE_HOST - missing


def test_step_time_of_a_trace_of_ours_is_complete(tmp_path, capsys):
    callback = run_fit(tmp_path, steps=(3, 6))
    (window,) = callback.run.ranks[0].windows
    assert main(["analyze", str(tmp_path / "modelprof" / window.trace_file), "--json", "-"]) == 0
    breakdown = json.loads(capsys.readouterr().out)["tables"]["step_breakdown"]
    steps = [row for row in raw_rows(breakdown) if row["name"].startswith("step ")]
    assert [row["name"] for row in steps] == ["step 3", "step 4", "step 5"]
    for row in steps:
        parts = [row[column["key"]] for column in breakdown["columns"][2:]]
        assert sum(part for part in parts if part is not None) == row["total_ns"]
        assert row["kernel_ns"] is None  # no device


def test_several_traces_of_a_folder_are_told_apart(tmp_path, capsys):
    run_fit(tmp_path, active=2, wait=1, warmup=0, repeat=2)
    assert main(["analyze", str(tmp_path), "--full"]) == 0
    shown = capsys.readouterr().out
    assert "Model Summary (steps 1 to 2) of trace 0" in shown
    assert "Model Summary (steps 4 to 5) of trace 1" in shown


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "No such file or directory"),
        ("empty.json", b"", "empty file"),
        ("text.json", b"hello", "expected a Chrome trace in JSON"),
        ("other.json", b'{"a": 1}', "traceEvents"),
        ("cut.json.gz", b"\x1f\x8b\x08", "cut off"),
        (".", None, "no trace files (*.json or *.json.gz) in"),
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
    assert main(["analyze", str(trace), "--full"]) == 0
    assert "the trace has no ProfilerStep ranges" in capsys.readouterr().out


# Several traces, of one job or not


def write_trace(path, first_step, begin_us, launches=2, **metadata):
    """Two steps of 10 us each; in each a kernel of 3 us, launched ``launches`` times in all."""
    events = []

    def add(cat, name, begin, duration, tid=1, **args):
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": duration}
            | {"args": args}
        )

    for number in range(2):
        begin = begin_us + 10 * number
        add("user_annotation", f"ProfilerStep#{first_step + number}", begin, 10)
    for number in range(launches):
        begin = begin_us + 4 * number
        add("cpu_op", "aten::mm", begin, 3)
        add("cuda_runtime", "cudaLaunchKernel", begin + 1, 1, correlation=number + 1)
        add("kernel", "gemm", begin + 2, 3, tid="stream 7", correlation=number + 1, device=0, stream=7)
    path.write_text(json.dumps({"traceEvents": events} | metadata))
    return str(path)


def of_rank(rank):
    return {"distributedInfo": {"rank": rank}}


def analyze(capsys, *arguments, code=0):
    assert main(["analyze", *arguments, "--json", "-"]) == code
    return json.loads(capsys.readouterr().out)


def row_of(table, name):
    (row,) = (row for row in raw_rows(table) if row["name"] == name)
    return row


@pytest.fixture
def alone_ids(tmp_path, capsys):
    """Ids of the tables of one trace."""
    report = analyze(capsys, write_trace(tmp_path / "alone.json", 0, 0))
    assert [table["title"] for table in report["tables"].values() if " of trace" in table["title"]] == []
    return list(report["tables"])


def test_two_ranks_of_a_job_are_one_set_of_tables(tmp_path, capsys, alone_ids):
    rank_1 = write_trace(tmp_path / "one.json", 4, 5, launches=3, **of_rank(1))
    rank_0 = write_trace(tmp_path / "zero.json", 4, 0, launches=2, **of_rank(0))
    report = analyze(capsys, rank_1, rank_0)
    tables = report["tables"]
    assert list(tables) == alone_ids
    assert not [table["title"] for table in tables.values() if " of trace" in table["title"]]
    assert [(one["rank"], one["tables_suffix"]) for one in report["summary"]["traces"]] == [(0, ""), (1, "")]
    assert tables["model_summary"]["title"] == "Model Summary (steps 4 to 5)"
    assert row_of(tables["model_summary"], "ProfileStep")["calls"] == 4
    assert row_of(tables["model_summary"], "ProfileStep")["device_total_ns"] == 5 * 3000
    assert row_of(tables["kernels"], "gemm")["calls"] == 5
    assert row_of(tables["operators"], "aten::mm")["calls"] == 5
    names = [row["name"] for row in raw_rows(tables["step_breakdown"])]
    assert names == ["Mean", "Share", "rank 0 mean", "rank 1 mean"]
    devices = [row["name"] for row in raw_rows(tables["device_usage"])]
    assert [name for name in devices if "GPU" in name] == ["rank 0 GPU 0", "rank 1 GPU 0"]


@pytest.mark.parametrize(
    "ranks",
    [(0, 0), (None, None), (0, None), (None, 1), ("1", 0), (-1, 0), (True, 0), (0, 1, 0), (1, 0, 1, 1)],
    ids=str,
)
def test_traces_that_are_no_job_stay_apart(tmp_path, capsys, alone_ids, ranks):
    """The same rank, no rank or one that is none, or not as many of each."""
    paths = [
        write_trace(tmp_path / f"{number}.json", 2 * number, 100 * number, **of_rank(rank))
        for number, rank in enumerate(ranks)
    ]
    report = analyze(capsys, *paths)
    suffixes = ["", *(f"_{number}" for number in range(1, len(paths)))]
    assert list(report["tables"]) == [name + suffix for suffix in suffixes for name in alone_ids]
    for number, suffix in enumerate(suffixes):
        assert all(
            report["tables"][name + suffix]["title"].endswith(f" of trace {number}") for name in alone_ids
        )
        title = f"Model Summary (steps {2 * number} to {2 * number + 1}) of trace {number}"
        assert report["tables"]["model_summary" + suffix]["title"] == title
    assert [one["tables_suffix"] for one in report["summary"]["traces"]] == suffixes
    assert [one["source"] for one in report["summary"]["traces"]] == paths  # in the order of the command line


@pytest.fixture
def iterations(tmp_path):
    """Two ranks' traces of two iterations, with the same steps, as torchtitan writes them."""
    for number in (9, 10):
        for rank in (0, 1):
            folder = tmp_path / f"iteration_{number}"
            folder.mkdir(exist_ok=True)
            write_trace(folder / f"rank{rank}_trace.json", 3, 0)
    return tmp_path


def test_ranks_of_iterations_are_told_apart_by_their_names(iterations, capsys):
    report = analyze(capsys, str(iterations))
    place = [
        (Path(one["source"]).parent.name, one["rank"], one["tables_suffix"])
        for one in report["summary"]["traces"]
    ]
    assert place == [
        ("iteration_9", 0, ""),
        ("iteration_9", 1, ""),
        ("iteration_10", 0, "_1"),
        ("iteration_10", 1, "_1"),
    ]
    (other,) = report["summary"]["others"]
    assert (other["name"], other["ranks"]) == ("iteration_9", [0, 1])
    assert other["verdict"]["kind"] == report["verdict"]["kind"]


def test_an_incomplete_iteration_does_not_borrow_a_rank(iterations, capsys):
    (iterations / "iteration_9" / "rank1_trace.json").unlink()
    report = analyze(capsys, str(iterations))
    assert [other["ranks"] for other in report["summary"]["others"]] == [[0]]
    assert [one["tables_suffix"] for one in report["summary"]["traces"]] == ["", "_1", "_1"]


@pytest.mark.parametrize("names", [("rank0", "rank1"), ("host_a_rank_0", "host_b_rank_1")])
def test_a_rank_may_have_a_folder_of_its_own(tmp_path, capsys, names):
    for name in names:
        (tmp_path / name).mkdir()
        write_trace(tmp_path / name / "my.pt.trace.json", 3, 0)
    report = analyze(capsys, str(tmp_path))
    assert [one["rank"] for one in report["summary"]["traces"]] == [0, 1]
    assert {one["tables_suffix"] for one in report["summary"]["traces"]} == {""}


def test_brief_prints_a_line_for_each_iteration_the_newest_first(iterations, capsys):
    assert main(["analyze", str(iterations), "--brief"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("lightning-modelprof: iteration_10, newest of 2: 2 ranks of one job ")
    assert second.startswith("lightning-modelprof: iteration_9: ")


def test_brief_asks_only_for_what_its_verdict_needs(monkeypatch, capsys):
    asked = []
    for name in ("summarize_operators", "summarize_memory", "summarize_critical_path"):
        summarize = getattr(trace_facts, name)
        monkeypatch.setattr(
            trace_facts, name, lambda timeline, name=name, do=summarize: asked.append(name) or do(timeline)
        )
    file = str(real_file("h100_item"))
    assert main(["analyze", file, "--brief"]) == 0
    assert "DEVICE-BOUND" in capsys.readouterr().out
    assert asked == []
    assert main(["analyze", file, "--brief", "--json", "-"]) == 0  # JSON has everything
    assert len(asked) == 3


def test_a_folder_of_many_iterations_gets_a_short_report(iterations, capsys):
    for number in range(11, 18):
        shutil.copytree(iterations / "iteration_9", iterations / f"iteration_{number}")
    assert main(["analyze", str(iterations)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 20
    assert any("iteration_17, newest of 9" in line for line in lines)
    assert any(line.startswith("iteration_16: ") for line in lines)
    assert "4 more traces; --brief prints a line for each" in lines


def test_two_windows_of_two_ranks_are_grouped_window_by_window(tmp_path, capsys, alone_ids):
    """By each rank's own order: rank 1's clock is so far behind that it is late in everything."""
    paths = [
        write_trace(tmp_path / "b1.json", 6, 1100, **of_rank(1)),
        write_trace(tmp_path / "a0.json", 2, 0, **of_rank(0)),
        write_trace(tmp_path / "a1.json", 2, 1000, **of_rank(1)),
        write_trace(tmp_path / "b0.json", 6, 100, **of_rank(0)),
    ]
    report = analyze(capsys, *paths)
    assert list(report["tables"]) == [*alone_ids, *(f"{name}_1" for name in alone_ids)]
    groups = [
        (Path(one["source"]).stem, one["rank"], one["tables_suffix"]) for one in report["summary"]["traces"]
    ]
    assert groups == [("a0", 0, ""), ("a1", 1, ""), ("b0", 0, "_1"), ("b1", 1, "_1")]
    for suffix, steps, number in (("", "2 to 3", 0), ("_1", "6 to 7", 1)):
        table = report["tables"]["model_summary" + suffix]
        assert table["title"] == f"Model Summary (steps {steps}) of traces {number}"
        assert row_of(table, "ProfileStep")["calls"] == 4


@pytest.mark.parametrize(
    "metadata",
    [
        of_rank(1),
        {"distributedInfo": json.dumps({"rank": 1})},
        {"modelprof": {"rank": 1}},
        {"modelprof": {"rank": 1}, "distributedInfo": {"rank": 0}},
        {"modelprof": {"recorded_steps": [0, 1]}, "distributedInfo": {"rank": 1}},
        {"modelprof": "not json", "distributedInfo": {"rank": 1}},
    ],
    ids=str,
)
def test_the_rank_is_what_the_callback_noted_or_torch(tmp_path, capsys, metadata):
    report = analyze(capsys, write_trace(tmp_path / "trace.json", 0, 0, **metadata))
    assert report["summary"]["traces"][0]["rank"] == 1


def test_a_folder_with_the_ranks_of_a_job(tmp_path, capsys):
    (tmp_path / "rank_1").mkdir()
    write_trace(tmp_path / "rank_1" / "trace.json", 0, 0, **of_rank(1))
    write_trace(tmp_path / "a.pt.trace.json", 0, 0, **of_rank(0))
    write_trace(tmp_path / "report.json", 0, 0)
    report = analyze(capsys, str(tmp_path))
    assert [one["rank"] for one in report["summary"]["traces"]] == [0, 1]


def test_what_speaks_against_a_trace_stands_at_the_top(tmp_path, capsys):
    good, bad = write_trace(tmp_path / "good.json", 0, 0), tmp_path / "bad.json"
    bad.write_bytes(Path(good).read_bytes()[:-40])  # the last event is cut off
    assert analyze(capsys, good)["summary"]["traces"][0]["checks"] == []
    (alone,) = analyze(capsys, str(bad), code=1)["summary"]["traces"]
    assert alone["checks"][0].startswith("The file is cut off")
    assert [one["checks"] for one in analyze(capsys, good, str(bad), code=1)["summary"]["traces"]] == [
        [],
        alone["checks"],
    ]
    assert main(["analyze", str(bad)]) == 1
    assert "Warning: The file is cut off" in "\n".join(capsys.readouterr().out.splitlines()[:6])
    assert main(["analyze", good, str(bad), "--full"]) == 1
    assert f"Warning       {bad}: The file is cut off" in capsys.readouterr().out


def test_ranks_that_share_no_step_or_are_of_other_jobs_stay_apart(tmp_path, capsys):
    first = write_trace(tmp_path / "first.json", 0, 0, distributedInfo={"rank": 0, "world_size": 2})
    later = write_trace(tmp_path / "later.json", 50, 0, distributedInfo={"rank": 1, "world_size": 2})
    larger = write_trace(tmp_path / "larger.json", 0, 0, distributedInfo={"rank": 1, "world_size": 64})
    for other in (later, larger):
        report = analyze(capsys, first, other)
        assert [one["tables_suffix"] for one in report["summary"]["traces"]] == ["", "_1"]
        assert "shown separately" in report["notes"][0]


def test_ranks_that_share_some_steps_say_which(tmp_path, capsys):
    first = write_trace(tmp_path / "first.json", 4, 0, **of_rank(0))
    second = write_trace(tmp_path / "second.json", 5, 0, **of_rank(1))
    report = analyze(capsys, first, second)
    assert [one["tables_suffix"] for one in report["summary"]["traces"]] == ["", ""]
    assert report["notes"] == ["The ranks have different steps: rank 0 steps 4 to 5; rank 1 steps 5 to 6."]


def test_a_folder_with_other_files(tmp_path, capsys):
    good = write_trace(tmp_path / "good_trace.json", 0, 0)
    (tmp_path / "good_trace.json.gz").write_bytes(gzip.compress(Path(good).read_bytes()))
    (tmp_path / "trace_meta.json").write_text('{"a": 1}')
    report = analyze(capsys, str(tmp_path), good)
    assert [Path(one["source"]).name for one in report["summary"]["traces"]] == ["good_trace.json"]
    (note,) = report["notes"]
    assert note.startswith("Skipped")
    assert "trace_meta.json" in note
    Path(good).unlink()
    (tmp_path / "good_trace.json.gz").unlink()
    assert main(["analyze", str(tmp_path)]) == 1
    assert "trace_meta.json" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "x"])
def test_a_limit_that_is_none(text, two_kernels, capsys):
    with pytest.raises(SystemExit):
        main(["analyze", two_kernels, "--max-gib", text])
    assert f"got '{text}'" in capsys.readouterr().err


# Options


@pytest.fixture
def two_kernels(tmp_path):
    """One kernel that is called often and short, one that is called once and long."""
    path = tmp_path / "kernels.json"
    events = [("user_annotation", "ProfilerStep#0", 0, 100, 1)]
    events += [("cpu_op", "aten::add", 10 * number, 5, 1) for number in range(4)]
    events += [("cpu_op", "aten::mm", 60, 39, 1), ("cpu_op", "aten::bmm", 61, 30, 1)]
    events += [("kernel", "often", 10 * number, 2, "stream 7") for number in range(4)]
    events += [("kernel", "long", 50, 40, "stream 7")]
    written = [
        {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": size, "pid": 1, "tid": tid, "args": {}}
        for cat, name, begin, size, tid in events
    ]
    path.write_text(json.dumps({"traceEvents": written}))
    return str(path)


def test_views_choose_the_tables(two_kernels, capsys):
    assert list(analyze(capsys, two_kernels, "--views", "KernelView,overview")["tables"]) == [
        "overview",
        "kernels",
    ]
    assert list(analyze(capsys, two_kernels, "--views", "operator")["tables"]) == [
        "operators",
        "operators_by_shape",
    ]


def test_the_order_of_the_rows_is_as_asked_for(two_kernels, capsys):
    def names(*options):
        return [row["name"] for row in raw_rows(analyze(capsys, two_kernels, *options)["tables"]["kernels"])]

    assert names() == ["long", "often"]
    assert names("--sorted-by", "calls") == ["often", "long"]
    assert names("--sorted-by", "GPUMin") == ["often", "long"]


def test_the_time_unit_and_the_number_of_rows_are_as_asked_for(two_kernels, capsys):
    assert main(["analyze", two_kernels, "--views", "kernel", "--time-unit", "ns", "--row-limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Time unit: ns" in shown
    assert "40000" in shown.replace(",", "").replace(" ", "")
    assert "long" in shown
    assert "often" not in shown
    rows = analyze(capsys, two_kernels, "--views", "kernel", "--row-limit", "1")["tables"]["kernels"]["rows"]
    assert len(rows) == 2  # JSON has all


def test_operators_in_detail(two_kernels, capsys):
    plain = analyze(capsys, two_kernels)["tables"]["operators"]
    detailed = analyze(capsys, two_kernels, "--op-detail")["tables"]["operators"]
    assert {row.get("depth", 0) for row in plain["rows"]} == {0}
    at = [row["name"] for row in raw_rows(detailed)].index("aten::mm")
    below = detailed["rows"][at + 1]
    assert (below["cells"]["name"]["text"], below["depth"]) == ("aten::bmm", 1)


def test_operators_of_each_thread(two_kernels, capsys):
    plain = analyze(capsys, two_kernels)["tables"]["operators"]["rows"]
    by_thread = analyze(capsys, two_kernels, "--thread-sep")["tables"]["operators"]["rows"]
    assert len(by_thread) > len(plain)


def test_a_saved_run_is_shown_with_its_own_options_or_those_asked_for(tmp_path, capsys):
    data = DataLoader(SlowNumbers(), batch_size=2)
    callback = run_fit(tmp_path, data=data, steps=(3, 6), views=["operator"], row_limit=2)
    of_window = [table.id for table in callback.report.tables if table.id not in RUN_TABLES]
    assert of_window == ["operators", "operators_by_shape"]
    folder = str(tmp_path / "modelprof")
    assert main(["report", folder, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"].keys() >= {"operators"}
    assert main(["report", folder, "--views", "model,idle", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["tables"].keys() - RUN_TABLES
    assert found == {"model_summary", "idle"}


def test_a_trace_beyond_the_limit_is_refused(two_kernels, capsys):
    assert main(["analyze", two_kernels, "--max-gib", "1e-7"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "--max-gib" in shown.err


def test_json_that_cannot_be_written_is_one_line(tmp_path, two_kernels, capsys):
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "file" / "report.json"
    assert main(["analyze", two_kernels, "--json", str(target)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"can't write {target}: no such directory: {target.parent}" in error


def test_json_in_a_place_that_cannot_be_written(tmp_path, two_kernels, capsys):
    (tmp_path / "report.json").mkdir()
    target = tmp_path / "report.json"
    assert main(["analyze", two_kernels, "--json", str(target)]) == 1
    assert f"can't write {target}" in capsys.readouterr().err


JAX = {
    "ph": "X",
    "pid": 1,
    "tid": 1,
    "ts": 5.0,
    "dur": 3.0,
    "name": "jit_step",
    "args": {"hlo_op": "fusion.3"},
}
NSYS = {"ph": "X", "cat": "cuda", "name": "gemm", "pid": 1, "tid": 1, "ts": 5, "dur": 3}


@pytest.mark.parametrize("written", [JAX, NSYS], ids=["JAX", "Nsight"])
def test_a_trace_of_another_tool(tmp_path, capsys, written):
    """Its events would be in no figure: a report of dashes with exit status 0 would say nothing is wrong."""
    file = tmp_path / "other.trace.json"
    file.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": [written, written]}))
    assert main(["analyze", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "isn't a torch.profiler trace: none of its 2 events has a torch.profiler category" in error
    assert "Give a trace written by torch.profiler" in error


def test_torch_s_own_trace_without_a_usable_event_is_read(tmp_path):
    """As of a window in which nothing ran: torch says in every file that it wrote it."""
    file = tmp_path / "mine.trace.json"
    empty = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [empty]}))
    assert main(["analyze", str(file)]) == 0


def test_a_large_file_of_another_kind_is_named_by_its_first_key(tmp_path, capsys, monkeypatch):
    """As of rocprofv3, whose whole file would have to be decoded for all keys."""
    monkeypatch.setattr("lightning_modelprof.trace.damaged.MAX_AROUND_BYTES", 10)
    file = tmp_path / "results.json"
    file.write_text('{"rocprofiler-sdk-tool": [{"metadata": {}}]}')
    assert main(["analyze", str(file)]) == 1
    assert "got the keys rocprofiler-sdk-tool and more." in capsys.readouterr().err
