"""Tables compared with independent sums, for real traces, our own and random ones.

``trace_sums.py`` counts the expected values from the JSON; plain loops here count those of the steps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from statistics import median

import pytest

from lightning_modelprof import analyze
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.all_rules import RULES
from tests.support.fuzz_traces import base_traces
from tests.support.random_traces import random_trace
from tests.support.trace_sums import COMMUNICATES, LAUNCHES, covered, device_of, kind_of, read, span_of, sums
from tests.support.traces import FOLDER, make_trace

REAL = sorted(FOLDER.glob("*.json.gz"))
NUM_RANDOM = 300


def tables_of(report):
    """Rows by column key, for each table's id."""
    tables = {}
    for table in report.tables:
        keys = [column.key for column in table.columns]
        tables[table.id] = [dict(zip(keys, row, strict=True)) for row in table.rows]
    return tables


def check_sums(events, report):
    """Kernels, copies, busy time, runtime calls and communication of the whole trace."""
    expected, tables = sums(events), tables_of(report)
    kernels = {row["name"]: (row["calls"], row["device_total_ns"]) for row in tables["kernels"]}
    assert kernels == expected["work"].get("kernel", {})
    copies = {row["name"]: (row["calls"], row["device_total_ns"]) for row in tables["copies"]}
    assert copies == expected["work"].get("memcpy", {}) | expected["work"].get("memset", {})
    sizes = {row["name"]: row["size_bytes"] for row in tables["copies"] if row["size_bytes"] is not None}
    assert sizes == expected["bytes"]
    busy = [row["total_ns"] for row in tables["idle"] if row["name"].endswith("Busy")]
    assert sorted(busy) == sorted(expected["busy"].values())
    named = {"INVALID": "(unnamed call)"}
    calls = {named.get(name, name): number for name, number in expected["calls"].items()}
    assert {row["name"]: row["calls"] for row in tables["runtime_calls"][1:]} == calls
    if kernels:
        rows = {row["name"]: row for row in tables["launches"]}
        assert rows["Kernel time"]["count"] == sum(calls for calls, _ in kernels.values())
        assert rows["Kernel time"]["total_ns"] == sum(total_ns for _, total_ns in kernels.values())
    return expected, tables


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name.partition(".")[0])
def test_traces_recorded_elsewhere(path):
    report = analyze(path)
    expected, tables = check_sums(read(path), report)
    calls, total_ns = expected["communication"]
    if calls:
        rows = {row["name"]: row["total_ns"] for row in tables["distributed"]}
        assert rows["Communication"] == total_ns
    check_idle(report, tables)
    check_first(report)


@pytest.mark.parametrize("number", range(len(base_traces())))
def test_traces_of_our_own(number, tmp_path):
    path = tmp_path / "a.trace.json"
    path.write_bytes(base_traces()[number])
    report = analyze(path)
    events = read(path)
    for event in events:
        if isinstance(event.get("tid"), str):  # stream 7
            event.get("args", {})["stream"] = int(event["tid"].split()[-1])
    _, tables = check_sums(events, report)
    check_idle(report, tables)


def check_idle(report, tables):
    """GPU busy and idle agree everywhere on a page: within the steps, as the mean over devices."""
    busy = [row["busy"] for row in tables["device_usage"] if row["name"].startswith("GPU")]
    rows = [row for row in tables["idle"] if row["name"].endswith(("Busy", "Idle"))]
    assert [row["covered_ratio"] for row in rows[::2]] == pytest.approx(busy, abs=1e-12)
    for works, rests in zip(rows[::2], rows[1::2], strict=True):
        assert works["covered_ratio"] + rests["covered_ratio"] == pytest.approx(1)
    check_account(tables, rows[1]["covered_ratio"] if len(busy) == 1 else None)
    if report.step_card is not None and report.step_card.device and busy:
        card = report.step_card
        figures = {label: value for label, value, _ in card.figures}
        assert figures["GPU busy"] == pytest.approx(sum(busy) / len(busy))
        idle_ns = sum(part.ns for part in card.device if part.is_idle)
        assert idle_ns / card.wall_ns == pytest.approx(1 - sum(busy) / len(busy))
        assert sum(part.ns for part in card.device) == pytest.approx(card.wall_ns)
    if "The device is busy in" in report.verdict.summary and len(busy) == 1:
        assert f"busy in {100 * busy[0]:.0f}%" in report.verdict.summary


