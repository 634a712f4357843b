"""Build a report from a run's facts."""

from __future__ import annotations

from dataclasses import replace

from lightning_modelprof.analysis.compare import run_settings
from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.modules.model_flops import ModelFlops
from lightning_modelprof.analysis.steps.memory import MemoryUse
from lightning_modelprof.record import asdict
from lightning_modelprof.report.changes.all_changes import with_change
from lightning_modelprof.report.charts.all_charts import CHARTS, FLAMES
from lightning_modelprof.report.model import NOT_DONE, Finding, Report, Status, Table
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions
from lightning_modelprof.report.rules.engine import diagnose
from lightning_modelprof.report.step_card import step_card
from lightning_modelprof.report.summary import (
    FlopsSummary,
    MeanStepFlops,
    MemorySummary,
    RunSummary,
    Summary,
)
from lightning_modelprof.report.tables.run.all_tables import TABLES, loop_tables
from lightning_modelprof.report.words import reason_in, to_the_second
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.records import IGNORED_CALLBACK, Run, WindowStatus


def build_report(facts: Facts, options: TableOptions = DEFAULT_OPTIONS) -> Report:
    """Build the report of one loop."""
    verdict, findings = diagnose(facts)
    findings = tuple(with_change(_with_reason(one, facts), facts) for one in findings)
    return Report(
        title=_title(facts),
        facts=_facts(facts),
        charts=tuple(chart for one in CHARTS if (chart := one.of(facts)) is not None),
        flames=tuple(flame for one in FLAMES if (flame := one.of(facts)) is not None),
        tables=tuple(_with_reasons(table, facts) for entry in TABLES for table in entry.of(facts, options)),
        notes=_notes(facts),
        summary=Summary(
            run=_run_summary(facts),
            settings=run_settings(facts),
            benchmark=facts.get(Facts.benchmark),
            phases=facts.phases,
            validation=facts.get(Facts.validation),
            callbacks=tuple(facts.callbacks),
            windows=tuple(one.window for one in facts.windows),
            ranks=facts.get(Facts.rank_skew),
            own_cost=facts.get(Facts.own_cost),
            flops=_flops_summary(facts),
            memory=_memory_summary(facts.get(Facts.memory)),
        ),
        verdict=verdict,
        findings=findings,
        step_card=step_card(facts, findings),
    )


def _with_reason(finding: Finding, facts: Facts) -> Finding:
    if finding.status is not Status.NOT_EVALUATED:
        return finding
    return replace(finding, summary=reason_in(facts, finding.summary))


def _with_reasons(table: Table, facts: Facts) -> Table:
    absent = None if table.absent_reason is None else reason_in(facts, table.absent_reason)
    return replace(table, absent_reason=absent, notes=tuple(reason_in(facts, note) for note in table.notes))


def with_loops(report: Report, run: Run) -> Report:
    """Add the loops and short loops that the process ran after the report's own."""
    return replace(report, tables=(*report.tables, *loop_tables(run.loops, run.short_loops)))


def _title(facts: Facts) -> str:
    model, loop = facts.info.model or "model", loop_of(facts.info.loop)
    steps = f"{loop.name} {loop.step}" if facts.num_steps == 1 else f"{loop.name} {loop.steps}"
    return f"lightning-modelprof: {model}, {facts.num_steps} {steps} ({facts.info.status})"


def _facts(facts: Facts) -> tuple[tuple[str, str], ...]:
    info = facts.info
    device = info.device_type if not info.device_name else f"{info.device_type} ({info.device_name})"
    if info.num_threads is not None and info.device_type == "cpu":
        device += f", {info.num_threads} thread{'' if info.num_threads == 1 else 's'}"
    ranks = "1 rank" if info.world_size == 1 else f"rank {facts.rank} of {info.world_size}"
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    shown = [
        ("Device", f"{device}, {ranks}, {info.strategy}"),
        ("Precision", info.precision),
        ("Started", to_the_second(info.created)),
        ("Versions", versions),
    ]
    shown = [*((NOT_DONE, sentence) for sentence in _requests_not_met(facts)), *shown]
    if info.accumulate_grad_batches > 1:
        shown.insert(-2, ("Accumulation", f"{info.accumulate_grad_batches} batches per optimizer step"))
    return tuple((label, value) for label, value in shown if value)


