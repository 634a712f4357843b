"""Waiting for other ranks, and ranks side by side: hand-derived waits, an oracle, and real traces."""

from __future__ import annotations

import gzip
import json
import random
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace import rank_waits as reasons
from lightning_modelprof.analysis.trace.communication_calls import list_communication_calls
from lightning_modelprof.analysis.trace.rank_waits import awaited_rank, chance_of_at_least, compare_ranks
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.charts.ranks import rank_shares
from lightning_modelprof.report.tables.trace.rank_waits import RANK_WAITS
from lightning_modelprof.show.html.chart import chart_view
from tests.support.facts import fact_or_why, table_of, why_not
from tests.support.traces import event, load, make_trace, real_file

US = 1000
STEP = 1000
"""Length of a hand-made step in microseconds."""
KERNELS = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "send_recv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}


def step(number, begin=None, end=None):
    begin = number * STEP if begin is None else begin
    return event("user_annotation", f"ProfilerStep#{number}", begin, begin + STEP if end is None else end)


def kernel(name, begin, end, **args):
    return event("kernel", KERNELS.get(name, name), begin, end, tid=40, pid=0, device=0, stream=40, **args)


def in_group(name, group, size, elements=100):
    return {
        "Collective name": name,
        "Process Group Description": group,
        "Group size": size,
        "dtype": "Float",
        "In msg nelems": elements,
    }


def calls_of(*events, **metadata):
    return list_communication_calls(build_timeline(make_trace(list(events), **metadata)))


def rank_of(steps, delay=0, **args):
    """A rank that makes the listed calls, (name, microseconds), one after the other in each step."""
    events = []
    for number, calls in steps.items():
        events.append(step(number))
        now = number * STEP + 1 + delay
        for name, duration in calls:
            events.append(kernel(name, now, now + duration, **args))
            now += duration + 1
    return calls_of(*events)


def reduces(*durations):
    return [("all_reduce", duration) for duration in durations]


def rows_of(by_rank):
    table = table_of(RANK_WAITS, by_rank)
    assert table.absent_reason is None
    return table, dict(
        zip([column.key for column in table.columns], zip(*table.rows, strict=True), strict=True)
    )


def test_waits_by_hand():
    """Rank 1 is last in the first and third call: rank 0 waits 20 and 5 µs; it waits 7 in the second."""
    table, cells = rows_of(
        {
            0: rank_of({0: reduces(30, 10), 1: [("all_gather", 15)]}),
            1: rank_of({0: reduces(10, 17), 1: [("all_gather", 10)]}, delay=20),
        }
    )
    assert cells["name"] == ("rank 0", "all_reduce", "all_gather", "rank 1", "all_reduce", "all_gather")
    assert table.depths == (0, 1, 1, 0, 1, 1)
    assert cells["calls"] == (3, 2, 1, 3, 2, 1)
    assert [ns / US for ns in cells["total_ns"]] == [55, 40, 15, 37, 27, 10]
    assert [ns / US for ns in cells["transfer_ns"]] == [30, 20, 10, 30, 20, 10]
    assert [ns / US for ns in cells["waited_ns"]] == [25, 20, 5, 7, 7, 0]
    assert [ns / US for ns in cells["waited_step_ns"]] == [12.5, 10, 2.5, 3.5, 3.5, 0]
    assert cells["waited_ratio"] == (25 / 55, 20 / 40, 5 / 15, 7 / 37, 7 / 27, 0)
    assert cells["last"] == (1, 1, 0, 2, 1, 1)
    assert cells["last_ratio"] == (1 / 3, 1 / 2, 0, 2 / 3, 1 / 2, 1)
    assert [ns / US for ns in cells["caused_ns"]] == [7, 7, 0, 25, 20, 5]
    assert [ns / US for ns in cells["caused_step_ns"]] == [3.5, 3.5, 0, 12.5, 10, 2.5]
    assert not any("came last in" in note or "not compared" in note for note in table.notes)


@pytest.mark.parametrize(("second", "awaited"), [((11, 10), 1), ((10, 10), None), ((10, 11), None)])
def test_awaited_rank_is_last_in_more_than_half_of_calls(second, awaited):
    """In the first call rank 0 waits 20 µs for rank 1, the longest wait. The last rank waits least."""
    firsts, seconds = (30, 10), second
    ranks = {rank: rank_of({0: reduces(firsts[rank], seconds[rank])}) for rank in (0, 1)}
    assert awaited_rank(compare_ranks(ranks)) == awaited


