"""Idle Summary: hand-made gaps, an oracle that checks every moment, and the real traces' busy times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.lazy import NO_DEVICE
from lightning_modelprof.analysis.timeline.tally import add_up
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.idle import CAUSES, KERNEL_GAP_NS, summarize_idle
from lightning_modelprof.report.tables.trace.idle import IDLE
from tests.support.facts import table_of, why_not
from tests.support.traces import event, load, make_trace, reference

US = 1000
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def launch(begin, correlation, tid=1):
    return event("cuda_runtime", "cudaLaunchKernel", begin, begin + 1, tid, correlation=correlation)


def work(begin, end, correlation=None, *, stream=7, device=0, cat="kernel", **args):
    known = {} if correlation is None else {"correlation": correlation}
    return event(cat, "k", begin, end, stream, device, device=device, stream=stream, **known, **args)


def fact_of(*events):
    return summarize_idle(build_timeline(make_trace(list(events))))


def one_device(*events):
    (device,) = fact_of(*events).devices
    assert device.busy_ns + device.idle.total_ns == device.span_ns
    assert sum(tally.total_ns for tally in device.by_cause) == device.idle.total_ns
    return device


def microseconds(tally):
    return tally.calls, tally.total_ns / US


def causes(device):
    """Gaps and microseconds per cause, without causes that don't occur."""
    return {
        cause: microseconds(tally)
        for cause, tally in zip(CAUSES, device.by_cause, strict=True)
        if tally.calls
    }


def test_each_cause():
    """Busy [0, 10), [15, 20), [100, 110), [160, 170) with a copy inside; gaps of 5, 80 and 50 between."""
    device = one_device(
        work(0, 10),
        launch(2, 1),
        work(15, 20, 1),  # launched at 2, before the gap starts at 10: 5 µs from one kernel to the next
        launch(90, 2),
        work(100, 110, 2, stream=9),  # launched at 90, after the gap started at 20
        launch(92, 3),
        work(160, 170, 3),  # launched at 92, before the gap started at 110, and 50 µs late
        work(165, 168, cat="gpu_memcpy"),
    )
    assert (device.span_ns, device.busy_ns) == (170 * US, 35 * US)
    assert causes(device) == {"kernel gap": (1, 5), "host": (1, 80), "other stream": (1, 50)}
    assert microseconds(device.idle) == (3, 135)
    assert (device.idle.max_ns, device.idle.avg_ns) == (80 * US, 45 * US)
    assert device.num_unknown == 0


@pytest.mark.parametrize(("gap", "cause"), [(29.999, "kernel gap"), (30, "unknown"), (30.001, "unknown")])
def test_longest_kernel_gap(gap, cause):
    assert KERNEL_GAP_NS == 30 * US
    device = one_device(launch(0, 1), work(5, 10), work(10 + gap, 50, 1))
    assert causes(device) == {cause: (1, gap)}
    assert microseconds(device.idle) == (1, gap)


@pytest.mark.parametrize(("launched", "cause"), [(9.999, "kernel gap"), (10, "kernel gap"), (10.001, "host")])
def test_launch_before_or_after_gap_starts(launched, cause):
    device = one_device(work(5, 10), launch(launched, 1), work(20, 30, 1))
    assert causes(device) == {cause: (1, 10)}


@pytest.mark.parametrize("first_in_file", [1, 2])
def test_earliest_launch_counts_among_events_that_end_gap(first_in_file):
    both = [work(20, 30, 1, stream=7), work(20, 30, 2, stream=8)]
    events = both if first_in_file == 1 else both[::-1]
    device = one_device(launch(2, 1), work(5, 10), launch(15, 2), work(20, 30, stream=9), *events)
    assert causes(device) == {"kernel gap": (1, 10)}
    assert device.num_unknown == 0


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [("k", "k", "other stream"), (NCCL, "k", "communication"), ("k", NCCL, "communication")],
)
def test_queued_work_waits_for_communication_or_is_it(before, after, cause):
    """Work launched at 2 on another stream starts 50 µs after the end of the work before it."""
    first = event("kernel", before, 0, 10, 7, 0, device=0, stream=7)
    second = event("kernel", after, 60, 70, 9, 0, device=0, stream=9, correlation=1)
    assert causes(one_device(first, launch(2, 1), second)) == {cause: (1, 50)}


