"""The one meeting point: an analysis becomes a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.compare import run_settings
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.modules.model_flops import ModelFlops
from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.analysis.steps.benchmark import Statistics
from lightning_modelprof.analysis.steps.phase_times import OwnCost, PhaseTime
from lightning_modelprof.errors import ConfigError, describe_error
from lightning_modelprof.report.advice.idioms import with_idiom
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.advice.owners import with_owners
from lightning_modelprof.report.changes.all_changes import with_change
from lightning_modelprof.report.charts.all_charts import CHARTS, FLAMES
from lightning_modelprof.report.model import NOT_DONE, Finding, Report, Severity, Status, Verdict
from lightning_modelprof.report.one_step import of_run
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions
from lightning_modelprof.report.order import by_time, in_order
from lightning_modelprof.report.rules.all_rules import configure_rules
from lightning_modelprof.report.rules.base import Rule, ShareRule
from lightning_modelprof.report.rules.batches import SmallBatches
from lightning_modelprof.report.rules.cpus import BusyCpus
from lightning_modelprof.report.rules.device import DeviceRule
from lightning_modelprof.report.rules.host_waits import HOST_WAIT, HostToDeviceCopy
from lightning_modelprof.report.rules.input import SlowTransfer
from lightning_modelprof.report.step_card import step_card
from lightning_modelprof.report.tables.run.all_tables import TABLES, loop_tables
from lightning_modelprof.report.verdict import account, give_verdict
from lightning_modelprof.report.words import to_the_second
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.records import IGNORED_CALLBACK, Run, Window, WindowStatus
from lightning_modelprof.run.stacks import SampledStack
from lightning_modelprof.units import milliseconds


def build_report(analysis: Analysis, options: TableOptions = DEFAULT_OPTIONS) -> Report:
    """Tables, notes and machine-readable sections of an analysis."""
    verdict, findings = diagnose(analysis)
    findings = tuple(with_change(one, analysis) for one in findings)
    return Report(
        title=_title(analysis),
        facts=_facts(analysis),
        charts=tuple(chart for one in CHARTS if (chart := one.draw(analysis)) is not None),
        flames=tuple(flame for one in FLAMES if (flame := one.draw(analysis)) is not None),
        tables=tuple(table for entry in TABLES for table in entry.build(analysis, options)),
        notes=_notes(analysis),
        sections={
            "run": _run_section(analysis),
            "settings": run_settings(analysis),
            "benchmark": _benchmark_section(analysis),
            "phases": [_phase_section(phase) for phase in analysis.phases],
            "validation": None if isinstance(analysis.validation, Absent) else asdict(analysis.validation),
            "callbacks": [asdict(callback) for callback in analysis.callbacks],
            "windows": [_window_section(facts.window) for facts in analysis.windows],
            "ranks": None if isinstance(analysis.rank_skew, Absent) else asdict(analysis.rank_skew),
            "own_cost": _own_cost_section(analysis.own_cost),
            "flops": _flops_section(analysis),
            "memory": _memory_section(analysis),
            "verdict": asdict(verdict),
            "findings": [one.as_plain() for one in findings],
        },
        verdict=verdict,
        findings=findings,
        step_card=step_card(analysis, findings),
    )


def with_loops(report: Report, run: Run) -> Report:
    """The report of a process's first loop, with what the process ran after it."""
    return replace(report, tables=(*report.tables, *loop_tables(run.loops, run.short_loops)))


def _title(analysis: Analysis) -> str:
    model, loop = analysis.info.model or "model", loop_of(analysis.info.loop)
    steps = f"{loop.name} {loop.step}" if analysis.num_steps == 1 else f"{loop.name} {loop.steps}"
    return f"lightning-modelprof: {model}, {analysis.num_steps} {steps} ({analysis.info.status})"