def test_caused_wait_is_mean_over_other_ranks():
    """Ranks 0 and 2 wait 30 and 10 µs for rank 1, so 20 each on average."""
    _, cells = rows_of({rank: rank_of({0: reduces(us)}) for rank, us in ((0, 40), (1, 10), (2, 20))})
    assert [ns / US for ns in cells["caused_ns"]] == [0, 0, 20, 20, 0, 0]


def test_no_rank_is_last_in_tie():
    _, cells = rows_of({rank: rank_of({0: reduces(us)}) for rank, us in ((0, 40), (1, 10), (2, 10))})
    assert cells["last"] == (0,) * 6
    assert cells["caused_ns"] == (0,) * 6
    assert [ns / US for ns in cells["waited_ns"]] == [30, 30, 0, 0, 0, 0]


def test_clock_offsets_do_not_matter():
    def ranks(begin):
        one = rank_of({0: reduces(30, 10)})
        other = calls_of(
            step(0, begin, begin + STEP),
            kernel("all_reduce", begin + 5, begin + 15),
            kernel("all_reduce", begin + 50, begin + 67),
        )
        return table_of(RANK_WAITS, {0: one, 1: other})

    assert ranks(0) == ranks(10**9)


def launched(name, launch, begin, end, number):
    return (
        event("cuda_runtime", "cudaLaunchKernel", launch, launch + 1, correlation=number),
        kernel(name, begin, end, correlation=number),
    )


def test_launch_decides_step():
    """Kernels that run after their step belong to it; those launched before a step don't."""
    late = calls_of(
        *launched("all_gather", 500, 1100, 1110, 1),
        step(1),
        *launched("gemm", 1001, 1050, 1060, 2),
        *launched("all_reduce", 1990, 2400, 2410, 3),
        step(2),
        *launched("all_reduce", 2990, 3400, 3410, 4),
    )
    assert [(call.kind.name, call.step) for call in late.calls] == [
        ("all_gather", None),
        ("all_reduce", 1),
        ("all_reduce", 2),
    ]


def test_step_with_mismatched_call_count_is_left_out():
    """Step 1 has two calls on one rank, and it's unknown which of them the other rank lacks."""
    table, cells = rows_of(
        {
            0: rank_of({0: reduces(30), 1: reduces(30, 20), 2: reduces(10)}),
            1: rank_of({0: reduces(10), 1: reduces(20), 2: reduces(10)}),
        }
    )
    assert cells["calls"] == (2, 2, 2, 2)
    assert cells["waited_step_ns"] == (10 * US, 10 * US, 0, 0)  # over two steps, not three
    assert f"Calls not compared: 2 because {reasons.LACKING}." in table.notes


def test_mismatched_names_and_sizes():
    table, cells = rows_of(
        {
            0: rank_of({0: reduces(30), 1: [("all_reduce", 9), ("all_gather", 9)]}),
            1: rank_of({0: reduces(10), 1: [("all_gather", 9), ("all_reduce", 9)]}),
        }
    )
    assert cells["calls"] == (1, 1, 1, 1)
    assert f"Calls not compared: 2 because {reasons.DISAGREEING}." in table.notes
    sizes = {rank: rank_of({0: reduces(5)}, **in_group("allreduce", "pg", 2, 100 + rank)) for rank in (0, 1)}
    assert reasons.DISAGREEING in table_of(RANK_WAITS, sizes).absent_reason


def test_calls_without_steps_are_matched_until_they_differ():
    """The second rank stopped recording one call earlier, and the third call has a different name."""
    first = calls_of(*(kernel("all_reduce", at, at + 8) for at in (0, 20, 40, 60)))
    second = calls_of(*(kernel("all_reduce", at, at + 5) for at in (0, 20)), kernel("all_gather", 40, 41))
    waits = compare_ranks({0: first, 1: second})
    assert waits.num_steps is None
    assert (waits.ranks[0].whole.calls, waits.ranks[0].whole.waited_ns) == (2, 6 * US)
    assert waits.ranks[0].whole.waited_per_step_ns is None
    assert waits.left_out == {reasons.DISAGREEING: 1, reasons.LACKING: 1}
    mixed = compare_ranks({0: first, 1: rank_of({0: reduces(5, 5)})})
    assert mixed.num_steps is None
    assert any("Not every rank has steps" in note for note in rows_of({0: first, 1: second})[0].notes)


