"""Model Summary: hand-made traces with known figures, and random traces against an oracle on a grid."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.facts import WindowFacts
from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.timeline.tally import NOTHING, Tally
from lightning_modelprof.analysis.trace.model_summary import NO_RANGES, NO_STEPS
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.trace.model_summary import MODEL_SUMMARY, window_model_summary
from lightning_modelprof.run.phases import PHASES, RANGE_PREFIX, TRACE_METADATA_KEY
from lightning_modelprof.run.records import Window, WindowStatus
from lightning_modelprof.trace.reader import read_trace
from tests.support.facts import ranks_with, table_of, why_not
from tests.support.traces import make_trace, summarize

MS = 1_000_000
CORE = ("dataloader", "forward", "backward", "optimizer")


class Recording:
    """Builds a trace, in milliseconds."""

    def __init__(self, **metadata):
        self.events, self.metadata, self.launches = [], metadata, 0

    def add(self, name, begin, end, *, cat="user_annotation", tid=1, correlation=None):
        args = {} if correlation is None else {"correlation": correlation}
        times = {"ts": begin * 1000, "dur": (end - begin) * 1000}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "args": args} | times)
        return self

    def step(self, number, begin, end, **more):
        return self.add(f"ProfilerStep#{number}", begin, end, **more)

    def phase(self, key, begin, end, **more):
        return self.add(RANGE_PREFIX + key, begin, end, **more)

    def kernel(self, launch, begin, end, *, tid=1, stream=7, cat="kernel"):
        self.launches += 1
        if launch is not None:
            self.add("launch", launch, launch + 5, cat="cuda_runtime", tid=tid, correlation=self.launches)
        return self.add("kernel", begin, end, cat=cat, tid=f"stream {stream}", correlation=self.launches)

    def trace(self):
        return make_trace(self.events, **self.metadata)


def rows_of(recording):
    """The summary and its rows by key; checks the sums."""
    summary = summarize(recording.trace())
    rows = {row.key: row for row in summary.rows}
    assert len(rows) == len(summary.rows)
    for column in ("host_total_ns", "device_total_ns"):
        depths = [sum(getattr(r, column) or 0 for r in summary.rows if r.depth == d) for d in (0, 1, 2)]
        assert depths[0] == depths[1]
        assert depths[2] == (getattr(rows["others"], column) or 0)
        assert all((getattr(r, column) or 0) >= 0 for r in summary.rows)
    return summary, rows


def paddle_demo():
    """Paddle's demo: two steps of 100 ms, each with 46 ms in a blocking copy that belongs to no phase."""
    demo = Recording()
    for number, t in ((3, 0), (4, 100)):
        demo.step(number, t, t + 100)
        demo.phase("dataloader", t, t + 10)
        demo.phase("forward", t + 10, t + 30).kernel(t + 12, t + 20, t + 50)
        demo.phase("backward", t + 30, t + 40)
        demo.kernel(t + 31, t + 50, t + 90, tid=2).kernel(t + 32, t + 60, t + 88, tid=2, stream=9)
        demo.kernel(t + 45, t + 90, t + 94, tid=3)
        demo.phase("optimizer", t + 90, t + 95).kernel(t + 91, t + 96, t + 98)
    return demo


