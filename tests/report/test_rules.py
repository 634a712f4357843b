"""Each rule on hand-made runs: what it finds, what passes and what isn't evaluated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_modelprof import ModelProfCallback
from lightning_modelprof.analysis.steps.step_costs import SlowFacts, trimmed_mean
from lightning_modelprof.errors import ConfigError
from lightning_modelprof.place import Place
from lightning_modelprof.report import rules
from lightning_modelprof.report.model import Finding, Severity, Status, Verdict
from lightning_modelprof.report.rules.all_rules import RULES, configure_rules
from lightning_modelprof.report.rules.callbacks import slow_callback
from lightning_modelprof.report.rules.cpus import busy_cpus, cpu_threads_oversubscribed, single_cpu_thread
from lightning_modelprof.report.rules.device import compile_recompiles
from lightning_modelprof.report.rules.engine import diagnose, judge
from lightning_modelprof.report.rules.input import input_bound, synchronous_loader, worker_startup
from lightning_modelprof.report.rules.lines import slow_forward_outside_model
from lightning_modelprof.report.rules.memory import memory_near_capacity
from lightning_modelprof.report.rules.optimizer import optimizer_not_fused
from lightning_modelprof.report.rules.passes import in_order
from lightning_modelprof.report.rules.phases import (
    checkpoint_share,
    slow_logger,
    slow_module_hook,
    slow_setup,
    zero_grad_cost,
)
from lightning_modelprof.report.rules.precision import amp_off, matmul_tile, tensor_cores_unused
from lightning_modelprof.report.rules.repeats import frozen_forward, many_calls
from lightning_modelprof.report.rules.steps import growing_steps
from lightning_modelprof.report.rules.torch_modules import conv_bias_before_batchnorm
from lightning_modelprof.report.rules.unused import frozen_layers_computed
from lightning_modelprof.report.rules.validation import validation_share
from lightning_modelprof.report.verdict import account, give_verdict
from lightning_modelprof.run.batches import CpuUse, RepeatedSamples
from lightning_modelprof.run.model_cost import FrozenModule, StepWaste
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.records import ActionTime, CallbackTime, OutsideLoop
from lightning_modelprof.run.setup import (
    CallbackSetup,
    CheckpointSetup,
    Compilation,
    CompileSetup,
    ConvolutionBias,
    DeviceSetup,
    LayerShape,
    OptimizerSetup,
)
from lightning_modelprof.run.sites import LineCount, StepSites
from lightning_modelprof.run.steps import SlowSteps, StepTag
from tests.support.diagnosed import MS, PLACE, SETUP, analysis_of, cost_of, only, steps_of, with_loader

CUDA = DeviceSetup(capability=(9, 0), total_bytes=100, reserved_bytes=50)


def evidence(finding):
    return {one.label: one.value for one in finding.evidence}


# All rules


@pytest.mark.parametrize("rule", RULES, ids=lambda one: one.kind)
def test_phases_of_each_rule_exist(rule):
    assert {*rule.phases, *rule.sampled_phases} <= PHASE_INDEX.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_every_rule_judges_any_run(rule):
    """Runs without setup or steps, a healthy one, and others never raise."""
    healthy = steps_of(forward=5, backward=5)
    for facts in (
        analysis_of(steps_of(0)),
        analysis_of(healthy, setup=None),
        analysis_of(healthy),
        analysis_of(steps_of(forward=5, dataloader=None)),
        analysis_of(healthy, loop="test"),
    ):
        findings = judge(rule, facts)
        assert findings
        for finding in findings:
            assert finding.kind == rule.kind
            assert finding.summary
            assert "because of a bug" not in finding.summary
            assert (finding.severity is not None) == (finding.status is Status.FOUND)
            assert bool(finding.action) == (finding.status is Status.FOUND)
            assert finding.severity in (None, Severity.INFO)


def test_kinds_are_unique_and_thresholds_are_numbers():
    assert len({rule.kind for rule in RULES}) == len(RULES)
    for rule in RULES:
        for name, value in rule.limits.items():
            assert type(value) in (int, float), (rule.kind, name)


def test_every_file_has_rules():
    folder = Path(rules.__file__).parent
    files = {path.stem for path in folder.glob("*.py")}
    files -= {"__init__", "all_rules", "engine", "passes", "rule"}
    assert {rule.ask.__module__.rpartition(".")[2] for rule in RULES} == files


def test_rules_are_named_like_their_functions():
    assert {rule.kind: rule.ask.__name__ for rule in RULES} == {rule.kind: rule.kind for rule in RULES}


def test_definitions_continue_a_sentence():
    wrong = [
        rule.kind
        for rule in RULES
        if rule.help.endswith(".") or (rule.help[0].isupper() and not rule.help[1].isupper())
    ]
    assert wrong == []


@pytest.mark.parametrize("given", [["input_bound"], {"input_bound": 0.1}])
def test_config_that_is_not_a_mapping_is_rejected(given):
    with pytest.raises(ConfigError, match="rules: expected a mapping"):
        ModelProfCallback(rules=given)


def test_findings_come_first_by_saving():
    steps = steps_of(forward=10, dataloader=4, logging=6)
    _, findings = diagnose(analysis_of(steps))
    assert [(one.kind, one.saving_ns_per_step) for one in findings[:2]] == [
        ("slow_logger", 6 * MS),
        ("input_bound", 4 * MS),
    ]
    order = [one.status for one in findings]
    assert order == sorted(order, key=[Status.FOUND, Status.CLEAN, Status.NOT_EVALUATED].index)


# Thresholds


def test_thresholds_can_be_replaced():
    [old] = [one for one in RULES if one.kind == "input_bound"]
    [new] = [one for one in configure_rules({"input_bound": {"warning": 0.15}}) if one.kind == "input_bound"]
    assert new.limits == {**old.limits, "warning": 0.15} != old.limits
    assert configure_rules(None) == RULES
    assert "slow_logger" not in {rule.kind for rule in configure_rules({"slow_logger": False})}
    assert configure_rules({"slow_logger": True}) == RULES


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_bond": {}}, "unknown rule 'input_bond'. Did you mean 'input_bound'"),
        ({"input_bound": {"warnin": 1}}, "unknown threshold 'warnin'. Did you mean 'warning'"),
        ({"input_bound": {"warning": "much"}}, "expected a number of at least 0, got 'much'"),
        ({"input_bound": {"warning": True}}, "expected a number of at least 0, got True"),
        ({"input_bound": {"warning": float("nan")}}, "expected a number of at least 0"),
        ({"input_bound": {"warning": 0.5}}, "expected warning of at most critical, got warning=0.5 and"),
        ({"input_bound": {"critical": 0.01}}, "got warning=0.05 and critical=0.01. Lower warning, or raise"),
        ({"optimizer_not_fused": {"cpu_warning": 1}}, "expected cpu_warning of at most cpu_critical"),
        ({"input_bound": 3}, "expected a mapping of thresholds, or false, got 3"),
    ],
)
def test_invalid_thresholds_are_rejected(given, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        configure_rules(given)


def test_thresholds_of_run_are_used():
    steps = steps_of(forward=90, dataloader=10)
    config = {"rules": {"input_bound": {"warning": 0.2}, "slow_logger": False}}
    _, findings = diagnose(analysis_of(steps, config=config))
    by_kind = {finding.kind: finding.status for finding in findings}
    assert by_kind["input_bound"] is Status.CLEAN
    assert "slow_logger" not in by_kind
    # A run saved by a version with other rules gets the defaults.
    _, findings = diagnose(analysis_of(steps, config={"rules": {"of_tomorrow": {}}}))
    assert {one.kind: one.status for one in findings}["input_bound"] is Status.FOUND


# Input


@pytest.mark.parametrize(
    ("wait_ms", "status", "severity"),
    [
        (4.0, Status.CLEAN, None),
        (5.0, Status.FOUND, Severity.WARNING),  # 5 of 100: TensorFlow's lower band
        (19.0, Status.FOUND, Severity.WARNING),
        (20.0, Status.FOUND, Severity.CRITICAL),
    ],
)
def test_input_bound_by_share(wait_ms, status, severity):
    finding = only(judge(input_bound, analysis_of(steps_of(forward=100 - wait_ms, dataloader=wait_ms))))
    assert (finding.status, finding.severity) == (status, severity)
    if status is Status.FOUND:
        assert finding.saving_ns_per_step == wait_ms * MS
        assert (finding.locations[0].file, finding.locations[0].line) == (PLACE.file, PLACE.line)


def test_input_bound_has_a_floor():
    """A third of the step, but too short."""
    finding = only(judge(input_bound, analysis_of(steps_of(forward=0.5, dataloader=0.25))))
    assert finding.status is Status.CLEAN
    found = judge(input_bound, analysis_of(steps_of(forward=0.5, dataloader=0.25)), {"floor_ns": 0})
    assert only(found).status is Status.FOUND


def test_single_long_wait_is_clean():
    waits = [0.1] * 19 + [100]
    assert only(judge(input_bound, analysis_of(steps_of(forward=5, dataloader=waits)))).status is Status.CLEAN


def test_first_fetches_of_epochs_do_not_count():
    """They include worker startup."""
    tags = [StepTag.FIRST_OF_EPOCH if step % 5 == 0 else 0 for step in range(20)]
    waits = [80 if tag else 0 for tag in tags]
    assert (
        only(judge(input_bound, analysis_of(steps_of(tags=tags, forward=5, dataloader=waits)))).status
        is Status.CLEAN
    )


@pytest.mark.parametrize(
    ("share", "status", "severity"),
    [
        (0.0, Status.CLEAN, None),
        (0.09, Status.CLEAN, None),
        (0.10, Status.FOUND, Severity.INFO),
        (0.25, Status.FOUND, Severity.WARNING),
        (None, Status.NOT_EVALUATED, None),
    ],
)
def test_cpu_contention_by_share(share, status, severity):
    record = SlowSteps(factor=3.0, cpu_wait_share=share, why_no_cpu_wait="no counts" if share is None else "")
    slow = SlowFacts(record=record, causes=(), medians_ns={}, worst=None)
    analysis = analysis_of(steps_of(forward=8)).replaced(slow=slow)
    finding = only(judge(busy_cpus, analysis))
    assert (finding.status, finding.severity) == (status, severity)
    assert finding.saving_ns_per_step is None, "it is nobody's fault"
    assert share is not None or finding.summary == "no counts"
    assert severity is None or f"spent {share:.0%} of the time waiting for a CPU" in finding.summary


def waited(share):
    """The training thread was ready to run and had no CPU in this share of the loop."""
    return SlowSteps(
        factor=3.0, cpu_wait_share=share, why_no_cpu_wait="" if share is not None else "no counts"
    )


@pytest.mark.parametrize(("share", "is_enough"), [(None, False), (0.0, False), (0.3, False), (0.5, True)])
def test_unattributed_time_is_tolerated_under_cpu_contention(share, is_enough):
    """1.5 of 10 ms are in no phase; with half a CPU, Lightning's own loop may take 2 ms."""
    analysis = analysis_of(steps_of(forward=8.5, other=1.5), slow=waited(share))
    assert account(analysis).is_enough is is_enough


