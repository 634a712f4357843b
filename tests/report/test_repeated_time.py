"""Time counts once: a finding about the time of one above becomes a hint that names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_modelprof.place import Place
from lightning_modelprof.report.model import Finding, Severity, Status
from lightning_modelprof.report.rules.all_rules import RULES
from lightning_modelprof.report.rules.engine import diagnose
from lightning_modelprof.report.rules.passes import placed
from tests.analysis.test_hot_lines import hot_of
from tests.support.diagnosed import MS, analysis_of, steps_of


def finding(kind, saving_ms, *lines, severity=Severity.WARNING, is_exact=True):
    return Finding(
        kind=kind,
        status=Status.FOUND,
        title=kind,
        summary="It takes long.",
        severity=severity,
        saving_ns_per_step=saving_ms * MS,
        locations=tuple(Place(file="train.py", line=line, is_exact=is_exact) for line in lines),
    )


def placed_of(hot, *findings):
    """Findings after all passes, in a run whose steps are long enough for them."""
    rules = {rule.kind: rule for rule in RULES}
    facts = analysis_of(steps_of(forward=10, validation=10, callbacks=10), stacks=hot.samples)
    return placed([(rules[one.kind], [one]) for one in findings], facts)


def judged(hot, *findings):
    return [(one.kind, one.severity, one.saving_ns_per_step) for one in placed_of(hot, *findings)]


HOT = hot_of(
    ("forward", "step:12 loss:22", 40, 400),
    ("forward", "step:12 loss:23", 10, 100),
    ("forward", "step:14", 30, 300),
    ("validation", "again:42", 20, 200),
)
OUTER = finding("slow_custom_module", 5, 12)


@pytest.mark.parametrize(
    ("other", "is_repeated"),
    [
        (finding("slow_line_in_module", 4, 22), True),
        (finding("slow_line_in_module", 4, 14), False),
        (finding("slow_line_in_module", 4, 14, 22), False),  # 400 of its 700: most, but not nearly all
        (finding("slow_line_in_module", 4, 22, is_exact=False), False),  # a def line has no time
        (finding("slow_custom_module", 4, 22), False),  # another module of the same rule
        (finding("host_device_sync", 4, 22), False),  # GPU time
        (finding("validation_share", 4, 42), False),
    ],
)
def test_finding_within_time_of_another_becomes_hint(other, is_repeated):
    first, second = placed_of(HOT, OUTER, other)
    assert (first.severity, first.saving_ns_per_step, first.summary) == (
        Severity.WARNING,
        5 * MS,
        OUTER.summary,
    )
    assert ("repeats" in second.passes) is is_repeated
    if is_repeated:
        assert (second.severity, second.saving_ns_per_step) == (Severity.INFO, None)
        assert second.summary.endswith("This time is already included in slow_custom_module.")
        assert second.locations == other.locations
    else:
        assert (second.severity, second.saving_ns_per_step) == (other.severity, other.saving_ns_per_step)
        assert second.summary == other.summary


def test_phase_time_includes_everything_in_it():
    """Logging during validation is part of the finding about validation."""
    whole, part = finding("validation_share", 8, 1), finding("slow_logging_calls", 6, 42)
    assert judged(HOT, whole, part) == [
        ("validation_share", Severity.WARNING, 8 * MS),
        ("slow_logging_calls", Severity.INFO, None),
    ]


def test_hook_time_includes_all_its_lines():
    """A callback writes histograms on two lines; the line it names has about half of its time."""
    hot = hot_of(
        ("callbacks", "on_after_backward:76 torch.utils.tensorboard.writer.add:9", 55, 550),
        ("callbacks", "on_after_backward:77 torch.utils.tensorboard.writer.add:9", 45, 450),
    )
    [hook] = {frame.function for frame in hot.samples.frames if frame.line == 76}
    whole, part = finding("slow_callback", 8, 76), finding("slow_logging_calls", 7, 76, 77)
    whole = replace(whole, locations=tuple(replace(one, function=hook) for one in whole.locations))
    assert judged(hot, whole, part) == [
        ("slow_callback", Severity.WARNING, 8 * MS),
        ("slow_logging_calls", Severity.INFO, None),
    ]


def test_finding_without_severity_stays_unjudged():
    part = replace(finding("slow_line_in_module", 4, 22), severity=None)
    assert judged(HOT, OUTER, part)[1] == ("slow_line_in_module", None, None)


def test_few_samples_keep_both_findings():
    few = hot_of(("forward", "step:12 loss:22", 9, 400))
    assert judged(few, OUTER, finding("slow_line_in_module", 4, 22))[1][1] is Severity.WARNING


def test_repeats_are_sorted_with_hints():
    """Validation takes 13 of 20 ms, nearly all of it logging; the logger takes 2 ms."""
    stacks = hot_of(
        ("validation", "again:42 lightning.pytorch.core.module.log:9", 60, 12_000),
        ("backward", "step:14", 40, 8_000),
    ).samples
    analysis = analysis_of(steps_of(validation=13, backward=5, logging=2), stacks=stacks)
    _, findings = diagnose(analysis)
    found = [one for one in findings if one.status is Status.FOUND]
    assert found[0].kind == "validation_share"
    assert [one.severity for one in found] == sorted(
        (one.severity for one in found), key=[Severity.CRITICAL, Severity.WARNING, Severity.INFO].index
    )
    kinds = {one.kind: one.severity for one in found}
    assert kinds.get("slow_logging_calls", Severity.INFO) is Severity.INFO
