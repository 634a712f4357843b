"""Passed checks carry the name of the healthy state, and findings show their first four figures."""

import json
import re

import pytest

from lightning_modelprof.report.model import Evidence, Finding, Report, Status, Unit
from lightning_modelprof.report.rules.all_rules import RULES
from lightning_modelprof.report.rules.engine import judge
from lightning_modelprof.show.document import render_json
from lightning_modelprof.show.findings import evidence_text, found_texts, passed_line, shown_evidence
from lightning_modelprof.show.html.head import found_views, other_rules
from lightning_modelprof.show.html.parts import findings_html
from lightning_modelprof.show.text import render_text
from tests.support.diagnosed import analysis_of, steps_of


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_each_rule_names_its_healthy_state(rule):
    words = rule.healthy.split()
    assert 1 <= len(words) <= 5
    assert rule.healthy != rule.title
    assert not rule.healthy.endswith(".")
    assert re.match(r"[A-Z]|training_step|torch\.", rule.healthy)


def test_healthy_names_are_unique():
    names = [rule.healthy for rule in RULES]
    assert len(set(names)) == len(names)


def test_rule_without_finding_never_shows_its_problem():
    facts = analysis_of(steps_of(forward=20))
    seen = set()
    for rule in RULES:
        for finding in judge(rule, facts):
            seen.add(finding.status)
            if finding.status is not Status.FOUND:
                assert finding.title == rule.healthy
    assert seen >= {Status.CLEAN, Status.NOT_EVALUATED}


def report_of(*findings):
    return Report(title="a run", facts=(), tables=(), notes=(), findings=findings, verdict=None)


def details(page, name):
    """Opening tag and content of a class's collapsed parts."""
    return re.findall(rf'(<details class="[^"]*\b{name}\b[^>]*>)(.*?)</details>', page, re.DOTALL)


def figures(number):
    return tuple(Evidence(label=f"figure {n}", value=n, unit=Unit.COUNT) for n in range(1, number + 1))


def slow(evidence):
    return Finding(
        kind="slow_callback", status=Status.FOUND, title="Slow callback", summary="It is.", evidence=evidence
    )


PASSED = (
    Finding(
        kind="memory_near_capacity",
        status=Status.CLEAN,
        title="Training fits in memory",
        summary="40% is used.",
    ),
    Finding(kind="input_bound", status=Status.CLEAN, title="Data loading keeps up", summary="Nothing waits."),
    Finding(kind="amp_off", status=Status.NOT_EVALUATED, title="Mixed precision is on", summary="no GPU"),
)


def test_four_figures_are_shown_and_rest_is_collapsed():
    unknown = Evidence(label="unknown", value=None, unit=Unit.COUNT)
    finding = slow((unknown, *figures(6)))
    assert [one.label for one in shown_evidence(finding)] == [f"figure {n}" for n in range(1, 5)]
    assert evidence_text(finding) == "figure 1 1 · figure 2 2 · figure 3 3 · figure 4 4"
    [text] = found_texts([finding])
    assert "Evidence: figure 1 1 · figure 2 2 · figure 3 3 · figure 4 4" in text.lines
    assert "figure 5" not in render_text(report_of(finding))
    [view] = found_views([finding])
    assert [label for label, _ in view["evidence"]] == [f"figure {n}" for n in range(1, 5)]
    assert [label for label, _ in view["more_evidence"]] == ["unknown", "figure 5", "figure 6"]
    [(_, more)] = details(findings_html(report_of(finding)), "more")
    assert "<summary>3 more values</summary>" in more
    assert "figure 6" in more
    (written,) = json.loads(render_json(report_of(finding)))["findings"]
    assert len(written["evidence"]) == 7


def test_few_figures_collapse_nothing():
    assert details(findings_html(report_of(slow(figures(4)))), "more") == []


def test_passed_checks_share_one_line():
    assert passed_line(PASSED) == "Passed: Training fits in memory · Data loading keeps up."
    assert passed_line(PASSED[2:]) == ""
    text = " ".join(render_text(report_of(*PASSED)).split())
    assert (
        "Passed: Training fits in memory · Data loading keeps up. 0 findings, 2 passed, 1 not checked" in text
    )
    groups = other_rules(PASSED)
    assert [one["label"] for one in groups] == ["Passed", "Not checked"]
    [(passed, names), (other, _)] = details(findings_html(report_of(*PASSED)), "checks")
    assert "open" not in passed + other
    assert "Training fits in memory · Data loading keeps up</span></summary>" in names
