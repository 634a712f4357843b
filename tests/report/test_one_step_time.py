"""Each report has one step time, and its parts, shares and savings add up to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof import analyze
from lightning_modelprof.reading import read_report
from lightning_modelprof.report.model import StepCard, StepPart
from lightning_modelprof.show.step_card import CORE, MOST_REST, REST, StepNumbers, merge_small
from tests.oracle.oracle import inputs, unpacked
from tests.support.adds_up import wrong_sums

KEYS = (*CORE, "callbacks", "logging", "transfer", "other", "profiler")


@pytest.mark.slow
@pytest.mark.parametrize("source", inputs(), ids=lambda source: source.name.partition(".")[0])
def test_stored_report_adds_up(source, tmp_path):
    report = read_report(unpacked(source, tmp_path / "modelprof")) if source.is_dir() else analyze(source)
    assert not wrong_sums(report)


def test_wrong_sums_are_detected(tmp_path):
    """The check fails for another step time, a saving above it, an unfilled cost and a wrong share."""
    source = next(one for one in inputs() if one.name == "cifar")
    report = read_report(unpacked(source, tmp_path / "modelprof"))
    first, *others = report.findings
    card = report.step_card
    longer = replace(card, host=tuple(replace(part, ns=1.5 * part.ns) for part in card.host))
    assert first.saving_ns_per_step
    for wrong in (
        replace(report, step_card=longer),
        replace(report, findings=(replace(first, saving_ns_per_step=2 * card.wall_ns), *others)),
        replace(report, findings=(replace(first, summary="It takes {cost}."), *others)),
        replace(report, findings=(replace(first, summary="It takes 1 ms per step (99%)."), *others)),
    ):
        assert wrong_sums(wrong)


steps = st.lists(st.floats(1e3, 1e10), min_size=1, max_size=len(KEYS)).map(
    lambda times: tuple(StepPart(key=key, label=key, ns=ns) for key, ns in zip(KEYS, times, strict=False))
)


@given(host=steps, gain=st.floats(0, 1))
def test_printed_parts_sum_to_the_printed_step(host, gain):
    better = tuple(replace(part, ns=part.ns * gain) for part in host)
    card = StepCard(step="a step", host=host, better=better)
    numbers = StepNumbers(card)
    unit = 10.0 ** -len(numbers.step.partition(".")[2])
    for parts, whole, is_best in ((host, numbers.step, False), (better, numbers.best, True)):
        shown = [float(text.replace(",", "")) for text in numbers.parts(parts, is_best=is_best)]
        seen = [one for one in shown if one > 0.99 * unit]  # parts below the last digit show more digits
        assert sum(seen) == pytest.approx(float(whole.replace(",", "")), abs=unit / 10)
        for part, one in zip(parts, shown, strict=True):
            assert one == pytest.approx(part.ns / 1e6, abs=1.01 * unit + 0.5 * part.ns / 1e6 * (one < unit))


@given(host=steps)
def test_model_phases_stay_visible_and_other_is_at_most_a_tenth(host):
    merged = merge_small(host, small=0.3)
    keys = {part.key for part in merged}
    assert {part.key for part in host if part.key in CORE} <= keys
    rest_ns = sum(part.ns for part in merged if part.key == REST)
    assert rest_ns <= MOST_REST * sum(part.ns for part in host) * (1 + 1e-9)
    assert sum(part.ns for part in merged) == pytest.approx(sum(part.ns for part in host))


@given(host=steps, small=st.floats(0, 0.3))
def test_phase_reads_the_same_on_page_and_terminal(host, small):
    numbers = StepNumbers(StepCard(step="a step", host=host, better=host))
    merged = merge_small(host, small)
    alone = dict(zip((part.key for part in host), numbers.parts(host), strict=True))
    for part, text in zip(merged, numbers.parts(merged), strict=True):
        assert part.key == REST or text == alone[part.key]
    unit = 10.0 ** -len(numbers.step.partition(".")[2])
    shown = [float(text.replace(",", "")) for text in numbers.parts(merged)]
    seen = sum(one for one in shown if one > 0.99 * unit)
    assert seen == pytest.approx(float(numbers.step.replace(",", "")), abs=unit / 10)
