"""Dataloader: hand-made traces, an oracle on a grid, and independent figures of real traces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.timeline.tally import Tally
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.dataloader import summarize_dataloader
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.tables.trace.dataloader import DATALOADER
from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from tests.support.facts import fact_or_why, table_of, why_not
from tests.support.traces import event, load, make_trace, reference

US = 1000
SINGLE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
OWN = "modelprof: dataloader"
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"
PINNED = "Memcpy HtoD (Pinned -> Device)"


def step(number, begin, end):
    return event("user_annotation", f"ProfilerStep#{number}", begin, end)


def fetch(begin, end, name=SINGLE, tid=1):
    return event("user_annotation", name, begin, end, tid)


def kernel(begin, end, stream=7, device=0):
    return event("kernel", "gemm", begin, end, f"{device} stream {stream}", device=device, stream=stream)


def copy(begin, end, name=PAGEABLE, **args):
    return event("gpu_memcpy", name, begin, end, "0 stream 7", device=0, stream=7, **args)


def summarize(*events, **metadata):
    return summarize_dataloader(build_timeline(make_trace(list(events), **metadata)))


def us(calls, total, longest, shortest):
    return Tally(calls, total * US, longest * US, shortest * US)


def test_fetches_by_call_and_step():
    found = summarize(
        step(0, 0, 100),
        fetch(0, 10),
        fetch(50, 54),
        step(1, 100, 200),
        fetch(110, 116),
        step(2, 200, 300),
        fetch(210, 240, tid=2),  # a thread that loads ahead isn't the training thread
        fetch(320, 330),
    )
    assert found.fetches == us(3, 20, 10, 4)
    assert found.per_step == us(3, 20, 14, 0)
    assert (found.steps_ns, found.outside_operators_ns) == (300 * US, 20 * US)
    assert (found.hidden, found.exposed, found.copies, found.operators) == (None, None, (), {})


def test_fetch_is_clipped_to_steps():
    """The first started before the profiler; the second is in two steps with a gap between them."""
    found = summarize(fetch(0, 20), step(0, 10, 50), fetch(45, 65), step(1, 60, 90), fetch(80, 80))
    assert found.fetches == us(3, 10 + 5 + 5, 10, 0)
    assert found.per_step == us(2, 20, 15, 5)


def test_modelprof_ranges_take_precedence_over_torch_ranges():
    events = (step(0, 0, 100), fetch(0, 30, OWN), fetch(5, 25, WORKERS), fetch(60, 90, SINGLE))
    found = summarize(*events)
    assert (found.fetches, found.has_own_ranges) == (us(1, 30, 30, 30), True)
    assert found.loading == {"workers"}  # ignores fetches outside the training's own range
    found = summarize(*(one for one in events if one["name"] != OWN))
    assert (found.fetches, found.has_own_ranges) == (us(2, 50, 30, 20), False)
    assert found.loading == {"workers", "main thread"}


def test_nested_fetch_counts_once():
    pipe = event("user_annotation", "enumerate(DataPipe)#Batcher", 10, 20)
    found = summarize(step(0, 0, 100), fetch(5, 25), pipe, fetch(25, 30))
    assert found.fetches == us(2, 25, 20, 5)


def test_fetches_overlapping_by_rounding_share_no_time():
    found = summarize(step(0, 0, 100), fetch(10, 20), fetch(19, 30))
    assert found.fetches == us(2, 20, 10, 10)


def test_range_outlives_python_function_that_opened_it():
    frames = (event("python_function", "__enter__", begin, begin + 2) for begin in (9, 14))
    found = summarize(step(0, 0, 100), *frames, fetch(10, 30, OWN), fetch(15, 25, WORKERS))
    assert (found.fetches, found.loading) == (us(1, 20, 20, 20), {"workers"})


@pytest.mark.parametrize(
    ("name", "loading"),
    [(SINGLE, {"main thread"}), (WORKERS, {"workers"}), ("enumerate(DataPipe)#Mapper", set())],
)
def test_loading_process_is_recognized(name, loading):
    assert summarize(step(0, 0, 100), fetch(10, 20, name)).loading == loading


def test_hidden_and_exposed_time():
    found = summarize(
        step(0, 0, 100),
        fetch(10, 30),
        fetch(60, 70),
        kernel(5, 15),
        kernel(12, 18, stream=9),  # overlaps the previous one: busy until 18
        kernel(28, 40, device=1),  # another device
        copy(62, 63, "Memcpy DtoH (Device -> Pinned)"),
        event("gpu_user_annotation", "twin", 0, 100, "0 stream 7"),
    )
    assert found.hidden == us(2, 8 + 2 + 1, 10, 1)
    assert found.exposed == us(2, 10 + 9, 10, 9)


def test_work_outside_steps_hides_nothing():
    found = summarize(fetch(0, 20), step(0, 10, 50), kernel(0, 12))
    assert (found.hidden, found.exposed) == (us(1, 2, 2, 2), us(1, 8, 8, 8))


def test_operators_inside_fetches():
    found = summarize(
        step(0, 0, 100),
        event("cpu_op", "aten::before", 0, 5),
        fetch(10, 40),
        event("cpu_op", "aten::stack", 12, 20),
        event("cpu_op", "aten::cat", 14, 18),
        event("cpu_op", "aten::to", 20, 22),
        event("cpu_op", "aten::stack", 24, 28),
        event("cpu_op", "aten::empty", 30, 30),
        event("cpu_op", "aten::elsewhere", 15, 35, 2),
        fetch(60, 65),
        event("cpu_op", "aten::to", 61, 64),
    )
    assert found.operators == {
        "aten::stack": us(2, 12, 8, 4),
        "aten::to": us(2, 5, 3, 2),
        "aten::empty": us(1, 0, 0, 0),
    }
    assert found.outside_operators_ns == (35 - 17) * US


def test_copies_to_device():
    found = summarize(
        step(0, 0, 100),
        fetch(10, 20),
        event("cuda_runtime", "cudaMemcpyAsync", 30, 31, correlation=1),
        event("cuda_runtime", "cudaMemcpyAsync", 120, 121, correlation=2),
        copy(104, 108, correlation=1, bytes=4096),  # launched in the steps, but finished after them
        copy(92, 99, correlation=2, bytes=1),  # launched after the steps, with a clock slightly off
        copy(50, 51, correlation=3, bytes=100),  # launched by an unknown call, but inside the steps
        copy(60, 62, PINNED, bytes=7),
        copy(64, 67, PINNED),
        copy(70, 80, "Memcpy DtoH (Device -> Pageable)", bytes=5),
        copy(150, 160, bytes=9),
    )
    pageable, pinned = found.copies
    assert (pageable.name, pageable.tally, pageable.size_bytes) == (PAGEABLE, us(2, 5, 4, 1), 4196)
    # One of them has no recorded size, so their sum is unknown.
    assert (pinned.name, pinned.tally, pinned.size_bytes) == (PINNED, us(2, 5, 3, 2), None)


def test_fetches_of_zero_length():
    found = summarize(step(0, 0, 100), fetch(10, 10), fetch(20, 20))
    assert found.fetches == us(2, 0, 0, 0)


def test_old_torch_writes_ranges_as_operators():
    found = summarize(
        event("Operator", "ProfilerStep#5", 0, 100),
        event("Operator", SINGLE, 10, 30),
        event("Operator", "aten::stack", 12, 20),
    )
    assert found.fetches == us(1, 20, 20, 20)
    assert found.operators == {"aten::stack": us(1, 8, 8, 8)}


def test_trace_without_fetches():
    nothing = why_not(summarize, step(0, 0, 100), event("cpu_op", "aten::a", 0, 10))
    assert "the trace has no fetches" in nothing
    for elsewhere in (fetch(110, 120), fetch(10, 20, tid=2)):
        reason = why_not(summarize, step(0, 0, 100), elsewhere)
        assert reason == "all batch fetches are outside the recorded steps or on other threads"
    other = {TRACE_METADATA_KEY: {"recorded_steps": [7]}}
    assert "none of the recorded steps" in why_not(summarize, step(0, 0, 100), fetch(0, 10), **other)
    table = table_of(DATALOADER, {0: nothing})
    assert (table.rows, table.absent_reason) == ((), nothing)


def one_fetch(*device, num_operators=1):
    """A step of 100 with a fetch of 20 that contains operators of 2, 3, ..."""
    operators, now = [], 10
    for number in range(num_operators):
        operators.append(event("cpu_op", f"aten::op{number}", now, now + 2 + number))
        now += 2 + number
    return summarize(step(0, 0, 100), fetch(10, 10 + max(20, now)), *operators, *device)


def test_table():
    fact = one_fetch(kernel(15, 20), copy(40, 44, bytes=4096))
    table = table_of(DATALOADER, {0: fact})
    assert list(zip(table.depths, table.row_units, table.rows, strict=True)) == [
        (0, Unit.DURATION_NS, ("Fetch", 1, 20 * US, 20 * US, 20 * US, 20 * US, 0.2)),
        (1, Unit.DURATION_NS, ("per step", 1, 20 * US, 20 * US, 20 * US, 20 * US, 0.2)),
        (1, Unit.DURATION_NS, ("hidden behind GPU work", None, 5 * US, 5 * US, 5 * US, 5 * US, 0.05)),
        (1, Unit.DURATION_NS, ("exposed", None, 15 * US, 15 * US, 15 * US, 15 * US, 0.15)),
        (1, Unit.DURATION_NS, ("in aten::op0", 1, 2 * US, 2 * US, 2 * US, 2 * US, 0.02)),
        (1, Unit.DURATION_NS, ("outside operators", None, 18 * US, None, None, None, 0.18)),
        (0, Unit.DURATION_NS, (PAGEABLE, 1, 4 * US, 4 * US, 4 * US, 4 * US, None)),
        (1, Unit.BYTES, ("size", None, 4096, 4096, None, None, None)),
    ]
    assert any("num_workers=0" in note for note in table.notes)
    assert any("pageable" in note for note in table.notes)


def test_table_shows_five_operators_and_rest():
    table = table_of(DATALOADER, {0: one_fetch(num_operators=7)})
    rows = {row[0]: row[2] for row in table.rows}
    assert [name for name in rows if name.startswith("in aten")] == [
        f"in aten::op{n}" for n in (6, 5, 4, 3, 2)
    ]
    assert rows["in other operators"] == (2 + 3) * US
    assert "exposed" not in rows
    assert sum(rows[name] for name in rows if name.startswith(("in ", "outside"))) == rows["Fetch"]
    assert any("no GPU events" in note for note in table.notes)


def test_table_for_several_ranks():
    by_rank = {
        1: summarize(step(0, 0, 100), fetch(10, 70, WORKERS), kernel(0, 5), copy(40, 44, bytes=4)),
        0: one_fetch(kernel(15, 20), copy(40, 50, bytes=4096)),
        2: "its file is damaged",
    }
    table = table_of(DATALOADER, by_rank)
    assert table.rows[:3] == (
        ("Fetch", 2, 80 * US, 40 * US, 60 * US, 20 * US, 0.4),
        ("rank 0", 1, 20 * US, 20 * US, 20 * US, 20 * US, 0.2),
        ("rank 1", 1, 60 * US, 60 * US, 60 * US, 60 * US, 0.6),
    )
    rows = {row[0]: row[1:] for row in table.rows}
    # Rank 1's copy (40 to 44) is in its fetch, rank 0's isn't.
    assert rows["hidden behind GPU work"] == (None, 9 * US, 4.5 * US, 5 * US, 4 * US, 0.045)
    assert rows[PAGEABLE][:2] == (2, 14 * US)
    assert rows["size"][1:3] == (4100, 2050)
    assert any("Some batches" in note for note in table.notes)
    assert table.notes[-1] == "Without rank 2: its file is damaged."


def test_pooling():
    with_device, without = one_fetch(kernel(15, 20)), one_fetch()
    pooled = pool([without, with_device])
    assert (pooled.hidden, pooled.exposed) == (None, None)  # unknown for one of them
    assert pooled.operators == {"aten::op0": us(2, 4, 2, 2)}
    reverse = summarize(step(0, 0, 100), fetch(10, 20, WORKERS))
    assert pool([without, reverse]).loading == pool([reverse, without]).loading


# The oracle: checks every microsecond with plain loops.


@st.composite
def recordings(draw):
    """Steps with gaps, and consecutive ranges on the training thread, some with operators."""
    now, steps = draw(st.integers(0, 8)), []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 15)), min_size=1, max_size=3)):
        steps.append((now + gap, now + gap + size))
        now += gap + size
    now, fetches, operators = 0, [], []
    # An empty range that touches another may or may not be inside it, so there are gaps between them.
    gaps = st.tuples(st.integers(1, 5), st.integers(0, 9))
    for gap, size in draw(st.lists(gaps, min_size=1, max_size=5)):
        begin = now + gap
        now = begin + size
        fetches.append((begin, now))
        if size > 2 and draw(st.booleans()):
            operators.append((begin + 1, now - 1))
    spans = st.tuples(st.integers(0, 45), st.integers(1, 10))
    device = [(begin, begin + size) for begin, size in draw(st.lists(spans, max_size=4))]
    return steps, fetches, operators, device


@settings(max_examples=100, deadline=None)
@given(recordings())
def test_matches_oracle(recording):
    steps, fetches, operators, device = recording
    written = [step(number, *span) for number, span in enumerate(steps)]
    written += [fetch(*span) for span in fetches]
    written += [event("cpu_op", "aten::stack", *span) for span in operators]
    written += [kernel(*span, stream=number) for number, span in enumerate(device)]

    inside = {point for begin, end in steps for point in range(begin, end)}
    busy = {point for begin, end in device for point in range(begin, end)}
    calls = [(begin, set(range(begin, end)) & inside) for begin, end in fetches]
    calls = [points for begin, points in calls if points or begin in inside]
    if not calls:
        assert why_not(summarize, *written)
        return
    found = summarize(*written)
    fetched = set().union(*calls)
    per_step = [len(fetched & set(range(begin, end))) for begin, end in steps]
    in_operators = sum(len(set(range(begin, end)) & fetched) for begin, end in operators if begin in fetched)

    def tally(sizes):
        return us(len(sizes), sum(sizes), max(sizes), min(sizes))

    assert found.fetches == tally([len(points) for points in calls])
    assert found.per_step == tally(per_step)
    if device:
        assert found.hidden == tally([len(points & busy) for points in calls])
        assert found.exposed == tally([len(points - busy) for points in calls])
    assert sum(one.total_ns for one in found.operators.values()) == in_operators * US
    assert found.outside_operators_ns == (len(fetched) - in_operators) * US


# Real traces


@pytest.mark.parametrize(
    ("name", "loading"), [("v100_resnet50_workers0", "main thread"), ("v100_resnet50_workers4", "workers")]
)
def test_resnet_matches_plugin(name, loading):
    found = summarize_dataloader(build_timeline(load(name)))
    truth = reference(name, "tb_plugin")
    assert (found.fetches.calls, found.loading) == (6, {loading})
    assert found.fetches.total_ns == found.per_step.total_ns == truth["role_range_sums"]["DataLoader"] * US
    assert found.hidden.total_ns + found.exposed.total_ns == found.fetches.total_ns
    # Its step breakdown counts the loader only while no device works.
    assert sum(one["DataLoader"] for one in truth["steps"]) * US == found.exposed.total_ns
    (images,) = found.copies
    assert (images.name, images.tally.calls, images.tally.total_ns) == (
        PAGEABLE,
        12,
        truth["role_range_sums"]["Memcpy"] * US,
    )
    assert images.size_bytes == 6 * (32 * 3 * 224 * 224 * 4 + 32 * 8)
    operators = found.operators
    if loading == "main thread":
        assert operators["aten::stack"].calls == 6
    else:
        assert "aten::stack" not in operators


@pytest.mark.parametrize(
    "name", ["a100_nccl", "mi250_toy", "sampled_2rank_rank0", "sampled_2rank_rank1", "v100_ns_resolution"]
)
def test_newer_traces(name):
    found = fact_or_why(summarize_dataloader, build_timeline(load(name)))
    truth = reference(name, "stdlib")["dataloader_events"]
    if truth["n"]:
        assert (found.fetches.calls, found.fetches.total_ns) == (truth["n"], round(truth["dur_us"] * US))
    else:
        assert "the trace has no fetches" in found
