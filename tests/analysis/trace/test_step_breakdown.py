"""Step time breakdown: hand-made traces, an oracle on a grid, and the numbers of the removed plugin."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_modelprof.analysis.timeline.intervals import length, union
from lightning_modelprof.analysis.trace.step_breakdown import NO_STEP, STEP_CATEGORIES, pool_breakdowns
from lightning_modelprof.report.model import Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.trace.step_breakdown import STEP_BREAKDOWN
from lightning_modelprof.run.phases import TRACE_METADATA_KEY
from lightning_modelprof.trace.model import DEVICE_WORK, Category
from tests.support.facts import table_of, why_not
from tests.support.traces import break_down, load, make_trace, reference

pytestmark = pytest.mark.slow

US = 1000
OPTIONS = TableOptions()
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def make(*events, **metadata):
    """A trace of events (category, name, begin, end, correlation, track), in microseconds."""
    written = [
        {
            "ph": "X",
            "cat": cat,
            "name": name,
            "ts": begin,
            "dur": end - begin,
            "pid": 1,
            "tid": more[1] if len(more) > 1 else 1,
            "args": {"correlation": more[0]} if more and more[0] is not None else {},
        }
        for cat, name, begin, end, *more in events
    ]
    return make_trace(written, **metadata)


def step(number, begin, end):
    return ("user_annotation", f"ProfilerStep#{number}", begin, end)


def parts_us(breakdown):
    """Number, length and non-zero categories of each step; checks the sums."""
    assert all(sum(one.parts_ns) == one.total_ns for one in breakdown.steps)
    return [
        (
            one.number,
            one.total_ns // US,
            {key: ns // US for key, ns in zip(STEP_CATEGORIES, one.parts_ns, strict=True) if ns},
        )
        for one in breakdown.steps
    ]


def test_fully_covered_step_counts_once():
    """The removed plugin counted 20 µs for these 10."""
    made = make(
        step(0, 0, 10),
        ("kernel", "k", 0, 10, None, "s7"),
        ("gpu_memcpy", "m", 2, 4, None, "s8"),
        ("cpu_op", "o", 1, 9),
    )
    assert parts_us(break_down(made)) == [(0, 10, {"kernel": 10})]


def test_each_category_takes_remaining_time():
    made = make(
        step(0, 0, 100),
        ("kernel", "k", 0, 10, None, "s7"),
        ("gpu_memcpy", "m", 5, 20, None, "s8"),
        ("gpu_memset", "m", 15, 30, None, "s8"),
        ("user_annotation", "gloo:all_reduce", 25, 40, None, 2),
        ("cuda_runtime", "cudaLaunchKernel", 35, 50),
        ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 45, 60),
        ("cpu_op", "aten::mm", 55, 70),
        ("user_annotation", "Optimizer.step#SGD.step", 65, 80),
        ("gpu_user_annotation", "twin on the device", 0, 100, None, "s7"),
        ("python_function", "train.py(1): main", 0, 100),
    )
    expected = dict(zip(STEP_CATEGORIES, (10, 10, 10, 10, 10, 10, 20, 20), strict=True))
    breakdown = break_down(made)
    assert parts_us(breakdown) == [(0, 100, expected)]
    assert breakdown.shares == (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2)


@pytest.mark.parametrize("name", [NCCL, "ncclKernel_AllReduce_RING_LL_Sum_float", "void RcclGeneric()"])
def test_communication_kernels_are_recognized_by_name(name):
    made = make(step(0, 0, 10), ("kernel", name, 2, 8, None, "s40"), ("kernel", "gemm", 2, 5, None, "s7"))
    assert parts_us(break_down(made)) == [(0, 10, {"kernel": 3, "communication": 3, "other": 4})]


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("## my whole step ##", 10, 20),
        ("## my epoch ##", 0, 30),
        ("[pl][profile]run_training_batch", 11, 19),
        ("[pl][module]torch.nn.Linear: layer", 12, 14),
        ("modelprof: forward", 11, 19),
    ],
)
def test_wrapping_ranges_are_not_work(name, begin, end):
    made = make(step(0, 10, 20), ("user_annotation", name, begin, end), ("cpu_op", "aten::mm", 12, 15))
    assert parts_us(break_down(made)) == [(0, 10, {"cpu_exec": 3, "other": 7})]


def test_annotation_inside_step_is_work():
    made = make(step(0, 10, 20), ("user_annotation", "## forward ##", 11, 20))
    assert parts_us(break_down(made)) == [(0, 10, {"cpu_exec": 9, "other": 1})]


def test_overlapping_streams_count_once():
    made = make(
        step(0, 0, 20),
        ("kernel", "a", 2, 8, None, "s7"),
        ("kernel", "b", 4, 12, None, "s9"),
        ("kernel", "c", 5, 6, None, "s11"),
    )
    assert parts_us(break_down(made)) == [(0, 20, {"kernel": 10, "other": 10})]


def test_trace_without_device():
    made = make(step(3, 0, 10), ("cpu_op", "a", 2, 8), step(4, 10, 30), ("cpu_op", "b", 5, 20, None, 2))
    breakdown = break_down(made)
    assert not breakdown.has_device
    assert parts_us(breakdown) == [
        (3, 10, {"cpu_exec": 8, "other": 2}),
        (4, 20, {"cpu_exec": 10, "other": 10}),
    ]
    assert breakdown.mean_total_ns == 15 * US
    assert breakdown.mean_parts_ns[-2:] == (9 * US, 6 * US)
    assert breakdown.shares[-2:] == (0.6, 0.4)


def three_steps(last_kernels, last_launches=5, **metadata):
    """Steps of 10 with kernels that lag by 5; the last step has only some of its kernels."""
    events = [("kernel", "left over", 0, 3, None, "s7")]
    for number, begin in enumerate((0, 10, 20)):
        events.append(step(number, begin, begin + 10))
        for index in range(5 if number < 2 else last_launches):
            correlation = 10 * number + index
            events.append(("cuda_runtime", "launch", begin + index, begin + index + 1, correlation))
            if number < 2 or index < last_kernels:
                device = ("kernel", "k", begin + 5 + 2 * index, begin + 7 + 2 * index, correlation, "s7")
                events.append(device)
    return make(*events, **metadata)


@pytest.mark.parametrize(("kernels", "kept"), [(0, (0, 1)), (3, (0, 1)), (4, (0, 1, 2)), (5, (0, 1, 2))])
@pytest.mark.parametrize("metadata", [{}, {TRACE_METADATA_KEY: {"recorded_steps": [0, 1, 2]}}])
def test_bounds_follow_device_and_incomplete_last_step_is_dropped(kernels, kept, metadata):
    """4 of the last step's 5 launches must have their kernel, whichever tool recorded it."""
    breakdown = break_down(three_steps(kernels, **metadata))
    # Step 0 starts after the left-over kernel; each step ends with its last kernel, where the next starts.
    bounds = {0: 15 - 3, 1: 10, 2: 35 - 25 if kernels == 5 else 33 - 25}
    assert [(one.number, one.total_ns) for one in breakdown.steps] == [
        (number, bounds[number] * US) for number in kept
    ]
    assert parts_us(breakdown)[1] == (1, 10, {"kernel": 10})
    assert len(breakdown.notes) == (len(kept) < 3)


