"""Selection of trace files in a folder."""

import gzip
import json
import re

import pytest

from lightning_modelprof import analyze
from lightning_modelprof.errors import TraceError
from lightning_modelprof.reading_traces import trace_files
from tests.support.traces import event

STEPS = [event("user_annotation", f"ProfilerStep#{n}", 100 * n, 100 * n + 90, pid=5) for n in range(3)]
TRACE = json.dumps({"schemaVersion": 1, "traceEvents": STEPS})
OTHERS = {
    "report.json": json.dumps({"verdict": {"kind": "balanced"}, "notes": ['"traceEvents": [']}),
    "run.json": json.dumps({"ranks": [{"events": [{"ph": 1}]}]}),
    "annotations.json": json.dumps([{"image": 1, "boxes": [1, 2]}]),
    "empty.json": "",
    "run.json.gz": "not packed at all",
}


def written(folder, files):
    for name, text in files.items():
        packed = name.endswith(".gz") and text.startswith(("{", "["))
        (folder / name).write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return folder


@pytest.mark.parametrize(
    "text",
    [
        TRACE,
        json.dumps(STEPS),
        "\ufeff" + TRACE,
        json.dumps({"distributedInfo": {"pg_config": [list(range(9))] * 900}, "traceEvents": STEPS}),
    ],
)
@pytest.mark.parametrize("names", [["rank0.json.gz", "node0_rank1.json.gz"], ["gpu.json"]])
def test_traces_of_any_name_are_found(tmp_path, names, text):
    written(tmp_path, {**OTHERS, **dict.fromkeys(names, text)})
    assert sorted(file.name for file in trace_files(tmp_path)) == sorted(names)


def test_report_covers_traces_of_any_name(tmp_path):
    written(tmp_path, {**OTHERS, "rank0.json.gz": TRACE, "rank1.json.gz": TRACE})
    assert [one.rank for one in analyze(tmp_path).summary.traces] == [0, 1]


def test_names_with_trace_come_first(tmp_path):
    written(tmp_path, {"a.pt.trace.json": TRACE, "other.json": TRACE})
    assert [file.name for file in trace_files(tmp_path)] == ["a.pt.trace.json"]


def test_folder_without_traces_is_an_error(tmp_path):
    with pytest.raises(TraceError, match=re.escape("no trace files (*.json or *.json.gz)")):
        trace_files(written(tmp_path, OTHERS))


def test_only_start_of_file_is_read(tmp_path):
    """The folder may contain a dataset."""
    far = json.dumps([{"ids": [12345678] * 200_000}, *STEPS])
    written(tmp_path, {"data.json": far, "rank0.json": TRACE})
    assert [file.name for file in trace_files(tmp_path)] == ["rank0.json"]