def test_unknown_launch():
    fact = fact_of(work(0, 10), work(12, 20), work(25, 30, 77))
    (device,) = fact.devices
    assert (causes(device), device.num_unknown) == ({"unknown": (2, 7)}, 2)
    table = table_of(IDLE, {0: fact})
    assert table.notes == ("2 gaps are in Other because the launch of their event wasn't recorded.",)


def test_launch_is_found_through_operator():
    device = one_device(
        work(0, 10),
        event("cpu_op", "aten::mm", 14, 16, **{"External id": 5}),
        event("user_annotation", FETCH, 11, 13),
        work(20, 30, 8, **{"External id": 5}),
    )
    assert causes(device) == {"host": (1, 8), "data loading": (1, 2)}


@pytest.mark.parametrize("name", [FETCH, "enumerate(DataPipe)#Pipe", "modelprof: dataloader"])
def test_launching_thread_waited_for_data(name):
    """Of the gap [10, 50), the fetch [5, 40) on the launching thread takes 30; the others don't count."""
    device = one_device(
        work(0, 10),
        event("user_annotation", name, 5, 40),
        event("user_annotation", name, 20, 30),
        event("user_annotation", name, 40, 48, 2),
        event("user_annotation", "modelprof: forward", 41, 60),
        launch(45, 1),
        work(50, 60, 1),
    )
    assert causes(device) == {"data loading": (1, 30), "host": (1, 10)}


def test_each_thread_has_its_own_fetches():
    device = one_device(
        event("user_annotation", FETCH, 0, 20, 1),
        event("user_annotation", FETCH, 30, 60, 2),
        work(0, 10),
        launch(19, 1, 1),
        work(20, 30, 1),  # gap [10, 20): thread 1, entirely in its fetch
        launch(39, 2, 1),
        work(40, 50, 2),  # gap [30, 40): thread 1, nothing
        launch(59, 3, 2),
        work(65, 70, 3),  # gap [50, 65): thread 2, 10 of it in its fetch
    )
    assert causes(device) == {"data loading": (2, 20), "host": (2, 15)}
    assert device.by_cause[CAUSES.index("data loading")].max_ns == 10 * US


def test_fetch_does_not_change_gap_with_other_cause():
    device = one_device(launch(0, 1), work(5, 10), event("user_annotation", FETCH, 12, 15), work(20, 30, 1))
    assert causes(device) == {"kernel gap": (1, 10)}


def test_events_of_zero_length():
    """They take no time and end no gap, but they extend the device's span."""
    device = one_device(work(0, 0), launch(3, 1), work(5, 5), work(10, 20, 1), work(30, 30))
    assert (device.span_ns, device.busy_ns) == (30 * US, 10 * US)
    assert causes(device) == {"host": (1, 10), "unknown": (1, 10)}
    nothing = one_device(work(4, 4))
    assert (nothing.span_ns, nothing.busy_ns, nothing.idle.calls) == (0, 0, 0)
    rows = table_of(IDLE, {0: fact_of(work(4, 4))}).rows
    assert rows[0] == ("Busy", 0, None, None, 0, None, None, None)


def test_no_gaps():
    device = one_device(work(0, 10), work(10, 20), work(5, 12, stream=9))
    assert (device.span_ns, device.busy_ns, device.idle.calls, device.idle.max_ns) == (
        20 * US,
        20 * US,
        0,
        None,
    )


def test_no_device():
    assert why_not(fact_of, event("cpu_op", "aten::mm", 0, 10)) == NO_DEVICE
    table = table_of(IDLE, {0: NO_DEVICE})
    assert (table.rows, table.absent_reason, table.notes) == ((), NO_DEVICE, ())