def test_idle_callbacks_are_not_shown_as_0_ms():
    idle = CallbackTime(callback="Mine", hook="on_train_batch_end", calls=20, total_ns=0)
    told = {
        times: only(
            judge(slow_callback, analysis_of(steps_of(forward=1, callbacks=0.1), callbacks=times))
        ).summary
        for times in ((), (idle,))
    }
    assert list(told.values()) == [
        "No other callback runs during the steps.",
        "The slowest callback takes no measurable time.",
    ]


@pytest.mark.parametrize(("share", "status"), [(0.0, Status.FOUND), (0.5, Status.CLEAN)])
def test_floor_rises_under_cpu_contention(share, status):
    """With half a CPU, a callback of 0.5 ms per step counts as 0.25 ms, below the floor of 0.3 ms."""
    steps = steps_of(forward=1, callbacks=0.5)
    callback = CallbackTime(callback="Mine", hook="on_train_batch_end", calls=20, total_ns=10 * MS)
    _, findings = diagnose(analysis_of(steps, callbacks=(callback,), slow=waited(share)), [slow_callback])
    assert only(findings).status is status


def ranked(*pairs):
    """Savings in the order in which findings are shown."""
    findings = [
        Finding(kind=str(n), status=Status.FOUND, title="", summary="", severity=one, saving_ns_per_step=ns)
        for n, (one, ns) in enumerate(pairs)
    ]
    ordered = in_order(findings, (), Verdict(kind="balanced", summary="", accounted_ratio=None))
    return [one.saving_ns_per_step for one in ordered]


