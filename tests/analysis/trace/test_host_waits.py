"""CPU waits for the GPU: hand-made traces, and a simulated device running the same program without waits."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.lazy import NO_DEVICE
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.host_waits import (
    NO_STEP_RANGES,
    pool_host_waits,
    summarize_host_waits,
)
from lightning_modelprof.report.tables.trace.host_waits import HOST_WAITS
from tests.support.facts import fact_or_why, table_of, why_not
from tests.support.traces import event, make_trace

US = 1000
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def step(number, begin, end):
    return event("user_annotation", f"ProfilerStep#{number}", begin, end)


def launch(begin, correlation, tid=1):
    return event("cuda_runtime", "cudaLaunchKernel", begin, begin + 1, tid, correlation=correlation)


def work(begin, end, correlation, *, stream=7, device=0, cat="kernel", name="k"):
    return event(cat, name, begin, end, stream, device, device=device, stream=stream, correlation=correlation)


def wait(begin, end, tid=1, name="cudaStreamSynchronize"):
    return event("cuda_runtime", name, begin, end, tid)


def kernel(launched, begin, end, correlation, tid=1, **where):
    return [launch(launched, correlation, tid), work(begin, end, correlation, **where)]


def fact_of(*events):
    return summarize_host_waits(build_timeline(make_trace(list(events))))


def savings(fact):
    """Microseconds saved per place of a wait, most first."""
    return [one.saves_ns / US for one in fact.waits]


def times(fact):
    """Idle, fetch, saved and late time, in microseconds."""
    return tuple(ns / US for ns in (fact.idle_ns, fact.fetch_ns, fact.saves_ns, fact.late_ns))


# Savings


def test_wait_saves_gap_after_it():
    """Busy [0, 10) ms, the host waits [2, 10) and launches at 13: 3 ms idle after 8 ms of waiting."""
    fact = fact_of(
        step(1, 0, 20000),
        *kernel(0, 0, 10000, 1),
        wait(2000, 10000),
        *kernel(13000, 13000, 20000, 2),
    )
    assert times(fact) == (3000, 0, 3000, 0)
    (one,) = fact.waits
    assert (one.calls, one.wait_ns) == (1, 8000 * US)
    assert (fact.num_steps, fact.steps_ns, fact.num_kernels) == (1, 20000 * US, 2)


def test_late_host_saves_only_its_wait():
    """It waits 20 µs for an idle device, which stays idle for 2 ms."""
    fact = fact_of(step(1, 0, 20000), *kernel(0, 0, 1000, 1), wait(1100, 1120), *kernel(3000, 3000, 20000, 2))
    assert times(fact) == (2000, 0, 20, 1980)
    assert (fact.launch_ns, fact.longest_launch_ns) == (1980 * US, 1980 * US)


@pytest.mark.parametrize(("waited", "saving"), [(8000, 460), (200, 200)])
def test_empty_queue_costs_more_than_first_gap(waited, saving):
    """After the wait, five kernels of 10 µs are launched every 100 µs: gaps of 100 and four times 90 µs."""
    small = [
        one for k in range(5) for one in kernel(10100 + 100 * k, 10100 + 100 * k, 10110 + 100 * k, 2 + k)
    ]
    fact = fact_of(step(1, 0, 10510), *kernel(0, 0, 10000, 1), wait(10000 - waited, 10000), *small)
    assert times(fact) == (460, 0, saving, 460 - saving)


def test_two_consecutive_waits():
    """The second wait lasts 20 µs on an idle device; the later wait is charged first for the gap of 3 ms."""
    fact = fact_of(
        step(1, 0, 20000),
        *kernel(0, 0, 10000, 1),
        wait(2000, 10000),
        wait(10000, 10020, name="cudaDeviceSynchronize"),
        *kernel(13000, 13000, 20000, 2),
    )
    assert {one.place.call: one.saves_ns / US for one in fact.waits} == {
        "cudaStreamSynchronize": 2980,
        "cudaDeviceSynchronize": 20,
    }


def test_other_stream_works_beyond_end_of_wait():
    """The wait ends at 9, the other stream at 10: without the wait of 7 ms there'd be no gap of 3."""
    fact = fact_of(
        step(1, 0, 20000),
        *kernel(0, 0, 9000, 1),
        *kernel(1, 1, 10000, 2, stream=8),
        wait(2000, 9000),
        *kernel(13000, 13000, 20000, 3),
    )
    assert times(fact) == (3000, 0, 3000, 0)


