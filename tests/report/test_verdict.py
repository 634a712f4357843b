"""Verdicts on hand-made runs: each kind, its threshold and its precedence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_modelprof.analysis.lazy import NO_DEVICE, NotMeasured
from lightning_modelprof.analysis.trace.host_waits import HostWait, HostWaits, WaitPlace
from lightning_modelprof.analysis.trace.idle import CoveredIdle
from lightning_modelprof.analysis.trace.step_breakdown import STEP_CATEGORIES, StepBreakdown, StepParts
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Severity, Status
from lightning_modelprof.report.rules.all_rules import RULES
from lightning_modelprof.report.rules.engine import diagnose
from lightning_modelprof.report.rules.phases import slow_logger
from lightning_modelprof.report.rules.rule import Found, Rule
from lightning_modelprof.report.verdict import account, give_verdict
from lightning_modelprof.run.archive import load_run, save_run
from lightning_modelprof.run.records import CallbackTime, RankRecord, Run, RunInfo, Window
from lightning_modelprof.run.steps import StepTag
from tests.support.diagnosed import MS, SETUP, analysis_of, cost_of, steps_of
from tests.support.traces import make_trace


def verdict(steps, **kwargs):
    return diagnose(analysis_of(steps, **kwargs))[0]


@pytest.mark.parametrize(
    ("wait_ms", "kind"), [(4, "balanced"), (19.9, "balanced"), (20, "input_bound"), (90, "input_bound")]
)
def test_input_bound_from_20_percent(wait_ms, kind):
    found = verdict(steps_of(forward=100 - wait_ms, dataloader=wait_ms))
    assert (found.kind, found.accounted_ratio) == (kind, 1.0)


def test_summary_contains_share():
    assert (
        verdict(steps_of(forward=15, dataloader=5)).summary == "25% of each step is spent waiting for data."
    )


@pytest.mark.parametrize(("logging_ms", "kind"), [(14.9, "balanced"), (15, "overhead_bound")])
def test_overhead_bound_from_15_percent(logging_ms, kind):
    assert verdict(steps_of(forward=100 - logging_ms, logging=logging_ms)).kind == kind


def test_overheads_add_up():
    """Each of three overheads of 6% is a warning; together they decide the verdict."""
    steps = steps_of(forward=82, logging=6, transfer=6, lr_scheduler=6)
    assert verdict(steps).kind == "overhead_bound"


def test_very_short_overheads_do_not_decide_verdict():
    """With a tiny model, Lightning's own work is more than half of the step."""
    steps = steps_of(forward=0.2, dataloader=0.1, logging=0.1, other=0.2)
    found = verdict(steps)
    assert found.kind == "compute_bound"
    assert found.summary.startswith("Forward, backward and optimizer take 33% of each step")
    assert found.summary.endswith("33% is spent between phases.")
    assert found.accounted_ratio == pytest.approx(2 / 3)


def test_callbacks_outside_steps_decide_verdict():
    """20 steps of 10 ms, then 100 ms at the end of the epoch."""
    callbacks = (CallbackTime(callback="Slow", hook="on_train_epoch_end", calls=1, total_ns=100 * MS),)
    steps = steps_of(forward=10)
    assert (
        verdict(steps, callbacks=callbacks, outside_ms={"callbacks": 100}).summary
        == "33% of the loop is spent in callbacks."
    )


def test_step_code_makes_run_host_bound():
    cost = cost_of(("", 10, 0, 0), ("layer", 10, 3, 0))
    assert verdict(steps_of(forward=10), cost=cost).kind == "host_bound"


def test_largest_share_wins():
    cost = cost_of(("", 10, 0, 0), ("layer", 10, 3, 0))
    assert verdict(steps_of(forward=10, dataloader=8), cost=cost).kind == "input_bound"
    assert verdict(steps_of(forward=13, dataloader=8), cost=cost).kind == "host_bound"


def test_rule_counts_for_verdict_it_names():
    """The time of a rule's findings counts for the verdict in the rule's ``bound``."""
    syncs = replace(slow_logger, bound="sync_bound")
    found, _ = diagnose(analysis_of(steps_of(forward=10, logging=10)), [syncs])
    assert found.summary == "50% of each step is spent waiting for values from the GPU."


