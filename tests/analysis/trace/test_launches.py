"""Launch Summary and Runtime calls: hand-made launches, plain loops, and the real traces' numbers."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.lazy import NO_DEVICE
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.launches import (
    NO_KERNELS,
    NO_RUNTIME_CALLS,
    summarize_launches,
    summarize_runtime_calls,
    waits_for_device,
)
from lightning_modelprof.report.tables.trace.launches import LAUNCHES, RUNTIME_CALLS
from tests.support.facts import table_of, why_not
from tests.support.traces import event, load, make_trace, reference

US = 1000


def call(begin, end, correlation=None, name="cudaLaunchKernel", tid=1, cat="cuda_runtime"):
    args = {} if correlation is None else {"correlation": correlation}
    return event(cat, name, begin, end, tid, **args)


def kernel(begin, end, correlation=None, cat="kernel"):
    args = {} if correlation is None else {"correlation": correlation}
    return event(cat, "k", begin, end, 7, 0, device=0, stream=7, **args)


def timeline_of(*events):
    return build_timeline(make_trace(list(events)))


def four_launches():
    """Calls of 4, 6 and 8 µs with kernels of 4, 10 and 20; one kernel of 5 without a call.

    The kernels start 2 µs after their call's end, 1 µs before it and 12 µs after it.
    """
    return timeline_of(
        call(0, 4, 1),
        kernel(6, 10, 1),
        call(10, 16, 2),
        kernel(15, 25, 2),
        call(20, 28, 3, cat="cuda_driver", name="cuLaunchKernel"),
        kernel(40, 60, 3),
        kernel(70, 75, 9),
        call(30, 35, 4, name="cudaMemcpyAsync"),
        kernel(61, 62, 4, cat="gpu_memcpy"),
    )


def test_hand_made_launches():
    fact = summarize_launches(four_launches())
    assert (fact.kernels.count, fact.linked.count, fact.unlinked.count) == (4, 3, 1)
    assert (fact.kernels.total_ns, fact.kernels.median_ns) == (39 * US, 7.5 * US)
    assert (fact.kernels.max_ns, fact.kernels.min_ns) == (20 * US, 4 * US)
    assert (fact.kernels.p90_ns, fact.kernels.avg_ns) == (20 * US, 9.75 * US)
    assert [spread.count for spread in fact.short] == [2, 3]
    assert [spread.total_ns for spread in fact.short] == [9 * US, 19 * US]
    assert fact.unlinked.total_ns == 5 * US
    assert (fact.shorter.count, fact.shorter_ratio) == (0, 0.0)
    assert (fact.calls.count, fact.calls.total_ns, fact.calls.median_ns) == (3, 18 * US, 6 * US)
    assert (fact.delay.count, fact.delay.median_ns, fact.delay.max_ns) == (3, 2 * US, 12 * US)
    assert (fact.delay.min_ns, fact.negative_delay.count, fact.negative_delay.max_ns) == (-US, 1, -US)
    assert fact.num_graph_calls == 0


@pytest.mark.parametrize(("size", "count"), [(3.999, 1), (4, 0), (4.001, 0)])
def test_kernel_shorter_than_launch_call(size, count):
    fact = summarize_launches(timeline_of(call(0, 4, 1), kernel(6, 6 + size, 1), kernel(20, 21)))
    assert (fact.shorter.count, fact.shorter_ratio) == (count, float(count))


@pytest.mark.parametrize(("size", "expected"), [(5, [1, 1]), (5.001, [0, 1]), (10, [0, 1]), (10.001, [0, 0])])
def test_short_kernels(size, expected):
    fact = summarize_launches(timeline_of(kernel(6, 6 + size)))
    assert [spread.count for spread in fact.short] == expected


def test_kernel_may_start_when_its_call_ends():
    fact = summarize_launches(timeline_of(call(0, 4, 1), kernel(4, 9, 1)))
    assert (fact.delay.median_ns, fact.negative_delay.count) == (0, 0)


def test_graph_launch_counts_once():
    """One call of 10 µs launched kernels that start 1, 3 and 5 µs after it."""
    fact = summarize_launches(
        timeline_of(
            call(0, 10, 1, name="cudaGraphLaunch"),
            kernel(11, 12, 1),
            kernel(13, 14, 1),
            kernel(15, 16, 1),
            call(20, 24, 2),
            kernel(25, 26, 2),
        )
    )
    assert (fact.calls.count, fact.calls.total_ns, fact.num_graph_calls) == (2, 14 * US, 1)
    assert (fact.linked.count, fact.delay.median_ns) == (4, 2 * US)
    notes = table_of(LAUNCHES, {0: fact}).notes
    (note,) = notes
    assert note.startswith("1 call launched more than one kernel")
    plain = summarize_launches(timeline_of(call(0, 4, 1), kernel(4, 9, 1)))
    assert table_of(LAUNCHES, {0: plain}).notes == ()


@pytest.mark.parametrize(("size", "count"), [(3, 3), (4, 0)])
def test_graph_as_whole_is_compared_with_launch(size, count):
    """A launch of 10 µs for three kernels, each of them shorter."""
    kernels = [kernel(begin, begin + size, 1) for begin in (11, 20, 30)]
    fact = summarize_launches(timeline_of(call(0, 10, 1, name="cudaGraphLaunch"), *kernels))
    assert (fact.shorter.count, fact.shorter_ratio) == (count, count / 3)


def test_kernels_without_launches():
    fact = summarize_launches(timeline_of(kernel(0, 5), kernel(5, 15)))
    assert (fact.unlinked.count, fact.calls.count, fact.delay.median_ns) == (2, 0, None)
    assert fact.shorter_ratio is None
    rows = {row[0]: row[1:] for row in table_of(LAUNCHES, {0: fact}).rows}
    assert rows["Known launch"][:2] == (0, 0.0)
    assert rows["Shorter than their launch"][:2] == (0, None)
    assert rows["Launch call"] == (0, *[None] * 7)


def test_trace_without_kernels_or_runtime_calls():
    on_host = timeline_of(event("cpu_op", "aten::mm", 0, 5))
    assert why_not(summarize_launches, on_host) == NO_DEVICE
    assert why_not(summarize_launches, timeline_of(kernel(0, 5, cat="gpu_memcpy"))) == NO_KERNELS
    assert why_not(summarize_runtime_calls, on_host) == NO_RUNTIME_CALLS
    for table, reason in (
        (table_of(LAUNCHES, {0: NO_DEVICE}), NO_DEVICE),
        (table_of(RUNTIME_CALLS, {0: NO_RUNTIME_CALLS}), NO_RUNTIME_CALLS),
    ):
        assert (table.rows, table.depths, table.absent_reason, table.notes) == ((), (), reason, ())


def test_table_of_launches():
    table = table_of(LAUNCHES, {0: summarize_launches(four_launches())})
    assert [(depth, *row[:4]) for depth, row in zip(table.depths, table.rows, strict=True)] == [
        (0, "Kernel time", 4, 1.0, 39 * US),
        (1, "At most 5 µs", 2, 0.5, 9 * US),
        (1, "At most 10 µs", 3, 0.75, 19 * US),
        (1, "Known launch", 3, 0.75, 34 * US),
        (2, "Shorter than their launch", 0, 0.0, None),
        (1, "Unknown launch", 1, 0.25, 5 * US),
        (0, "Launch call", 3, None, 18 * US),
        (0, "Queue delay", 3, None, None),
        (1, "Negative", 1, 1 / 3, None),
    ]
    # avg, median, p90, max, min of 2, -1 and 12
    assert table.rows[7][4:] == (pytest.approx(13 / 3 * US), 2 * US, 12 * US, 12 * US, -US)


def test_launches_on_several_ranks():
    ranks = {1: summarize_launches(four_launches()), 0: "the trace has no kernels"}
    table = table_of(LAUNCHES, ranks)
    assert len(table.rows) == 9
    assert all(row[0].startswith("rank 1 ") for row in table.rows)
    assert table.notes[-1] == "Without rank 0: the trace has no kernels."


def some_calls():
    return timeline_of(
        call(0, 4),
        call(5, 7, tid=2),
        call(10, 30, name="cudaStreamSynchronize"),
        call(31, 35, name="cudaMemcpy"),
        event("cpu_op", "cudaMemcpy", 31, 50),
    )


def test_runtime_calls():
    """30 µs in total, with 20 and 4 in calls that wait."""
    fact = summarize_runtime_calls(some_calls())
    assert {(one.name, one.host.calls, one.host.total_ns // US, one.waits) for one in fact.calls} == {
        ("cudaStreamSynchronize", 1, 20, True),
        ("cudaLaunchKernel", 2, 6, False),
        ("cudaMemcpy", 1, 4, True),
    }
    assert (fact.host.total_ns, fact.wait_ns) == (30 * US, 24 * US)
    table = table_of(RUNTIME_CALLS, {0: fact})
    assert table.rows == (
        ("All calls", 4, 30 * US, 7.5 * US, 20 * US, 2 * US, 1.0, 24 * US),
        ("cudaStreamSynchronize", 1, 20 * US, 20 * US, 20 * US, 20 * US, 20 / 30, 20 * US),
        ("cudaLaunchKernel", 2, 6 * US, 3 * US, 4 * US, 2 * US, 6 / 30, None),
        ("cudaMemcpy", 1, 4 * US, 4 * US, 4 * US, 4 * US, 4 / 30, 4 * US),
    )
    assert table.depths == (0, 1, 1, 1)


def test_no_call_waits():
    table = table_of(RUNTIME_CALLS, {0: summarize_runtime_calls(timeline_of(call(0, 0)))})
    assert table.rows[0] == ("All calls", 1, 0, 0.0, 0, 0, None, 0)


def test_runtime_calls_on_several_ranks():
    """Ranks are summed: launches of 4, 2 and 10."""
    more = summarize_runtime_calls(timeline_of(call(0, 10), call(20, 40, name="hipFree")))
    ranks = {0: summarize_runtime_calls(some_calls()), 1: more, 2: NO_RUNTIME_CALLS}
    table = table_of(RUNTIME_CALLS, ranks)
    assert [row[:6] for row in table.rows] == [
        ("All calls", 6, 60 * US, 10 * US, 20 * US, 2 * US),
        ("cudaStreamSynchronize", 1, 20 * US, 20 * US, 20 * US, 20 * US),
        ("hipFree", 1, 20 * US, 20 * US, 20 * US, 20 * US),
        ("cudaLaunchKernel", 3, 16 * US, 16 / 3 * US, 10 * US, 2 * US),
        ("cudaMemcpy", 1, 4 * US, 4 * US, 4 * US, 4 * US),
    ]
    assert table.notes[-1].startswith("Without rank 2: ")


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("cudaDeviceSynchronize", True),
        ("cudaStreamSynchronize_ptsz", True),
        ("cudaEventSynchronize", True),
        ("cuCtxSynchronize", True),
        ("hipDeviceSynchronize", True),
        ("hipStreamSynchronize", True),
        ("zeCommandQueueSynchronize", True),
        ("cudaMemcpy", True),
        ("cudaMemcpy2D", True),
        ("cuMemcpyDtoH_v2", True),
        ("hipMemcpyWithStream", True),
        ("cudaMemcpyAsync", False),
        ("cudaMemcpy2DAsync", False),
        ("cuMemcpyHtoDAsync_v2", False),
        ("hipMemcpyAsync", False),
        ("cudaStreamWaitEvent", False),
        ("cudaEventQuery", False),
        ("cudaMemsetAsync", False),
        ("cudaLaunchKernel", False),
        ("aten::my_cudaMemcpy", False),
    ],
)
def test_calls_that_wait_for_device(name, waits):
    assert waits_for_device(name) is waits


# The oracle: plain lists and the statistics module


@st.composite
def recordings(draw):
    calls = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), max_size=6))
    kernel_of = st.tuples(st.integers(0, 60), st.integers(0, 15), st.integers(-1, 6))
    return calls, draw(st.lists(kernel_of, min_size=1, max_size=9))


def check(spread, times):
    """Checks every field against its definition, in microseconds."""
    assert spread.count == len(times)
    if not times:
        assert (spread.total_ns, spread.avg_ns, spread.median_ns, spread.p90_ns) == (None,) * 4
        assert (spread.max_ns, spread.min_ns) == (None, None)
        return
    assert (spread.total_ns, spread.max_ns, spread.min_ns) == (
        sum(times) * US,
        max(times) * US,
        min(times) * US,
    )
    assert spread.avg_ns == pytest.approx(sum(times) / len(times) * US)
    assert spread.median_ns == statistics.median(times) * US
    # The first value with at least nine tenths of the others before it.
    place = next(index for index in range(len(times)) if 10 * index >= 9 * (len(times) - 1))
    assert spread.p90_ns == sorted(times)[place] * US


@settings(max_examples=150, deadline=None)
@given(recordings())
def test_matches_oracle(recording):
    calls, kernels = recording
    fact = summarize_launches(
        timeline_of(
            *(call(begin, begin + size, index, tid=index) for index, (begin, size) in enumerate(calls)),
            *(
                kernel(begin, begin + size, number if number >= 0 else None)
                for begin, size, number in kernels
            ),
        )
    )
    linked = [(*calls[number], begin, size) for begin, size, number in kernels if 0 <= number < len(calls)]
    check(fact.kernels, [size for _, size, _ in kernels])
    for spread, limit in zip(fact.short, (5, 10), strict=True):
        check(spread, [size for _, size, _ in kernels if size <= limit])
    check(fact.linked, [size for *_, size in linked])
    check(fact.unlinked, [size for _, size, number in kernels if not 0 <= number < len(calls)])
    work = Counter()
    for _, size, number in kernels:
        work[number] += size
    known = [(size, number) for _, size, number in kernels if 0 <= number < len(calls)]
    check(fact.shorter, [size for size, number in known if work[number] < calls[number][1]])
    launching = [number for *_, number in kernels if 0 <= number < len(calls)]
    check(fact.calls, [calls[number][1] for number in set(launching)])
    assert fact.num_graph_calls == sum(launching.count(number) > 1 for number in set(launching))
    delays = [begin - (called + duration) for called, duration, begin, _ in linked]
    check(fact.delay, delays)
    check(fact.negative_delay, [delay for delay in delays if delay < 0])


# Real traces

REFERENCES = ("a100_nccl", "mi250_toy", "sampled_2rank_rank0", "sampled_2rank_rank1", "v100_ns_resolution")


@pytest.mark.parametrize("name", REFERENCES)
def test_launches_in_real_traces(name):
    """The references are rounded to whole nanoseconds, and shares to four digits."""
    truth = reference(name, "stdlib")
    fact = summarize_launches(build_timeline(load(name)))
    assert fact.kernels.count == truth["n_kernels"]
    assert fact.kernels.total_ns == pytest.approx(truth["kernel_dur_sum_us"] * US, abs=1)
    assert fact.kernels.median_ns == pytest.approx(truth["kernel_dur_median_us"] * US, abs=1)
    assert [spread.count for spread in fact.short] == [truth["n_kernels_le_5us"], truth["n_kernels_le_10us"]]
    launch = truth["launch"]
    assert fact.linked.count == launch["n_correlated"]
    assert fact.delay.median_ns == pytest.approx(launch["launch_delay_median_us"] * US, abs=1)
    assert fact.delay.p90_ns == pytest.approx(launch["launch_delay_p90_us"] * US, abs=1)
    assert fact.calls.median_ns == pytest.approx(launch["cpu_launch_dur_median_us"] * US, abs=1)
    assert fact.shorter_ratio == pytest.approx(launch["frac_kernels_shorter_than_launch_call"], abs=1e-4)


@pytest.mark.parametrize("name", REFERENCES)
def test_runtime_calls_in_real_traces(name):
    """The references contain the fifteen calls with the longest totals."""
    truth = reference(name, "stdlib")
    fact = summarize_runtime_calls(build_timeline(load(name)))
    by_name = {one.name: one.host for one in fact.calls}
    for name, figures in truth["runtime_calls"].items():
        assert by_name[name].calls == figures["n"]
        assert by_name[name].total_ns == pytest.approx(figures["dur_us"] * US, abs=1)
    assert len(fact.calls) >= len(truth["runtime_calls"])
    assert {one.name for one in fact.calls if one.waits} == set(truth["sync_calls"])
    waited = sum(figures["dur_us"] for figures in truth["sync_calls"].values())
    assert fact.wait_ns == pytest.approx(waited * US, abs=1)
