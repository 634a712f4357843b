"""The report and analyze commands print what the live report showed, and errors are one line."""

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
def test_saved_report_equals_live_report(tmp_path, monkeypatch, export, steps):
    if export is not None:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    live = run_fit(tmp_path, steps=steps).report
    (table,) = (table for table in live.tables if table.id == "model_summary")
    assert bool(table.rows) == (export is None)
    saved = read_report(tmp_path / "modelprof")
    assert saved.tables == live.tables
    assert saved.notes == live.notes
    assert saved.facts == live.facts


def test_unreached_window_has_same_saved_tables(tmp_path):
    live = run_fit(tmp_path, steps=(40, 50)).report
    assert read_report(tmp_path / "modelprof").tables == live.tables


@pytest.mark.parametrize("steps", [(3, 6), (20, 50)], ids=["complete", "partial"])
def test_unsaved_trace_shows_its_reason(tmp_path, steps):
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


def test_report_prints_tables_and_writes_json(tmp_path, capsys):
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
def test_run_is_found_from_its_folder_or_parent(tmp_path, capsys, asked):
    run_fit(tmp_path, active=0)
    assert main(["report", str(tmp_path / asked), "--json", "-"]) == 0
    assert capsys.readouterr().out.encode() == (tmp_path / "modelprof" / "report.json").read_bytes()


# Any trace


# A run has "num_workers" if fetching takes over 1% of a step, so any of these can appear.
RUN_TABLES = {kind.id for entry in TABLES for kind in entry.kinds}


class SlowNumbers(Numbers):
    """Fetches slow enough for a worker count prediction."""

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
def test_live_run_saved_run_and_trace_give_same_tables(tmp_path, capsys, arguments, missing):
    """Offline tables differ only in titles, ids and notes on the window, never in a figure."""
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
    if window.index:  # each of the newest windows has its own Model Summary
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


def test_step_time_of_own_trace_adds_up(tmp_path, capsys):
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


def test_traces_in_one_folder_have_numbered_titles(tmp_path, capsys):
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
def test_non_trace_is_rejected_in_one_line(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["analyze", str(tmp_path / name)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lightning-modelprof: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_trace_without_steps_has_note(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 2}]}'
    )
    assert main(["analyze", str(trace), "--full"]) == 0
    assert "the trace has no ProfilerStep ranges" in capsys.readouterr().out


# Several traces, from one job or several


def write_trace(path, first_step, begin_us, launches=2, **metadata):
    """Two steps of 10 us each, with ``launches`` kernels of 3 us in all."""
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
    """Table ids of a single trace."""
    report = analyze(capsys, write_trace(tmp_path / "alone.json", 0, 0))
    assert [table["title"] for table in report["tables"].values() if " of trace" in table["title"]] == []
    return list(report["tables"])


def test_ranks_of_one_job_share_tables(tmp_path, capsys, alone_ids):
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
def test_unrelated_traces_stay_separate(tmp_path, capsys, alone_ids, ranks):
    """Equal, missing or invalid ranks, or an unequal number of traces per rank."""
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
    assert [one["source"] for one in report["summary"]["traces"]] == paths  # in command line order


@pytest.fixture
def iterations(tmp_path):
    """Traces of two iterations on two ranks, with the same steps, as torchtitan writes them."""
    for number in (9, 10):
        for rank in (0, 1):
            folder = tmp_path / f"iteration_{number}"
            folder.mkdir(exist_ok=True)
            write_trace(folder / f"rank{rank}_trace.json", 3, 0)
    return tmp_path


def test_iterations_are_grouped_by_folder_name(iterations, capsys):
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


def test_incomplete_iteration_borrows_no_rank(iterations, capsys):
    (iterations / "iteration_9" / "rank1_trace.json").unlink()
    report = analyze(capsys, str(iterations))
    assert [other["ranks"] for other in report["summary"]["others"]] == [[0]]
    assert [one["tables_suffix"] for one in report["summary"]["traces"]] == ["", "_1", "_1"]