def test_finding_without_saving_ranks_in_the_middle():
    warning, critical = Severity.WARNING, Severity.CRITICAL
    assert ranked((warning, 9.0), (warning, 1.0), (warning, 2.0), (warning, None)) == [9.0, 2.0, None, 1.0]
    assert ranked((warning, 9.0), (critical, None), (critical, 3.0)) == [3.0, None, 9.0]
    assert ranked((warning, None), (Severity.INFO, 5.0)) == [None, 5.0]


# Every seventh of 100 fetches is interrupted: the mean is 1.55 ms (13%), the usual fetch 0.3 ms.
STOPPED = np.where(np.arange(100) % 7 == 3, 9.2, 0.3)


@pytest.mark.parametrize(
    ("share", "status"), [(0.0, Status.FOUND), (0.05, Status.CLEAN), (None, Status.CLEAN)]
)
def test_few_long_fetches_count_only_without_cpu_contention(share, status):
    analysis = analysis_of(steps_of(100, forward=10, dataloader=STOPPED), slow=waited(share))
    finding = only(judge(input_bound, analysis))
    assert finding.status is status
    assert evidence(finding)["data wait per step"] == pytest.approx(STOPPED.mean() * MS)  # in either case


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_wait_once_per_worker_round_is_found(share):
    """Four workers deliver four batches at once: three fetches cost nothing, the fourth 40 ms."""
    fetches = np.where(np.arange(100) % 4 == 0, 40, 0)
    setup = with_loader(num_workers=4)
    analysis = analysis_of(steps_of(100, forward=10, dataloader=fetches), setup=setup, slow=waited(share))
    finding = only(judge(input_bound, analysis))
    assert finding.severity is Severity.CRITICAL
    assert evidence(finding)["data wait per step"] == pytest.approx(10 * MS)
    assert finding.saving_ns_per_step == pytest.approx(10 * MS)


def test_single_long_step_is_not_significant():
    """It is 8% of the mean, but the mean minus two standard errors is below zero."""
    fetches = np.where(np.arange(50) == 20, 45, 0.1)
    analysis = analysis_of(steps_of(50, forward=10, dataloader=fetches), slow=waited(0.0))
    assert only(judge(input_bound, analysis)).status is Status.CLEAN


def cpu_of(thread_ms):
    """10 steps of 10 ms, in which the training thread computes this long and waits for the rest."""
    return CpuUse(
        num_steps=10,
        steps_ns=100 * MS,
        fetches_ns=0,
        fetches_thread_ns=0,
        rest_thread_ns=10 * thread_ms * MS,
        rest_process_ns=10 * thread_ms * MS,
        loop_ns=100 * MS,
        process_ns=10 * thread_ms * MS,
    )


@pytest.mark.parametrize(
    ("share", "severity"), [(0.0, Severity.CRITICAL), (0.09, Severity.CRITICAL), (0.3, Severity.WARNING)]
)
def test_cpu_contention_lowers_severities(share, severity):
    setup = replace(SETUP, num_threads=1)
    analysis = analysis_of(
        steps_of(forward=20, dataloader=10), setup=setup, slow=waited(share), cpu=cpu_of(10)
    )
    verdict, findings = diagnose(analysis)
    assert verdict.kind == "input_bound"
    assert (severity is Severity.WARNING) == ("spent 30% of the time waiting for a CPU" in verdict.summary)
    found = {one.kind: one for one in findings if one.status is Status.FOUND}
    assert found["input_bound"].severity is severity
    # More threads are only advised if a CPU is free.
    assert ("single_cpu_thread" in found) == (severity is Severity.CRITICAL)


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=60),
    st.integers(-2, 70),
)
def test_trimmed_mean_by_hand(values, period):
    """Neighbors are averaged, and a fifth of the averages is dropped at each end."""
    period = min(max(period, 1), len(values))
    means = sorted(
        sum(values[at : at + period]) / period for at in range(0, len(values) - period + 1, period)
    )
    cut = len(means) // 5
    kept = means[cut : len(means) - cut]
    assert trimmed_mean(np.array(values), period) == pytest.approx(sum(kept) / len(kept))


def test_in_memory_rows_get_batch_fetch_advice():
    """64 rows of 31 us are a hint, because handing a batch over takes longer. Rows of 63 us are real work."""
    rows = replace(SETUP.loaders[0], batch_size=64)
    setup = replace(SETUP, loaders=(rows,))
    for rule, loop_ms in ((input_bound, 20), (synchronous_loader, 100)):
        cheap = analysis_of(steps_of(forward=loop_ms, dataloader=2), setup=setup)
        dear = analysis_of(steps_of(forward=loop_ms, dataloader=4), setup=setup)
        advice = only(judge(rule, cheap)).action
        assert "num_workers" not in advice
        assert ("BatchSampler(RandomSampler(dataset), 64" in advice) == (rule.kind == "input_bound")
        assert "num_workers" in only(judge(rule, dear)).action
    cheap = analysis_of(steps_of(forward=20, dataloader=2), setup=setup)
    assert only(judge(input_bound, cheap)).severity is Severity.INFO
    assert only(judge(input_bound, analysis_of(steps_of(forward=4, dataloader=2), setup=setup))).severity is (
        Severity.WARNING
    )
    whole = replace(rows, dataset=replace(PLACE, function="Reader.__getitems__"))
    cheap = analysis_of(steps_of(forward=20, dataloader=2), setup=replace(SETUP, loaders=(whole,)))
    assert "BatchSampler" not in only(judge(input_bound, cheap)).action


def test_unknown_loader_gets_general_advice():
    setup = replace(SETUP, loaders=(replace(SETUP.loaders[0], kind="Stream", num_workers=None),))
    finding = only(judge(input_bound, analysis_of(steps_of(forward=5, dataloader=50), setup=setup)))
    assert finding.action == "Make Stream faster, or load batches in the background."


