"""Several processes in one file: ids are matched within a process, and ranks stay separate."""

import gzip
import json

import pytest

from lightning_modelprof import analyze
from tests.support.traces import event

STEPS = 3
KERNEL_US = {0: 3000, 1: 1500}
"""By rank."""


def rank_events(rank, host, device, later=0):
    """Steps of 10 ms with one matmul each; both ranks count their ids from 1."""
    found = []
    for step in range(STEPS):
        begin, number = 10_000 * step + later, step + 1
        host_thread = {"pid": host, "tid": 7}
        found += [
            event("user_annotation", f"ProfilerStep#{step}", begin, begin + 9990, **host_thread),
            event("cpu_op", "aten::mm", begin + 500, begin + 600, **host_thread, **{"External id": number}),
            event(
                "cuda_runtime",
                "cudaLaunchKernel",
                begin + 550,
                begin + 560,
                **host_thread,
                **{"External id": number, "correlation": number},
            ),
            event(
                "kernel",
                "sgemm",
                begin + 700,
                begin + 700 + KERNEL_US[rank],
                pid=device,
                tid=7,
                **{"External id": number, "correlation": number, "device": 0, "stream": 7},
            ),
        ]
    return found


def report_of(tmp_path, events, **metadata):
    file = tmp_path / "merged.trace.json.gz"
    whole = {"schemaVersion": 1, "traceEvents": events, **metadata}
    file.write_bytes(gzip.compress(json.dumps(whole).encode()))
    return analyze(file)


def operator_row(report):
    table = next(one for one in report.tables if one.id == "operators")
    row = next(row for row in table.rows if row[0] == "aten::mm")
    return dict(zip((column.key for column in table.columns), row, strict=True))


MERGES = {
    "labels, as SGLang writes them": lambda: (
        rank_events(0, "[TP00] 1000", "[TP00] 0") + rank_events(1, "[TP01] 1001", "[TP01] 1")
    ),
    "labels behind, one pid in all containers": lambda: (
        rank_events(0, "1 rank 0", "0 rank 0") + rank_events(1, "1 rank 1", "0 rank 1")
    ),
    "one pid for all of a rank": lambda: rank_events(0, 0, 0) + rank_events(1, 1, 1),
    "pids as recorded, in step": lambda: rank_events(0, 1000, 0) + rank_events(1, 1001, 1),
    "devices in another order than pids": lambda: (
        rank_events(0, 1000, 1, later=4000) + rank_events(1, 1001, 0)
    ),
    "all on device 0 of their hosts": lambda: rank_events(0, 1000, 0) + rank_events(1, 2000, 0, later=1000),
}


@pytest.mark.parametrize("merge", MERGES)
def test_kernels_belong_to_operator_of_their_process(tmp_path, merge):
    report = report_of(tmp_path, MERGES[merge]())
    row = operator_row(report)
    assert row["calls"] == 2 * STEPS
    assert row["device_total_ns"] == STEPS * (3_000_000 + 1_500_000)
    assert row["device_max_ns"] == 3_000_000
    assert row["device_min_ns"] == 1_500_000
    assert [trace.rank for trace in report.summary.traces] == [0, 1]
    assert not [value for label, value in report.facts if label == "Warning"]
    assert any("2 processes" in note for note in report.notes)


def test_ranks_are_numbered_by_labels(tmp_path):
    events = rank_events(0, "[TP02] 1000", "[TP02] 0") + rank_events(1, "[TP05] 1001", "[TP05] 1")
    report = report_of(tmp_path, events, distributedInfo={"rank": 2, "world_size": 8})
    assert [trace.rank for trace in report.summary.traces] == [2, 5]


def test_single_process_is_not_merged(tmp_path):
    report = report_of(tmp_path, rank_events(0, 1, 1))
    assert [trace.rank for trace in report.summary.traces] == [None]
    assert not any("processes" in note for note in report.notes)