def _requests_not_met(facts: Facts) -> list[str]:
    config, last = facts.info.config, facts.num_steps - 1
    lines = []
    for window in (one.window for one in facts.windows):
        if config.get("active") is None or window.status in (WindowStatus.COMPLETE, WindowStatus.PARTIAL):
            continue
        why = window.note
        if window.status is WindowStatus.NOT_REACHED and last < window.first_step:
            why = f"{loop_of(facts.info.loop).subject} ended at step {last}"
        lines.append(f"Profiler window: asked for steps {window.first_step}–{window.last_step}, {why}")
    cost = facts.get(Facts.cost)
    if config.get("fvcore") and (cost is None or cost.forward_table is None):
        lines.append(f"fvcore: {'no step was counted' if cost is None else cost.forward_table_note}")
    return lines + [note.rstrip(".") for note in facts.notes if note == IGNORED_CALLBACK]


def _notes(facts: Facts) -> tuple[str, ...]:
    notes = list(facts.notes)
    if facts.info.status == "running":
        notes.append(
            "This was saved while the loop ran: it still runs, or its process was killed. Later steps aren't"
            " counted."
        )
    for one in facts.windows:
        window = one.window
        if window.status is not WindowStatus.COMPLETE:
            notes.append(
                f"Profiler window {window.index} (steps {window.first_step} to {window.last_step}):"
                f" {window.status.value.replace('_', ' ')}: {window.note}."
            )
        if one.facts is not None:
            notes += [f"Trace of window {window.index}: {check}" for check in one.facts.checks]
    unfinished = facts.unfinished_steps
    if unfinished:
        batches, are = ("batch", "isn't") if unfinished == 1 else ("batches", "aren't")
        loop = loop_of(facts.info.loop)
        skipped = "an epoch was skipped, or " if loop.is_fit else ""
        notes.append(
            f"{unfinished} {batches} started but didn't finish, and {are} counted. This is normal once"
            f" per epoch where {loop.step_hook} takes a dataloader_iter. Otherwise"
            f" {skipped}an exception ended {loop.subject}."
        )
    return tuple(notes)


def _run_summary(facts: Facts) -> RunSummary:
    return RunSummary(
        **asdict(facts.info),
        rank=facts.rank,
        num_steps=facts.num_steps,
        num_steps_without_optimizer_step=facts.num_not_stepping,
        unfinished_steps=facts.unfinished_steps,
        wall_ns=facts.wall_ns,
        outside_steps_ns=dict(facts.outside_ns),
        excluded_steps=facts.exclusions,
        all_ranks=facts.get(Facts.all_ranks),
    )


def _flops_summary(facts: Facts) -> FlopsSummary | None:
    flops, tree = facts.get(Facts.flops), facts.get(Facts.modules)
    if flops is None:
        return None
    root = None if tree is None else tree.root
    return FlopsSummary(
        step=flops.count.step,
        samples=flops.count.samples,
        on_fake_tensors=flops.count.on_fake_tensors,
        phases=flops.phases,
        fourier_flops=flops.fourier,
        model_flops=flops.model_flops,
        hardware_flops=flops.hardware_flops,
        optimizer_share=flops.optimizer_share,
        mean_step=_mean_step(flops),
        flops_per_s=flops.model.flops_per_s,
        mfu=flops.model.share_of_peak,
        hfu=flops.hardware.share_of_peak,
        peaks=flops.peaks,
        params=None if root is None else root.parameters,
        trainable_params=None if root is None else root.trainable,
        uncounted=flops.uncounted,
        errors=flops.count.errors,
    )


def _mean_step(flops: ModelFlops) -> MeanStepFlops | None:
    mean = flops.mean
    if flops.why_no_mean:
        return MeanStepFlops(note=flops.why_no_mean)
    if mean is None:
        return None
    return MeanStepFlops(
        model_flops=flops.model.flops,
        hardware_flops=flops.hardware.flops,
        error=mean.error,
        sizes=len(mean.rows),
        counted=mean.num_counted,
        fitted=mean.num_fitted,
    )


def _memory_summary(use: MemoryUse | None) -> MemorySummary | None:
    if use is None:
        return None
    figures = asdict(use.record)
    return MemorySummary(
        num_points=len(figures.pop("curve")),
        **figures,
        growth=use.growth,
        unused_bytes=use.unused_bytes,
        unused_share=use.unused_share,
    )