def test_data_wait_on_gpu_excludes_hidden_time():
    """The CPU fetches for 10 ms, and the GPU has work for 8 of them."""
    steps = steps_of(forward=20, dataloader=10, device_ms={"dataloader": 2})
    finding = only(judge(input_bound, analysis_of(steps, device_type="cuda")))
    assert finding.saving_ns_per_step == 2 * MS


def test_unseen_fetches_are_not_evaluated():
    finding = only(judge(input_bound, analysis_of(steps_of(forward=5, dataloader=None))))
    assert (finding.status, finding.summary) == (Status.NOT_EVALUATED, "fetches weren't recorded")


def test_synchronous_loader_does_not_repeat_input_bound():
    """It's a hint below the shares that input_bound reports, and clean where input_bound reports."""
    finding = only(judge(synchronous_loader, analysis_of(steps_of(forward=100, dataloader=3))))
    assert (finding.severity, finding.saving_ns_per_step) == (Severity.INFO, None)
    steps = steps_of(forward=8, dataloader=30)
    assert only(judge(synchronous_loader, analysis_of(steps))).status is Status.CLEAN
    assert (
        only(judge(synchronous_loader, analysis_of(steps, setup=with_loader(num_workers=1)))).status
        is Status.CLEAN
    )


def boundaries(persistent=False):
    """4 epochs of 5 steps; at 3 boundaries workers start in 40 ms and a batch of 2 ms takes 62."""
    tags = [StepTag.FIRST_OF_EPOCH if step % 5 == 0 else 0 for step in range(20)]
    later = [bool(tag) and step > 0 for step, tag in enumerate(tags)]
    steps = steps_of(
        tags=tags,
        forward=8,
        dataloader=[62 if first else 2 for first in later],
        dataloader_init=[40 if first else 0 for first in later],
    )
    return analysis_of(steps, setup=with_loader(num_workers=2, persistent_workers=persistent))


def test_worker_startup_is_spread_over_steps():
    """3 x (40 + 62 - 2) ms in 20 steps are 15 ms per step."""
    finding = only(judge(worker_startup, boundaries()))
    assert finding.saving_ns_per_step == pytest.approx(15 * MS)
    assert evidence(finding)["restarts"] == 3
    assert "persistent_workers=True" in finding.action


@pytest.mark.parametrize(
    ("share", "longer_ms", "slowed_ms"),
    [
        (0.2, 60, 60),
        (0.2, 500, 100),  # at most as long as the startup
        (0.0, 60, 0),  # every thread had its CPU
        (None, 60, 0),
    ],
)
def test_worker_startup_slows_training_on_busy_cpus(share, longer_ms, slowed_ms):
    """Each epoch starts with 100 ms of startup, and its first step computes longer."""
    first = [step % 5 == 0 for step in range(20)]
    steps = steps_of(
        tags=[StepTag.FIRST_OF_EPOCH if one else 0 for one in first],
        forward=[8 + longer_ms if one else 8 for one in first],
        dataloader_init=[100 if one else 0 for one in first],
    )
    slow = None if share is None else SlowSteps(factor=3.0, cpu_wait_share=share, why_no_cpu_wait="")
    setup = with_loader(num_workers=2, persistent_workers=False)
    finding = only(judge(worker_startup, analysis_of(steps, setup=setup, slow=slow)))
    assert evidence(finding)["restart time per epoch"] == pytest.approx((100 + slowed_ms) * MS)
    assert f"at least {100 + slowed_ms} ms" in finding.summary
    speaks_ns = finding.saving_ns_per_step if finding.verdict_ns is None else finding.verdict_ns
    waited = speaks_ns / finding.saving_ns_per_step
    assert waited == pytest.approx(100 / (100 + slowed_ms)), "the rest is no wait for data"


def test_worker_startup_needs_restarts():
    assert only(judge(worker_startup, boundaries(persistent=True))).status is Status.CLEAN
    one_epoch = analysis_of(steps_of(forward=5), setup=with_loader(num_workers=2))
    assert only(judge(worker_startup, one_epoch)).status is Status.NOT_EVALUATED
    assert only(judge(worker_startup, analysis_of(steps_of(forward=5)))).status is Status.CLEAN


# Around the model


def test_slow_callbacks_are_found_by_name_and_hook():
    """Of 20 steps of 10 ms, callbacks of 60 and 20 ms are found; one of 2 ms and the checkpoint aren't."""
    hook = Place(function="Slow.on_train_batch_end", file="/home/me/callbacks.py", line=12)
    callbacks = (
        CallbackTime(callback="Slow", hook="on_train_batch_end", calls=20, total_ns=40 * MS),
        CallbackTime(callback="Slow", hook="on_train_epoch_end", calls=2, total_ns=20 * MS),
        CallbackTime(callback="Other", hook="on_train_batch_start", calls=20, total_ns=20 * MS),
        CallbackTime(callback="Quick", hook="on_train_batch_start", calls=20, total_ns=2 * MS),
        CallbackTime(callback="Once", hook="on_train_start", calls=1, total_ns=90 * MS),
        CallbackTime(callback="Saver", hook="on_train_batch_end", calls=20, total_ns=90 * MS),
    )
    setup = replace(
        SETUP,
        callbacks=(CallbackSetup(callback="Slow", kind="Slow", hooks={"on_train_batch_end": hook}),),
        checkpoints=(CheckpointSetup(callback="Saver"),),
    )
    steps = steps_of(forward=6, callbacks=4)
    findings = judge(slow_callback, analysis_of(steps, setup=setup, callbacks=callbacks))
    assert [one.title for one in findings] == [
        "Slow callback Slow",
        "Slow callback Other",
    ]
    slow, other = findings
    assert (slow.saving_ns_per_step, other.saving_ns_per_step) == (3 * MS, 1 * MS)
    assert (slow.severity, other.severity) == (Severity.CRITICAL, Severity.WARNING)
    assert [(one.file, one.line, one.function) for one in slow.locations] == [
        ("/home/me/callbacks.py", 12, "Slow.on_train_batch_end"),
        (None, None, "Slow.on_train_epoch_end"),
    ]