def test_wait_that_costs_nothing():
    """Work was queued before the first wait. No work follows the second, and the host is late by 1 ms."""
    fact = fact_of(
        step(1, 0, 20000),
        *kernel(0, 0, 10000, 1),
        *kernel(5, 10000, 19000, 2),
        wait(10, 10000),
        wait(15000, 19000),
    )
    assert times(fact) == (1000, 0, 0, 1000)
    assert fact.waits[0].wait_ns == (9990 + 4000) * US


def test_busiest_of_several_devices_counts():
    """Device 1 is idle for 3 ms after the wait, device 0 for 1 ms."""
    fact = fact_of(
        step(1, 0, 20000),
        *kernel(0, 0, 10000, 1),
        *kernel(1, 1, 8000, 2, device=1),
        wait(2000, 10000),
        *kernel(11000, 11000, 11500, 3, device=1),
        *kernel(11000, 11000, 20000, 4),
    )
    assert times(fact) == (1000, 0, 1000, 0)


@pytest.mark.parametrize(
    ("waiting", "launching", "saving"),
    [(1, 2, 3000), (2, 2, 3000), (2, 1, 3000), (3, 1, 0)],
)
def test_only_waits_of_launching_threads_cost_time(waiting, launching, saving):
    """The steps' thread and the backward thread alternate; a helper's waits hold up neither."""
    fact = fact_of(
        step(1, 0, 20000),
        *kernel(0, 0, 10000, 1),
        *kernel(10, 10000, 10010, 2, tid=2),
        wait(2000, 10010, tid=waiting),
        *kernel(13010, 13010, 20000, 3, tid=launching),
    )
    assert times(fact) == (3000, 0, saving, 3000 - saving)
    assert fact.waits[0].wait_ns == 8010 * US


def test_overlapping_waits_on_two_threads_count_once():
    """[2, 10) and [9.5, 10.5): 8.5 ms together, all of it saved from a gap of 20 ms."""
    fact = fact_of(
        step(1, 0, 40000),
        *kernel(0, 0, 10000, 1),
        *kernel(1, 10000, 10500, 2, tid=2),
        wait(2000, 10000),
        wait(9500, 10500, tid=2),
        *kernel(30500, 30500, 40000, 3),
    )
    assert times(fact) == (20000, 0, 8500, 11500)


def test_waits_outside_steps_do_not_count():
    fact = fact_of(
        *kernel(0, 0, 900, 1),
        wait(100, 900),
        step(1, 1000, 20000),
        *kernel(1000, 1000, 2000, 2),
        *kernel(3000, 3000, 20000, 3),
    )
    assert fact.waits == ()
    assert times(fact) == (1000, 0, 0, 1000)


def test_fetch_is_not_charged_to_wait():
    """In the gap [10, 13) the loop fetches its batch, [10.2, 12.7)."""
    fact = fact_of(
        step(1, 0, 20000),
        *kernel(0, 0, 10000, 1),
        wait(2000, 10000),
        event("user_annotation", FETCH, 10200, 12700),
        *kernel(13000, 13000, 20000, 2),
    )
    assert times(fact) == (3000, 2500, 500, 0)


def test_delay_of_queued_work_is_not_charged():
    fact = fact_of(step(1, 0, 20000), *kernel(0, 0, 1000, 1), *kernel(500, 3000, 20000, 2), wait(600, 900))
    assert times(fact) == (2000, 0, 0, 0)


# Steps


def steps_with_waits(num_steps, *, first_wait=10, extra=()):
    """Steps of 20 ms: busy [0, 10), the host waits [0.1, 10) and launches at 13: 3 ms idle, then busy to 20.

    In the last 10 µs of each step it waits again, and is 1 ms late in the next.
    """
    ids = count(1)
    events = []
    for number in range(num_steps):
        at = 21000 * number
        events += [
            step(number, at - (1000 if number else 0), at + 20000),
            *kernel(at, at, at + 10000, next(ids)),
            wait(at + 100, at + 10000),
            *kernel(at + 13000, at + 13000, at + 20000, next(ids)),
            wait(
                at + 20000 - first_wait if number == 0 else at + 19000,
                at + 20000,
                name="cudaEventSynchronize",
            ),
        ]
    return fact_of(*events, *extra)