def check_account(tables, idle):
    """Each column group of the critical path adds up to the step; its idle time is the device's."""
    causes = tables.get("critical_path")
    if not causes:
        return
    parts = [row for row in causes[1:] if row["name"] not in ("After waits", "CPU late")]
    for key in ("step_ns", "running_ns", "idle_ns"):
        if key in causes[0]:
            assert sum(row[key] or 0 for row in parts) == pytest.approx(causes[0][key], rel=1e-12, abs=1e-6)
    assert causes[0]["running_ns"] == causes[0].get("step_ns", causes[0]["running_ns"])
    rows = {row["name"]: row for row in causes}
    if "CPU late" in rows:
        split = sum(rows[name]["idle_ns"] for name in ("After waits", "CPU late") if name in rows)
        assert split == pytest.approx(rows["CPU"]["idle_ns"])
    if idle is not None and "idle_ratio" in causes[0]:
        assert causes[0]["idle_ratio"] == pytest.approx(idle)


BOUNDS = {rule.kind: rule.bound for rule in RULES}


def check_first(report):
    """The first finding belongs to the verdict, if any of those found is more than a hint."""
    found = [one for one in report.findings if one.status is Status.FOUND]
    of_verdict = [
        one for one in found if BOUNDS[one.kind] == report.verdict.kind and one.severity is not Severity.INFO
    ]
    if of_verdict:
        assert found[0] == max(of_verdict, key=lambda one: one.saving_ns_per_step)
    ranks = [(Severity.CRITICAL, Severity.WARNING, Severity.INFO).index(one.severity) for one in found[1:]]
    assert ranks == sorted(ranks)


# Random traces and their steps