@pytest.mark.parametrize(
    ("rule", "phase"),
    [(slow_logger, "logging"), (slow_module_hook, "module_hooks"), (checkpoint_share, "checkpoint")],
    ids=["slow_logger", "slow_module_hook", "checkpoint_share"],
)
@pytest.mark.parametrize(
    ("cost_ms", "severity"), [(2.9, None), (3.0, Severity.WARNING), (15.0, Severity.CRITICAL)]
)
def test_overheads_by_share(rule, phase, cost_ms, severity):
    """TensorFlow's bands: 3% and 15%."""
    finding = only(judge(rule, analysis_of(steps_of(forward=100 - cost_ms, **{phase: cost_ms}))))
    assert finding.severity == severity


def test_checkpoint_after_last_step_counts():
    """20 steps of 10 ms, then 100 ms: 5 ms per step, a third of the loop."""
    analysis = analysis_of(steps_of(forward=10), outside_ms={"checkpoint": 100})
    finding = only(judge(checkpoint_share, analysis))
    assert finding.saving_ns_per_step == 5 * MS


def test_validation_is_spread_over_all_steps():
    """Validations of 100 ms in 2 of 20 steps are 10 ms per step, although 5 steps are inspected."""
    tags = [StepTag.INSPECTED] * 5 + [0] * 15
    tags[10] = tags[19] = StepTag.VALIDATION
    validation = [100 if tag & StepTag.VALIDATION else 0 for tag in tags]
    finding = only(
        judge(validation_share, analysis_of(steps_of(tags=tags, forward=10, validation=validation)))
    )
    assert finding.saving_ns_per_step == 10 * MS
    assert finding.severity is Severity.CRITICAL


def test_custom_zero_grad_is_found():
    steps = steps_of(forward=10, zero_grad=5)
    hooks = {"optimizer_zero_grad": Place(function="Net.optimizer_zero_grad", file="net.py", line=3)}
    setup = replace(SETUP, module_hooks=hooks, keeps_gradients=True)
    finding = only(judge(zero_grad_cost, analysis_of(steps, setup=setup)))
    assert (finding.severity, finding.saving_ns_per_step) == (Severity.CRITICAL, 5 * MS)
    assert finding.locations[0].line == 3
    # With Lightning's own there is nothing to change.
    assert only(judge(zero_grad_cost, analysis_of(steps))).status is Status.CLEAN
    manual = analysis_of(steps, setup=replace(setup, manual_optimization=True))
    assert only(judge(zero_grad_cost, manual)).status is Status.NOT_EVALUATED


# The model and the rest of the step


def test_forward_outside_modules_is_found():
    """Forward takes 10 ms, the modules 3 ms and the step 12 ms."""
    cost = cost_of(("", 10, 1, 0), ("layer", 10, 2, 0))
    finding = only(
        judge(slow_forward_outside_model, analysis_of(steps_of(forward=10, backward=2), cost=cost))
    )
    assert finding.saving_ns_per_step == 7 * MS
    assert finding.severity is Severity.CRITICAL
    assert finding.locations[0].line == 30


def test_forward_in_modules_or_few_slow_steps_is_clean():
    cost = cost_of(("", 10, 0, 0), ("layer", 10, 9.5, 0))
    rule = slow_forward_outside_model
    assert only(judge(rule, analysis_of(steps_of(forward=10), cost=cost))).status is Status.CLEAN
    # Half of the steps are slow, perhaps because the machine was busy.
    forward = [10] * 10 + [20] * 10
    assert only(judge(rule, analysis_of(steps_of(forward=forward), cost=cost))).status is Status.CLEAN
    assert only(judge(rule, analysis_of(steps_of(forward=10)))).status is Status.NOT_EVALUATED


@pytest.mark.parametrize(
    ("loop_ms", "status"), [(0.2, Status.FOUND), (0.5, Status.FOUND), (0.6, Status.CLEAN)]
)
def test_short_step_forward_must_exceed_lightning_loop(loop_ms, status):
    """0.5 ms of Forward are outside the modules; the loop's own time shows how slow this machine is."""
    cost = cost_of(("", 10, 0, 0), ("layer", 10, 0.4, 0))
    steps = steps_of(forward=0.9, backward=0.3, other=loop_ms)
    finding = only(judge(slow_forward_outside_model, analysis_of(steps, cost=cost)))
    assert finding.status is status


def optimizer(**changes):
    one = OptimizerSetup(
        kind="Adam", foreach=None, fused=None, has_foreach=True, has_fused=True, num_tensors=300
    )
    return replace(SETUP, optimizers=(replace(one, **changes),))


@pytest.mark.parametrize(
    ("device", "changes", "severity"),
    [
        ("cpu", {}, Severity.CRITICAL),  # 3.75 of 15 ms, 25%
        ("cpu", {"foreach": True}, Severity.CRITICAL),  # foreach doesn't help on a CPU
        ("cpu", {"has_fused": False}, None),
        ("cpu", {"fused": True}, None),
        ("cuda", {}, None),  # torch uses foreach by default
        ("cuda", {"foreach": False}, Severity.CRITICAL),
        ("cuda", {"foreach": False, "fused": True}, None),
        ("mps", {}, None),
        ("mps", {"foreach": False}, Severity.CRITICAL),
    ],
)
def test_optimizer_not_fused(device, changes, severity):
    steps = steps_of(forward=10, optimizer=5)
    finding = only(
        judge(optimizer_not_fused, analysis_of(steps, setup=optimizer(**changes), device_type=device))
    )
    assert finding.severity is severity
    is_known = device == "cpu" and finding.status is Status.FOUND
    assert finding.saving_ns_per_step == (3.75 * MS if is_known else None)


@pytest.mark.parametrize(
    ("forward_ms", "severity", "verdict"),
    [
        (10, Severity.CRITICAL, "optimizer_bound"),
        (15, Severity.WARNING, "balanced"),
        (30, Severity.WARNING, "balanced"),
        (40, Severity.INFO, "balanced"),
    ],
)
def test_cpu_optimizer_is_judged_by_fusing_gain(forward_ms, severity, verdict):
    """3.75 of 15, 20, 35 and 45 ms are 25, 18.75, 10.7 and 8.3%."""
    analysis = analysis_of(steps_of(forward=forward_ms, optimizer=5), setup=optimizer())
    finding = only(judge(optimizer_not_fused, analysis))
    assert finding.severity is severity
    said = give_verdict(analysis, [finding], [optimizer_not_fused], account(analysis))
    assert said.kind == verdict
    if verdict == "optimizer_bound":
        assert said.summary == "25% of each step is spent in an optimizer step that could be faster."