def test_paddle_demo():
    summary, rows = rows_of(paddle_demo())
    assert list(rows) == ["profile_step", *CORE, "others", "unattributed"]
    assert [row.depth for row in summary.rows] == [0, 1, 1, 1, 1, 1, 2]
    ratios = [row[6] for row in of_window(window(), summary).rows]
    figures = zip(rows.items(), ratios, strict=True)
    assert {key: (row.calls, row.host_total_ns // MS, ratio) for (key, row), ratio in figures} == {
        "profile_step": (2, 200, 1.0),
        "dataloader": (2, 20, 0.1),
        "forward": (2, 40, 0.2),
        "backward": (2, 20, 0.1),
        "optimizer": (2, 10, 0.05),
        "others": (None, 110, 0.55),
        "unattributed": (None, 110, 0.55),
    }
    # Paddle loses the other thread's 4 ms kernel; here it's in Others.
    assert {key: row.device_total_ns // MS for key, row in rows.items()} == {
        "profile_step": 208,
        "dataloader": 0,
        "forward": 60,
        "backward": 136,
        "optimizer": 4,
        "others": 8,
        "unattributed": 8,
    }
    assert rows["backward"].device_calls == Tally(2, 136 * MS, 68 * MS, 68 * MS)
    assert rows["others"].host_calls is None
    assert (summary.num_steps, summary.step_numbers, summary.notes) == (2, (3, 4), ())
    assert (summary.phase_source, summary.device_outside_ns) == ("modelprof ranges", 0)


def test_closure_inside_optimizer():
    made = Recording().step(0, 0, 100).phase("optimizer", 10, 90).phase("forward", 20, 40)
    made.phase("zero_grad", 40, 45).phase("backward", 45, 70).phase("other", 0, 100)
    _, rows = rows_of(made)
    totals = {key: row.host_total_ns // MS for key, row in rows.items()}
    assert totals == {
        "profile_step": 100,
        "dataloader": 0,
        "forward": 20,
        "backward": 25,
        "optimizer": 30,
        "others": 25,
        "zero_grad": 5,
        "other": 20,
    }
    assert rows["dataloader"].host_calls == NOTHING
    assert (rows["zero_grad"].label, rows["other"].label) == ("Zero grad", "Loop")
    assert rows["zero_grad"].depth == 2


def test_cpu_only_has_no_device_figures():
    summary, rows = rows_of(Recording().step(1, 0, 10).phase("forward", 2, 5))
    assert not summary.has_device
    assert summary.device_outside_ns is None
    assert any("no GPU events" in note for note in of_window(window(), summary).notes)
    for row in rows.values():
        assert row.device_total_ns is row.device_calls is None


def test_launch_decides_phase_and_rest_is_noted():
    made = Recording().step(1, 10, 20).phase("forward", 12, 18)
    made.kernel(19.999, 50, 53)  # launched in the step, but ran long after it
    made.kernel(12, 30, 31, cat="gpu_memcpy").kernel(17.999, 60, 61, cat="gpu_memset")
    made.kernel(18, 70, 74)  # the phase has just ended
    made.kernel(20, 80, 85).kernel(9, 15, 16).kernel(None, 15, 17)
    summary, rows = rows_of(made)
    assert rows["forward"].device_total_ns == 2 * MS
    assert rows["unattributed"].device_total_ns == 7 * MS
    assert summary.device_outside_ns == 8 * MS
    assert "3 of 7 GPU events" in summary.notes[0]


def test_recorded_steps_limit_window():
    def made(**metadata):
        made = Recording(**metadata)
        for number in range(5, 9):
            made.step(number, number * 10, number * 10 + 10).phase(
                "forward", number * 10, number * 10 + number
            )
            made.step(number, number * 10, number * 10 + 10, cat="gpu_user_annotation", tid="stream 7")
        return made

    def recorded(steps):
        return made(**{TRACE_METADATA_KEY: {"recorded_steps": steps}})

    assert rows_of(made())[0].step_numbers == (5, 6, 7, 8)
    assert rows_of(recorded([6, 7, 99]))[0].step_numbers == (6, 7)
    summary, rows = rows_of(recorded([7]))
    assert summary.step_numbers == (7,)
    assert (rows["forward"].calls, rows["forward"].host_total_ns) == (1, 7 * MS)
    for none in ([], [99]):
        assert why_not(summarize, recorded(none).trace()) == NO_STEPS


def test_trace_without_steps_has_no_summary():
    assert why_not(summarize, Recording().phase("forward", 1, 2).trace()) == NO_RANGES
    assert why_not(summarize, Recording().add("aten::mm", 1, 2, cat="cpu_op").trace()) == NO_RANGES
    assert why_not(summarize, Recording().trace()) == NO_RANGES


def test_calls_start_in_step_and_time_is_clipped():
    made = Recording().step(1, 10, 20).step(2, 20, 30)
    made.phase("dataloader", 5, 12).phase("forward", 12, 15).phase("forward", 18, 25).phase(
        "backward", 28, 40
    )
    made.phase("callbacks", 20, 20).phase("invented", 26, 27)
    _, rows = rows_of(made)
    assert (rows["dataloader"].calls, rows["dataloader"].host_total_ns) == (0, 2 * MS)
    assert rows["forward"].host_calls == Tally(2, 10 * MS, 7 * MS, 3 * MS)
    assert rows["backward"].host_total_ns == 2 * MS
    assert (rows["callbacks"].calls, rows["callbacks"].host_total_ns) == (1, 0)
    assert (rows["invented"].label, rows["invented"].depth) == ("invented", 2)


def test_ranges_of_other_threads_are_ignored():
    made = Recording().step(1, 0, 10).phase("forward", 2, 5).phase("backward", 0, 10, tid=9)
    made.step(7, 0, 1, tid=9).step(2, 10, 20)
    summary, rows = rows_of(made)
    assert (rows["backward"].calls, rows["backward"].host_total_ns) == (0, 0)
    assert summary.step_numbers == (1, 2)
    assert "Steps on other threads are left out (1)" in summary.notes[0]


def test_torch_ranges_with_closure():
    def op(name, begin, end, tid=1):
        made.add(name, begin, end, cat="cpu_op", tid=tid)

    made = Recording().step(1, 0, 100).add("enumerate(DataLoader)#It.__next__", 0, 10)
    op("aten::collate", 2, 5)
    made.add("Optimizer.step#SGD.step", 15, 95).add("Optimizer.zero_grad#SGD.zero_grad", 20, 25)
    op("aten::conv2d", 30, 40)
    op("aten::loss", 42, 45)
    op("autograd::engine::evaluate_function: A", 50, 60, tid=2)
    op("autograd::engine::evaluate_function: B", 62, 70, tid=2)
    op("aten::_foreach_add_", 75, 90)
    op("aten::item", 96, 99)
    made.kernel(55, 200, 210, tid=2)
    summary, rows = rows_of(made)
    assert summary.phase_source == "torch ranges"
    assert {key: (row.calls, row.host_total_ns // MS) for key, row in rows.items()} == {
        "profile_step": (1, 100),
        "dataloader": (1, 10),
        "forward": (None, 13),
        "backward": (None, 18),
        "optimizer": (1, 25),
        "others": (None, 34),
        "zero_grad": (1, 5),
        "unattributed": (None, 29),
    }
    assert rows["backward"].device_total_ns == 10 * MS
    assert rows["backward"].device_calls is None
    assert "phases come from torch's own" in summary.notes[0]


def test_phases_are_unknown_without_ranges():
    summary, rows = rows_of(Recording().step(1, 0, 10).add("aten::mm", 1, 5, cat="cpu_op"))
    assert summary.phase_source == "none"
    assert list(rows) == ["profile_step", "others", "unattributed"]


def nested(draw, begin, end, depth):
    """Properly nested ranges inside [begin, end) on an integer grid."""
    ranges = []
    while begin < end and draw(st.booleans()):
        first = draw(st.integers(begin, end - 1))
        last = draw(st.integers(first + 1, end))
        ranges.append((first, last, draw(st.sampled_from([*CORE, "clip", "other"]))))
        if depth:
            ranges += nested(draw, first, last, depth - 1)
        begin = last
    return ranges


@st.composite
def recordings(draw):
    ranges = nested(draw, 0, 60, 3)
    edges = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=6)))
    steps = list(zip(edges[::2], edges[1::2], strict=False))
    kernels = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=8))
    return ranges, steps, kernels


