"""Steps of traces without ProfilerStep ranges: chosen by name, or guessed from ranges that repeat."""

from __future__ import annotations

import json

import pytest

from lightning_modelprof import analyze
from lightning_modelprof.analysis.timeline.timeline import build_timeline
from lightning_modelprof.analysis.trace.host_waits import ONE_STEP
from lightning_modelprof.analysis.trace.job_facts import JobFacts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.cli.main import main
from lightning_modelprof.errors import ConfigError, TraceError
from lightning_modelprof.report.model import Status
from lightning_modelprof.report.options import parse_step_range
from lightning_modelprof.report.rules.engine import diagnose_traces
from tests.support.traces import event, make_trace

US = 1000
STEP, GAP, FIRST = 1000, 100, 50
"""Microseconds: a server's step, the time between two steps, and the time before the first."""


def served(*names, busy=600, inner=True, gap=GAP):
    """A server's steps with these names; each launches a kernel that ends inside the step."""
    events = [event("cpu_op", "aten::empty", 0, 5)]
    for number, name in enumerate(names):
        at = FIRST + number * (STEP + gap)
        events += [
            event("user_annotation", name, at, at + STEP),
            event("cpu_op", "aten::mm", at + 10, at + 40),
            event("cuda_runtime", "cudaLaunchKernel", at + 20, at + 30, correlation=number + 1),
            event("kernel", "gemm", at + 50, at + 50 + busy, 7, 0, correlation=number + 1, device=0),
        ]
        if inner:
            events.append(event("user_annotation", "preprocess", at + 1, at + 9))
    return events


def steps_of(events, asked=None):
    wanted = None if asked is None else parse_step_range(asked)
    return build_timeline(make_trace(events), wanted).steps


def as_us(steps):
    return (steps.intervals // US).tolist()


def expected(count, gap=GAP):
    begins = [FIRST + number * (STEP + gap) for number in range(count)]
    return [[at, at + STEP] for at in begins]


VLLM = [f"execute_context_{n % 2}({128 * n})_generation_{n}({n})" for n in range(5)]
SGLANG = ["step[EXTEND bs=2 toks=256]", *[f"step[DECODE bs={n}]" for n in (2, 2, 4, 8)]]


@pytest.mark.parametrize(
    "names",
    [
        VLLM,
        [f"execute_{n}_context_3(sq128sk256)_generation_2(sq1sk{n})" for n in range(4)],
        SGLANG,
        ["execute_model"] * 3,
        [f"iteration {n}" for n in range(6)],
        ["[pl][profile]run_training_batch"] * 4,
    ],
)
def test_repeating_ranges_that_cover_most_time_are_steps(names):
    steps = steps_of(served(*names))
    assert as_us(steps) == expected(len(names))
    assert steps.numbers == tuple(range(len(names)))
    assert "a guess" in steps.origin
    assert f"ranges like {names[0]!r} ({len(names)} of them)" in steps.origin
    assert "--step-range REGEX" in steps.origin


def test_outer_of_two_repeating_ranges_is_step():
    events = served(*VLLM)
    events += [event("user_annotation", "forward", at + 2, at + 999) for at, _ in expected(5)]
    assert as_us(steps_of(events)) == expected(5)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (VLLM[0], "step[MIXED bs=2]"),
        ("execute_32_context_0(sq0)_generation_32(sq32)", SGLANG[1]),
        (SGLANG[0], VLLM[1]),
    ],
)
def test_single_server_step_is_recognized_by_name(outer, inner):
    """Even if it's short compared with the rest, and contains another of its ranges."""
    events = [*served(outer), wide(1), event("user_annotation", inner, FIRST + 2, FIRST + 900)]
    timeline = build_timeline(make_trace(events))
    assert as_us(timeline.steps) == expected(1)
    assert len(timeline.steps.rows) == 2
    assert "(1 of them)" in timeline.steps.origin