@pytest.mark.parametrize("launches", [1, 2, 3, 4])
def test_last_step_with_less_work_is_complete(launches):
    """As with gradient accumulation; the removed plugin dropped it below 0.8 of the previous step."""
    breakdown = break_down(three_steps(launches, launches))
    assert [one.number for one in breakdown.steps] == [0, 1, 2]
    assert breakdown.notes == ()


def test_last_step_without_launches_needs_record():
    """Without a schedule, such a step follows the last call of profiler.step()."""
    assert [one.number for one in break_down(three_steps(0, 0)).steps] == [0, 1]
    ours = three_steps(0, 0, **{TRACE_METADATA_KEY: {"recorded_steps": [0, 1, 2]}})
    assert [one.number for one in break_down(ours).steps] == [0, 1, 2]


def test_calls_that_never_have_kernel_are_not_launches():
    """A memset of 0 bytes has no device event, nor do calls whose name never launches one."""
    events = []
    for number, begin in enumerate((0, 10)):
        events += [step(number, begin, begin + 10), ("cuda_runtime", "launch", begin, begin + 1, begin + 1)]
        events.append(("kernel", "k", begin + 2, begin + 5, begin + 1, "s7"))
        events += [("cuda_runtime", "cudaFree", begin + 6, begin + 7, begin + n) for n in (2, 3, 4)]
        events += [("cuda_runtime", "launch", begin + 8, begin + 9, begin + 5)]  # without a kernel in both
    assert [one.number for one in break_down(make(*events)).steps] == [0, 1]