def _facts(analysis: Analysis) -> tuple[tuple[str, str], ...]:
    info = analysis.info
    device = info.device_type if not info.device_name else f"{info.device_type} ({info.device_name})"
    if info.num_threads is not None and info.device_type == "cpu":
        device += f", {info.num_threads} thread{'' if info.num_threads == 1 else 's'}"
    ranks = "1 rank" if info.world_size == 1 else f"rank {analysis.rank} of {info.world_size}"
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    facts = [
        ("Device", f"{device}, {ranks}, {info.strategy}"),
        ("Precision", info.precision),
        ("Started", to_the_second(info.created)),
        ("Versions", versions),
    ]
    facts = [*((NOT_DONE, sentence) for sentence in _not_done(analysis)), *facts]
    if info.accumulate_grad_batches > 1:
        facts.insert(-2, ("Accumulation", f"{info.accumulate_grad_batches} batches per optimizer step"))
    return tuple((label, value) for label, value in facts if value)


def _not_done(analysis: Analysis) -> list[str]:
    """What was asked for by name and did not come about, a line each."""
    config, last = analysis.info.config, analysis.num_steps - 1
    lines = []
    for window in (facts.window for facts in analysis.windows):
        if config.get("active") is None or window.status in (WindowStatus.COMPLETE, WindowStatus.PARTIAL):
            continue
        why = window.note
        if window.status is WindowStatus.NOT_REACHED and last < window.first_step:
            why = f"{loop_of(analysis.info.loop).subject} ended at step {last}"
        lines.append(f"Profiler window: asked for steps {window.first_step}–{window.last_step}, {why}")
    cost = analysis.cost
    if config.get("fvcore") and (cost is None or cost.forward_table is None):
        lines.append(f"fvcore: {'no step was counted' if cost is None else cost.forward_table_note}")
    return lines + [note.rstrip(".") for note in analysis.notes if note == IGNORED_CALLBACK]


def _notes(analysis: Analysis) -> tuple[str, ...]:
    notes = list(analysis.notes)
    if analysis.info.status == "running":
        notes.append(
            "This was saved while the loop ran: it still runs, or its process was killed. Later steps aren't"
            " counted."
        )
    for facts in analysis.windows:
        window = facts.window
        if window.status is not WindowStatus.COMPLETE:
            notes.append(
                f"Profiler window {window.index} (steps {window.first_step} to {window.last_step}):"
                f" {window.status.value.replace('_', ' ')}: {window.note}."
            )
        if facts.facts is not None:
            notes += [f"Trace of window {window.index}: {check}" for check in facts.facts.checks]
    unfinished = analysis.unfinished_steps
    if unfinished:
        batches, are = ("batch", "isn't") if unfinished == 1 else ("batches", "aren't")
        loop = loop_of(analysis.info.loop)
        skipped = "an epoch was skipped, or " if loop.is_fit else ""
        notes.append(
            f"{unfinished} {batches} started but didn't finish, and {are} counted. This is normal once"
            f" per epoch where {loop.step_hook} takes a dataloader_iter. Otherwise"
            f" {skipped}an exception ended {loop.subject}."
        )
    return tuple(notes)


def _run_section(analysis: Analysis) -> dict[str, Any]:
    return asdict(analysis.info) | {
        "rank": analysis.rank,
        "num_steps": analysis.num_steps,
        "num_steps_without_optimizer_step": analysis.num_not_stepping,
        "unfinished_steps": analysis.unfinished_steps,
        "wall_ns": analysis.wall_ns,
        "outside_steps_ns": dict(analysis.outside_ns),
        "excluded_steps": [asdict(exclusion) for exclusion in analysis.exclusions],
        "all_ranks": None if analysis.all_ranks is None else asdict(analysis.all_ranks),
    }