class Oracle:
    """A random trace's steps and their contents, found by loops over its events."""

    def __init__(self, events):
        work = [one for one in events if kind_of(one) not in ("", "runtime")]
        self.calls = sorted((one for one in events if kind_of(one) == "runtime"), key=span_of)
        by_id = {one["args"]["correlation"]: one for one in self.calls}
        self.work = [
            (one, *span_of(one), by_id.get(one["args"].get("correlation")), self.type_of(one)) for one in work
        ]
        named = [one for one in events if one["name"].startswith("ProfilerStep#")]
        self.steps = sorted((*span_of(one), int(one["name"][13:])) for one in named)
        if not named:
            operators = [span_of(one) for one in events if one["cat"] == "cpu_op"]
            self.steps = [(min(operators)[0], max(end for _, end in operators), 0)] if operators else []
        self.bounds = self.bounded()[: self.num_kept()]

    @staticmethod
    def type_of(event):
        kind = kind_of(event)
        return "communication" if kind == "kernel" and COMMUNICATES.search(event["name"]) else kind

    def step_of(self, time_ns):
        return next((n for n, (begin, end, _) in enumerate(self.steps) if begin <= time_ns < end), None)

    def launching(self, call):
        """The step that contains the whole call."""
        number = None if call is None else self.step_of(span_of(call)[0])
        return number if number is not None and span_of(call)[1] <= self.steps[number][1] else None

    def bounded(self):
        """Each step lasts until the work it launched has ended; the next one starts there."""
        launched = defaultdict(list)
        for _, begin, end, call, _ in self.work:
            launched[self.launching(call)].append((begin, end))
        if not self.steps:
            return []
        reached = self.steps[0][0]
        if launched[0]:
            first = min(begin for begin, _ in launched[0])
            reached = max([reached, *(end for _, end in launched[None] if end < first)])
        bounds = []
        for number, (host_begin, host_end, _) in enumerate(self.steps):
            begin = max(reached, host_begin)
            reached = max([begin, host_end, *(end for _, end in launched[number])])
            bounds.append((begin, reached))
        return bounds

    def num_kept(self):
        """Number of steps without the last ones that have less than 0.8 of their launches' work."""
        done = {id(call) for *_, call, _ in self.work if call is not None}
        names = {call["name"] for call in self.calls if id(call) in done}
        shares = []
        for number in range(len(self.steps)):
            inside = [one for one in self.calls if self.step_of(span_of(one)[0]) == number]
            mine = [one for one in inside if one["name"] in names]
            shares.append(sum(id(one) in done for one in mine) / len(mine) if mine else 0.0)
        if not any(shares):
            return len(shares)
        return max(n for n, share in enumerate(shares) if share and share >= 0.8 * max(shares)) + 1

    def stretches(self):
        """Spans of consecutive kept steps."""
        steps = self.steps[: len(self.bounds)]
        limit = max(1_000_000, median(end - begin for begin, end, _ in steps))
        found = [list(self.bounds[0])]
        for (before, after), bound in zip(pairwise(steps), self.bounds[1:], strict=True):
            if after[2] - before[2] != 1 or after[0] - before[1] > limit:
                found.append(list(bound))
            found[-1][1] = bound[1]
        return [(begin, end) for begin, end in found if begin < end]

    def spans(self, kind):
        return [(begin, end) for _, begin, end, _, one in self.work if one == kind]

    def in_stretches(self, types=None, device=None):
        """Time with work of the given types, or of any, within the stretches."""
        chosen = [
            (begin, end)
            for event, begin, end, _, kind in self.work
            if (types is None or kind in types) and device in (None, device_of(event))
        ]
        return sum(clipped(chosen, *stretch) for stretch in self.stretches())


def clipped(spans, first, last):
    near = [(begin, end) for begin, end in spans if end > first and begin < last]
    return covered([(max(begin, first), min(end, last)) for begin, end in near])


def check_steps(oracle, facts, tables):
    """Check the figures of the steps."""
    assert facts.step_numbers == tuple(number for *_, number in oracle.steps)
    whole_ns = sum(end - begin for begin, end in oracle.stretches())
    for row in tables["device_usage"]:
        device = int(row["name"].split()[-1])
        assert row["busy"] == pytest.approx(oracle.in_stretches(device=device) / whole_ns, abs=1e-12)
        kernels_ns = oracle.in_stretches(("kernel", "communication"), device)
        assert row["utilization"] == pytest.approx(kernels_ns / whole_ns, abs=1e-12)
    types = {"Kernel": "kernel", "Memcpy": "memcpy", "Memset": "memset", "Communication": "communication"}
    for row in tables["overview"]:
        if row["device_total_ns"] is not None:
            kind = types[row["name"]]
            assert row["device_total_ns"] == oracle.in_stretches((kind,))
            inside = [
                one for one in oracle.work
                if one[4] == kind and any(begin <= one[1] < end for begin, end in oracle.stretches())
            ]  # fmt: skip
            assert row["calls"] == len(inside)
    distributed = facts.get(TraceFacts.distributed)
    if distributed is not None and distributed.in_steps is not None:
        talk = sum(clipped(oracle.spans("communication"), *bound) for bound in oracle.bounds)
        compute = sum(clipped(oracle.spans("kernel"), *bound) for bound in oracle.bounds)
        either = sum(
            clipped(oracle.spans("communication") + oracle.spans("kernel"), *bound) for bound in oracle.bounds
        )
        inside = distributed.in_steps
        assert (inside.communication_ns, inside.computation_ns) == (talk, compute)
        assert (inside.overlap_ns, inside.exposed_ns) == (talk + compute - either, either - compute)
    check_breakdown(oracle, facts.step_breakdown)


