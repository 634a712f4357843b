"""Real GPU traces, compared with independently derived reference numbers."""

from __future__ import annotations

import gzip
import json
import re
from decimal import Decimal

import numpy as np
import pytest

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.timeline.intervals import length, union
from lightning_modelprof.analysis.trace.model_summary import NO_RANGES
from lightning_modelprof.reading_traces import analyze_files
from lightning_modelprof.trace.model import DEVICE_WORK, Category
from tests.support.traces import load, real_file, reference, summarize

WITH_REFERENCE = (
    "a100_nccl",
    "mi250_toy",
    "sampled_2rank_rank0",
    "sampled_2rank_rank1",
    "v100_ns_resolution",
)
RESNETS = ("v100_resnet50_workers0", "v100_resnet50_workers4")


def durations(trace, category):
    chosen = trace.category == category
    return (trace.end_ns - trace.begin_ns)[chosen]


def ns(microseconds):
    """The references are sums of floating-point microseconds, which are off by less than 1 ns."""
    return pytest.approx(microseconds * 1000, abs=1)


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_counts_and_durations_match_reference(name):
    trace, truth = load(name), reference(name, "stdlib")
    assert len(trace) == truth["n_X_events"]
    assert trace.num_dropped == 0
    assert len(durations(trace, Category.KERNEL)) == truth["n_kernels"]
    assert len(durations(trace, Category.MEMCPY)) == truth["n_memcpy"]
    assert len(durations(trace, Category.MEMSET)) == truth["n_memset"]
    assert int(durations(trace, Category.KERNEL).sum()) == ns(truth["kernel_dur_sum_us"])
    copies = sum(kind["dur_us"] for kind in truth["memcpy_by_kind"].values())
    assert int(durations(trace, Category.MEMCPY).sum()) == ns(copies)
    for call, figures in truth["runtime_calls"].items():
        chosen = (trace.category == Category.RUNTIME) & np.isin(
            trace.name, [i for i, text in enumerate(trace.names) if text == call]
        )
        assert int(chosen.sum()) == figures["n"]
        assert int((trace.end_ns - trace.begin_ns)[chosen].sum()) == ns(figures["dur_us"])


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_step_times_match_reference(name):
    trace, truth = load(name), reference(name, "stdlib")
    summary = summarize(trace)
    assert list(summary.step_numbers) == [step["step"] for step in truth["profiler_steps"]]
    walls = [step["wall_us"] for step in truth["profiler_steps"]]
    row = summary.rows[0]
    assert (row.key, row.calls) == ("profile_step", len(walls))
    assert row.host_total_ns == ns(sum(walls))
    assert (row.host_calls.max_ns, row.host_calls.min_ns) == (ns(max(walls)), ns(min(walls)))


@pytest.mark.parametrize("name", [*WITH_REFERENCE, *RESNETS])
def test_every_device_event_is_in_one_row_or_noted(name):
    trace = load(name)
    summary = summarize(trace)
    assert summary.phase_source == "torch ranges"
    everything = sum(int(durations(trace, category).sum()) for category in DEVICE_WORK)
    rows = {row.key: row for row in summary.rows}
    assert (
        sum(r.device_total_ns for r in rows.values() if r.depth == 1) + summary.device_outside_ns
        == everything
    )
    assert sum(r.host_total_ns for r in rows.values() if r.depth == 1) == rows["profile_step"].host_total_ns
    assert all(row.host_total_ns >= 0 and row.device_total_ns >= 0 for row in rows.values())
    assert rows["backward"].device_total_ns > 0
    assert rows["forward"].device_total_ns > 0


@pytest.mark.parametrize("name", RESNETS)
def test_resnet_matches_removed_plugin(name):
    trace, truth = load(name), reference(name, "tb_plugin")["role_range_sums"]
    for key, category in (
        ("Kernel", Category.KERNEL),
        ("Memcpy", Category.MEMCPY),
        ("Memset", Category.MEMSET),
    ):
        chosen = trace.category == category
        assert length(union(trace.begin_ns[chosen], trace.end_ns[chosen])) == truth[key] * 1000
    rows = {row.key: row for row in summarize(trace).rows}
    assert rows["dataloader"].calls == rows["profile_step"].calls == rows["optimizer"].calls == 6
    assert rows["dataloader"].host_total_ns == truth["DataLoader"] * 1000


def test_more_workers_shrink_dataloader_time():
    rows = [{row.key: row.host_total_ns for row in summarize(load(name)).rows} for name in RESNETS]
    assert [one["dataloader"] / one["profile_step"] for one in rows] == [
        pytest.approx(0.396, abs=1e-3),
        pytest.approx(0.010, abs=1e-3),
    ]


@pytest.mark.parametrize("name", ["v100_ns_resolution", "a100_nccl", "sampled_2rank_rank0"])
def test_every_stamp_matches_file(name):
    trace = load(name)
    raw = gzip.decompress(real_file(name).read_bytes())
    written = json.loads(raw, parse_float=Decimal)
    base = written.get("baseTimeNanoseconds", 0)
    truth = sorted(
        (base + int(event["ts"] * 1000), int(event["dur"] * 1000))
        for event in written["traceEvents"]
        if event["ph"] == "X"
    )
    begin = [value + trace.base_ns for value in trace.begin_ns.tolist()]
    assert sorted(zip(begin, (trace.end_ns - trace.begin_ns).tolist(), strict=True)) == truth


def test_trace_without_steps_has_no_summary():
    with pytest.raises(NotMeasured, match=re.escape(NO_RANGES)):
        summarize(load("a100_alexnet"))


def test_two_ranks_of_job_are_pooled():
    """Figures are sums over both ranks, or rows per rank where a sum is meaningless."""
    names = ("sampled_2rank_rank0", "sampled_2rank_rank1")
    files = [real_file(name) for name in names]
    pooled = {table.id: table for table in analyze_files(files).tables}
    alone = [{table.id: table for table in analyze_files([file]).tables} for file in files]
    assert pooled.keys() == alone[0].keys() == alone[1].keys()  # one set of tables
    truths = [reference(name, "stdlib") for name in names]

    def column(table, name, key):
        index = [column.key for column in table.columns].index(key)
        return [row[index] for row in table.rows if row[0] == name]

    walls = [[step["wall_us"] for step in truth["profiler_steps"]] for truth in truths]
    summary = pooled["model_summary"]
    assert column(summary, "ProfileStep", "calls") == [sum(map(len, walls))]
    assert column(summary, "ProfileStep", "host_total_ns") == [ns(sum(map(sum, walls)))]
    assert column(summary, "ProfileStep", "host_max_ns") == [ns(max(map(max, walls)))]
    assert column(summary, "ProfileStep", "host_min_ns") == [ns(min(map(min, walls)))]
    for row in summary.rows:
        parts = [column(tables["model_summary"], row[0], "device_total_ns") for tables in alone]
        assert [row[7]] == [sum(part for (part,) in parts)]

    breakdown = pooled["step_breakdown"]
    assert [row[0] for row in breakdown.rows] == ["Mean", "Share", "rank 0 mean", "rank 1 mean"]
    for row, tables in zip(breakdown.rows[2:], alone, strict=True):
        assert row[1:] == tables["step_breakdown"].rows[0][1:]