def test_steps_not_on_all_ranks_are_left_out():
    table, cells = rows_of(
        {0: rank_of({n: reduces(5) for n in (0, 1)}), 1: rank_of({n: reduces(7) for n in (1, 2)})}
    )
    assert cells["calls"] == (1, 1, 1, 1)
    assert f"Calls not compared: 2 because {reasons.NOT_IN_SHARED_STEPS}." in table.notes


def test_collectives_that_ranks_may_leave_early_are_left_out():
    """A broadcast's root doesn't wait, and a send involves only two ranks."""
    table, cells = rows_of(
        {
            0: rank_of({0: [("broadcast", 2), ("all_reduce", 30), ("send_recv", 50)]}),
            1: rank_of({0: [("broadcast", 90), ("all_reduce", 10)]}),
        }
    )
    assert cells["name"] == ("rank 0", "all_reduce", "rank 1", "all_reduce")
    assert [ns / US for ns in cells["waited_ns"]] == [20, 20, 0, 0]
    assert f"Calls not compared: 1 because {reasons.PAIRWISE}; 1 because {reasons.ONE_SIDED}." in table.notes


def grid(rank, *, with_members):
    """One of four ranks: all of them reduce, and the pairs 0 1 and 2 3 gather, in groups of the same name."""
    pair = [0, 1] if rank < 2 else [2, 3]
    groups = [
        {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2, 3]},
        {"pg_name": str(1 + rank // 2), "pg_desc": "tp", "ranks": pair},
    ]
    return calls_of(
        step(0),
        kernel("all_gather", 10, 20 + 10 * rank, **in_group("_allgather_base", "tp", 2)),
        kernel("all_reduce", 100, 150 - 10 * rank, **in_group("allreduce", "default_pg", 4)),
        distributedInfo={"rank": rank, "world_size": 4} | ({"pg_config": groups} if with_members else {}),
    )


def test_groups_of_same_name_are_separated_by_members():
    """In each pair the first rank is last and the second waits 10; among all four, rank 3 is last."""
    table, cells = rows_of({rank: grid(rank, with_members=True) for rank in range(4)})
    assert cells["name"][:3] == ("rank 0", "all_reduce in default_pg", "all_gather in tp")
    named = zip(cells["name"], cells["waited_ns"], strict=True)
    waited = {(name, at // 3): ns / US for at, (name, ns) in enumerate(named)}
    assert [waited["all_gather in tp", rank] for rank in range(4)] == [0, 10, 0, 10]
    assert [waited["all_reduce in default_pg", rank] for rank in range(4)] == [30, 20, 10, 0]
    assert not any("not compared" in note for note in table.notes)


def test_groups_of_same_name_are_left_out_without_members():
    table, cells = rows_of({rank: grid(rank, with_members=False) for rank in range(4)})
    assert set(cells["name"]) == {*(f"rank {rank}" for rank in range(4)), "all_reduce"}
    assert f"Calls not compared: 1 because {reasons.UNCLEAR_GROUP}." in table.notes
    # With two of the four ranks, 0 and 2, the calls could be from one group or from two.
    two = compare_ranks({rank: grid(rank, with_members=False) for rank in (0, 2)})
    assert two.left_out == {reasons.UNCLEAR_GROUP: 1}
    known = compare_ranks({rank: grid(rank, with_members=True) for rank in (0, 2)})
    assert known.left_out == {reasons.ALONE: 2}


def test_missing_ranks_are_noted():
    table, _ = rows_of({rank: grid(rank, with_members=True) for rank in (0, 1)})
    assert any(note.startswith("2 of 4 ranks are compared") for note in table.notes)
    whole, _ = rows_of({rank: grid(rank, with_members=True) for rank in range(4)})
    assert not any("ranks are compared" in note for note in whole.notes)


def gloo(*durations):
    begins = range(10, 1000, 100)
    return calls_of(
        step(0),
        event("cpu_op", "gloo:barrier", 1, 9),
        *(
            event("user_annotation", "gloo:all_reduce", begin, begin + duration, tid=2)
            for begin, duration in zip(begins, durations, strict=False)
        ),
    )


def test_gloo_on_host():
    table, cells = rows_of({0: gloo(50, 60), 1: gloo(20, 10)})
    assert [ns / US for ns in cells["waited_ns"]] == [80, 80, 0, 0, 0, 0]
    assert any("the backend's CPU ranges" in note for note in table.notes)


def test_host_ranges_are_not_compared_with_kernels():
    table, cells = rows_of({0: rank_of({0: reduces(5)}), 1: gloo(50), 3: rank_of({0: reduces(9)})})
    assert [name for name in cells["name"] if name.startswith("rank")] == ["rank 0", "rank 3"]
    assert any(note.startswith("Rank 1 not compared") for note in table.notes)


def test_reason_if_nothing_can_be_compared():
    one = rank_of({0: reduces(5)})
    none = why_not(calls_of, step(0))
    assert none == "the trace has no communication"
    asked = why_not(calls_of, step(0), event("user_annotation", "nccl:all_reduce", 1, 5))
    for by_rank, reason in (
        ({0: one}, "only one rank's trace is loaded"),
        ({0: one, 1: none}, "only one rank's communication was recorded"),
        ({0: none, 1: none}, "the trace has no communication"),
        ({0: asked, 1: asked}, asked),
        ({0: one, 1: rank_of({0: [("all_gather", 5)]})}, reasons.DISAGREEING),
    ):
        table = table_of(RANK_WAITS, by_rank)
        assert table.rows == ()
        assert reason in table.absent_reason


# Stragglers


def job(durations_by_rank, num_steps=5):
    """Ranks whose calls take these times, spread evenly over the steps."""
    return {
        rank: rank_of({n: reduces(*durations[n::num_steps]) for n in range(num_steps)})
        for rank, durations in enumerate(durations_by_rank)
    }


def stragglers_of(by_rank):
    notes = table_of(RANK_WAITS, by_rank).notes
    return [note for note in notes if "came last in" in note]


def test_straggler_among_eight_ranks_is_found():
    """Rank 5 is last in 27 of 30 calls; the other seven wait 40 µs for it, 27 x 40 / 5 = 216 µs per step."""
    durations = [[50.0] * 30 for _ in range(8)]
    durations[5] = [10.0] * 27 + [50.0] * 3
    for late in (27, 28, 29):
        durations[late % 5][late] = 49.0
    assert stragglers_of(job(durations)) == [
        "Rank 5 came last in 27 of 30 calls. The others waited 0.216 ms per step for it. By chance it would"
        " come last in 1 of 8 calls."
    ]


def test_chance_is_not_reported_as_straggler():
    """Each of eight ranks is last equally often, and 5 of 6 calls with two ranks aren't enough."""
    durations = [[50.0] * 32 for _ in range(8)]
    for call in range(32):
        durations[call % 8][call] = 10.0
    assert stragglers_of(job(durations)) == []
    assert stragglers_of(job([[50.0] * 5 + [10.0], [10.0] * 5 + [50.0]])) == []
    assert len(stragglers_of(job([[50.0] * 7, [10.0] * 7]))) == 1


def test_fair_ranks_are_rarely_reported_as_stragglers():
    """The level is 5%: at most 10 of 200 jobs with fair ranks, plus a few for the random draw."""
    draw = random.Random(7)
    found = 0
    for _ in range(200):
        calls = [[draw.randint(10, 40) for _ in range(20)] for _ in range(4)]
        found += bool(stragglers_of(job(calls)))
    assert found <= 16


def test_straggler_needs_noticeable_delay():
    assert stragglers_of(job([[50.0] * 40, [49.0] * 40])) == []
    assert len(stragglers_of(job([[50.0] * 40, [47.0] * 40]))) == 1


@given(st.integers(1, 60), st.integers(2, 16), st.data())
def test_binomial_tail(tries, num_ranks, data):
    hits = data.draw(st.integers(0, tries))
    p = Fraction(1, num_ranks)
    exact = sum(comb(tries, n) * p**n * (1 - p) ** (tries - n) for n in range(hits, tries + 1))
    assert chance_of_at_least(hits, tries, 1 / num_ranks) == pytest.approx(float(exact), rel=1e-9)


# The oracle: compares lists, step by step.

CALLS = st.lists(st.tuples(st.sampled_from(list(KERNELS)), st.integers(1, 40)), max_size=4)


@st.composite
def jobs(draw):
    """Ranks that mostly agree: all have the common calls with their own times; some change one step."""
    num_ranks, num_steps = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    common = [[name for name, _ in draw(CALLS)] for _ in range(num_steps)]
    ranks = []
    for _ in range(num_ranks):
        own = {n: [(name, draw(st.integers(1, 40))) for name in names] for n, names in enumerate(common)}
        if draw(st.integers(0, 5)) == 0:
            own[draw(st.integers(0, num_steps - 1))] = draw(CALLS)
        ranks.append(own)
    return ranks


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_matches_oracle(ranks):
    facts = {rank: fact_or_why(rank_of, own) for rank, own in enumerate(ranks)}
    facts = {rank: fact for rank, fact in facts.items() if not isinstance(fact, str)}
    plain = {
        rank: {n: [call for call in calls if call[0] != "send_recv"] for n, calls in ranks[rank].items()}
        for rank in facts
    }
    plain = {rank: own for rank, own in plain.items() if any(own.values())}
    expected = {rank: [0, 0, 0, 0, 0] for rank in plain}  # calls, total, waited, last, caused
    num_steps = 0
    for n in ranks[0]:
        names = {tuple(name for name, _ in own[n]) for own in plain.values()}
        if len(names) != 1 or len(plain) < 2:
            continue
        num_steps += 1
        for place, name in enumerate(names.pop()):
            if name == "broadcast":
                continue
            times = {rank: own[n][place][1] for rank, own in plain.items()}
            ordered = sorted(times.values())
            for rank, time in times.items():
                is_last = time == ordered[0] < ordered[1]
                caused = Fraction(sum(ordered) - len(ordered) * ordered[0], len(ordered) - 1)
                for at, more in enumerate((1, time, time - ordered[0], is_last, caused * is_last)):
                    expected[rank][at] += more
    waits = fact_or_why(compare_ranks, facts)
    if isinstance(waits, str):
        assert len(plain) < 2 or all(one[0] == 0 for one in expected.values())
        return
    assert set(waits.ranks) == set(expected)
    for rank, one in waits.ranks.items():
        calls, total, waited, last, caused = expected[rank]
        whole = one.whole
        assert (whole.calls, whole.total_ns, whole.waited_ns, whole.last) == (
            calls,
            total * US,
            waited * US,
            last,
        )
        assert whole.caused_ns == pytest.approx(float(caused * US))
        assert whole.waited_per_step_ns == pytest.approx(waited * US / num_steps)
        parts = one.by_collective.values()
        assert sum(part.calls for part in parts) == calls
        assert sum(part.waited_ns for part in parts) == whole.waited_ns
        assert sum(part.caused_per_step_ns for part in parts) == pytest.approx(whole.caused_per_step_ns)


# Ranks side by side


def shares_us(chart):
    return {series.label: [value / US for value in series.values] for series in chart.series}


def side(gemm_end):
    """Communication [40, 70), a gemm from 10 and a copy [60, 80) in a step of 100."""
    return TraceFacts(
        make_trace(
            [
                step(0, 0, 100),
                step(1, 100, 200),
                kernel("gemm", 10, gemm_end),
                kernel("all_reduce", 40, 70),
                event("gpu_memcpy", "Memcpy DtoH", 60, 80, tid=7, pid=0, device=0, stream=7),
            ]
        )
    )


def test_shares_by_hand():
    """Means over two steps, the second of them empty."""
    chart = rank_shares({0: side(50), 1: side(30)})
    assert (chart.kind, chart.x, chart.x_label) == ("stacked", (0.0, 1.0), "rank")
    assert shares_us(chart) == {
        "Computation": [15, 10],
        "Overlap": [5, 0],
        "Exposed communication": [10, 15],
        "Copies": [5, 5],
        "Other": [65, 70],
    }
    view = chart_view(chart)
    assert len({layer.color for layer in view.layers}) == 5


def test_ranks_without_shares_are_not_shown():
    host = TraceFacts(make_trace([step(0), event("user_annotation", "gloo:all_reduce", 10, 30)]))
    without_steps = TraceFacts(make_trace([kernel("all_reduce", 0, 5)]))
    asking = TraceFacts(make_trace([step(0), event("user_annotation", "nccl:all_reduce", 10, 30)]))
    assert rank_shares({0: side(50)}) is None
    assert rank_shares({0: side(50), 1: without_steps}) is None
    assert rank_shares({0: asking, 1: asking}) is None
    assert shares_us(rank_shares({0: host, 1: host})) == {
        "Communication": [20, 20],
        "Rest of the step": [980, 980],
    }
    chart = rank_shares({0: side(50), 1: host, 2: side(30)})
    assert chart.x_label == "ranks 0, 2, renumbered from 1"
    assert chart.notes[1].startswith("Rank 1 not shown:")


PLACES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 20)), max_size=8)