def check_breakdown(oracle, breakdown):
    """Each moment goes to the first of kernel, memcpy, memset, communication and runtime that is active."""
    spans = defaultdict(list)
    for _, begin, end, _, kind in oracle.work:
        spans[kind].append((begin, end))
    spans["runtime"] = [span_of(call) for call in oracle.calls]
    order = ("kernel", "memcpy", "memset", "communication", "runtime")
    assert [step.number for step in breakdown.steps] == [n for *_, n in oracle.steps[: len(oracle.bounds)]]
    for step, (first, last) in zip(breakdown.steps, oracle.bounds, strict=True):
        assert step.total_ns == last - first
        so_far = [clipped([one for kind in order[:n] for one in spans[kind]], first, last) for n in range(6)]
        expected = [after - before for before, after in pairwise(so_far)]
        assert list(step.parts_ns[:5]) == [*expected[:4], *([expected[4]] if len(step.parts_ns) > 4 else [])]


def check_lost(oracle, facts):
    """Launches in kept steps whose work isn't in the trace; nested calls count as one."""
    ids = {event["args"].get("correlation") for event, *_ in oracle.work}
    launches = []  # name, begin, end, thread, whether a kernel is there
    for one in (one for one in oracle.calls if LAUNCHES.search(one["name"])):
        begin, end = span_of(one)
        is_there = one["args"]["correlation"] in ids
        around = [each for each in launches if each[3] == one["tid"] and each[1] <= begin and end <= each[2]]
        if around:
            around[0][4] = around[0][4] or is_there
        else:
            launches.append([one["name"], begin, end, one["tid"], is_there])
    if {one[0] for one in launches} != {one[0] for one in launches if one[4]}:
        return  # if no call of a name has a kernel, that name may never be linked to kernels
    kept = [one for one in launches if oracle.step_of(one[1]) in range(len(oracle.bounds))]
    assert facts.launch_count.launches == len(kept)
    assert facts.launch_count.lost == sum(not one[4] for one in kept)


@pytest.mark.parametrize("tens", range(NUM_RANDOM // 10))
def test_random_traces(tens):
    with_steps = 0
    for number in range(10 * tens, 10 * tens + 10):
        events = random_trace(number)
        facts = TraceFacts(make_trace(events))
        report = build_trace_report([facts])
        if not any(kind_of(one) not in ("", "runtime") for one in events):
            continue
        _, tables = check_sums(events, report)
        check_idle(report, tables)
        oracle = Oracle(events)
        if facts.step_origin or not oracle.bounds or not oracle.stretches():
            continue  # without steps
        check_steps(oracle, facts, tables)
        check_lost(oracle, facts)
        with_steps += 1
    assert with_steps > 0


def test_random_traces_cover_intended_cases():
    """Graphs, nested ranges, several devices, lost kernels, steps left out, and gaps between steps."""
    seen = set()
    for number in range(40):
        events = random_trace(number)
        oracle = Oracle(events)
        names = {one["name"] for one in events}
        seen |= {name for name in ("cudaGraphLaunch", "block") if name in names}
        seen |= {f"{len({one['pid'] for one in events if kind_of(one) == 'kernel'})} devices"}
        seen |= {"dropped"} if len(oracle.bounds) < len(oracle.steps) else set()
        seen |= {"stretches"} if oracle.bounds and len(oracle.stretches()) > 1 else set()
        seen |= {"lost"} if sums(events)["launches"][1] else set()
        seen |= {"without steps"} if len(oracle.steps) == 1 and oracle.steps[0][2] == 0 else set()
        assert json.dumps(events) == json.dumps(random_trace(number))
    assert seen >= {"cudaGraphLaunch", "block", "2 devices", "3 devices", "dropped", "stretches", "lost"}
    assert "without steps" in seen