# Too little data


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (steps_of(0), "No step finished"),
        (steps_of(tags=[StepTag.PROFILED] * 20, forward=5), "Every step after the first ones"),
        (steps_of(4, forward=5), "Only 4 steps"),
        (steps_of(forward=5, other=1.5), "1.5 ms per step (23%) is spent between phases."),
        (steps_of(forward=5, dataloader=None), "Phases were read from hooks"),
    ],
)
def test_cannot_tell_gives_reason(steps, reason):
    found, findings = diagnose(analysis_of(steps))
    assert found.kind == "cannot_tell"
    assert reason in found.summary
    assert all(finding.severity is None for finding in findings)


def test_no_severity_below_90_percent():
    """Logging would be critical; it's still listed."""
    found, findings = diagnose(analysis_of(steps_of(forward=5, logging=5, other=2)))
    assert (found.kind, found.accounted_ratio) == ("cannot_tell", pytest.approx(10 / 12))
    assert [(one.kind, one.severity) for one in findings if one.status is Status.FOUND] == [
        ("slow_logger", None)
    ]


@pytest.mark.parametrize(("other", "kind"), [(1, "balanced"), (2, "compute_bound"), (2.1, "cannot_tell")])
def test_balanced_from_95_percent_and_judged_from_90(other, kind):
    assert verdict(steps_of(forward=20 - other, other=other)).kind == kind


@pytest.mark.parametrize(
    ("phases", "kind"),
    [
        ({"forward": 11, "dataloader": 3, "callbacks": 3, "logging": 3}, "balanced"),
        ({"forward": 9, "dataloader": 3, "callbacks": 4, "validation": 0, "logging": 4}, "compute_bound"),
        ({"forward": 3, "dataloader": 3.9, "callbacks": 3.5, "checkpoint": 3.2}, "input_bound"),
    ],
)
def test_step_with_less_than_half_model_is_not_balanced(phases, kind):
    """Without findings no bound is reached, so the largest part decides."""
    facts = analysis_of(steps_of(**phases))
    found = give_verdict(facts, (), (), account(facts))
    assert found.kind == kind


# GPU runs


EMPTY = TraceFacts(make_trace([]))
WINDOW = Window(index=0, first_step=0, last_step=0)


def trace(host_waits=None, **shares):
    """The parts of a window's trace that the verdict uses."""
    parts = tuple(round(shares.get(name, 0) * 100) for name in STEP_CATEGORIES)
    assert sum(parts) == 100
    works = sum(round(100 * shares.get(name, 0)) for name in ("kernel", "memcpy", "memset", "communication"))
    idle = CoveredIdle(total_ns=100, busy_ns=works, by_cause_ns=(0, 100 - works, 0, 0, 0, 0))
    breakdown = StepBreakdown(
        steps=(StepParts(number=0, total_ns=100, parts_ns=parts),),
        has_device=True,
        has_runtime=True,
        notes=(),
    )
    return EMPTY.replaced(
        host_waits=NotMeasured(NO_DEVICE) if host_waits is None else host_waits,
        idle=SimpleNamespace(devices=[SimpleNamespace(covered=idle)]),
        step_breakdown=breakdown,
    )


def on_device(steps, window=None, **known):
    if window is not None:
        known |= {"windows": (WINDOW,), "facts": {0: window}}
    return diagnose(analysis_of(steps, device_type="cuda", **known), RULES)[0]


@pytest.mark.parametrize(
    ("shares", "kind"),
    [
        ({"kernel": 0.85, "cpu_exec": 0.15}, "device_bound"),
        ({"kernel": 0.80, "memcpy": 0.05, "cpu_exec": 0.15}, "device_bound"),
        ({"kernel": 0.84, "cpu_exec": 0.16}, "balanced"),
        ({"kernel": 0.50, "cpu_exec": 0.30, "runtime": 0.20}, "host_bound"),
        ({"kernel": 0.51, "cpu_exec": 0.29, "runtime": 0.20}, "balanced"),
        ({"kernel": 0.70, "communication": 0.15, "other": 0.15}, "communication_bound"),
        ({"kernel": 0.71, "communication": 0.14, "other": 0.15}, "balanced"),
    ],
)
def test_window_shares_decide_verdict(shares, kind):
    assert on_device(steps_of(forward=10, backward=10), trace(**shares)).kind == kind


def test_busy_device_precedes_cpu_overheads():
    """While the GPU is busy, CPU work costs no time."""
    steps = steps_of(forward=10, logging=10)
    assert on_device(steps, trace(kernel=0.9, other=0.1)).kind == "device_bound"
    assert on_device(steps, trace(kernel=0.6, other=0.4)).kind == "overhead_bound"