def test_table():
    fact = fact_of(work(0, 10), launch(20, 1), work(25, 30, 1), launch(21, 2), work(40, 50, 2))
    table = table_of(IDLE, {0: fact})
    # Busy 25 of 50; the host is late by 15, and 10 are between queued kernels.
    assert tuple((row[0], *row[3:]) for row in table.rows) == (
        ("Busy", None, 25 * US, None, None, 0.5),
        ("Idle", 2, 25 * US, 12.5 * US, 15 * US, 0.5),
        ("Data loading", 0, 0, None, None, 0.0),
        ("CPU", 1, 15 * US, 15 * US, 15 * US, 0.3),
        ("Kernel gap", 1, 10 * US, 10 * US, 10 * US, 0.2),
        ("Other", 0, 0, None, None, 0.0),
    )
    assert table.depths == (0, 0, 1, 1, 1, 1)


def test_idle_time_in_steps():
    """A step from 20 to 60: busy 5 + 10; late until 25 and for 10 at the end; a kernel gap of 10."""
    step = event("user_annotation", "ProfilerStep#1", 20, 60)
    fact = fact_of(step, work(0, 10), launch(20, 1), work(25, 30, 1), launch(29, 2), work(40, 50, 2))
    rows = {row[0]: row[1:3] for row in table_of(IDLE, {0: fact}).rows}
    assert rows == {
        "Busy": (15 * US, 15 / 40),
        "Idle": (25 * US, 25 / 40),
        "Data loading": (0, 0),
        "CPU": (15 * US, 15 / 40),
        "Kernel gap": (10 * US, 10 / 40),
        "Other": (0, 0),
    }


def test_fetch_in_steps():
    """Of the wait from 30 to 50 within a step, the fetch takes 15 and other host work 5."""
    step = event("user_annotation", "ProfilerStep#1", 20, 60)
    fetch = event("user_annotation", FETCH, 32, 47)
    covered = one_device(step, launch(20, 1), work(20, 30, 1), fetch, launch(48, 2), work(50, 60, 2)).covered
    assert (covered.total_ns, covered.busy_ns, covered.idle_ns) == (40 * US, 20 * US, 20 * US)
    by_cause = dict(zip(CAUSES, covered.by_cause_ns, strict=True))
    assert {cause: ns for cause, ns in by_cause.items() if ns} == {"data loading": 15 * US, "host": 5 * US}


def test_devices_and_ranks_have_separate_rows():
    two = fact_of(work(0, 10, device=3), work(20, 30, device=3), work(5, 12, device=1))
    assert [(device.device, device.span_ns // US) for device in two.devices] == [(1, 7), (3, 30)]
    names = [row[0] for row in table_of(IDLE, {0: two}).rows]
    assert (names[0], names[5], names[6], names[7]) == (
        "GPU 1 Busy",
        "GPU 1 Other",
        "GPU 3 Busy",
        "GPU 3 Idle",
    )
    ranks = {1: fact_of(work(0, 10)), 0: two, 2: "the trace has no device events"}
    table = table_of(IDLE, ranks)
    assert [row[0] for row in table.rows][::6] == [
        "rank 0 GPU 1 Busy",
        "rank 0 GPU 3 Busy",
        "rank 1 GPU 0 Busy",
    ]
    assert len(table.depths) == 18
    assert table.notes[-1] == "Without rank 2: the trace has no device events."


# The oracle: checks every moment of a grid of 10 microseconds; three moments exceed a kernel gap.

GRID = 10


def oracle(events, launches, fetches):
    """Span, busy time, and the number and length of gaps by cause for each device, in grid moments."""
    result = {}
    for device in sorted({one["device"] for one in events}):
        mine = [one for one in events if one["device"] == device]
        first, last = min(one["begin"] for one in mine), max(one["end"] for one in mine)
        found = {"span": last - first, "busy": 0, "unknown": 0}
        found |= {cause: [] for cause in ("data loading", "host", "kernel gap", "other")}
        idle_since = None
        for now in range(first, last + 1):
            is_busy = any(one["begin"] <= now < one["end"] for one in mine)
            if now < last and is_busy:
                found["busy"] += 1
            if (is_busy or now == last) and idle_since is not None:
                close_gap(found, idle_since, now, mine, launches, fetches)
                idle_since = None
            elif not is_busy and now < last and idle_since is None:
                idle_since = now
        result[device] = found
    return result


def close_gap(found, since, now, mine, launches, fetches):
    enders = [one for one in mine if one["begin"] == now]
    known = [launches[one["launch"]] for one in enders if one["launch"] in launches]
    if not known:
        found["unknown"] += 1
        found["other"].append(now - since)
        return
    launched, thread = min(known)
    if launched > since:
        waits = [
            any(begin <= moment < end and at == thread for begin, end, at in fetches)
            for moment in range(since, now)
        ]
        if any(waits):
            found["data loading"].append(sum(waits))
        if not all(waits):
            found["host"].append(waits.count(False))
    else:
        found["kernel gap" if now - since < 3 else "other"].append(now - since)


@st.composite
def recordings(draw):
    """Device events on two devices, launches on two threads at distinct times, and fetches."""
    times = draw(st.lists(st.integers(0, 40), max_size=6, unique=True))
    launches = {index: (begin, draw(st.integers(1, 2))) for index, begin in enumerate(times)}
    events = [
        {"device": device, "begin": begin, "end": begin + size, "launch": number}
        for device, begin, size, number in draw(
            st.lists(
                st.tuples(
                    st.sampled_from([0, 0, 0, 1]),
                    st.integers(0, 40),
                    st.integers(0, 6),
                    st.one_of(st.none(), st.integers(0, 7)),
                ),
                min_size=1,
                max_size=8,
            )
        )
    ]
    fetch = st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 2))
    fetches = [(begin, begin + size, thread) for begin, size, thread in draw(st.lists(fetch, max_size=3))]
    return events, launches, fetches