@pytest.mark.parametrize(("left_over_until", "begin"), [(4, 4), (5, 0), (6, 0)])
def test_left_over_work_touching_own_work_stays_in_first_step(left_over_until, begin):
    """Strictly before, like the plugin: work that touches the step's own device work stays in the step."""
    made = make(
        step(0, 0, 10),
        ("kernel", "left over", -2, left_over_until, None, "s7"),
        ("cuda_runtime", "launch", 1, 2, 1),
        ("kernel", "k", 5, 8, 1, "s9"),
    )
    assert break_down(made).steps[0].total_ns == (10 - begin) * US


def test_step_hidden_by_device_work_of_previous_step_is_empty():
    made = make(
        step(0, 0, 10),
        ("cuda_runtime", "launch", 1, 2, 1),
        ("kernel", "long", 5, 40, 1, "s7"),
        step(1, 10, 20),
        ("cuda_runtime", "launch", 11, 12, 2),
        ("kernel", "short", 12, 13, 2, "s9"),
    )
    breakdown = break_down(made)
    assert [(one.number, one.total_ns // US) for one in breakdown.steps] == [(0, 40), (1, 0)]
    assert breakdown.steps[1].parts_ns == (0,) * len(STEP_CATEGORIES)


def test_only_recorded_steps_are_used():
    events = [step(0, 0, 10), step(1, 10, 20), step(2, 20, 30)]
    made = make(*events, **{TRACE_METADATA_KEY: {"recorded_steps": [1]}})
    assert parts_us(break_down(made)) == [(1, 10, {"other": 10})]
    assert why_not(break_down, make(*events, **{TRACE_METADATA_KEY: {"recorded_steps": [7]}})) == NO_STEP


def test_trace_without_steps():
    made = make(("cpu_op", "a", 5, 10), ("cpu_op", "b", 12, 20), ("user_annotation", "c", 0, 30))
    breakdown = break_down(made)
    assert parts_us(breakdown) == [(0, 15, {"cpu_exec": 13, "other": 2})]
    assert len(breakdown.notes) == 1
    assert why_not(break_down, make(("kernel", "k", 0, 10, None, "s7"))) == NO_STEP
    assert why_not(break_down, make(("cpu_op", "empty", 3, 3))) == NO_STEP
    assert why_not(break_down, make()) == NO_STEP


def test_table():
    breakdown = break_down(three_steps(5))
    table = table_of(STEP_BREAKDOWN, {0: breakdown})
    assert (table.id, table.title) == ("step_breakdown", "Step time breakdown")
    assert [row[0] for row in table.rows] == ["Mean", "Share", "step 0", "step 1", "step 2"]
    assert table.row_units == (Unit.DURATION_NS, Unit.RATIO, *[Unit.DURATION_NS] * 3)
    assert all(sum(row[2:]) == pytest.approx(row[1]) for row in table.rows)
    assert table.rows[1][1] == 1.0
    assert not [row for row in table.rows if None in row]


def test_table_without_device_or_steps():
    table = table_of(STEP_BREAKDOWN, {0: break_down(make(step(0, 0, 10)))})
    assert all(row[2:5] == (None, None, None) for row in table.rows)
    for name in ("Mean", "step 0"):
        (row,) = (row for row in table.rows if row[0] == name)
        assert row[1:2] + row[5:] == (10 * US, 0, None, 0, 0, 10 * US)
    assert any("Runtime wasn't measured" in note for note in table.notes)
    called = break_down(make(step(0, 0, 10), ("cuda_runtime", "cudaFree", 2, 5)))
    table = table_of(STEP_BREAKDOWN, {0: called})
    assert table.rows[0][1:] == (10 * US, None, None, None, 0, 3 * US, 0, 0, 7 * US)
    assert not any("Runtime wasn't measured" in note for note in table.notes)
    absent = table_of(STEP_BREAKDOWN, {0: NO_STEP})
    assert (absent.rows, absent.absent_reason) == ((), NO_STEP)


# Several ranks


def ranks():
    """Rank 0 has a device and steps of 10 and 30, rank 1 has no device and one step of 20."""
    kernel, call = ("kernel", "k", 2, 8, None, "s7"), ("cuda_runtime", "cudaFree", 9, 10)
    return (
        break_down(make(step(0, 0, 10), step(1, 10, 40), kernel, call)),
        break_down(make(step(0, 0, 20), ("cpu_op", "aten::mm", 5, 20))),
    )


def test_pooled_ranks():
    """Of 40 + 20 µs, 6 are in the kernel, 1 in the call, 15 in the operator and 38 in none of them."""
    device, host = ranks()
    also = break_down(make(step(0, 0, 20), ("cpu_op", "aten::mm", 5, 20), ("kernel", "k", 0, 0, None, "s7")))
    pooled = pool_breakdowns([device, also])
    assert [(one.number, one.total_ns // US) for one in pooled.steps] == [(0, 10), (1, 30), (0, 20)]
    assert pooled.mean_total_ns == 20 * US
    expected = {"kernel": 6, "runtime": 1, "cpu_exec": 15, "other": 38}
    sums = [expected.get(key, 0) for key in STEP_CATEGORIES]
    assert pooled.mean_parts_ns == pytest.approx([value * US / 3 for value in sums])
    assert pooled.shares == pytest.approx([value / 60 for value in sums])
    assert pooled.has_device
    # Unmeasured isn't 0: a rank without a device doesn't change the mean Kernel.
    assert pool_breakdowns([device, host]) == device
    assert pool_breakdowns([host, host]).mean_total_ns == 20 * US


def test_note_of_several_ranks_appears_once():
    without_steps = make(("cpu_op", "a", 5, 10))
    (note,) = break_down(without_steps).notes
    assert pool_breakdowns([break_down(without_steps)] * 3).notes == (note,)


def test_table_for_several_ranks():
    device, host = ranks()
    table = table_of(STEP_BREAKDOWN, {0: device, 3: host, 7: NO_STEP})
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["Mean", "Share", "rank 0 mean", "rank 3 mean"]
    assert table.row_units == (Unit.DURATION_NS, Unit.RATIO, Unit.DURATION_NS, Unit.DURATION_NS)
    assert rows["rank 0 mean"] == (20 * US, 3 * US, 0, 0, 0, 0.5 * US, 0, 0, 16.5 * US)
    # Rank 3 has no device: a dash instead of zero.
    assert rows["rank 3 mean"] == (20 * US, None, None, None, 0, None, 0, 15 * US, 5 * US)
    assert rows["Mean"] == rows["rank 0 mean"]
    assert rows["Share"] == pytest.approx((1, 0.15, 0, 0, 0, 0.025, 0, 0, 0.825))
    assert "Mean and Share exclude rank 3: no GPU events." in table.notes
    both = table_of(STEP_BREAKDOWN, {0: device, 3: host, 4: host})
    assert "Mean and Share exclude ranks 3, 4: no GPU events." in both.notes
    none = table_of(STEP_BREAKDOWN, {3: host, 4: host})
    assert not any("Mean and Share exclude" in note for note in none.notes)
    assert f"Without rank 7: {NO_STEP}." in table.notes
    absent = table_of(STEP_BREAKDOWN, {0: "why", 1: NO_STEP})
    assert (absent.rows, absent.absent_reason) == ((), f"why; {NO_STEP}")


# The oracle: checks every microsecond of every step with plain loops.

KINDS = {
    "kernel": [("kernel", "gemm")],
    "memcpy": [("gpu_memcpy", "Memcpy HtoD")],
    "memset": [("gpu_memset", "Memset")],
    "communication": [("kernel", NCCL), ("user_annotation", "nccl:all_reduce"), ("cpu_op", "gloo:x")],
    "runtime": [("cuda_runtime", "cudaFree"), ("cuda_driver", "cuLaunchKernel")],
    "dataloader": [
        ("user_annotation", "enumerate(DataLoader)#_Iter.__next__"),
        ("cpu_op", "enumerate(DataPipe)#Pipe"),
    ],
    "cpu_exec": [("cpu_op", "aten::mm"), ("user_annotation", "## forward ##")],
    "other": [
        ("user_annotation", "[pl][profile]x"),
        ("cpu_op", "modelprof: forward"),
        ("gpu_user_annotation", "nccl:twin"),
        ("python_function", "f"),
    ],
}
CATEGORY_OF = {kind: key for key, kinds in KINDS.items() for kind in kinds}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def oracle(steps, events):
    """Length and categories of each kept step, given the steps' (begin, end) and the events."""
    launched = []
    for begin, end in steps:
        numbers = {e[4] for e in events if e[0].startswith("cuda_") and begin <= e[2] and e[3] <= end}
        launched.append([e for e in events if e[0] in ON_DEVICE and e[4] in numbers - {None}])
    by_a_step = [event for device in launched for event in device]
    reached = steps[0][0]
    if launched[0]:
        first = min(event[2] for event in launched[0])
        for event in events:
            if event[0] in ON_DEVICE and event not in by_a_step and event[3] < first:
                reached = max(reached, event[3])
    result = []
    for (begin, end), device in zip(steps, launched, strict=True):
        start = max(reached, begin)
        reached = max([start, end, *(event[3] for event in device)])
        counts = dict.fromkeys(STEP_CATEGORIES, 0)
        for point in range(start, reached):
            counts[owner(point, steps, events)] += 1
        result.append((reached - start, counts))
    # All launches are called cudaFree, and are complete if a device event has their number.
    with_device = {event[4] for event in events if event[0] in ON_DEVICE} - {None}
    done = []
    for begin, end in steps:
        calls = [e for e in events if e[0] == "cuda_runtime" and e[4] is not None and begin <= e[2] < end]
        done.append(Fraction(sum(e[4] in with_device for e in calls), len(calls)) if calls else None)
    best = max((part for part in done if part is not None), default=0)
    while best and (done[len(result) - 1] is None or done[len(result) - 1] < Fraction(8, 10) * best):
        result.pop()
    return result


def owner(point, steps, events):
    """The first category that is active in the microsecond starting at ``point``."""
    busy = set()
    for cat, name, begin, end, *_ in events:
        wraps = cat == "user_annotation" and any(begin <= s and e <= end for s, e in steps)
        key = CATEGORY_OF[cat, name]
        if begin <= point < end and not (wraps and key == "cpu_exec"):
            busy.add(key)
    return next((key for key in STEP_CATEGORIES if key in busy), "other")


@st.composite
def recordings(draw):
    """Consecutive steps, events of all kinds, and launches with their device events."""
    now, steps = draw(st.integers(0, 8)), []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=4)):
        steps.append((now + gap, now + gap + size))
        now += gap + size
    interval = st.tuples(st.integers(0, 40), st.integers(1, 14))
    kinds = st.sampled_from(sorted(CATEGORY_OF))
    events = []
    for (cat, name), (begin, size) in draw(st.lists(st.tuples(kinds, interval), max_size=10)):
        events.append((cat, name, begin, begin + size, None, f"track {len(events)}"))
    device_kinds = st.sampled_from([kind for kind in sorted(CATEGORY_OF) if kind[0] in ON_DEVICE])
    device_events = st.lists(st.tuples(device_kinds, interval), max_size=3)
    launches = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3), device_events), max_size=6))
    for number, (begin, size, device) in enumerate(launches):
        events.append(("cuda_runtime", "cudaFree", begin, begin + size, number, 1))
        for (cat, name), (at, lasts) in device:
            # A separate track makes each event unique, so the oracle can distinguish them.
            events.append((cat, name, at, at + lasts, number, f"track {len(events)}"))
    return steps, events