def test_single_step_gives_no_verdict():
    """It includes whatever happens once, when recording starts."""
    events = served(VLLM[0], busy=10)
    facts = TraceFacts(make_trace(events))
    assert facts.why_not(TraceFacts.host_waits) == ONE_STEP
    verdict, findings = diagnose_traces(JobFacts([facts]))
    assert verdict.kind == "cannot_tell"
    assert verdict.summary.startswith("The trace has one step")
    timed = [one for one in findings if one.kind != "tensor_cores_eligible"]  # that one is about kernels
    assert {one.status for one in timed} == {Status.NOT_EVALUATED}
    several = JobFacts([TraceFacts(make_trace(served(*VLLM)))])
    assert "one step" not in diagnose_traces(several)[0].summary


def test_short_host_range_covers_work_it_launched():
    """Like a server ahead of its device: the host part is a tenth of the step."""
    events = []
    for number in range(5):
        at = 100 * number
        events += [
            event("user_annotation", f"step[DECODE bs={number}]", at, at + 90),
            event("cuda_runtime", "cudaGraphLaunch", at + 20, at + 30, correlation=number + 1),
        ]
        begin = 40 + 1000 * number
        events.append(event("kernel", "k", begin, begin + 990, 7, 0, correlation=number + 1, device=0))
    timeline = build_timeline(make_trace(events))
    assert "a guess" in timeline.steps.origin
    assert timeline.bounds.intervals[:, 1].tolist() == [(1030 + 1000 * number) * US for number in range(5)]


def on_thread(tid, name):
    return [event("user_annotation", name, at, at + 900, tid) for at, _ in expected(5)]


def wide(count):
    """An operator outside the steps, much longer than all of them together."""
    return event("cpu_op", "aten::sort", 20_000, 20_000 + 2 * count * STEP)


@pytest.mark.parametrize(
    "events",
    [
        served("block", "block"),  # too few
        [*served(*["block"] * 5), wide(5)],  # most of the time is outside them
        [  # nested in each other
            event("cpu_op", "aten::mm", 0, 5000),
            *[event("user_annotation", "block", begin, 5000 - begin) for begin in range(0, 2000, 100)],
        ],
        [  # most device work is launched elsewhere
            *served(*VLLM),
            *[
                event("cuda_runtime", "cudaLaunchKernel", 1051 + n, 1052 + n, 9, correlation=50 + n)
                for n in range(9)
            ],
            *[event("kernel", "k", 1060 + n, 1061 + n, 8, 0, correlation=50 + n, device=0) for n in range(9)],
        ],
        [*served(*["request"] * 5), *on_thread(2, "request"), *on_thread(3, "request")],  # simultaneous
        served(*["Optimizer.step#SGD.step"] * 5, inner=False),
        served(*["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"] * 5, inner=False),
        served(*["nccl:all_reduce"] * 5, inner=False),
        served(*["Torch-Compiled Region: 0/0"] * 5, inner=False),
    ],
)
def test_unsuitable_ranges_are_not_guessed_as_steps(events):
    steps = steps_of(events)
    assert not steps.has_ranges
    assert steps.origin == ""


def test_profiler_steps_take_precedence():
    profiled = [
        event("user_annotation", f"ProfilerStep#{n}", at, end) for n, (at, end) in enumerate(expected(5))
    ]
    steps = steps_of([*served(*VLLM), *profiled[1:3]])
    assert (steps.numbers, steps.origin, len(steps.rows)) == ((1, 2), "", 0)


def test_window_of_callback_is_never_guessed():
    trace = make_trace(served(*VLLM), modelprof={"recorded_steps": [3]})
    timeline = build_timeline(trace)
    assert timeline.steps is None or not timeline.steps.has_ranges


def test_steps_are_chosen_by_name():
    """Works for ranges that wouldn't be guessed, for operators, and with profiler.step() calls."""
    events = [*served(*VLLM), wide(5), event("user_annotation", "ProfilerStep#7", 0, 9000)]
    steps = steps_of(events, r"execute_context_\d")
    assert as_us(steps) == expected(5)
    assert steps.origin == r"The steps are the 5 ranges whose names match 'execute_context_\\d'."
    assert as_us(steps_of(events, "^pre")) == [[at + 1, at + 9] for at, _ in expected(5)]
    assert as_us(steps_of(events, r"aten::mm")) == [[at + 10, at + 40] for at, _ in expected(5)]
    assert len(steps_of(events, "generation_3").numbers) == 1