@settings(max_examples=200, deadline=None)
@given(recordings())
def test_matches_oracle(recording):
    events, launches, fetches = recording
    fact = fact_of(
        *(
            work(
                one["begin"] * GRID,
                one["end"] * GRID,
                one["launch"],
                stream=index,
                device=one["device"],
                cat=("kernel", "gpu_memcpy", "gpu_memset")[index % 3],
            )
            for index, one in enumerate(events)
        ),
        *(launch(begin * GRID, number, thread) for number, (begin, thread) in launches.items()),
        *(
            event("user_annotation", FETCH, begin * GRID, end * GRID, thread)
            for begin, end, thread in fetches
        ),
    )
    truth = oracle(events, launches, fetches)
    assert [device.device for device in fact.devices] == list(truth)
    for device in fact.devices:
        expected = truth[device.device]
        moment = GRID * US
        assert device.span_ns == expected["span"] * moment
        assert device.busy_ns == expected["busy"] * moment
        assert device.num_unknown == expected["unknown"]
        for cause in ("data loading", "host", "kernel gap", "other"):
            gaps = expected[cause]
            names = ("other stream", "unknown") if cause == "other" else (cause,)
            found = add_up(device.by_cause[CAUSES.index(name)] for name in names)
            assert (found.calls, found.total_ns) == (len(gaps), sum(gaps) * moment), cause
            assert found.max_ns == (max(gaps) * moment if gaps else None)
        assert device.busy_ns + sum(tally.total_ns for tally in device.by_cause) == device.span_ns


# Real traces


@pytest.mark.parametrize(
    "name", ["a100_nccl", "mi250_toy", "sampled_2rank_rank0", "sampled_2rank_rank1", "v100_ns_resolution"]
)
def test_busy_and_idle_of_real_traces(name):
    truth = reference(name, "stdlib")
    (device,) = summarize_idle(build_timeline(load(name))).devices
    assert device.span_ns == pytest.approx(truth["gpu_window_us"] * US, abs=1)
    assert device.busy_ns == pytest.approx(truth["busy_us"] * US, abs=1)
    assert device.idle.total_ns == pytest.approx(truth["idle_us"] * US, abs=1)
    assert device.num_unknown == 0


def test_more_workers_reduce_idle_time():
    """ResNet-50's fetches took 396 of 1000 µs without workers, and almost nothing with four workers."""
    devices = [
        summarize_idle(build_timeline(load(f"v100_resnet50_workers{workers}"))).devices[0]
        for workers in (0, 4)
    ]
    without, four = (device.by_cause[CAUSES.index("data loading")] for device in devices)
    assert without.total_ns / devices[0].idle.total_ns > 0.7
    assert without.calls == 5  # six steps, and the first fetch precedes the device's first event
    assert four.total_ns < without.total_ns / 50