@pytest.mark.parametrize("names", [("rank0", "rank1"), ("host_a_rank_0", "host_b_rank_1")])
def test_rank_is_read_from_folder_name(tmp_path, capsys, names):
    for name in names:
        (tmp_path / name).mkdir()
        write_trace(tmp_path / name / "my.pt.trace.json", 3, 0)
    report = analyze(capsys, str(tmp_path))
    assert [one["rank"] for one in report["summary"]["traces"]] == [0, 1]
    assert {one["tables_suffix"] for one in report["summary"]["traces"]} == {""}


def test_brief_prints_iterations_newest_first(iterations, capsys):
    assert main(["analyze", str(iterations), "--brief"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("lightning-modelprof: iteration_10, newest of 2: 2 ranks of one job ")
    assert second.startswith("lightning-modelprof: iteration_9: ")


def test_brief_computes_only_what_its_verdict_needs(monkeypatch, capsys):
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


def test_many_iterations_get_short_report(iterations, capsys):
    for number in range(11, 18):
        shutil.copytree(iterations / "iteration_9", iterations / f"iteration_{number}")
    assert main(["analyze", str(iterations)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 20
    assert any("iteration_17, newest of 9" in line for line in lines)
    assert any(line.startswith("iteration_16: ") for line in lines)
    assert "4 more traces; --brief prints a line for each" in lines


def test_windows_of_two_ranks_are_grouped_by_window(tmp_path, capsys, alone_ids):
    """Ordered within each rank: rank 1's clock is off by more than the time between windows."""
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
def test_rank_comes_from_callback_or_torch(tmp_path, capsys, metadata):
    report = analyze(capsys, write_trace(tmp_path / "trace.json", 0, 0, **metadata))
    assert report["summary"]["traces"][0]["rank"] == 1


def test_ranks_in_one_folder_are_found(tmp_path, capsys):
    (tmp_path / "rank_1").mkdir()
    write_trace(tmp_path / "rank_1" / "trace.json", 0, 0, **of_rank(1))
    write_trace(tmp_path / "a.pt.trace.json", 0, 0, **of_rank(0))
    write_trace(tmp_path / "report.json", 0, 0)
    report = analyze(capsys, str(tmp_path))
    assert [one["rank"] for one in report["summary"]["traces"]] == [0, 1]


def test_trace_warnings_come_first(tmp_path, capsys):
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


def test_ranks_without_common_steps_or_job_stay_separate(tmp_path, capsys):
    first = write_trace(tmp_path / "first.json", 0, 0, distributedInfo={"rank": 0, "world_size": 2})
    later = write_trace(tmp_path / "later.json", 50, 0, distributedInfo={"rank": 1, "world_size": 2})
    larger = write_trace(tmp_path / "larger.json", 0, 0, distributedInfo={"rank": 1, "world_size": 64})
    for other in (later, larger):
        report = analyze(capsys, first, other)
        assert [one["tables_suffix"] for one in report["summary"]["traces"]] == ["", "_1"]
        assert "shown separately" in report["notes"][0]


def test_note_names_steps_of_each_rank(tmp_path, capsys):
    first = write_trace(tmp_path / "first.json", 4, 0, **of_rank(0))
    second = write_trace(tmp_path / "second.json", 5, 0, **of_rank(1))
    report = analyze(capsys, first, second)
    assert [one["tables_suffix"] for one in report["summary"]["traces"]] == ["", ""]
    assert report["notes"] == ["The ranks have different steps: rank 0 steps 4 to 5; rank 1 steps 5 to 6."]


def test_non_traces_in_folder_are_skipped(tmp_path, capsys):
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
def test_invalid_max_gib_is_rejected(text, two_kernels, capsys):
    with pytest.raises(SystemExit):
        main(["analyze", two_kernels, "--max-gib", text])
    assert f"got '{text}'" in capsys.readouterr().err


# Options


@pytest.fixture
def two_kernels(tmp_path):
    """One short kernel that runs often, and one long kernel that runs once."""
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


def test_views_select_tables(two_kernels, capsys):
    assert list(analyze(capsys, two_kernels, "--views", "KernelView,overview")["tables"]) == [
        "overview",
        "kernels",
    ]
    assert list(analyze(capsys, two_kernels, "--views", "operator")["tables"]) == [
        "operators",
        "operators_by_shape",
    ]


def test_sorted_by_orders_rows(two_kernels, capsys):
    def names(*options):
        return [row["name"] for row in raw_rows(analyze(capsys, two_kernels, *options)["tables"]["kernels"])]

    assert names() == ["long", "often"]
    assert names("--sorted-by", "calls") == ["often", "long"]
    assert names("--sorted-by", "GPUMin") == ["often", "long"]


def test_time_unit_and_row_limit_apply(two_kernels, capsys):
    assert main(["analyze", two_kernels, "--views", "kernel", "--time-unit", "ns", "--row-limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Time unit: ns" in shown
    assert "40000" in shown.replace(",", "").replace(" ", "")
    assert "long" in shown
    assert "often" not in shown
    rows = analyze(capsys, two_kernels, "--views", "kernel", "--row-limit", "1")["tables"]["kernels"]["rows"]
    assert len(rows) == 2  # JSON has all rows


def test_op_detail_nests_child_operators(two_kernels, capsys):
    plain = analyze(capsys, two_kernels)["tables"]["operators"]
    detailed = analyze(capsys, two_kernels, "--op-detail")["tables"]["operators"]
    assert {row.get("depth", 0) for row in plain["rows"]} == {0}
    at = [row["name"] for row in raw_rows(detailed)].index("aten::mm")
    below = detailed["rows"][at + 1]
    assert (below["cells"]["name"]["text"], below["depth"]) == ("aten::bmm", 1)


def test_thread_sep_separates_threads(two_kernels, capsys):
    plain = analyze(capsys, two_kernels)["tables"]["operators"]["rows"]
    by_thread = analyze(capsys, two_kernels, "--thread-sep")["tables"]["operators"]["rows"]
    assert len(by_thread) > len(plain)


def test_command_line_overrides_options_of_saved_run(tmp_path, capsys):
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


def test_trace_above_max_gib_is_rejected(two_kernels, capsys):
    assert main(["analyze", two_kernels, "--max-gib", "1e-7"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "--max-gib" in shown.err


def test_json_in_missing_directory_is_a_one_line_error(tmp_path, two_kernels, capsys):
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "file" / "report.json"
    assert main(["analyze", two_kernels, "--json", str(target)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"can't write {target}: no such directory: {target.parent}" in error


def test_json_path_that_is_a_directory_is_an_error(tmp_path, two_kernels, capsys):
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
def test_trace_of_another_tool_is_rejected(tmp_path, capsys, written):
    """None of its events would count, so a report of dashes with exit status 0 would look like success."""
    file = tmp_path / "other.trace.json"
    file.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": [written, written]}))
    assert main(["analyze", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "isn't a torch.profiler trace: none of its 2 events has a torch.profiler category" in error
    assert "Give a trace written by torch.profiler" in error


def test_empty_torch_trace_is_read(tmp_path):
    """From a window in which nothing ran: torch marks every file that it writes."""
    file = tmp_path / "mine.trace.json"
    empty = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [empty]}))
    assert main(["analyze", str(file)]) == 0


def test_large_foreign_file_is_named_by_first_key(tmp_path, capsys, monkeypatch):
    """Such as rocprofv3's: finding all keys would mean decoding the whole file."""
    monkeypatch.setattr("lightning_modelprof.trace.damaged.MAX_AROUND_BYTES", 10)
    file = tmp_path / "results.json"
    file.write_text('{"rocprofiler-sdk-tool": [{"metadata": {}}]}')
    assert main(["analyze", str(file)]) == 1
    assert "got the keys rocprofiler-sdk-tool and more." in capsys.readouterr().err