def waits_of(*waits, late=0.0, launch=None, wait_of=None):
    """Steps of 100 ms; each wait is (phase, share saved), and the CPU waits twice as long."""
    return HostWaits(
        num_steps=1,
        steps_ns=100 * MS,
        idle_ns=100 * MS,
        fetch_ns=0,
        late_ns=round(late * 100 * MS),
        launch_ns=round((late if launch is None else launch) * 100 * MS),
        longest_launch_ns=1,
        num_kernels=100,
        waits=tuple(
            HostWait(
                place=WaitPlace(kind="device_to_host", operators=("aten::item",), phase=phase),
                calls=1,
                wait_ns=round((2 * share if wait_of is None else wait_of) * 100 * MS),
                saves_ns=round(share * 100 * MS),
            )
            for phase, share in waits
        ),
    )


def verdict_of_waits(waits, steps=None, **shares):
    return on_device(steps_of(forward=50, backward=50) if steps is None else steps, trace(waits, **shares))


@pytest.mark.parametrize(
    ("waits", "shares", "kind", "begins"),
    [
        (
            waits_of(("forward", 0.3)),
            {"kernel": 0.7, "runtime": 0.3},
            "sync_bound",
            "The GPU spends 30% of each step idle after the CPU waited",
        ),
        (
            waits_of(late=0.6),
            {"kernel": 0.4, "cpu_exec": 0.6},
            "host_bound",
            "The GPU spends 60% of each step waiting for the CPU to launch",
        ),
        (
            waits_of(("forward", 0.0), wait_of=0.9),
            {"kernel": 0.95, "runtime": 0.05},
            "device_bound",
            "The GPU is busy in 95%",
        ),
        (
            waits_of(),
            {"kernel": 0.6, "communication": 0.25, "cpu_exec": 0.15},
            "communication_bound",
            "25% of each step is communication",
        ),
        (waits_of(("forward", 0.14)), {"kernel": 0.8, "runtime": 0.2}, "balanced", ""),
        (waits_of(late=0.29), {"kernel": 0.7, "cpu_exec": 0.3}, "balanced", ""),
        # With both, the larger one decides, and each counts only its own part of the idle time.
        (waits_of(("forward", 0.35), late=0.31), {"kernel": 0.3, "runtime": 0.7}, "sync_bound", "35%"),
        (waits_of(("forward", 0.31), late=0.35), {"kernel": 0.3, "runtime": 0.7}, "host_bound", "35%"),
        # Waits in two phases add up.
        (
            waits_of(("forward", 0.1), ("backward", 0.1)),
            {"kernel": 0.8, "runtime": 0.2},
            "sync_bound",
            "20%",
        ),
        # The CPU is late without launching, e.g. in callbacks; from half of the time on that doesn't matter.
        (waits_of(late=0.5, launch=0.05), {"kernel": 0.5, "cpu_exec": 0.5}, "host_bound", "50%"),
        (waits_of(late=0.49, launch=0.05), {"kernel": 0.5, "cpu_exec": 0.5}, "balanced", ""),
        # Half of the time the CPU is busy and the GPU idle, yet work was queued.
        (waits_of(late=0.1), {"kernel": 0.4, "cpu_exec": 0.6}, "cannot_tell", "The GPU is busy in 40%"),
    ],
)
def test_waits_and_launches_decide_verdict(waits, shares, kind, begins):
    found = verdict_of_waits(waits, **shares)
    assert found.kind == kind
    assert begins in found.summary


def test_logger_waiting_for_gpu_is_not_overhead():
    """Logging takes 40% of the step, all of it waiting; after that the GPU is idle for 20%."""
    steps = steps_of(forward=60, logging=40)
    waits = waits_of(("logging", 0.2), wait_of=0.4)
    found = verdict_of_waits(waits, steps, kernel=0.8, runtime=0.2)
    assert (found.kind, found.summary.split()[3]) == ("sync_bound", "20%")
    # The same wait while the GPU is busy costs nothing and isn't overhead.
    free = waits_of(("logging", 0.0), wait_of=0.4)
    assert verdict_of_waits(free, steps, kernel=0.8, runtime=0.2).kind == "balanced"
    # Without waits it's the logger's own time.
    assert verdict_of_waits(waits_of(), steps, kernel=0.8, runtime=0.2).kind == "overhead_bound"