@settings(max_examples=100, deadline=None)
@given(PLACES)
def test_shares_match_oracle(drawn):
    """Checks every microsecond of two steps of 25 and 35."""
    kinds = ("gemm", "all_reduce", "Memcpy", "Memset")
    events = [step(0, 0, 25), step(1, 25, 60), kernel("all_reduce", 5, 6)]
    events += [kernel("gemm", 20, 21)]
    moments = [{20}, {5}, set(), set()]
    for kind, begin, duration in drawn:
        end = begin + duration
        moments[kind] |= set(range(begin, end))
        cat = ("kernel", "kernel", "gpu_memcpy", "gpu_memset")[kind]
        name = KERNELS.get(kinds[kind], kinds[kind])
        events.append(event(cat, name, begin, end, tid=7, pid=0, device=0, stream=7))
    fact = TraceFacts(make_trace(events)).distributed
    steps = set(range(60))
    compute, talk, copy = moments[0] & steps, moments[1] & steps, (moments[2] | moments[3]) & steps
    shares = fact.shares
    assert shares.computation_ns == US * len(compute - talk)
    assert shares.overlap_ns == US * len(compute & talk)
    assert shares.exposed_ns == US * len(talk - compute)
    assert shares.copies_ns == US * len(copy - talk - compute)
    assert shares.other_ns == US * len(steps - copy - talk - compute)
    assert shares.total_ns == US * 60
    assert fact.in_steps.exposed_ns == shares.exposed_ns


