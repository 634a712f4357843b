"""The rule engine: how it turns what a rule yields into findings."""

from __future__ import annotations

import json

import pytest

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.model import Severity, Slices, Status
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules import passes
from lightning_modelprof.report.rules.engine import diagnose, judge
from lightning_modelprof.report.rules.rule import Found, Limits, Passed, count, rule
from lightning_modelprof.run.phases import RANGE_PREFIX
from lightning_modelprof.run.steps import SlowSteps
from lightning_modelprof.show.document import render_json
from tests.support.diagnosed import MS, analysis_of, only, steps_of

FACTS = analysis_of(steps_of(forward=80, backward=20))
"""Steps of 100 ms."""


def asking(*said, kind="slow_layers", **given):
    """A rule that yields these, or raises them if they are exceptions."""

    @rule(kind, title="Slow layers", healthy="Layers are fast", **given)
    def asked(facts):
        """Layers that could be faster."""
        for one in said:
            if isinstance(one, Exception):
                raise one
            yield one

    return asked


def found(ms, **more):
    return Found(what=f"Layers take {COST}.", do="Use faster ones.", saves_ns=ms * MS, **more)


def judged(*said, facts=FACTS, limits=None, **given):
    return only(judge(asking(*said, **given), facts, limits))


def waited(share):
    """The training thread was ready to run and had no CPU in this share of the loop."""
    return SlowSteps(factor=3.0, cpu_wait_share=share, why_no_cpu_wait="")


# Thresholds


@pytest.mark.parametrize(
    ("ms", "limits", "severity"),
    [
        (2.9, {}, None),
        (3, {}, Severity.WARNING),
        (14.9, {}, Severity.WARNING),
        (15, {}, Severity.CRITICAL),
        (3, {"warning": 0.04}, None),
        (2.9, {"warning": 0.02}, Severity.WARNING),
        (14, {"critical": 0.14}, Severity.CRITICAL),
    ],
)
def test_share_of_step_decides_severity(ms, limits, severity):
    finding = judged(found(ms, passed="Too little."), limits=limits)
    assert finding.severity is severity
    assert finding.status is (Status.CLEAN if severity is None else Status.FOUND)
    assert finding.saving_ns_per_step == (None if severity is None else ms * MS)


@pytest.mark.parametrize(("floor_ms", "status"), [(0.3, Status.CLEAN), (0.25, Status.FOUND)])
def test_time_below_floor_is_never_found(floor_ms, status):
    """The time is a quarter of a 1 ms step."""
    facts = analysis_of(steps_of(forward=1))
    assert judged(found(0.25), facts=facts, limits={"floor_ns": floor_ms * MS}).status is status


@pytest.mark.parametrize(("share", "status"), [(0.0, Status.FOUND), (0.2, Status.FOUND), (0.5, Status.CLEAN)])
def test_floor_rises_without_cpu(share, status):
    """With half a CPU, 0.4 ms count as 0.2 ms, below the floor of 0.3 ms."""
    facts = analysis_of(steps_of(forward=2), slow=waited(share))
    _, findings = diagnose(facts, [asking(found(0.4))])
    assert only(findings).status is status


@pytest.mark.parametrize(
    ("least_ms", "severity"), [(None, Severity.CRITICAL), (3, Severity.CRITICAL), (2.9, None), (0.2, None)]
)
def test_interval_lower_end_must_reach_warning(least_ms, severity):
    """It decides whether there is a finding; the severity follows from the mean, 20 of 100 ms."""
    least_ns = None if least_ms is None else least_ms * MS
    assert judged(found(20, least_ns=least_ns)).severity is severity


def test_interval_lower_end_must_exceed_floor():
    facts = analysis_of(steps_of(forward=2))
    assert judged(found(1, least_ns=0.29 * MS), facts=facts).status is Status.CLEAN
    assert judged(found(1, least_ns=0.31 * MS), facts=facts).status is Status.FOUND


def test_judged_time_may_differ_from_saving():
    finding = judged(found(1, judged_ns=20 * MS))
    assert (finding.severity, finding.saving_ns_per_step) == (Severity.CRITICAL, 1 * MS)
    assert judged(found(20, judged_ns=1 * MS)).status is Status.CLEAN
    assert judged(found(20, whole_ns=1000 * MS)).status is Status.CLEAN
    assert judged(found(20, whole_ns=0.0)).status is Status.CLEAN