def test_first_step_does_not_count_if_others_follow():
    """Three steps: each of the last two has 1 ms idle after the previous step's last wait, and 3 ms."""
    fact = steps_with_waits(3, first_wait=1000)
    assert (fact.num_steps, fact.steps_ns) == (2, 2 * 21000 * US)
    assert times(fact) == (8000, 0, 8000, 0)
    assert {one.place.call: (one.calls, one.saves_ns / US) for one in fact.waits} == {
        "cudaStreamSynchronize": (2, 6000),
        "cudaEventSynchronize": (2, 2000),
    }


def test_single_step_counts():
    assert steps_with_waits(1).num_steps == 1


@pytest.mark.parametrize(("waits_in", "late"), [((1, 2), 0), ((1,), 2000), ((2,), 3000), ((), 6000)])
def test_gap_after_last_event(waits_in, late):
    """Two steps end with 3 ms idle each. A wait of 4 ms costs that in its step, and its rest in the next."""
    events = [step(0, 0, 10000)]
    for number in (1, 2):
        begin = 10000 * number
        events += [step(number, begin, begin + 10000), *kernel(begin, begin, begin + 7000, number)]
        events += [wait(begin + 3000, begin + 7000)] if number in waits_in else []
    fact = fact_of(*events)
    assert (fact.saves_ns + fact.late_ns) / US == 6000
    assert fact.late_ns / US == late


def test_end_of_single_step_is_not_charged_to_wait():
    """It's unknown whether work follows."""
    fact = fact_of(step(1, 0, 10000), *kernel(0, 0, 7000, 1), wait(1000, 7000))
    assert times(fact) == (3000, 0, 0, 3000)


def test_wait_only_at_start_of_recording_does_not_count():
    """5 ms in the first step, at a place where no later step waits, cost the second step nothing."""
    fact = fact_of(
        step(0, 0, 10000),
        *kernel(0, 0, 10000, 1),
        wait(5000, 10000, name="cudaDeviceSynchronize"),
        step(1, 10000, 30000),
        *kernel(12000, 12000, 30000, 2),
        wait(12500, 12600),
    )
    assert times(fact) == (2000, 0, 0, 2000)
    assert [one.place.call for one in fact.waits] == ["cudaStreamSynchronize"]


@pytest.mark.parametrize(("gap_step", "saving"), [(2, 1000), (3, 0)])
def test_wait_is_forgotten_after_next_step(gap_step, saving):
    """Steps of 10 ms; the host waits 5 ms in step 1, and the device is idle for 1 ms in a later step."""
    events = [step(number, 10000 * number, 10000 * (number + 1)) for number in range(4)]
    for number in range(4):
        begin = 10000 * number + (1000 if number == gap_step else 0)
        events += kernel(begin, begin, 10000 * (number + 1), number + 1)
    fact = fact_of(*events, wait(12000, 17000))
    assert times(fact) == (1000, 0, saving, 1000 - saving)


def test_lateness_outside_model_is_not_late_launching():
    """During the gap [2, 8) the host is in backward until 3, then logging until 7, then in forward."""
    fact = fact_of(
        step(1, 0, 20000),
        event("user_annotation", "modelprof: backward", 0, 3000),
        event("user_annotation", "modelprof: logging", 3000, 7000),
        event("user_annotation", "modelprof: forward", 7000, 20000),
        *kernel(0, 0, 2000, 1),
        *kernel(8000, 8000, 20000, 2),
    )
    assert times(fact) == (6000, 0, 0, 6000)
    assert (fact.launch_ns, fact.longest_launch_ns) == (2000 * US, 2000 * US)


# Kinds and places of waits


def item(begin, end, correlation, copy, tid=1):
    """``tensor.item()``: a copy at ``copy`` = (begin, end), and a synchronization."""
    called = event("cuda_runtime", "cudaMemcpyAsync", begin + 2, begin + 4, tid, correlation=correlation)
    return [
        event("cpu_op", "aten::item", begin, end, tid),
        event("cpu_op", "aten::_local_scalar_dense", begin + 1, end - 1, tid),
        called,
        work(*copy, correlation, cat="gpu_memcpy", name="Memcpy DtoH (Device -> Pinned)"),
        wait(begin + 5, end - 2, tid),
    ]