# Real traces


@pytest.fixture(scope="module")
def sampled():
    return {rank: TraceFacts(load(f"sampled_2rank_rank{rank}")) for rank in (0, 1)}


def kernels_of_step(rank, number):
    """(collective of the range around the launch, µs) of a step's NCCL kernels, directly from the JSON."""
    with gzip.open(real_file(f"sampled_2rank_rank{rank}")) as file:
        events = [one for one in json.load(file)["traceEvents"] if one.get("ph") == "X"]
    (bounds,) = [one for one in events if one["name"] == f"ProfilerStep#{number}"]
    launches = {one["args"].get("correlation"): one for one in events if one["cat"] == "cuda_runtime"}
    ranges = [one for one in events if one["cat"] == "user_annotation" and one["name"].startswith("nccl:")]
    found = []
    for one in events:
        if one["cat"] == "kernel" and "nccl" in one["name"]:
            launch = launches[one["args"]["correlation"]]
            if bounds["ts"] <= launch["ts"] < bounds["ts"] + bounds["dur"]:
                (name,) = [
                    around["name"]
                    for around in ranges
                    if around["tid"] == launch["tid"]
                    and around["ts"] <= launch["ts"] < around["ts"] + around["dur"]
                ]
                found.append((one["ts"], name, one["dur"]))
    return [(name, duration) for _, name, duration in sorted(found)]