def test_insignificant_optimizer_is_clean():
    steps = steps_of(forward=1000, optimizer=5)
    assert only(judge(optimizer_not_fused, analysis_of(steps, setup=optimizer()))).status is Status.CLEAN


def test_backward_in_leading_frozen_layers_is_found():
    """6 ms of backward are wasted; the frozen layer after the trained one has to pass gradients on."""
    cost = cost_of(
        ("", 0, 0, 0), ("trunk", 0, 1, 2), ("trunk.inner", 0, 1, 4), ("head", 10, 1, 1), ("tail", 0, 1, 9)
    )
    finding = only(judge(frozen_layers_computed, analysis_of(steps_of(forward=4, backward=16), cost=cost)))
    assert finding.saving_ns_per_step == 6 * MS
    assert [one.module for one in finding.locations] == ["trunk"]


def test_frozen_layers_without_backward_are_clean():
    cost = cost_of(("", 0, 0, 0), ("trunk", 0, 5, 0), ("head", 10, 1, 1))
    assert (
        only(judge(frozen_layers_computed, analysis_of(steps_of(forward=9), cost=cost))).status
        is Status.CLEAN
    )
    trained = cost_of(("", 0, 0, 0), ("stem", 10, 5, 5), ("frozen", 0, 1, 5))
    assert (
        only(judge(frozen_layers_computed, analysis_of(steps_of(forward=9), cost=trained))).status
        is Status.CLEAN
    )


def test_frozen_layers_after_trained_factors_are_clean():
    """LoRA's factors belong to a module with a frozen child, so later layers must pass gradients on."""
    cost = cost_of(("", 8, 0, 0), ("first", 8, 1, 3), ("first.base", 0, 1, 4), ("next", 0, 1, 9))
    finding = only(judge(frozen_layers_computed, analysis_of(steps_of(forward=4, backward=16), cost=cost)))
    assert finding.status is Status.CLEAN


@pytest.mark.parametrize(
    ("cost", "seen", "status"),
    [
        ([("", 0, 0, 0), ("teacher", 0, 5, 0), ("student", 10, 4, 8)], (20, 20), Status.FOUND),
        ([("", 0, 0, 0), ("teacher", 0, 5, 0), ("student", 10, 4, 8)], (20, 19), Status.CLEAN),
        ([("", 0, 0, 0), ("teacher", 0, 5, 0), ("student", 10, 4, 8)], (5, 5), Status.NOT_EVALUATED),
        # The layer before it is trained, so its input changes every epoch.
        ([("", 0, 0, 0), ("stem", 10, 1, 1), ("trunk", 0, 5, 5)], (20, 20), Status.CLEAN),
        ([("", 0, 0, 0), ("teacher", 0, 0.5, 0), ("student", 10, 9, 9)], (20, 20), Status.CLEAN),
    ],
)
def test_frozen_teacher_of_same_samples_is_found(cost, seen, status):
    repeated = RepeatedSamples(num_indices=9, num_compared=seen[0], num_equal=seen[1], sample_bytes=8)
    frozen = tuple(
        FrozenModule(path=path, changes=False, has_varying_input=False) for path in ("teacher", "trunk")
    )
    given = replace(cost_of(*cost), waste=StepWaste(frozen=frozen))
    analysis = analysis_of(steps_of(forward=10, backward=10), cost=given, repeated=repeated)
    finding = only(judge(frozen_forward, analysis))
    assert finding.status is status
    if status is Status.FOUND:
        assert finding.saving_ns_per_step == pytest.approx(5 * MS)
        assert finding.severity is Severity.WARNING  # 5 of 20
        assert "Compute the outputs of teacher once" in finding.action


@pytest.mark.parametrize(
    ("calls", "kind", "status"),
    [
        ({"": 1, "enc": 40, "enc.conv": 40, "head": 1}, "Linear", Status.FOUND),
        ({"": 1, "enc": 15, "enc.conv": 15, "head": 1}, "Linear", Status.CLEAN),
        ({"": 1, "enc": 1, "enc.conv": 1, "head": 40}, "Linear", Status.CLEAN),  # it takes 1 of 20 ms
        ({"": 1, "enc": 40, "enc.conv": 40, "head": 1}, "GRUCell", Status.CLEAN),
    ],
)
def test_module_called_per_sample_is_found(calls, kind, status):
    cost = cost_of(("", 0, 0, 0), ("enc", 10, 1, 1), ("enc.conv", 10, 5, 6), ("head", 10, 0.5, 0.5))
    modules = tuple(replace(one, type_name=kind if one.path == "enc" else "Linear") for one in cost.modules)
    times = tuple(replace(one, calls=calls[one.path]) for one in cost.times.times)
    cost = replace(cost, modules=modules, times=replace(cost.times, times=times))
    found = only(judge(many_calls, analysis_of(steps_of(forward=10, backward=10), cost=cost)))
    assert found.status is status
    if status is Status.FOUND:  # the outermost module, including its children: 13 of 20 ms
        assert found.title == "enc called 40 times per step"
        assert "takes 13 ms per step (65%)" in found.summary
        assert found.saving_ns_per_step is None


def test_convolution_bias_is_found():
    pair = ConvolutionBias(convolution="net.0", normalisation="net.1", is_sequential=True, owner=PLACE)
    setup = replace(SETUP, convolution_biases=(pair,))
    finding = only(judge(conv_bias_before_batchnorm, analysis_of(steps_of(forward=1), setup=setup)))
    assert (finding.severity, finding.saving_ns_per_step) == (Severity.INFO, None)
    assert (finding.locations[0].module, finding.locations[0].line) == ("net.0", 7)


