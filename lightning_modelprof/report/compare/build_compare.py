"""Build a report from two sides of runs: the decision, then figures, phases and other differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Final

from lightning_modelprof.analysis.change import ASSUMED_RUN_SPREAD, Comparison, Outcome
from lightning_modelprof.analysis.compare import (
    DEFAULT_TOLERANCE,
    compare,
    setting_differences,
)
from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.record import asdict
from lightning_modelprof.report.compare.compared_run import ComparedRun
from lightning_modelprof.report.compare.differences import (
    find_differences,
    has_other_batches,
    side_warnings,
    warnings,
    why_no_speedup,
)
from lightning_modelprof.report.compare.tables import (
    figures_table,
    findings_table,
    phases_table,
    settings_table,
)
from lightning_modelprof.report.model import WARNING, Report, Status
from lightning_modelprof.report.rules.rule import INFLATED
from lightning_modelprof.report.summary import Difference, RunComparison, SideRun, Summary
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.units import duration_unit, percent, three_digits

EXIT_CODES: Final = {Outcome.FASTER: 0, Outcome.SAME: 0, Outcome.SLOWER: 3, Outcome.CANNOT_TELL: 4}
"""Exit codes of the command; 1 is an error, as for every command."""

_LEAST_APART: Final = timedelta(minutes=1)
"""Runs that started closer together are ranks of one job, or ran in parallel."""

_Runs = Sequence[ComparedRun]


def build_comparison(
    before: _Runs, after: _Runs, tolerance: float = DEFAULT_TOLERANCE
) -> tuple[Report, Comparison]:
    """Compare two sides of runs; return the report and the comparison.

    Args:
        before: one or more runs of one loop.
        after: one or more runs of the same loop.
        tolerance: relative change of the time that doesn't matter.

    Raises:
        ArchiveError: If the runs are of different loops.
    """
    _check_loops((*before, *after))
    result = compare(
        [run.steps for run in before],
        [run.steps for run in after],
        tolerance=tolerance,
        ranks=(before[0].world_size, after[0].world_size),
        per_sample=has_other_batches(before, after),
        paired=_are_interleaved(before, after),
    )
    busy = [run for run in (*before, *after) if _busy_summary(run)]
    if busy and min(len(before), len(after)) == 1 and result.outcome is not Outcome.CANNOT_TELL:
        reason = (
            f"one run per side isn't enough, because {' and '.join(run.source for run in busy)} ran on a busy"
            " machine, where timings vary more from run to run than the steps within one run suggest. Compare"
            " multiple runs per side, alternating between before and after"
        )
        result = replace(result, outcome=Outcome.CANNOT_TELL, reason=reason)
    loop = loop_of(before[0].loop)
    settings = setting_differences([run.settings for run in before], [run.settings for run in after])
    differences = find_differences(before, after)
    report = Report(
        title=_first_line(result, before, after, differences),
        facts=_facts(result, before, after, differences),
        tables=(
            figures_table(result, loop, before[0].sample_unit),
            phases_table(result),
            settings_table(settings),
            findings_table(before[0].report, after[0].report),
        ),
        notes=_notes(result, before, after),
        summary=Summary(
            comparison=RunComparison(
                **asdict(result),
                exit_code=EXIT_CODES[result.outcome],
                differences=differences,
                runs_before=tuple(map(_side_run, before)),
                runs_after=tuple(map(_side_run, after)),
            )
        ),
    )
    return report, result


def _busy_summary(run: ComparedRun) -> str:
    found = (one for one in run.report.findings if one.kind == "busy_cpus" and one.status is Status.FOUND)
    return next((one.summary.replace(INFLATED, "All of its timings are inflated.") for one in found), "")


def _check_loops(runs: _Runs) -> None:
    first = runs[0]
    for run in runs[1:]:
        if run.loop != first.loop:
            raise ArchiveError(
                f"{run.source}: expected a trainer.{first.loop} run like {first.source}, got a"
                f" trainer.{run.loop} run. Their steps aren't comparable, so compare runs of the same loop."
            )


def _are_interleaved(before: _Runs, after: _Runs) -> bool:
    if len(before) != len(after) or len(before) < 2:
        return False
    times = [(old.started, new.started) for old, new in zip(before, after, strict=True)]
    pairs = [sorted((old, new)) for old, new in times if old is not None and new is not None]
    return len(pairs) == len(times) and all(first[1] < second[0] for first, second in pairwise(pairs))


def _order_note(before: _Runs, after: _Runs) -> str:
    sides = [[run.started for run in runs] for runs in (before, after)]
    known = [[time for time in times if time is not None] for times in sides]
    if known != sides:
        return ""
    old, new = min(known[0]), max(known[1])
    if old - new < _LEAST_APART:
        return ""
    starts = [time.astimezone(old.tzinfo).strftime("%Y-%m-%d %H:%M") for time in (old, new)]
    return f"Before is the newer run (started {starts[0]}, after {starts[1]}). Swap them?"


def _first_line(result: Comparison, before: _Runs, after: _Runs, differences: Sequence[Difference]) -> str:
    names = {
        Outcome.FASTER: "FASTER",
        Outcome.SLOWER: "SLOWER",
        Outcome.SAME: f"SAME within {percent(result.tolerance)}",
        Outcome.CANNOT_TELL: "CANNOT TELL",
    }
    name = names[result.outcome]
    if result.times_as_fast is None:
        return f"{name}: {result.reason}"
    if differences:
        return f"{name}: {_cost(result, before, after)} ({why_no_speedup(differences)})"
    line = f"{name}: {_speed_text(result, result.times_as_fast)}× as fast, {_cost(result, before, after)}"
    if result.low is None or result.high is None:
        return f"{line} (too few steps for an interval)"
    low, high = (_speed_text(result, bound) for bound in (result.low, result.high))
    return f"{line} (95% confidence interval {low}× to {high}×)"


def _cost(result: Comparison, before: _Runs, after: _Runs) -> str:
    """Such as ``28.4 → 21.6 ms per step``."""
    loop = loop_of(before[0].loop)
    if result.per_sample:
        rate = next(figure for figure in result.figures if figure.key == "samples_per_s")
        if rate.before is not None and rate.after is not None:
            worlds = (before[0].world_size, after[0].world_size)
            unit = before[0].sample_unit
            ranks = ", all ranks" if max(worlds) > 1 else ""
            rates = (three_digits(rate.before * worlds[0]), three_digits(rate.after * worlds[1]))
            return f"{rates[0]} → {rates[1]} {unit}/s{ranks}"
    step = next(figure for figure in result.figures if figure.key == "batch_cost")
    assert step.before is not None
    assert step.after is not None
    scale, unit = duration_unit(max(step.before, step.after))
    return f"{three_digits(step.before / scale)} → {three_digits(step.after / scale)} {unit} per {loop.step}"


def _facts(
    result: Comparison, before: _Runs, after: _Runs, differences: Sequence[Difference]
) -> tuple[tuple[str, str], ...]:
    facts = warnings(differences)
    facts += [(WARNING, sentence) for sentence in side_warnings(before, after)]
    if order := _order_note(before, after):
        facts.append(("Order", order))
    if result.reason:
        facts.append(("Why", f"{result.reason[0].upper()}{result.reason[1:]}."))
    if result.times_as_fast is not None and not differences:
        speed, time = result.times_as_fast - 1, 1 / result.times_as_fast - 1
        one = "sample" if result.per_sample else "step"
        facts.append(
            (
                "Change",
                f"{percent(abs(speed))} {'slower' if speed < 0 else 'faster'}: each {one} takes"
                f" {percent(abs(time))} {'longer' if time > 0 else 'less time'}"
                f" (tolerance {100 * result.tolerance:.3g}%)",
            )
        )
    if result.detectable is not None:
        facts.append(
            (
                "Smallest detectable change",
                f"{percent(result.detectable)} (at 80% power)",
            )
        )
    facts += [
        ("CPU contention", f"{run.source}: {busy}")
        for run in (*before, *after)
        if (busy := _busy_summary(run))
    ]
    for label, runs, steps in zip(("Before", "After"), (before, after), result.num_steps, strict=True):
        verdicts = (run.report.verdict for run in runs)
        words = " | ".join(dict.fromkeys(verdict.word for verdict in verdicts if verdict is not None))
        number = f"{len(runs)} runs" if len(runs) > 1 else ""
        said = ", ".join(filter(None, (words, number, f"{steps:,} clean steps")))
        facts.append((label, f"{said}: {', '.join(run.source for run in runs)}"))
    return tuple(facts)


def _notes(result: Comparison, before: _Runs, after: _Runs) -> tuple[str, ...]:
    notes = []
    if result.low is not None:
        notes.append(_interval_note(result))
    if result.per_sample:
        notes.append(
            "Batch sizes differ, so time per sample decides"
            + (", over all ranks." if any(run.world_size > 1 for run in (*before, *after)) else ".")
        )
    return tuple(notes)


def _interval_note(result: Comparison) -> str:
    method = "The interval is bootstrapped from blocks of consecutive clean steps"
    if result.num_runs == (1, 1):
        return (
            f"{method}. It also includes the assumed difference between single runs,"
            f" {percent(ASSUMED_RUN_SPREAD)}, and the drift within each run. A machine that was slower"
            " during one run looks like slower code. For a tighter interval, pass multiple interleaved runs"
            " per side: compare --before A1 A2 A3 --after B1 B2 B3."
        )
    if result.paired:
        pairs = f"the differences between the {result.num_runs[0]} pairs of runs"
        return f"{method} or from {pairs}, whichever is wider. The runs were interleaved."
    turns = (
        ""
        if min(result.num_runs) < 2
        else " Interleave the runs (before, after, before, after) for a tighter interval."
    )
    return f"{method} or from the differences between runs of the same side, whichever is wider.{turns}"


def _side_run(run: ComparedRun) -> SideRun:
    return SideRun(
        source=run.source,
        created=run.created,
        clean_steps=run.num_clean_steps,
        batch_cost_ns=run.batch_cost_ns,
        settings=dict(run.settings),
    )


def _speed_text(result: Comparison, value: float) -> str:
    is_narrow = result.low is not None and result.high is not None and result.high - result.low < 0.02
    return f"{value:.{3 if is_narrow else 2}f}"