@settings(max_examples=200, deadline=None)
@given(recordings())
def test_matches_oracle_on_grid(drawn):
    ranges, steps, kernels = drawn
    made = Recording()
    owner = {}
    for number, (begin, end) in enumerate(steps):
        made.step(number, begin, end)
        owner |= dict.fromkeys(range(begin, end))
    for begin, end, key in ranges:
        made.phase(key, begin, end)
        for tick in range(begin, end):
            if tick in owner:
                owner[tick] = key
    # The file's order decides between two equal ranges, and nested() lists the outer one first.
    outside = 0
    device = dict.fromkeys([*owner.values(), *CORE, None], 0)
    for launch, duration in kernels:
        made.kernel(launch, 100, 100 + duration, tid=launch)
        if launch in owner:
            device[owner[launch]] += duration * MS
        else:
            outside += duration * MS
    summary, rows = rows_of(made)
    source = "modelprof ranges" if ranges else "none"
    assert summary.phase_source == source
    for key in {key for _, _, key in ranges}:
        expected = sum(value == key for value in owner.values()) * MS
        calls = sum(k == key and b in owner for b, _, k in ranges)
        row = rows.get(key)
        assert (row.host_total_ns if row else 0) == expected
        assert (row.calls if row else 0) == calls
        if kernels and row:
            assert row.device_total_ns == device.get(key, 0)
        if calls:
            assert row.host_calls.min_ns <= Fraction(row.host_calls.avg_ns) <= row.host_calls.max_ns
    assert rows["profile_step"].host_total_ns == len(owner) * MS
    if kernels:
        assert rows["profile_step"].device_total_ns == sum(device.values())
        assert summary.device_outside_ns == outside


def window(index=0, status=WindowStatus.COMPLETE, note=""):
    return Window(index=index, first_step=3, last_step=6, status=status, note=note)


def of_window(window, summary=None, note=""):
    """The table; without a summary, that of a window without a trace."""
    facts = None if summary is None else ranks_with("model_summary", {0: summary})[0]
    return window_model_summary(WindowFacts(window=window, facts=facts, trace_note=note))