@settings(max_examples=200, deadline=None)
@given(recordings())
@example(([(0, 10)], [("kernel", "gemm", 0, 10, None, "s7"), ("cpu_op", "aten::mm", 1, 9, None, 1)]))
def test_matches_oracle(recording):
    steps, events = recording
    made = make(*events, *(step(number, begin, end) for number, (begin, end) in enumerate(steps)))
    breakdown = break_down(made)
    found = [(one.total_ns, dict(zip(STEP_CATEGORIES, one.parts_ns, strict=True))) for one in breakdown.steps]
    assert all(sum(parts.values()) == total for total, parts in found)
    assert found == [
        (total * US, {key: value * US for key, value in parts.items()})
        for total, parts in oracle(steps, events)
    ]
    assert [one.number for one in breakdown.steps] == list(range(len(found)))


# Real traces against the removed plugin

RESNETS = ("v100_resnet50_workers0", "v100_resnet50_workers4")
PLUGIN_KEYS = ("Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CpuOp", "Other")


def load_with_truth(name):
    return load(name), reference(name, "tb_plugin")


@pytest.mark.parametrize("name", RESNETS)
def test_resnet_matches_plugin(name):
    trace, truth = load_with_truth(name)
    breakdown = break_down(trace)
    assert breakdown.notes == ()
    assert [(one.number, one.total_ns, one.parts_ns) for one in breakdown.steps] == [
        (int(one["name"]), one["Total"] * US, tuple(one[key] * US for key in PLUGIN_KEYS))
        for one in truth["steps"]
    ]
    mean = (breakdown.mean_total_ns, *breakdown.mean_parts_ns)
    assert mean == pytest.approx([truth["avg"][key] * US for key in ("Total", *PLUGIN_KEYS)], rel=1e-12)