def test_place_of_item_call():
    fact = fact_of(
        step(1, 0, 20000),
        event("user_annotation", "modelprof: forward", 0, 15000),
        event("user_annotation", "my loss", 1900, 12000),
        event("python_function", "train.py(12): training_step", 1800, 14000),
        event("python_function", "torch/_tensor.py(5): item", 1950, 10900),
        *kernel(0, 0, 10000, 1),
        *item(2000, 10004, 2, (10000, 10002)),
        *kernel(13002, 13002, 20000, 3),
    )
    (one,) = fact.waits
    assert one.place.kind == "device_to_host"
    assert one.place.memory == "pinned"
    assert one.place.operators == ("aten::_local_scalar_dense", "aten::item")
    assert one.place.call == "cudaStreamSynchronize"
    assert (one.place.phase, one.place.annotation) == ("forward", "my loss")
    assert one.place.function == "train.py(12): training_step"
    assert one.saves_ns == 3000 * US


def test_phase_of_wait_on_other_thread():
    fact = fact_of(
        step(1, 0, 20000),
        event("user_annotation", "modelprof: backward", 0, 15000),
        event("cpu_op", "autograd::engine::evaluate_function: MulBackward0", 1500, 10010, 2),
        event("cpu_op", "MulBackward0", 1600, 10009, 2),
        *kernel(0, 0, 10000, 1, tid=2),
        *item(2000, 10004, 2, (10000, 10002), tid=2),
    )
    (one,) = fact.waits
    assert one.place.phase == "backward"
    assert one.place.operators == ("aten::_local_scalar_dense", "aten::item")


@pytest.mark.parametrize(
    ("name", "call", "copy", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", (100, 200), (150, 160), "host_to_device"),
        ("Memcpy HtoD (Pageable -> Device)", (100, 120), (150, 160), "host_to_device"),  # staged
        ("Memcpy HtoD (Pinned -> Device)", (100, 200), (150, 160), None),
        ("Memcpy DtoH (Device -> Pageable)", (100, 200), (150, 160), "device_to_host"),
        ("Memcpy DtoH (Device -> Pageable)", (100, 110), (150, 160), None),
        ("Memcpy DtoH (Device -> Pinned)", (100, 200), (150, 160), None),
        ("Memcpy HtoD (Host -> Device)", (100, 200), (150, 160), "host_to_device"),  # ROCm
        ("Memcpy HtoD (Host -> Device)", (100, 110), (150, 160), None),
        ("Memcpy DtoD (Device -> Device)", (100, 200), (150, 160), None),
    ],
)
def test_asynchronous_copies_that_wait(name, call, copy, kind):
    fact = fact_of(
        step(1, 0, 1000),
        event("cuda_runtime", "cudaMemcpyAsync", *call, correlation=5),
        work(*copy, 5, cat="gpu_memcpy", name=name),
    )
    assert [one.place.kind for one in fact.waits] == ([kind] if kind else [])
    assert sum(one.wait_ns for one in fact.waits) == (call[1] - call[0]) * US * bool(kind)


def test_synchronization_in_operator_waits_for_its_copy():
    fact = fact_of(
        step(1, 0, 1000),
        event("cpu_op", "aten::to", 90, 400),
        event("cpu_op", "aten::copy_", 95, 350),
        event("cuda_runtime", "cudaMemcpyAsync", 100, 110, correlation=5),
        work(120, 300, 5, cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)"),
        wait(110, 301),
        wait(500, 510),
    )
    assert {(one.place.kind, one.place.memory): one.wait_ns / US for one in fact.waits} == {
        ("host_to_device", "pinned"): 191,
        ("sync", ""): 10,
    }


def test_driver_call_inside_runtime_call_is_same_wait():
    fact = fact_of(
        step(1, 0, 20000),
        *kernel(0, 0, 10000, 1),
        wait(2000, 10000),
        event("cuda_driver", "cuStreamSynchronize", 2001, 9999),
        *kernel(13000, 13000, 20000, 2),
    )
    (one,) = fact.waits
    assert (one.calls, one.wait_ns, one.saves_ns) == (1, 8000 * US, 3000 * US)


def test_trace_without_device_or_steps():
    assert why_not(fact_of, step(1, 0, 100), event("cpu_op", "aten::mm", 10, 20)) == NO_DEVICE
    assert why_not(fact_of, event("cpu_op", "aten::mm", 10, 20), *kernel(11, 12, 30, 1)) == NO_STEP_RANGES