def test_waits_of_two_real_ranks(sampled):
    """The file is a sample of a job with 128 ranks; in its second step the ranks' calls don't agree."""
    first, second = (kernels_of_step(rank, 551) for rank in (0, 1))
    assert [name for name, _ in first] == [name for name, _ in second]
    assert [name for name, _ in kernels_of_step(0, 552)] != [name for name, _ in kernels_of_step(1, 552)]
    pairs = [(one, other) for (_, one), (_, other) in zip(first, second, strict=True)]
    waits = compare_ranks({rank: facts.communication_calls for rank, facts in sampled.items()})
    assert waits.left_out == {reasons.DISAGREEING: 5}
    assert (waits.world_size, waits.num_steps) == (128, 2)
    for rank in (0, 1):
        whole = waits.ranks[rank].whole
        assert whole.calls == 5
        assert whole.total_ns == US * sum(pair[rank] for pair in pairs)
        assert whole.transfer_ns == US * sum(map(min, pairs))
        assert whole.waited_ns == US * sum(max(0, pair[rank] - pair[1 - rank]) for pair in pairs)
        assert whole.last == sum(pair[rank] < pair[1 - rank] for pair in pairs)
        assert whole.waited_per_step_ns == whole.waited_ns  # over the one step that could be compared
    assert waits.stragglers == ()


def test_report_of_two_real_ranks(sampled):
    report = build_trace_report(list(sampled.values()))
    assert [table.id for table in report.tables].count("rank_waits") == 1
    (chart,) = [chart for chart in report.charts if chart.id == "rank_shares"]
    for place, facts in enumerate(sampled.values()):
        mean_ns = facts.step_breakdown.mean_total_ns
        assert sum(series.values[place] for series in chart.series) == pytest.approx(mean_ns, rel=1e-12)
    apart = build_trace_report([sampled[0]])
    (table,) = [table for table in apart.tables if table.id == "rank_waits"]
    assert table.absent_reason == "only one rank's trace is loaded"
    assert all(chart.id != "rank_shares" for chart in apart.charts)
