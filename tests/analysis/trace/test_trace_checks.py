"""Warnings about a trace: each appears when it should, and none for a sound trace."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal

import pytest

from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.trace_checks import check_trace
from lightning_modelprof.units import milliseconds
from tests.support.traces import load, make_trace, real_file

STEP = 1_000  # microseconds


def timed(cat, name, begin, duration, tid=1, **args):
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 0 if cat == "kernel" else 1, "tid": tid, "ts": begin,
        "dur": duration, "args": args,
    }  # fmt: skip


def step(number, begin, duration=STEP):
    return timed("user_annotation", f"ProfilerStep#{number}", begin, duration)


def launch(correlation, begin, name="cudaLaunchKernel"):
    return timed("cuda_runtime", name, begin, 10, correlation=correlation)


def kernel(correlation, begin, duration=50):
    return timed("kernel", "gemm", begin, duration, 7, device=0, stream=7, correlation=correlation)


SOUND = [
    step(1, 0),
    step(2, STEP),
    step(3, 2 * STEP),
    *[timed("cpu_op", "aten::mm", at, 100) for at in (50, 1_050, 2_050)],
    launch(1, 60), kernel(1, 100),
    launch(2, 1_060), kernel(2, 1_100),
    launch(3, 2_060), kernel(3, 2_100),
]  # fmt: skip
"""Three steps with an operator, a launch and a kernel each."""


def checks(*events, **metadata):
    return check_trace(build_timeline(make_trace(list(events), **metadata)))


def without(*dropped):
    return [event for event in SOUND if event not in dropped]


def test_sound_trace_has_no_warnings():
    assert checks(*SOUND) == ()
    assert checks(timed("cpu_op", "op", 0, 5)) == ()
    assert checks(*[event for event in SOUND if event["cat"] != "kernel"]) == ()  # host only
    assert checks(*SOUND, WARNING=["WARNING: 12 events processed"], ERROR=[], INFO=["3 dropped"]) == ()


def test_damage_and_unusable_times_come_first():
    events = [*SOUND, timed("cpu_op", "bad", 1, -5), timed("cpu_op", "bad", None, 5)]
    assert checks(*events) == ("2 events have no usable time and are left out of all figures.",)
    many = [*events, *[timed("cpu_op", "op", 2_500 + n, 1) for n in range(200)]]
    many[20]["ts"] = "noon"
    first, second = checks(*many)
    assert first.startswith("1 of 214 events can't be read")
    assert second.startswith("2 events have no usable time")


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: CUPTI dropped 12 records",
        "Activity buffers lost",
        "Out of memory while tracing",
        "buffer OVERFLOW",
        "Failed to start",
    ],
)
@pytest.mark.parametrize("level", ["WARNING", "ERROR"])
def test_losses_reported_by_profiler(line, level):
    (note,) = checks(*SOUND, **{level: ["all is well", line]})
    assert note == f"The profiler reported losses: {line}."


def test_many_reported_losses_are_truncated():
    (note,) = checks(*SOUND, WARNING=[f"dropped {n}" for n in range(3)], ERROR=["lost 3", 5, None])
    assert note == "The profiler reported losses: dropped 0; dropped 1; dropped 2 (and 1 more)."


@pytest.mark.parametrize("odd", ["dropped", 5, None, {"dropped": 1}, [["dropped"]]])
def test_logs_of_other_types_are_not_quoted(odd):
    assert checks(*SOUND, WARNING=odd) == ()


@pytest.mark.parametrize(
    "name",
    [
        "cudaLaunchKernel",
        "cudaLaunchKernelExC_v11060",
        "cuLaunchKernel",
        "hipExtModuleLaunchKernel",
        "cudaGraphLaunch",
        "urEnqueueKernelLaunch",
    ],
)
def test_launches_without_kernel(name):
    """Two more launches in step 2 of three steps: 2 of 5."""
    (note,) = checks(*SOUND, launch(8, 1_200, name), launch(9, 1_300, name))
    assert note.startswith("2 of 5 kernel launches have no kernel in the trace (steps 2). ")


def test_launches_without_kernel_name_their_steps():
    more = [event for n in range(4, 7) for event in (step(n, (n - 1) * STEP), launch(n, (n - 1) * STEP + 60),
            kernel(n, (n - 1) * STEP + 100))]  # fmt: skip
    (note,) = checks(*SOUND, *more, *[launch(50 + n, n * STEP + 200) for n in range(5)])
    assert "(steps 1, 2, 3 and 2 more)" in note


@pytest.mark.parametrize(
    "event",
    [
        launch(-1, 1_200),  # no correlation
        launch(8, 1_200, "cudaMemcpyAsync"),
        launch(8, 5_000),  # after the steps
        timed("cpu_op", "cudaLaunchKernel", 1_200, 5, correlation=8),
    ],
)
def test_other_calls_need_no_kernel(event):
    assert checks(*SOUND, event) == ()


def test_launches_of_dropped_steps_are_not_missed():
    """The last step lacks most of its kernels, but it's in no figure, so no warning is needed."""
    events = list(SOUND)
    for at in (0, 1_000, 2_000):
        events += [launch(at + n, at + 60 + n) for n in range(10, 15)]
        events += [kernel(at + n, at + 50 * n) for n in range(10, 15) if at < 2_000]
    timeline = build_timeline(make_trace(events))
    assert timeline.bounds.dropped == (3,)
    assert check_trace(timeline) == ()


def test_kernels_without_launch():
    (note,) = checks(*SOUND, kernel(9, 1_500), kernel(-1, 1_600))
    assert note.startswith("2 of 5 GPU events have no launch in the trace. ")