def test_table_for_window():
    summary, _ = rows_of(paddle_demo())
    table = of_window(window(status=WindowStatus.PARTIAL, note="training ended."), summary)
    assert table.id == "model_summary"
    assert table.title == "Model Summary (steps 3 to 4)"
    assert [column.group for column in table.columns] == [None, None, *["CPU"] * 5, *["GPU"] * 5]
    assert table.rows[0][:7] == ("ProfileStep", 2, 200 * MS, 100e6, 100 * MS, 100 * MS, 1.0)
    assert table.rows[3][7:] == (136 * MS, 68e6, 68 * MS, 68 * MS, 136 / 208)
    assert table.depths == (0, 1, 1, 1, 1, 1, 2)
    assert "partial; steps 3 to 6 were requested: training ended." in " ".join(table.notes)


def test_table_without_device_or_summary():
    summary, _ = rows_of(Recording().step(4, 0, 10).phase("forward", 2, 5))
    table = of_window(window(index=2), summary)
    assert table.id == "model_summary_2"
    assert table.title == "Model Summary (step 4)"
    assert table.rows[1][7:] == (None,) * 5
    assert "are dashes" in table.notes[-1]
    assert of_window(window(), summary, "a caveat").notes[-1] == "a caveat"
    absent = of_window(window(note="not reached"))
    assert (absent.rows, absent.absent_reason) == ((), "not reached")
    assert of_window(window(), None, "why").absent_reason == "why"
    assert of_window(window()).absent_reason


def test_contract_with_kineto(tmp_path):
    path = tmp_path / "trace.json.gz"
    keys = ("dataloader", "forward", "backward", "optimizer", "zero_grad")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        weight = torch.randn(16, 16, requires_grad=True)
        for number in (3, 4):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                for key in keys:
                    with torch.profiler.record_function(RANGE_PREFIX + key):
                        (weight @ weight).sum().backward()
        profiler.add_metadata_json(TRACE_METADATA_KEY, json.dumps({"recorded_steps": [4]}))
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    assert trace.base_ns > 1_600_000_000 * 10**9
    assert trace.num_dropped == 0
    summary = summarize(trace)
    assert summary.step_numbers == (4,)
    rows = {row.key: row for row in summary.rows}
    assert all(rows[key].calls == 1 and rows[key].host_total_ns > 0 for key in keys)
    assert (
        sum(row.host_total_ns for row in summary.rows if row.depth == 1) == rows["profile_step"].host_total_ns
    )
    assert rows["profile_step"].host_total_ns > 0
    both = summarize(replace(trace, metadata={}))
    assert both.step_numbers == (3, 4)
    assert np.all(trace.end_ns >= trace.begin_ns)
    assert {phase.key for phase in PHASES} >= set(keys)


def test_window_of_any_length_is_described_quickly():
    asked = replace(window(status=WindowStatus.PARTIAL), first_step=0, last_step=10**15)
    summary, _ = rows_of(paddle_demo())
    table = of_window(asked, summary)
    assert any(f"steps 0 to {10**15} were requested" in note for note in table.notes)


# Several ranks

OPTIONS = TableOptions()


def rank_0():
    """Steps 3 and 4 of 100 ms on the host and the device."""
    made = Recording().step(3, 0, 100).step(4, 100, 200)
    made.phase("forward", 10, 30).kernel(12, 20, 28)  # a call of 20 ms that launches 8 ms
    made.phase("forward", 110, 150).kernel(120, 130, 154)  # a call of 40 ms that launches 24 ms
    return made.phase("backward", 60, 70)


def rank_1():
    """Step 3 only, of 50 ms, with a Zero grad that rank 0 lacks, and no Backward."""
    made = Recording().step(3, 0, 50)
    made.phase("forward", 5, 10).kernel(6, 7, 9).kernel(60, 61, 64)  # 2 ms inside, 3 ms launched too late
    return made.phase("zero_grad", 20, 24)