def test_recompilations_show_time_and_guard():
    """Two recompilations of 0.1 s in 20 steps are 10 ms per step."""
    place = Place(function="forward", file="net.py", line=4)
    compiled = CompileSetup(
        compilations=tuple(Compilation(function=place, attempt=n, seconds=0.1) for n in (0, 1, 2)),
        graph_breaks={"builtin print": 3},
        failed_guards={"forward": ("tensor 'x' size mismatch at index 0. expected 2, actual 3",)},
    )
    setup = replace(SETUP, compiled=compiled)
    finding = only(judge(compile_recompiles, analysis_of(steps_of(forward=50), setup=setup)))
    assert finding.saving_ns_per_step == pytest.approx(10 * MS)
    assert finding.severity is Severity.CRITICAL  # 10 of 50
    assert "size mismatch at index 0" in finding.summary
    assert "builtin print" in finding.summary
    assert [one.line for one in finding.locations] == [4]
    once = replace(setup, compiled=CompileSetup(compilations=compiled.compilations[:1]))
    assert (
        only(judge(compile_recompiles, analysis_of(steps_of(forward=50), setup=once))).status is Status.CLEAN
    )


# CPUs


@pytest.mark.parametrize(
    ("threads", "workers", "severity"), [(8, 0, None), (9, 0, Severity.WARNING), (6, 3, None)]
)
def test_oversubscribed_threads_on_8_cpus(threads, workers, severity):
    setup = replace(with_loader(num_workers=workers), num_threads=threads)
    finding = only(judge(cpu_threads_oversubscribed, analysis_of(steps_of(forward=1), setup=setup)))
    assert finding.severity == severity


def test_threads_of_all_processes_count():
    setup = replace(SETUP, num_threads=4, local_world_size=4)
    finding = only(judge(cpu_threads_oversubscribed, analysis_of(steps_of(forward=1), setup=setup)))
    assert evidence(finding)["PyTorch threads"] == 16
    assert "torch.set_num_threads(2)" in finding.action


@pytest.mark.parametrize(
    ("thread_ms", "status"), [(10, Status.FOUND), (5, Status.FOUND), (4, Status.CLEAN), (0, Status.CLEAN)]
)
def test_threads_help_computing_steps_only(thread_ms, status):
    one = replace(SETUP, num_threads=1)
    analysis = analysis_of(steps_of(forward=10), setup=one, cpu=cpu_of(thread_ms))
    assert only(judge(single_cpu_thread, analysis)).status is status


@pytest.mark.parametrize(
    ("took_ms", "workers", "saving_ms"),
    [
        (9, 0, 7.5),  # three of four CPUs help
        (0.5, 0, None),  # 10 operators of 50 us
        (9, 1, None),  # the worker needs a CPU
        (None, 0, None),
    ],
)
def test_threads_may_save_time_in_large_operators(took_ms, workers, saving_ms):
    """Forward takes 10 ms in 10 operators."""
    line = LineCount(
        file="net.py",
        line=7,
        function="forward",
        function_line=5,
        module="net",
        phase="forward",
        calls=10,
        views=0,
        operators=1,
        elements=1,
        num_bytes=1,
        took_ns=round((took_ms or 0) * MS),
    )
    sites = None if took_ms is None else StepSites(step=3, device="cpu", sites=(), lines=(line,))
    setup = replace(with_loader(num_workers=workers), num_threads=1, usable_cpus=4)
    cost = replace(cost_of(("", 1, 10, 0)), sites=sites)
    analysis = analysis_of(steps_of(forward=10), setup=setup, cpu=cpu_of(9), cost=cost)
    finding = only(judge(single_cpu_thread, analysis))
    assert finding.saving_ns_per_step == (None if saving_ms is None else saving_ms * MS)
    assert (finding.severity is Severity.WARNING) == (saving_ms is not None)
    assert ("saves up to 7.5 ms per step" in finding.action) == (saving_ms is not None)
    assert ("Small operators won't get faster" in finding.action) == (saving_ms is None)


def test_single_thread_advice_by_free_cpus():
    one = replace(SETUP, num_threads=1)
    finding = only(judge(single_cpu_thread, analysis_of(steps_of(forward=10), setup=one, cpu=cpu_of(9))))
    assert finding.severity is Severity.INFO
    assert evidence(finding)["share of step on training thread's CPU"] == 0.9
    unknown = only(judge(single_cpu_thread, analysis_of(steps_of(forward=10), setup=one)))
    assert unknown.status is Status.NOT_EVALUATED
    assert "no step's CPU time" in unknown.summary
    alone = replace(one, usable_cpus=1)
    assert (
        only(judge(single_cpu_thread, analysis_of(steps_of(forward=10), setup=alone))).status is Status.CLEAN
    )
    # CPU-bound batches that take 8 of 18 ms need the second CPU for a worker.
    for computing_ms, status in [(8, Status.CLEAN), (1, Status.FOUND)]:
        fetches = {"fetches_ns": 80 * MS, "fetches_thread_ns": 10 * computing_ms * MS, "steps_ns": 180 * MS}
        more = {"loop_ns": 180 * MS, "busy_ns": 180 * MS, "cpus_ns": 360 * MS}
        used = replace(cpu_of(10), **fetches, **more)
        analysis = analysis_of(
            steps_of(forward=10, dataloader=8), setup=replace(one, usable_cpus=2), cpu=used
        )
        assert only(judge(single_cpu_thread, analysis)).status is status
        assert "num_workers=1" in only(judge(input_bound, analysis)).action


@pytest.mark.parametrize(("taken_ms", "status"), [(0, Status.FOUND), (90, Status.CLEAN)])
def test_busy_cpu_is_free_for_neither_workers_nor_threads(taken_ms, status):
    """2 CPUs and 10 steps of 10 ms: if others use the second CPU for 90 ms, no advice counts on it."""
    one = replace(SETUP, num_threads=1, usable_cpus=2)
    used = replace(
        cpu_of(9),
        fetches_ns=40 * MS,
        fetches_thread_ns=40 * MS,
        steps_ns=140 * MS,
        loop_ns=140 * MS,
        process_ns=130 * MS,
        busy_ns=(130 + taken_ms) * MS,
        cpus_ns=280 * MS,
    )
    analysis = analysis_of(steps_of(forward=10, dataloader=4), setup=one, cpu=used)
    assert only(judge(single_cpu_thread, analysis)).status is (
        Status.CLEAN if "num_workers=" in only(judge(input_bound, analysis)).action else status
    )
    analysis = analysis_of(
        steps_of(forward=10), setup=one, cpu=replace(used, fetches_ns=0, fetches_thread_ns=0)
    )
    assert only(judge(single_cpu_thread, analysis)).status is status
    cuda = analysis_of(steps_of(forward=10), setup=one, device_type="cuda")
    assert only(judge(single_cpu_thread, cuda)).status is Status.NOT_EVALUATED