@pytest.mark.parametrize(("early_us", "is_said"), [(0, False), (1, False), (1.001, True), (2_000, True)])
def test_kernels_before_their_launch(early_us, is_said):
    """Old traces round to a microsecond."""
    notes = checks(*SOUND, launch(9, 2_600), kernel(9, 2_600 - early_us, 1))
    if not is_said:
        assert notes == ()
        return
    (note,) = notes
    assert note.startswith(
        f"1 of 4 GPU events start before their launch, by up to {milliseconds(1000 * early_us)}. "
    )


@pytest.mark.parametrize(("overlap_us", "is_said"), [(0, False), (1, False), (1.001, True), (300, True)])
def test_overlapping_steps(overlap_us, is_said):
    notes = checks(*SOUND, step(4, 3 * STEP - overlap_us))
    if not is_said:
        assert notes == ()
        return
    (note,) = notes
    assert note.startswith(
        f"1 steps start before the previous one ends, by up to {milliseconds(1000 * overlap_us)}"
    )


def test_steps_of_other_threads_and_device_do_not_overlap():
    other = timed("user_annotation", "ProfilerStep#2", 1_100, STEP, tid=5)
    twin = timed("gpu_user_annotation", "ProfilerStep#2", 1_100, STEP, tid=1)
    assert checks(*SOUND, other, twin) == ()


@pytest.mark.parametrize(
    ("gap_us", "is_said"), [(0, False), (1_000, False), (1_000.001, True), (50_000, True)]
)
def test_gaps_between_steps(gap_us, is_said):
    """Steps of 1 ms: the warning starts above both their median and 1 ms."""
    notes = checks(*SOUND, step(4, 3 * STEP + gap_us))
    if not is_said:
        assert notes == ()
        return
    (note,) = notes
    assert note.startswith(f"{milliseconds(1000 * gap_us)} between step 3 and step 4 belong to no step")


def test_short_steps_may_have_longer_gaps():
    """Steps of 0.1 ms with gaps of 0.9 ms: no warning below a millisecond."""
    assert checks(*[step(n, n * 1_000, 100) for n in range(4)]) == ()
    assert len(checks(*[step(n, n * 1_101, 100) for n in range(4)])) == 1


def test_repeated_step_numbers():
    """Two windows in one file; only the first of many numbers are listed."""
    (note,) = checks(*SOUND, step(2, 10 * STEP), step(3, 11 * STEP))
    assert note.startswith("Multiple steps have the same number (steps 2, 3), because ")
    twice = [step(n % 5, n * STEP) for n in range(10)]
    (note,) = checks(*twice)
    assert "(steps 0, 1, 2 and 2 more)" in note


def test_longest_gap_is_named_and_skipped_numbers_are_ignored():
    """A schedule skips steps between its cycles, so steps 3 and 9 aren't neighbors."""
    assert checks(*SOUND, step(9, 50_000)) == ()
    (note,) = checks(*SOUND, step(4, 6_000), step(5, 20_000), step(9, 90_000))
    assert note.startswith("13 ms between step 4 and step 5")


@pytest.mark.parametrize(("duration_us", "is_said"), [(300, False), (300.001, True), (1_500, True)])
def test_profiler_overhead(duration_us, is_said):
    """Three steps of 1 ms: the warning starts above a tenth of them."""
    notes = checks(*SOUND, timed("overhead", "Activity Buffer Request", 100, duration_us, tid=9))
    if not is_said:
        assert notes == ()
        return
    (note,) = notes
    assert note.startswith(f"The profiler takes {duration_us / 30:.0f}% of the steps")


def test_overhead_outside_steps_does_not_count():
    assert checks(*SOUND, timed("overhead", "Buffer Flush", 4_000, 90_000, tid=9)) == ()


def test_trace_without_steps_is_checked_only_for_device():
    events = [timed("cpu_op", "op", 0, 100), launch(1, 10), kernel(1, 50), kernel(2, 60)]
    (note,) = checks(*events, timed("overhead", "Buffer Flush", 10, 90, tid=9))
    assert note.startswith("1 of 2 GPU events have no launch in the trace")


# Real traces


@pytest.mark.parametrize(
    "name",
    [
        "a100_alexnet",
        "a100_nccl",
        "mi250_toy",
        "sampled_2rank_rank0",
        "sampled_2rank_rank1",
        "v100_ns_resolution",
        "v100_resnet50_workers0",
        "v100_resnet50_workers4",
    ],
)
def test_real_traces_have_no_warnings(name):
    """Rightly so: in the raw JSON, every device event has its launch and starts after it."""
    assert check_trace(build_timeline(load(name))) == ()
    raw = gzip.decompress(real_file(name).read_bytes())
    document = json.loads(raw, parse_float=Decimal)
    begins, device, kernels = {}, [], set()
    for event in document["traceEvents"]:
        if event.get("ph") != "X":
            continue
        cat = event.get("cat", "").lower()
        correlation = event.get("args", {}).get("correlation")
        if cat.endswith(("runtime", "driver")):
            begins.setdefault(correlation, []).append(event)
        elif cat in ("kernel", "memcpy", "memset", "gpu_memcpy", "gpu_memset"):
            device.append(event)
            kernels.add(correlation)
    assert device
    for event in device:
        calls = begins.get(event["args"]["correlation"], [])
        assert calls
        assert min(call["ts"] for call in calls) <= event["ts"] + 1
    launches = [call for calls in begins.values() for call in calls if "LaunchKernel" in call["name"]]
    lost = [call for call in launches if call["args"]["correlation"] not in kernels]
    assert len(launches) > 10
    assert lost == []