def test_pooled_ranks():
    ranks = {0: summarize(rank_0().trace()), 1: summarize(rank_1().trace())}
    summary, table = pool(ranks.values()), table_of(MODEL_SUMMARY, ranks)
    keys = ["profile_step", *CORE, "others", "zero_grad", "unattributed"]
    assert [row[0] for row in table.rows] == [
        {row.key: row.label for row in summary.rows}[key] for key in keys
    ]
    assert table.depths == (0, 1, 1, 1, 1, 1, 2, 2)

    def figures(key):
        row = table.rows[keys.index(key)]
        return row[1], row[2:7], row[7:]

    # Three steps of 100, 100 and 50 ms that launch 8, 24 and 2 ms.
    assert figures("profile_step") == (
        3,
        (250 * MS, 250 * MS / 3, 100 * MS, 50 * MS, 1.0),
        (34 * MS, 34 * MS / 3, 24 * MS, 2 * MS, 1.0),
    )
    # Three calls of 20, 40 and 5 ms: the mean is over calls, not over ranks.
    assert figures("forward") == (
        3,
        (65 * MS, 65 * MS / 3, 40 * MS, 5 * MS, 65 / 250),
        (34 * MS, 34 * MS / 3, 24 * MS, 2 * MS, 1.0),
    )
    # Rank 1 has no call, so it adds nothing to the figures per call.
    assert figures("backward") == (1, (10 * MS, 1e7, 10 * MS, 10 * MS, 0.04), (0, 0.0, 0, 0, 0.0))
    assert figures("dataloader") == (0, (0, None, None, None, 0.0), (0, None, None, None, 0.0))
    # 200 - 20 - 40 - 10 of rank 0 and 50 - 5 of rank 1.
    assert figures("others") == (None, (175 * MS, None, None, None, 0.7), (0, None, None, None, 0.0))
    assert figures("zero_grad") == (1, (4 * MS, 4e6, 4 * MS, 4 * MS, 0.016), (0, 0.0, 0, 0, 0.0))
    assert figures("unattributed")[1][0] == 171 * MS
    assert (summary.num_steps, summary.step_numbers) == (3, (3, 4))
    assert (summary.has_device, summary.device_outside_ns) == (True, 3 * MS)
    assert ["1 of 2 GPU events" in note for note in summary.notes] == [True]


def test_rank_without_device_events_adds_no_zeros():
    """It has no device figures, so they come from the other rank only."""
    on_device = summarize(rank_0().trace())
    on_host = summarize(Recording().step(3, 0, 40).phase("forward", 0, 30).trace())
    pooled = pool([on_host, on_device])
    alone = {row.key: row for row in on_device.rows}
    for row in pooled.rows:
        assert row.device_total_ns == alone[row.key].device_total_ns
        assert row.device_calls == alone[row.key].device_calls
    assert pooled.device_outside_ns == 0
    told = " ".join(table_of(MODEL_SUMMARY, {0: on_host, 1: on_device}).notes)
    assert "Some ranks have no GPU events" in told
    assert "The trace has no GPU events" not in told
    nothing = pool([on_host, on_host])
    assert not nothing.has_device
    assert {row.device_total_ns for row in nothing.rows} == {nothing.device_outside_ns} == {None}
    assert nothing.rows[0].host_total_ns == 80 * MS


def test_phase_made_of_operators_on_one_rank_has_no_calls():
    """Forward is a range of this package on rank 0, and made of operators on rank 1."""
    pieced = Recording().step(3, 0, 50).add("aten::mm", 5, 10, cat="cpu_op")
    pieced.add("autograd::engine::evaluate_function: A", 20, 30, cat="cpu_op")
    ranks = {0: summarize(rank_0().trace()), 1: summarize(pieced.trace())}
    (forward,) = (row for row in table_of(MODEL_SUMMARY, ranks).rows if row[0] == "Forward")
    assert forward[1:6] == (None, 65 * MS, None, None, None)
    assert forward[7:11] == (32 * MS, None, None, None)


def test_table_for_several_ranks():
    by_rank = {0: summarize(rank_0().trace()), 1: summarize(rank_1().trace()), 2: "rank 2 slept"}
    table = table_of(MODEL_SUMMARY, by_rank)
    assert (table.id, table.title) == ("model_summary", "Model Summary (steps 3 to 4)")
    assert table.rows[0][:4] == ("ProfileStep", 3, 250 * MS, 250 * MS / 3)
    assert table.rows[2][7:] == (34 * MS, 34 * MS / 3, 24 * MS, 2 * MS, 1.0)
    assert "Without rank 2: rank 2 slept." in table.notes
    assert table.notes[0] == "Covers steps 3 to 4 (3 in total)."

    alone = table_of(MODEL_SUMMARY, {0: by_rank[0]})
    assert alone.rows == of_window(window(), by_rank[0]).rows
    assert not [note for note in alone.notes if "rank" in note]

    absent = table_of(MODEL_SUMMARY, {0: "no reason", 1: NO_RANGES})
    assert (absent.rows, absent.absent_reason) == ((), f"no reason; {NO_RANGES}")


def test_window_trace_without_summary():
    table = of_window(window(), NO_STEPS)
    assert (table.rows, table.absent_reason) == ((), NO_STEPS)
    assert table.title == "Model Summary (steps 3 to 6)"