# CUDA


@pytest.mark.parametrize(
    "rule", [tensor_cores_unused, amp_off, matmul_tile, memory_near_capacity], ids=lambda rule: rule.kind
)
def test_gpu_rules_need_a_gpu(rule):
    finding = only(judge(rule, analysis_of(steps_of(forward=10))))
    assert (finding.status, finding.summary) == (Status.NOT_EVALUATED, "the run didn't use a CUDA device")


@pytest.mark.parametrize(
    ("capability", "precision", "matmul", "tensor_cores", "amp"),
    [
        ((9, 0), "32-true", "highest", Status.FOUND, Status.FOUND),
        ((9, 0), "32-true", "high", Status.CLEAN, Status.FOUND),
        ((9, 0), "bf16-mixed", "highest", Status.CLEAN, Status.CLEAN),
        ((7, 0), "32-true", "highest", Status.NOT_EVALUATED, Status.FOUND),
        ((6, 1), "32-true", "highest", Status.NOT_EVALUATED, Status.NOT_EVALUATED),
    ],
)
def test_precision_rules_by_capability(capability, precision, matmul, tensor_cores, amp):
    setup = replace(SETUP, cuda=replace(CUDA, capability=capability), matmul_precision=matmul)
    analysis = analysis_of(steps_of(forward=1), setup=setup, precision=precision, device_type="cuda")
    assert only(judge(tensor_cores_unused, analysis)).status is tensor_cores
    assert only(judge(amp_off, analysis)).status is amp


def test_matmul_tile():
    layers = (
        LayerShape(path="a", in_features=64, out_features=64),
        LayerShape(path="head", in_features=64, out_features=50257),
    )
    setup = replace(SETUP, cuda=CUDA, layers=layers)
    half = analysis_of(steps_of(forward=1), setup=setup, precision="16-mixed")
    assert [one.module for one in only(judge(matmul_tile, half)).locations] == ["head"]
    whole = analysis_of(steps_of(forward=1), setup=setup, precision="32-true")
    assert only(judge(matmul_tile, whole)).status is Status.NOT_EVALUATED


@pytest.mark.parametrize(
    ("reserved", "severity"), [(91, None), (92, Severity.WARNING), (97, Severity.CRITICAL)]
)
def test_memory_near_capacity(reserved, severity):
    setup = replace(SETUP, cuda=replace(CUDA, reserved_bytes=reserved))
    assert (
        only(judge(memory_near_capacity, analysis_of(steps_of(forward=1), setup=setup))).severity == severity
    )


RAMP = np.arange(200) / 20


@pytest.mark.parametrize(
    ("phases_ms", "status"),
    [
        ({"forward": 4 + RAMP, "backward": 5}, Status.FOUND),
        ({"forward": 4, "backward": 5}, Status.CLEAN),
        ({"forward": 4 + RAMP, "backward": 5 + RAMP}, Status.CLEAN),  # a slower machine or larger batches
        ({"forward": 4 + np.minimum(RAMP, 2), "backward": 5}, Status.CLEAN),  # it levels off
        ({"forward": 4 + RAMP % 1 * 3, "backward": 5}, Status.CLEAN),  # it starts over
        ({"forward": 14 - RAMP, "backward": 5}, Status.CLEAN),
        ({"forward": 4 + RAMP / 20, "backward": 5}, Status.CLEAN),
    ],
)
def test_growing_steps_are_found(phases_ms, status):
    """Forward grows by 10 ms over the loop; its mean is 5.25 ms in the first quarter and 9 ms overall."""
    found = only(judge(growing_steps, analysis_of(steps_of(200, **phases_ms))))
    assert found.status is status
    if status is Status.FOUND:
        assert found.saving_ns_per_step == pytest.approx(3.75 * MS, rel=0.02)
        assert found.severity is Severity.CRITICAL  # 3.75 of 14
        assert found.phases == ("forward",)


def test_short_loop_is_not_checked_for_growth():
    found = only(judge(growing_steps, analysis_of(steps_of(40, forward=4 + RAMP[:40]))))
    assert found.status is Status.NOT_EVALUATED


def around_of(setup_ms, gap_ms):
    """A DataModule's ``setup``, the gap after it, and 4 s after the loop."""
    name = "[LightningDataModule]Data.setup"
    before = ActionTime(action=name, calls=1, total_ns=setup_ms * MS, after_ns=gap_ms * MS)
    after = ActionTime(action="report", calls=1, total_ns=4000 * MS, after_ns=0)
    return OutsideLoop(before=(before,), after=(after,))


@pytest.mark.parametrize(
    ("setup_ms", "gap_ms", "summary"),
    [
        (6000, 2000, "8000 ms (25% of the total time), of which 6000 ms are in Data.setup."),
        (2000, 6000, "8000 ms (25% of the total time), of which 6000 ms follow Data.setup."),
        (4000, 1000, None),  # exactly 5 s
        (5001, 0, None),  # 17%
    ],
)
def test_slow_setup_is_found(setup_ms, gap_ms, summary):
    """20 s of steps and 4 s after them make 8 s before the loop a quarter of 32 s."""
    setup = replace(SETUP, data_hooks={"setup": PLACE})
    around = around_of(setup_ms, gap_ms)
    found = only(judge(slow_setup, analysis_of(steps_of(forward=1000), setup=setup, around=around)))
    assert found.status is (Status.FOUND if summary else Status.CLEAN)
    if summary:
        assert found.severity is Severity.INFO
        assert found.summary == f"Startup takes {summary}"
        assert [one.line for one in found.locations] == ([] if "follow" in summary else [PLACE.line])


def test_setup_without_records_is_not_evaluated():
    assert only(judge(slow_setup, analysis_of(steps_of(forward=9)))).status is Status.NOT_EVALUATED
