"""Tests that generated benchmark traces look like torch's and that the reader finds their contents."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_modelprof.trace.model import Category
from lightning_modelprof.trace.reader import read_trace

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from generate_trace import generate_trace

CATEGORY = {
    "cpu_op": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "Trace": Category.OTHER,
}
NUM_BYTES = 3_000_000


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    path = tmp_path_factory.mktemp("generated") / "small.pt.trace.json"
    return path, generate_trace(path, NUM_BYTES, seed=3)


@pytest.fixture(scope="module")
def events(generated):
    """Events as read by the standard library, without rounding."""
    return json.loads(generated[0].read_text(), parse_float=Decimal)["traceEvents"]


@pytest.fixture(scope="module")
def trace(generated):
    return read_trace(generated[0])


def ns(microseconds):
    return int(microseconds * 1000)


def union_ns(intervals):
    total, reached = 0, 0
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def test_json_load_finds_generators_counts(generated, events):
    path, truth = generated
    timed = [event for event in events if event["ph"] == "X"]
    assert truth.num_bytes == path.stat().st_size >= NUM_BYTES
    assert truth.num_events == len(events)
    assert truth.num_timed_events == len(timed)
    assert truth.events == Counter(event["cat"] for event in timed)
    totals = dict.fromkeys(truth.events, 0)
    for event in timed:
        totals[event["cat"]] += ns(event["dur"])
    assert truth.total_ns == totals
    steps = [
        ns(e["dur"]) for e in timed if e["cat"] == "user_annotation" and e["name"].startswith("ProfilerStep")
    ]
    assert truth.step_ns == steps
    assert truth.num_steps == len(steps) >= 2
    assert truth.flows == Counter(event["name"] for event in events if event["ph"] in "sf")
    device = [e for e in timed if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    assert truth.device_busy_ns == union_ns([(ns(e["ts"]), ns(e["ts"] + e["dur"])) for e in device])
    assert 0 < truth.device_busy_ns < sum(ns(e["dur"]) for e in device)  # the streams overlap


def test_reader_finds_same_events(generated, trace):
    _, truth = generated
    assert trace.num_dropped == 0
    assert not trace.damage
    assert len(trace) == truth.num_timed_events
    assert trace.base_ns == truth.begin_ns
    assert trace.base_ns + int(trace.end_ns.max()) == truth.end_ns
    expected = Counter()
    for category, number in truth.events.items():
        expected[CATEGORY[category]] += number
    assert Counter(trace.category.tolist()) == expected
    for category in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "user_annotation"):
        chosen = trace.is_category(CATEGORY[category])
        assert int(trace.duration_ns[chosen].sum()) == truth.total_ns[category]


def test_reader_finds_every_name_with_its_time(generated, trace):
    _, truth = generated
    found = {}
    for event in np.flatnonzero(trace.is_category(Category.CPU_OP)):
        tally = found.setdefault(trace.name_of(event), [0, 0])
        tally[0] += 1
        tally[1] += int(trace.duration_ns[event])
    assert found == truth.by_name["cpu_op"]


def test_reader_finds_steps_copies_and_memory(generated, trace):
    _, truth = generated
    steps = trace.is_category(Category.USER_ANNOTATION) & trace.is_named(
        lambda n: n.startswith("ProfilerStep#")
    )
    assert trace.duration_ns[steps].tolist() == truth.step_ns
    of_device = trace.category[trace.device.event]
    sizes = trace.device.size_bytes
    assert int(sizes[of_device == Category.MEMCPY].sum()) == truth.copied_bytes > 0
    assert int(sizes[of_device == Category.MEMSET].sum()) == truth.set_bytes > 0
    assert set(trace.device.device.tolist()) == {0}
    assert set(trace.device.stream.tolist()) == {7, 20}
    memory = trace.allocations.size_bytes
    assert len(memory) == truth.num_allocations
    assert int(memory[memory > 0].sum()) == truth.allocated_bytes
    assert int(-memory[memory < 0].sum()) == truth.released_bytes


def test_reader_finds_collectives_and_kernel_properties(generated, trace, events):
    _, truth = generated
    on_device = trace.is_category(Category.KERNEL) & (trace.collective >= 0)
    assert int(np.count_nonzero(on_device)) == truth.num_collectives == 4 * truth.num_steps
    (collective,) = {trace.collectives[index] for index in trace.collective[on_device]}
    assert (collective.name, collective.group_size, collective.dtype) == ("allreduce", 2, "BFloat16")
    kernels = [event for event in events if event.get("cat") == "kernel"]
    written = sorted(
        (float(e["args"]["blocks per SM"]), e["args"]["est. achieved occupancy %"] / 100) for e in kernels
    )
    is_kernel = trace.category[trace.device.event] == Category.KERNEL
    found = sorted(zip(trace.device.blocks_per_sm[is_kernel], trace.device.occupancy[is_kernel], strict=True))
    np.testing.assert_allclose(found, written, rtol=1e-6)


def test_every_kernel_has_launch_and_operator(trace):
    launches = dict(
        zip(
            trace.correlation[trace.is_category(Category.RUNTIME)].tolist(),
            np.flatnonzero(trace.is_category(Category.RUNTIME)).tolist(),
            strict=True,
        )
    )
    host = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION)
    operators = {int(trace.external_id[event]): event for event in np.flatnonzero(host)}
    assert len(trace.device.event) > 0
    for event in trace.device.event:
        launch = launches[int(trace.correlation[event])]
        operator = operators[int(trace.external_id[event])]
        assert trace.track[operator] == trace.track[launch]
        assert trace.begin_ns[operator] <= trace.begin_ns[launch]
        assert trace.end_ns[launch] <= trace.end_ns[operator]
        assert trace.end_ns[launch] < trace.begin_ns[event]


@pytest.mark.parametrize("category", ["cpu_op", "kernel"])
def test_thread_events_nest_and_stream_events_do_not_overlap(events, category):
    tracks = {}
    for event in events:
        if event.get("cat") == category:
            span = ns(event["ts"]), ns(event["ts"] + event["dur"])
            tracks.setdefault(event["tid"], []).append(span)
    assert len(tracks) == 2
    for spans in tracks.values():
        open_ends = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or (category == "cpu_op" and end <= open_ends[-1])
            open_ends.append(end)


def test_arrows_lead_forward_in_time_to_another_track(events):
    ends = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            ends[event["ph"]][event["name"], event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys()
    for key, start in ends["s"].items():
        assert start["ts"] < ends["f"][key]["ts"]
        assert (start["pid"], start["tid"]) != (ends["f"][key]["pid"], ends["f"][key]["tid"])


def test_same_seed_gives_same_bytes_for_any_file_name(tmp_path):
    digests = {}
    for name, seed in (("a.json", 1), ("b.json.gz", 1), ("c.json", 2)):
        truth = generate_trace(tmp_path / name, 1, seed=seed)
        raw = (tmp_path / name).read_bytes()
        text = gzip.decompress(raw) if name.endswith(".gz") else raw
        assert truth.num_bytes == len(text)
        assert truth.num_steps == 1
        digests[name] = hashlib.sha256(text).digest()
    assert digests["a.json"] == digests["b.json.gz"] != digests["c.json"]


SHAPE_OF_TORCH = (2, 13)
"""The torch version whose layout is copied. Others differ in whitespace."""


def layout(text, phase, category):
    """The first row of a kind, with its values blanked out."""
    rows = re.findall(r"\n  \{\n.*?\n  \}(?=,?\n)", text, flags=re.DOTALL)
    (row, *_) = (
        row for row in rows if f'"ph": "{phase}"' in row and (not category or f'"cat": "{category}"' in row)
    )
    row = re.sub(r'"args": \{\n      .*\n', '"args": {\n      ARGS\n', row)
    return re.sub(r'("\w+": )("[^"]*"|[\d.]+)', r"\1VALUE", row)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) != SHAPE_OF_TORCH,
    reason="another torch, another layout",
)
def test_layout_matches_torch(generated, tmp_path):
    torch_path = tmp_path / "torch.json"
    options = {"activities": [ProfilerActivity.CPU], "record_shapes": True, "profile_memory": True}
    with profile(**options) as recorded, record_function("range"):
        torch.ones(4, requires_grad=True).square().sum().backward()
    recorded.export_chrome_trace(str(torch_path))
    theirs, ours = torch_path.read_text(), generated[0].read_text()
    for phase, category in (
        *(("X", "cpu_op"), ("X", "user_annotation"), ("X", "Trace"), ("i", "cpu_instant_event")),
        *(("s", "fwdbwd"), ("f", "fwdbwd"), ("M", "")),
    ):
        assert layout(ours, phase, category) == layout(theirs, phase, category), (phase, category)
    head = re.compile(r'\A \{\n    "schemaVersion": 1,\n    "deviceProperties": \[')
    middle = re.compile(
        r'\n    "displayTimeUnit": "ms",\n    "baseTimeNanoseconds": \d+,\n    "traceEvents": \[\n    \n'
    )
    tail = re.compile(r'\n    "ts": [\d.]+\n    \n  \}\n  \],"traceName": "[^"]*" \}\Z')
    for text in (theirs, ours):
        assert head.search(text)
        assert middle.search(text)
        assert tail.search(text)