@pytest.mark.parametrize(("of", "status"), [("step", Status.FOUND), ("loop", Status.CLEAN)])
def test_shares_are_of_clean_steps_or_loop(of, status):
    """20 steps of 100 ms, then 2 s of checkpoints: 4 ms are 4% of a step and 2% of the loop."""
    facts = analysis_of(steps_of(forward=100), outside_ms={"checkpoint": 2000})
    assert judged(found(4), facts=facts, of=of).status is status


def test_rule_may_set_severity():
    assert judged(found(0.001, severity=Severity.INFO)).severity is Severity.INFO
    assert judged(found(90, severity=Severity.INFO)).severity is Severity.INFO
    hint = Found(what="Something.", do="Change it.", severity=Severity.INFO, saving_is="up to")
    assert judged(hint, has_thresholds=False).saving_is == ""


def test_rule_reads_its_own_limits():
    @rule("slow_layers", title="Slow layers", healthy="Layers are fast", least_layers=3, floor_ns=1)
    def asked(facts, limits):
        """Layers."""
        yield Passed(what=f"{limits.least_layers}, {limits.floor_ns}, {limits.warning}")
        _ = limits.most_layers

    assert asked.limits == {"warning": 0.03, "critical": 0.15, "floor_ns": 1, "least_layers": 3}
    finding = only(judge(asked, FACTS, {"least_layers": 5}))
    assert finding.summary == "the rule failed because of a bug: AttributeError: most_layers"
    assert Limits({"share": 0.5}).share == 0.5


# What isn't found


def test_rule_without_findings_passed():
    finding = judged()
    assert (finding.status, finding.title) == (Status.CLEAN, "Layers are fast")
    assert finding.summary == "Layers are fast."


def test_small_time_passes_with_evidence():
    finding = judged(found(1, passed="Layers take 1 ms.", evidence=[count("layers", 2)]))
    assert (finding.status, finding.summary) == (Status.CLEAN, "Layers take 1 ms.")
    assert [(one.label, one.value) for one in finding.evidence] == [("layers", 2)]


def test_passed_is_shown_only_without_findings():
    passed = Passed(what="No layer is slow.", title="Nothing to see", evidence=[count("layers", 9)])
    finding = judged(found(1, passed="Layers take 1 ms."), passed)
    assert (finding.title, finding.summary, len(finding.evidence)) == ("Nothing to see", passed.what, 1)
    assert [one.status for one in judge(asking(found(5), passed, found(6)), FACTS)] == [Status.FOUND] * 2


# What isn't measured, and what fails


@pytest.mark.parametrize("before", [(), (found(1, passed="Too little."),), (Passed(what="Fine."),)])
def test_unmeasured_is_not_evaluated(before):
    finding = judged(*before, NotMeasured("no layer was timed"))
    assert (finding.status, finding.summary) == (Status.NOT_EVALUATED, "no layer was timed")
    assert (finding.title, finding.severity, finding.action) == ("Layers are fast", None, "")


def test_earlier_findings_stay():
    finding = judged(found(20), NotMeasured("no other layer was timed"))
    assert (finding.status, finding.severity) == (Status.FOUND, Severity.CRITICAL)


def test_failing_rule_loses_only_its_own_findings():
    rules = [asking(found(20), RuntimeError("oops")), asking(found(10), kind="slow_heads")]
    _, (first, second) = diagnose(FACTS, rules)
    assert (first.kind, first.status) == ("slow_heads", Status.FOUND)
    assert (second.kind, second.status) == ("slow_layers", Status.NOT_EVALUATED)
    assert second.summary == "the rule failed because of a bug: RuntimeError: oops"


def test_device_rules_need_device_data():
    rule_of_device = asking(found(20), is_of_device=True)
    on_the_cpu = only(judge(rule_of_device, FACTS))
    assert (on_the_cpu.status, on_the_cpu.summary) == (Status.NOT_EVALUATED, "only checked on a GPU")
    no_steps = analysis_of(steps_of(0), device_type="cuda")
    assert only(judge(rule_of_device, no_steps)).status is Status.NOT_EVALUATED


# What a finding inherits from its rule