def test_pageable_copy_wait_is_transfer_time():
    """As recorded on an H100: transfer takes 86% of a step, and copies on the GPU take 81%."""
    steps = steps_of(transfer=86, forward=14)
    waits = waits_of(("transfer", 0.14), wait_of=0.83)
    found = verdict_of_waits(waits, steps, kernel=0.03, memcpy=0.81, runtime=0.16)
    assert found.kind == "overhead_bound"
    assert "is spent in transfer" in found.summary
    # While kernels run, the same wait is for the kernels.
    assert verdict_of_waits(waits, steps, kernel=0.83, memcpy=0.01, runtime=0.16).kind == "balanced"


def test_idle_time_seen_by_both_clocks_counts_once():
    """By the CPU clock, forward's own code takes 25%; the GPU is idle for 35% of the time."""
    cost = cost_of(("", 10, 0, 0), ("layer", 10, 75, 0))
    steps = steps_of(forward=100)
    found = on_device(steps, trace(waits_of(late=0.35), kernel=0.65, cpu_exec=0.35), cost=cost)
    assert (found.kind, found.summary.split()[3]) == ("host_bound", "35%")
    # The wait is a tenth of the step and isn't the code's own time.
    waits = waits_of(("forward", 0.1))
    assert on_device(steps, trace(waits, kernel=0.8, cpu_exec=0.2), cost=cost).kind == "balanced"
    assert on_device(steps, trace(waits_of(), kernel=0.8, cpu_exec=0.2), cost=cost).kind == "host_bound"


def test_window_share_applies_to_step_without_profiler():
    """The fix saves half of the recorded step of 100 ms; other steps take 20 ms."""
    window = trace(waits_of(("forward", 0.5)), kernel=0.5, runtime=0.5)
    steps = steps_of(forward=20)
    run = analysis_of(steps, device_type="cuda", windows=(WINDOW,), facts={0: window})
    found, findings = diagnose(run, RULES)
    assert findings[0].saving_ns_per_step == pytest.approx(10 * MS)
    assert found.summary.startswith("The GPU spends 50%")


def test_no_device_verdict_without_window():
    assert on_device(steps_of(forward=20)).kind == "cannot_tell"
    # Waiting for data is also measured on a GPU.
    assert on_device(steps_of(forward=10, dataloader=10)).kind == "input_bound"


def test_saved_setup_reads_back(tmp_path):
    record = RankRecord(rank=0, steps=steps_of(3, forward=5), setup=SETUP)
    save_run(Run(info=RunInfo(created="now"), ranks=(record,)), tmp_path / "run.json")
    assert load_run(tmp_path).ranks[0].setup == SETUP


def says(severity, saving, bound=None):
    """A rule with a fixed finding."""
    return Rule(
        kind=f"says {bound}",
        title="Says",
        healthy="Says nothing",
        help="",
        ask=lambda facts, limits: iter([Found(what="It.", do="Do.", severity=severity, saves_ns=saving)]),
        limits={},
        bound=bound,
    )


def test_findings_are_ranked_by_severity_then_time():
    """Critical 3 ms ranks above a warning of 5 ms, and hints are last. Unknown time ranks as the median."""
    critical, warning, hint = Severity.CRITICAL, Severity.WARNING, Severity.INFO
    expected = [(critical, 3 * MS), (critical, None), (warning, 5 * MS), (warning, None), (warning, 3 * MS)]
    expected += [(hint, 9 * MS), (hint, None)]
    rules = [says(severity, saving) for severity, saving in reversed(expected)]
    _, found = diagnose(analysis_of(steps_of(forward=100)), rules)
    assert [(one.severity, one.saving_ns_per_step) for one in found] == expected


def test_first_finding_supports_verdict():
    """The verdict is INPUT-BOUND by a warning of 30 ms, which ranks above an unrelated critical finding."""
    rules = [
        says(Severity.CRITICAL, 20 * MS),
        says(Severity.WARNING, 2 * MS, "input_bound"),
        says(Severity.WARNING, 30 * MS, "input_bound"),
        says(Severity.INFO, 40 * MS, "input_bound"),
    ]
    verdict, found = diagnose(analysis_of(steps_of(forward=100)), rules)
    assert verdict.kind == "input_bound"
    assert [one.saving_ns_per_step / MS for one in found] == [30, 20, 2, 40]
