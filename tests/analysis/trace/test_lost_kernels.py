"""Launches without a kernel: which they are, and no GPU verdict if most of them lack one."""

from __future__ import annotations

import pytest

from lightning_modelprof.analysis.pooling import pool
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.trace_checks import count_kernel_launches
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Status
from lightning_modelprof.report.rules.engine import diagnose, diagnose_traces
from lightning_modelprof.run.records import Window
from tests.support.diagnosed import analysis_of, steps_of
from tests.support.traces import event, make_trace

STEP = 1000
"""Microseconds."""


def step(number):
    return event("user_annotation", f"ProfilerStep#{number}", number * STEP, (number + 1) * STEP)


def launch(correlation, at, name="cudaLaunchKernel", duration=4, cat="cuda_runtime"):
    return event(cat, name, at, at + duration, correlation=correlation)


def kernel(begin, correlation=None, size=5):
    ids = {} if correlation is None else {"correlation": correlation}
    return event("kernel", "k", begin, begin + size, 7, 0, device=0, stream=7, **ids)


def steps_with(*parts):
    """Steps of 1 ms, given the number of kernels launched in each and how many of these were recorded."""
    events, correlation = [], 0
    for number, (launched, recorded) in enumerate(parts):
        events += [step(number), event("cpu_op", "aten::mm", number * STEP, number * STEP + 990)]
        for place in range(launched):
            correlation += 1
            at = number * STEP + 10 + 5 * place
            events.append(launch(correlation, at))
            if place < recorded:
                events.append(kernel(at + 4, correlation))
    return events


def lost(events):
    return count_kernel_launches(build_timeline(make_trace(events)))


def numbers(fact):
    return fact.launches, fact.lost, fact.kernels


def verdict_of(events):
    return diagnose_traces(JobFacts([TraceFacts(make_trace(events))]))


def test_graph_capture_gives_no_verdict():
    """During a graph capture, only two of 100 launches run a kernel."""
    events = steps_with((100, 2))
    ids = {one["args"]["correlation"] for one in events if one["cat"] == "kernel"}
    calls = [one for one in events if one["cat"] == "cuda_runtime"]
    without = [one for one in calls if one["args"]["correlation"] not in ids]
    verdict, findings = verdict_of(events)
    assert verdict.kind == "cannot_tell"
    assert verdict.summary.startswith(f"{len(without)} of {len(calls)} kernel launches have no kernel")
    assert "captured into a CUDA graph" in verdict.summary
    assert {one.status for one in findings} == {Status.NOT_EVALUATED}


def test_complete_trace_gives_verdict():
    verdict, findings = verdict_of(steps_with((100, 100), (100, 100)))
    assert verdict.kind != "cannot_tell"
    assert any(one.status is not Status.NOT_EVALUATED for one in findings)


@pytest.mark.parametrize(("recorded", "kind"), [(50, "host_bound"), (49, "cannot_tell")])
def test_verdict_needs_half_of_kernels(recorded, kind):
    events = steps_with((100, recorded), (100, recorded))
    assert numbers(lost(events)) == (200, 2 * (100 - recorded), 2 * recorded)
    assert verdict_of(events)[0].kind == kind


def test_one_captured_step_of_many_is_harmless():
    """The first of twenty steps captures a graph that the others launch."""
    events = steps_with((100, 0))
    for number in range(1, 20):
        at, correlation = number * STEP, 1000 + number
        events += [step(number), event("cpu_op", "aten::mm", at, at + 990)]
        events += [launch(correlation, at + 10, "cudaGraphLaunch")]
        events += [kernel(at + 20 + 9 * place, correlation, 6) for place in range(100)]
    fact = lost(events)
    assert numbers(fact) == (119, 100, 1900)
    assert fact.steps == (0,)
    assert verdict_of(events)[0].kind == "balanced"  # busy for 6 of 9 µs, and not late


def graph_launches():
    """Launches of a graph in each of three steps."""
    at = [number * STEP for number in range(3)]
    return [*map(step, range(3)), *[launch(n, at[n] + 5, "hipGraphLaunch") for n in range(3)]]


def test_graph_launches_without_kernels_are_lost():
    """The profiler recorded a copy but none of the graphs' kernels."""
    events = graph_launches()
    for number in range(3):
        at, correlation = number * STEP + 500, 90 + number
        events.append(event("cuda_runtime", "hipMemcpyAsync", at, at + 5, correlation=correlation))
        where = {"device": 0, "stream": 7, "correlation": correlation}
        events.append(event("gpu_memcpy", "Memcpy", at + 10, at + 30, 7, 0, **where))
    assert numbers(lost(events)) == (3, 3, 0)
    assert verdict_of(events)[0].kind == "cannot_tell"


def test_kernels_never_linked_to_calls_are_not_lost():
    """Some recorders give a graph's kernels no correlation, or a different one."""
    events = graph_launches()
    events += [kernel(number * STEP + 20 + 9 * place) for number in range(3) for place in range(100)]
    assert numbers(lost(events)) == (0, 0, 300)


def test_driver_call_inside_runtime_call_is_same_launch():
    events = [step(0)]
    for number in range(10):
        at = 10 + 50 * number
        events += [
            launch(2 * number, at, duration=9),
            launch(2 * number + 1, at + 2, "cuLaunchKernel", cat="cuda_driver"),
        ]
        events.append(kernel(at + 20, 2 * number + number % 2))  # linked to either
    assert numbers(lost(events)) == (10, 0, 10)


def test_busy_device_stays_busy():
    """Additional kernels would only make it busier."""
    events = [step(0)]
    for number in range(10):
        events += [launch(number, 1 + 5 * number)]
        events += [kernel(10 + 240 * number, number, size=240)] if number < 4 else []
    assert lost(events).tells_nothing
    assert verdict_of(events)[0].kind == "device_bound"


def test_whole_trace_counts_without_steps():
    assert numbers(lost([launch(1, 5), launch(2, 9), kernel(15, 1)])) == (2, 1, 1)
    assert numbers(lost([step(0), launch(1, 5)])) == (1, 1, 0)


def test_ranks_are_pooled():
    """Only one of two ranks recorded its device."""
    whole, capture = lost(steps_with((10, 10))), lost(steps_with((10, 0), (10, 10)))
    both = pool([whole, capture])
    assert (*numbers(both), both.steps) == (30, 10, 20, (0,))
    facts = JobFacts(TraceFacts(make_trace(steps_with((100, recorded)))) for recorded in (30, 2))
    assert diagnose_traces(facts)[0].summary.startswith("168 of 200 kernel launches")


def test_window_without_kernels_gives_no_gpu_verdict():
    """Host timing still counts: nothing stands out on the host here."""
    for recorded, is_told in ((100, True), (2, False)):
        trace = TraceFacts(make_trace(steps_with((100, recorded), (100, recorded))))
        window = Window(index=0, first_step=0, last_step=1)
        run = {"windows": (window,), "facts": {0: trace}, "device_type": "cuda"}
        verdict, findings = diagnose(analysis_of(steps_of(forward=15), **run))
        late = next(one for one in findings if one.kind == "launch_bound")
        assert (late.status is not Status.NOT_EVALUATED) == is_told
        assert (verdict.kind != "cannot_tell") == is_told
    assert "196 of 200 kernel launches" in verdict.summary
    assert "no CPU time stands out" in verdict.summary