def test_finding_inherits_phases_and_slices():
    own, of_rule = Slices(name="aten::mm", kind="operator"), Slices(kind="idle: host")
    one = found(
        20,
        slices=[own],
        at=[None, Place(function="Net.forward", file="net.py", line=3)],
        wants={"num_workers": 4},
        saving_is="up to",
    )
    finding = judged(one, sampled_phases=("forward",), slices=(of_rule,))
    assert finding.title == "Slow layers"
    assert finding.phases == ("forward",)
    assert finding.slices == (own, of_rule, Slices(name=f"{RANGE_PREFIX}forward"))
    assert [place.line for place in finding.locations] == [3]
    assert finding.wants == (("num_workers", 4),)
    assert finding.saving_is == "up to"
    other = judged(found(20, title="A slow layer", phases=("backward",)), phases=("forward",))
    assert (other.title, other.phases) == ("A slow layer", ("backward",))


def test_torch_code_is_named_without_line():
    place = Place(function="Linear.forward", file="torch/nn.py", line=3, is_library=True)
    assert judged(found(20, at=[place])).locations == (Place(function="Linear.forward"),)


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        ({}, "3%, 15%"),
        ({"of": "loop"}, "3%, 15% of the loop"),
        ({"of_words": "of the step time", "warning": 0.125}, "12.5%, 15% of the step time"),
        ({"levels": "10% of kernel time"}, "10% of kernel time"),
        ({"has_thresholds": False, "least": 1}, ""),
    ],
)
def test_levels_in_words(given, levels):
    assert asking(**given).levels == levels


@pytest.mark.parametrize(
    ("text", "help_text"),
    [
        ("Layers that could\n    be faster.", "layers that could be faster"),
        ("CPU time of layers. A hint.", "CPU time of layers. A hint"),
        ("A layer.", "a layer"),
        ("`forward` of layers.", "`forward` of layers"),
    ],
)
def test_docstring_becomes_part_of_sentence(text, help_text):
    def asked(facts):
        yield Passed(what="Fine.")

    asked.__doc__ = text
    assert rule("slow_layers", title="Slow layers", healthy="Layers are fast")(asked).help == help_text


# Passes


def test_cost_is_filled_into_sentences():
    _, findings = diagnose(FACTS, [asking(found(20))])
    assert only(findings).summary == "Layers take 20 ms per step (20%)."
    assert only(findings).passes == ("cost",)
    in_all = asking(found(20), is_between_steps=True)
    facts = analysis_of(steps_of(forward=100), outside_ms={"checkpoint": 2000})
    assert only(diagnose(facts, [in_all])[1]).summary == "Layers take 400 ms in all (10% of the loop)."


def busy(severity=Severity.WARNING):
    one = Found(what="The CPUs are busy.", do="Wait.", severity=severity)
    return asking(one, kind="busy_cpus", points_at=PointsAt.NO_TIME, has_thresholds=False)


def test_busy_machine_lowers_severity_of_times():
    rules = [
        busy(),
        asking(found(20)),
        asking(found(5), kind="slow_heads"),
        asking(found(20), kind="memory", points_at=PointsAt.NO_TIME),
    ]
    by_kind = {one.kind: one for one in diagnose(FACTS, rules)[1]}
    assert {kind: (one.severity, one.passes) for kind, one in by_kind.items()} == {
        "busy_cpus": (Severity.WARNING, ()),
        "slow_layers": (Severity.WARNING, ("busy machine", "cost")),
        "slow_heads": (Severity.INFO, ("busy machine", "cost")),
        "memory": (Severity.CRITICAL, ("cost",)),
    }


def test_unattributed_time_leaves_findings_unjudged():
    facts = analysis_of(steps_of(forward=60, other=40))
    finding = only(diagnose(facts, [asking(found(20))])[1])
    assert (finding.status, finding.severity) == (Status.FOUND, None)
    assert finding.passes == ("busy machine", "cost")


def test_report_json_lists_passes_of_each_finding():
    report = build_report(analysis_of(steps_of(forward=80, logging=20)))
    written = {one["kind"]: one["passes"] for one in json.loads(render_json(report))["findings"]}
    assert written["slow_logger"] == ["cost"]
    assert written["checkpoint_share"] == []


def test_failing_pass_loses_only_its_own_finding(monkeypatch):
    def broken(finding, _):
        if finding.kind == "broken":
            raise RuntimeError("oops")
        return finding

    monkeypatch.setattr(passes, "with_owners", broken)
    _, findings = diagnose(FACTS, [asking(found(30), kind="broken"), asking(found(20), kind="sound")])
    assert {one.kind: one.status for one in findings} == {
        "broken": Status.NOT_EVALUATED,
        "sound": Status.FOUND,
    }
    assert findings[1].summary == "the rule failed because of a bug: RuntimeError: oops"