def test_nested_matches_count_once():
    assert as_us(steps_of(served(*VLLM), "execute|preprocess")) == expected(5)


def test_step_figures():
    """Each step of 1000 µs has a 600 µs kernel; the range itself is neither work nor a user range."""
    facts = TraceFacts(make_trace(served(*VLLM)))
    assert facts.step_numbers == (0, 1, 2, 3, 4)
    parts = [dict(zip(("kernel",), step.parts_ns, strict=False)) for step in facts.step_breakdown.steps]
    assert [part["kernel"] for part in parts] == [600 * US] * 5
    assert [step.total_ns for step in facts.step_breakdown.steps] == [STEP * US] * 5
    other = facts.step_breakdown.steps[0].parts_ns[-1]
    assert other == (STEP - 600 - 30 - 8) * US  # kernel, operator and the preprocess range
    assert facts.overview.steps_ns == 5 * STEP * US
    own = {one.key: one for one in facts.overview.host}
    assert (own["user_defined"].total_ns, own["operator"].total_ns) == (5 * 8 * US, 5 * 30 * US)
    assert facts.host_waits.num_steps == 4  # excluding the first
    assert facts.checks == ()


def test_idle_server_causes_no_warning():
    """Time between its steps isn't a clock jump."""
    events = [*served(*VLLM, gap=50_000)]
    facts = TraceFacts(make_trace(events), parse_step_range("execute"))
    assert facts.checks == ()
    assert facts.step_breakdown.steps[0].total_ns == STEP * US


def test_waits_at_one_place_share_one_row():
    """Regardless of the names of the steps around them."""
    events = served(*VLLM)
    for number, (at, _) in enumerate(expected(5)):
        events.append(
            event("cuda_runtime", "cudaStreamSynchronize", at + 700, at + 800, correlation=90 + number)
        )
    (wait,) = TraceFacts(make_trace(events)).host_waits.waits
    assert (wait.calls, wait.place.annotation) == (4, "")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "server.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": served(*SGLANG)}))
    return path


def test_report_describes_steps(file, capsys):
    told = dict(analyze(file).facts)
    assert told["Steps"].startswith("The trace has no ProfilerStep ranges. Its steps are a guess:")
    assert analyze(file).summary.traces[0].step_origin == told["Steps"]
    asked = analyze(file, step_range=r"step\[DECODE")
    assert dict(asked.facts)["Steps"].startswith("The steps are the 4 ranges whose names match")
    assert main(["analyze", str(file), "--step-range", r"DECODE"]) == 0
    assert "The steps are the 4 ranges whose names match 'DECODE'." in " ".join(
        capsys.readouterr().out.split()
    )


def test_unknown_name_is_rejected_with_closest_names(file, capsys):
    with pytest.raises(TraceError) as error:
        analyze(file, step_range="step.DECDE")
    said = str(error.value)
    assert "no range matches 'step.DECDE'. Closest names: 'step[DECODE bs=" in said
    assert main(["analyze", str(file), "--step-range", "executor"]) == 1
    assert "'step[" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["step[DECODE", "(", "*", ""])
def test_invalid_regular_expression_is_rejected(file, capsys, wrong):
    with pytest.raises(ConfigError, match="step_range: expected a regular expression"):
        analyze(file, step_range=wrong)
    with pytest.raises(SystemExit) as ended:
        main(["analyze", str(file), "--step-range", wrong])
    assert ended.value.code == 2
    assert "expected a regular expression" in capsys.readouterr().err


def test_guessed_step_numbers_do_not_match_across_ranks():
    """Rank 1 starts recording later, so its step 0 isn't rank 0's step 0."""
    events = served(*VLLM)
    for number, (at, _) in enumerate(expected(5)):
        events.append(event("cuda_runtime", "cudaLaunchKernel", at + 60, at + 65, correlation=50 + number))
        where = {"correlation": 50 + number, "device": 0}
        events.append(event("kernel", "ncclDevKernel_AllReduce_Sum_f32", at + 700, at + 800, 9, 0, **where))
    guessed = TraceFacts(make_trace(events, distributedInfo={"rank": 0, "world_size": 2}))
    assert guessed.step_origin
    assert guessed.communication_calls.steps is None