def test_ranks_are_pooled():
    one = fact_of(
        step(1, 0, 20000), *kernel(0, 0, 10000, 1), wait(2000, 10000), *kernel(13000, 13000, 20000, 2)
    )
    other = fact_of(step(1, 0, 30000), *kernel(0, 0, 10000, 1), *kernel(14000, 14000, 30000, 2))
    both = pool_host_waits([one, other])
    assert (both.num_steps, both.steps_ns) == (2, 50000 * US)
    assert times(both) == (7000, 0, 3000, 4000)
    assert (both.longest_launch_ns, both.num_kernels, len(both.waits)) == (4000 * US, 4, 1)


def test_table_lists_places_that_wait():
    """A gap of 3 ms, 0.5 ms of it a fetch, and 1 ms with work queued, in a step of 20 ms."""
    fact = fact_of(
        step(1, 0, 20000),
        event("user_annotation", "my loss", 0, 12000),
        *kernel(0, 0, 10000, 1),
        *item(2000, 10004, 2, (10000, 10002)),
        event("user_annotation", FETCH, 12100, 12600),
        *kernel(13002, 13002, 14000, 3),
        *kernel(13500, 15000, 20000, 4),
    )
    table = table_of(HOST_WAITS, {0: fact})
    causes = {row[0]: row[5] / US for row in table.rows}
    assert causes == {
        "After waits": 2500,
        "aten::item": 2500,
        "CPU late": 0,
    }
    assert (fact.idle_ns, fact.fetch_ns, fact.saves_by_step_ns) == (4000 * US, 500 * US, (2500 * US,))
    assert table.depths == (0, 1, 0)
    assert table.rows[1] == ("aten::item", "copy to CPU, pinned", "my loss", 1, 7997 * US, 2500 * US, 0.125)
    assert table_of(HOST_WAITS, {0: NO_DEVICE}).absent_reason == NO_DEVICE


# Against a simulated device

PROGRAM = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), st.integers(1, 50)),
        st.tuples(st.just("compute"), st.integers(1, 30)),
        st.tuples(st.just("wait"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=40,
)


def simulate(program, *, with_waits):
    """Runs a host program on a device that works in launch order.

    Returns:
        When the device is done, and the events.
    """
    now, done, events, ids = 0, 0, [], count(1)
    for what, amount in program:
        if what == "launch":
            number, begin = next(ids), max(now, done)
            done = begin + amount
            events += kernel(now, begin, done, number)
            now += 1
        elif what == "compute":
            now += amount
        elif with_waits:
            end = max(now, done) + amount  # the call itself takes some time
            events.append(wait(now, end))
            now = end
    return done, [step(1, 0, max(now, done, 1)), *events]


@settings(max_examples=150, deadline=None)
@given(PROGRAM)
def test_savings_match_same_program_without_waits(program):
    """The program starts with a launch: how long the device was idle before its first event is unknown."""
    program = [("launch", 5), *program]
    done, events = simulate(program, with_waits=True)
    done_without, _ = simulate(program, with_waits=False)
    fact = fact_of(*events)
    assert fact.saves_ns == (done - done_without) * US
    assert fact.saves_ns <= sum(one.wait_ns for one in fact.waits)
    assert fact.saves_ns + fact.late_ns <= fact.idle_ns


ANY = st.lists(
    st.tuples(
        st.sampled_from(("kernel", "wait", "fetch")),
        st.integers(0, 900),
        st.integers(1, 200),
        st.integers(0, 100),
        st.integers(1, 3),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(ANY, st.integers(1, 4))
def test_no_time_is_counted_twice_in_any_trace(parts, num_steps):
    """Threads, streams, devices and steps in any order."""
    events = [step(number, 250 * number, 250 * (number + 1)) for number in range(num_steps)]
    for number, (what, begin, length, delay, tid, device) in enumerate(parts):
        if what == "kernel":
            events += kernel(
                begin, begin + delay, begin + delay + length, number + 1, tid, device=device, stream=tid
            )
        elif what == "wait":
            events.append(wait(begin, begin + length, tid))
        else:
            events.append(event("user_annotation", FETCH, begin, begin + length, tid))
    fact = fact_or_why(fact_of, *events)
    if isinstance(fact, str):
        return
    assert 0 <= fact.launch_ns <= fact.late_ns
    assert fact.fetch_ns >= 0
    assert 0 <= fact.saves_ns <= sum(length * US for what, _, length, *_ in parts if what == "wait")
    assert fact.fetch_ns + fact.saves_ns + fact.late_ns <= fact.idle_ns <= fact.steps_ns