def test_alexnet_matches_plugin_except_wrapping_annotations():
    """A trace without steps; the plugin counts an annotation around the whole trace as CPU Exec."""
    trace, truth = load_with_truth("a100_alexnet")
    (only,), (plugin,) = break_down(trace).steps, truth["steps"]
    assert (only.number, only.total_ns) == (0, plugin["Total"] * US)
    assert only.parts_ns[:6] == tuple(plugin[key] * US for key in PLUGIN_KEYS[:6])
    assert sum(only.parts_ns[6:]) == (plugin["CpuOp"] + plugin["Other"]) * US


@pytest.mark.parametrize(("name", "tolerance_ns"), [("a100_nccl", 1), ("v100_ns_resolution", 250)])
def test_newer_traces_have_steps_of_plugin(name, tolerance_ns):
    """The plugin's time stamps are doubles since 1970, up to 250 ns apart."""
    trace, truth = load_with_truth(name)
    found = [(one.number, one.total_ns) for one in break_down(trace).steps]
    assert [number for number, _ in found] == [int(one["name"]) for one in truth["steps"]]
    for (_, total_ns), plugin in zip(found, truth["steps"], strict=True):
        assert total_ns == pytest.approx(plugin["Total"] * US, abs=tolerance_ns)


@pytest.mark.parametrize("name", ["a100_nccl", "v100_ns_resolution", "a100_alexnet"])
def test_device_sums_for_newer_traces(name):
    """Uses the plugin's rounding of time stamps; its Kernel includes NCCL's kernels."""
    trace, truth = load_with_truth(name)
    first_ns = trace.base_ns - trace.metadata.get("baseTimeNanoseconds", 0)  # as written in the file
    for key, category in zip(("Kernel", "Memcpy", "Memset"), DEVICE_WORK, strict=True):
        chosen = np.flatnonzero(trace.category == category)
        begin = np.array([(first_ns + ns) / US for ns in trace.begin_ns[chosen].tolist()])
        end = begin + (trace.end_ns - trace.begin_ns)[chosen] / US
        merged = union(begin, end)
        assert (merged[:, 1] - merged[:, 0]).sum() == pytest.approx(truth["role_range_sums"][key], abs=0.01)


@pytest.mark.parametrize("name", ["a100_nccl", "sampled_2rank_rank0", "sampled_2rank_rank1"])
def test_nccl_kernels_are_communication(name):
    trace = load(name)
    breakdown = break_down(trace)
    parts = {
        key: sum(one.parts_ns[index] for one in breakdown.steps) for index, key in enumerate(STEP_CATEGORIES)
    }
    is_nccl = np.array(["nccl" in text.lower() for text in trace.names])[trace.name]
    nccl = (trace.category == Category.KERNEL) & is_nccl
    compute = (trace.category == Category.KERNEL) & ~is_nccl
    assert 0 < parts["kernel"] <= length(union(trace.begin_ns[compute], trace.end_ns[compute]))
    assert parts["communication"] > 0.05 * length(union(trace.begin_ns[nccl], trace.end_ns[nccl]))