def _benchmark_section(analysis: Analysis) -> dict[str, Any] | None:
    figures = analysis.benchmark
    if figures is None:
        return None
    loop = loop_of(analysis.info.loop)
    steps_per_s = _statistics(figures.steps_per_s)
    samples_per_s = _statistics(figures.samples_per_s)
    return {
        "steps": figures.num_steps,
        "reader_ratio": None if figures.reader_ratio is None else figures.reader_ratio.avg,
        "reader_ratio_per_step": _statistics(figures.reader_ratio),
        "batch_cost_ns": _statistics(figures.batch_cost_ns),
        "reader_cost_ns": _statistics(figures.reader_cost_ns),
        "ips": None if steps_per_s is None else {"unit": f"{loop.steps}/s", **steps_per_s},
        "samples_per_s": (
            None if samples_per_s is None else {"unit": f"{analysis.info.sample_unit}/s", **samples_per_s}
        ),
        "samples_per_step": figures.samples_per_step,
    }


def _own_cost_section(cost: OwnCost | Absent) -> dict[str, Any] | None:
    return None if isinstance(cost, Absent) else {**asdict(cost), "share": cost.share}


def _flops_section(analysis: Analysis) -> dict[str, Any] | None:
    facts = analysis.flops
    if isinstance(facts, Absent):
        return None
    root = None if isinstance(analysis.modules, Absent) else analysis.modules.root
    return {
        "step": facts.count.step,
        "samples": facts.count.samples,
        "on_fake_tensors": facts.count.on_fake_tensors,
        **{phase: {"flops": flops, "macs": flops // 2} for phase, flops in facts.phases.items()},
        "fourier_flops": facts.fourier,
        "model_flops": facts.model_flops,
        "hardware_flops": facts.hardware_flops,
        "optimizer_share": facts.optimizer_share,
        "mean_step": _mean_step_section(facts),
        "flops_per_s": facts.model.flops_per_s,
        "mfu": facts.model.share_of_peak,
        "hfu": facts.hardware.share_of_peak,
        "peaks": [asdict(peak) for peak in facts.peaks],
        "params": None if root is None else root.parameters,
        "trainable_params": None if root is None else root.trainable,
        "uncounted": [asdict(operator) for operator in facts.uncounted],
        "errors": list(facts.count.errors),
    }


def _mean_step_section(facts: ModelFlops) -> dict[str, Any] | None:
    """The mean clean step where batches vary in size."""
    mean = facts.mean
    if mean is None:
        return None
    if isinstance(mean, Absent):
        return {"model_flops": None, "hardware_flops": None, "note": mean.reason}
    return {
        "model_flops": facts.model.flops,
        "hardware_flops": facts.hardware.flops,
        "error": mean.error,
        "sizes": len(mean.rows),
        "counted": mean.num_counted,
        "fitted": mean.num_fitted,
        "note": "",
    }


_OF_A_DEFINITION: Final = ("file", "line", "is_library", "package")
_OF_A_PLACE: Final = ("module", "package", "is_library", "is_exact", "inner", "call")


def _memory_section(analysis: Analysis) -> dict[str, Any] | None:
    """Without the curve, which is in run.json."""
    use = analysis.memory
    if isinstance(use, Absent):
        return None
    section = asdict(use.record)
    section["num_points"] = len(section.pop("curve"))
    # A place has the fields that it had in the first version of report.json.
    for growing in section["growing"]:
        growing["lines"] = [
            {"name": one["function"], **{key: one[key] for key in _OF_A_DEFINITION}}
            for one in growing["lines"]
        ]
    for name in _OF_A_PLACE if section["out_of_memory"] else ():
        del section["out_of_memory"][name]
    return section | {
        "growth": [asdict(growth) for growth in use.growth],
        "unused_bytes": use.unused_bytes,
        "unused_share": use.unused_share,
    }


def _phase_section(phase: PhaseTime) -> dict[str, Any]:
    section = asdict(phase)
    return {"phase": section.pop("key"), **section}


def _statistics(statistics: Statistics | None) -> dict[str, Any] | None:
    return None if statistics is None else asdict(statistics)


def _window_section(window: Window) -> dict[str, Any]:
    section = asdict(window)
    section["status"] = window.status.value
    section["recorded_steps"] = list(window.recorded_steps)
    return section


_THE_SAME: Final[Mapping[Severity | None, Severity]] = {one: one for one in Severity}


_LESS: Final[Mapping[Severity | None, Severity]] = {
    Severity.CRITICAL: Severity.WARNING,
    Severity.WARNING: Severity.INFO,
    Severity.INFO: Severity.INFO,
}
"""What becomes of a severity that rests on times, where the training thread waited for a CPU."""


def diagnose(analysis: Analysis, rules: Sequence[Rule] | None = None) -> tuple[Verdict, tuple[Finding, ...]]:
    """The verdict, and what each rule says, in the order of :func:`in_order`.

    Args:
        rules: to ask; by default those that the run's own configuration says.
    """
    if rules is None:
        rules = _rules_of(analysis)
    costs = analysis.step_costs
    accounting = account(costs)
    rules = rules if isinstance(costs, Absent) else [_with_floor(one, costs.cpu_share) for one in rules]
    said = [(rule, _ask(rule, analysis)) for rule in rules]
    is_busy = any(
        one.kind == BusyCpus.kind and one.status is Status.FOUND for _, of_it in said for one in of_it
    )
    findings: list[Finding] = []
    for rule, of_it in said:
        # Whoever does not know where the time goes cannot say how much something matters.
        severities = {} if not accounting.is_enough else _LESS if is_busy else _THE_SAME
        findings += [
            one if rule.points_at is PointsAt.NO_TIME else replace(one, severity=severities.get(one.severity))
            for one in of_it
        ]
    if not isinstance(costs, Absent):
        loops = {rule.kind for rule in rules if rule.is_of_loop}
        findings = [of_run(one, costs, analysis.num_steps, is_of_loop=one.kind in loops) for one in findings]
    # A time that is part of a longer one is told from the longer one, whatever the severities.
    findings = without_repeats(sorted(findings, key=by_time), rules, analysis.hot_lines)
    verdict = give_verdict(analysis, findings, rules, accounting)
    return verdict, in_order(_without_copies(findings), rules, verdict)


def _with_floor(rule: Rule, cpu_share: float) -> Rule:
    """Its least time per step, for a thread that had a CPU only so much of the time."""
    if not isinstance(rule, ShareRule | SmallBatches):
        return rule
    return replace(rule, floor_ns=rule.floor_ns / cpu_share)


def _without_copies(findings: Sequence[Finding]) -> list[Finding]:
    """Slow transfers without the waits for copies that a finding of their own is about."""
    copies_ns = sum(
        float(one.value or 0.0)
        for finding in findings
        if finding.kind == HostToDeviceCopy.kind and finding.status is Status.FOUND
        if finding.phases == (SlowTransfer.phase,)
        for one in finding.evidence
        if one.label == HOST_WAIT
    )
    return [
        _less_copies(one, copies_ns)
        if copies_ns and one.kind == SlowTransfer.kind and one.status is Status.FOUND
        else one
        for one in findings
    ]


def _less_copies(finding: Finding, copies_ns: float) -> Finding:
    whole_ns = finding.saving_ns_per_step or 0.0
    left_ns = whole_ns - copies_ns
    said = f"{milliseconds(min(copies_ns, whole_ns))} of that is already included in {HostToDeviceCopy.kind}."
    is_hint = left_ns < (1 - _MOSTLY) * whole_ns
    return replace(
        finding,
        severity=Severity.INFO if is_hint and finding.severity is not None else finding.severity,
        summary=f"{finding.summary} {said}",
        saving_ns_per_step=None if is_hint else left_ns,
    )


def _ask(rule: Rule, analysis: Analysis) -> tuple[Finding, ...]:
    """What a rule says; a rule that fails costs its own finding, not the report."""
    try:
        findings = rule.evaluate(analysis)
        if rule.points_at not in (PointsAt.CHANGE, PointsAt.NO_TIME):
            findings = tuple(rule.at_lines(finding, analysis) for finding in findings)
            workers = analysis.worker_stacks
            sampled = (analysis.hot_lines, workers if isinstance(workers, Absent) else workers.hot_lines)
            findings = tuple(with_idiom(one, analysis.info.created, *sampled) for one in findings)
        return tuple(with_owners(finding, analysis.setup) for finding in findings)
    except Exception as error:
        return rule.not_evaluated(f"the rule failed because of a bug: {describe_error(error)}")


def _rules_of(analysis: Analysis) -> tuple[Rule, ...]:
    """With the thresholds of the run, if this version knows all of them."""
    try:
        return configure_rules(analysis.info.config.get("rules"))
    except ConfigError:  # saved by another version
        return configure_rules(None)


_MOSTLY: Final = 0.8
"""Share of a finding's samples in another one's time, from which on it says the same time again."""


_LEAST_SAMPLES: Final = 10


_OF_HOOKS: Final = frozenset(("callbacks", "module_hooks"))
"""Phases that consist of whole hooks."""


_Claims = Callable[[SampledStack], bool]


def without_repeats(
    findings: Sequence[Finding], rules: Sequence[Rule], hot: HotLines | Absent
) -> list[Finding]:
    """The same findings, those that say the time of one above again as hints that name it.

    What time a finding is about samples tell: those of its phases if these are all its own, else those with
    one of its lines on the stack.

    Args:
        findings: in their order.
    """
    if isinstance(hot, Absent):
        return list(findings)
    by_kind = {rule.kind: rule for rule in rules}
    above: list[tuple[Finding, _Claims]] = []
    result: list[Finding] = []
    for finding in findings:
        claims = _claims(finding, by_kind.get(finding.kind), hot)
        first = None if claims is None else _first_with(finding, claims, above, hot)
        if first is None:
            result.append(finding)
            above += [] if claims is None else [(finding, claims)]
            continue
        said = f"This time is already included in {first.kind}."
        result.append(
            replace(
                finding,
                severity=Severity.INFO if finding.severity is not None else None,
                summary=f"{finding.summary} {said}",
                saving_ns_per_step=None,
            )
        )
    return result


def _claims(finding: Finding, rule: Rule | None, hot: HotLines) -> _Claims | None:
    """Whether a stack is of a finding's time; ``None`` where samples do not tell."""
    if rule is None or finding.status is not Status.FOUND or not finding.saving_ns_per_step:
        return None
    if isinstance(rule, DeviceRule):  # its time is the device's
        return None
    if rule.sampled_phases:
        return lambda stack: stack.phase in rule.sampled_phases
    exact = [one for one in finding.locations if one.is_exact]
    lines = {(one.file, one.line) for one in exact}
    # The time of a hook is all of it, not only that of its slowest line.
    is_of_hooks = bool(rule.phases) and set(rule.phases) <= _OF_HOOKS
    hooks = {(one.file, one.function) for one in exact} if is_of_hooks else set()
    frames = {
        number
        for number, frame in enumerate(hot.samples.frames)
        if (frame.file, frame.line) in lines or (frame.file, frame.function) in hooks
    }
    return (lambda stack: not frames.isdisjoint(stack.frames)) if frames else None


def _first_with(
    finding: Finding, claims: _Claims, above: Sequence[tuple[Finding, _Claims]], hot: HotLines
) -> Finding | None:
    """The first finding above in whose time most of this one's is; several of one rule are several things."""
    stacks = [stack for stack in hot.samples.stacks if claims(stack)]
    whole_ns = sum(stack.time_ns for stack in stacks)
    if sum(stack.samples for stack in stacks) < _LEAST_SAMPLES:
        return None
    for other, is_its in above:
        inside_ns = sum(stack.time_ns for stack in stacks if is_its(stack))
        if other.kind != finding.kind and inside_ns >= _MOSTLY * whole_ns:
            return other
    return None
