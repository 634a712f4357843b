"""Perf Summary: Paddle's benchmark box, with all figures over the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from operator import itemgetter
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.steps.benchmark import Statistics
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.run.table import run_table
from lightning_modelprof.run.loops import loop_of

_OF_STEPS: Final = "over the steps' values. Percentiles interpolate linearly between the two nearest steps."
_COLUMNS: Final = (
    ColumnSpec("name", "Metric"),
    ColumnSpec(
        "avg",
        "avg",
        Unit.BY_ROW,
        help="over the whole set. Rates and ratios are total over total, not means of the steps' values.",
    ),
    *(ColumnSpec(key, key, Unit.BY_ROW, help=_OF_STEPS) for key in ("max", "min", "p50", "p90", "p99")),
    ColumnSpec(
        "standard_error",
        "std. error",
        Unit.BY_ROW,
        help=(
            "standard error of avg. If two averages differ by less than about three standard errors, they"
            " may not differ at all. Steps aren't independent (slow and fast ones alternate or come in"
            " runs), so it's estimated from overlapping batch means (Meketon and Schmeiser, 1984). With"
            " fewer than 4 steps it's the sample deviation over √n, and with one step a dash. Differences"
            " between runs, such as machine load, aren't included."
        ),
    ),
)
PERF_SUMMARY: Final = TableSpec(
    id="perf_summary",
    title="Perf Summary",
    help=(
        "All figures are over the same clean steps; the notes say how many steps were excluded and why. `b`"
        " is a step's wall time without profiler overhead (such as sending scalars to loggers between two"
        " steps), `r` its phase `dataloader`, and `s` its sample count from `samples_fn` (by default the"
        " batch size that all parts of the batch agree on)."
    ),
    columns=_COLUMNS,
    unit_of=itemgetter("unit"),
    rows={
        "reader_cost": "time per step spent waiting for data. avg is the mean of r; the others are over r.",
        "batch_cost": "step time. avg is the mean of b; the others are over b.",
        "ips": (
            "steps (batches in evaluation loops) and samples per second. avg is the number of steps / Σb,"
            " or Σs / Σb; the others are over 1 / b and s / b."
        ),
        "Reader Ratio": "share of time spent waiting for data. avg is Σr / Σb; the others are over r / b.",
    },
    place=10,
    views=("overview",),
    compared=CompareKey(keys=("avg",), better={"Reader Ratio": "less"}),
)


_FEW: Final = 10
"""With fewer clean steps, a single slow one dominates the figures."""

_ADVICE: Final = {
    "skip_first": "{more} or set a smaller skip_first=...",
    "first in an epoch": "use more batches per epoch",
    "recorded by torch.profiler": "{more} or profile fewer {steps} (active=..., repeat=...)",
    "profiler warm-up": "{more} or set smaller warmup=... or repeat=...",
    "closing a window or saving the run": "{more} or open fewer windows (repeat=...)",
    "counting FLOPs or timing modules": "{more}",
    "prefetched while the profiler worked": "{more} or open fewer windows (repeat=...)",
    "CPU ahead of the GPU": "{more}",
    "with validation": "validate less often (the Trainer's val_check_interval)",
}
"""Reason for excluding a step → how to get more clean steps, in the loop's terms."""

_EXCLUDED: Final = {
    "skip_first": "initial (skip_first=...)",
    "first in an epoch": "at the start of an epoch",
    "first in a dataloader": "at the start of a dataloader",
    "profiler warm-up": "while the profiler warmed up",
    "closing a window or saving the run": "while a window was closed or the run saved",
    "counting FLOPs or timing modules": "while FLOPs were counted or modules timed",
    "CPU ahead of the GPU": "with the CPU ahead of the GPU",
}
"""Reason for excluding a step → text after the number of such steps; other reasons appear unchanged."""


@run_table(PERF_SUMMARY)
def perf_summary(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    """Show the run's speed without profiling, and how much of a step waits for data."""
    figures, loop = facts.get(Facts.benchmark), loop_of(facts.info.loop)
    if figures is None:
        yield PERF_SUMMARY.table(notes=_left_out(facts), absent_reason=_no_clean_steps(facts))
        return
    unit = facts.info.sample_unit
    named: tuple[tuple[str, Statistics | None, Unit], ...] = (
        ("reader_cost", figures.reader_cost_ns, Unit.DURATION_NS),
        ("batch_cost", figures.batch_cost_ns, Unit.DURATION_NS),
        (f"ips ({loop.steps}/s)", figures.steps_per_s, Unit.RATE),
        (f"ips ({unit}/s)", figures.samples_per_s, Unit.RATE),
        ("Reader Ratio", figures.reader_ratio, Unit.RATIO),
    )
    rows = [
        {"name": name, "unit": of_row, **({} if statistics is None else asdict(statistics))}
        for name, statistics, of_row in named
    ]
    steps = loop.step if figures.num_steps == 1 else loop.steps
    notes = [f"Based on {figures.num_steps} clean {steps} out of {facts.num_steps}.", *_left_out(facts)]
    if figures.num_steps < _FEW:
        notes.append(
            f"With fewer than {_FEW} clean {loop.steps}, these figures are unreliable. For more clean"
            f" {loop.steps}, {_advice(facts)}."
        )
    note = facts.samples_note
    if figures.samples_per_s is None:
        reason = note or f"the number of {unit} per batch couldn't be counted (pass samples_fn=...)"
        notes.append(f"{unit}/s is unknown: {reason}.")
    elif note:
        notes.append(f"{unit}/s: {note}.")
    setup = facts.get(Facts.setup)
    num_loaders = 0 if setup is None or not loop.is_fit else len(setup.loaders)
    is_ours = not facts.info.config.get("samples_fn")
    if figures.samples_per_s is not None and num_loaders > 1 and is_ours:
        notes.append(
            f"{unit}/s: each step takes one batch from each of {num_loaders} dataloaders but counts only"
            " one; pass samples_fn=... to count all."
        )
    if facts.num_not_stepping and loop.is_fit:
        why = " (gradient accumulation)" if (facts.info.accumulate_grad_batches or 1) > 1 else ""
        notes.append(
            f"The optimizer didn't step in {facts.num_not_stepping} of {facts.num_steps} steps{why}. A"
            " step is one batch."
        )
    cost = facts.get(Facts.own_cost)
    if cost is not None and cost.share is not None:
        of = f"the {_seconds(cost.loop_ns)} s loop"
        wait = ""
        if cost.report_wait_ns:
            of, waited = f"{_seconds(cost.loop_ns + cost.report_wait_ns)} s", _seconds(cost.report_wait_ns)
            wait = f" At least {waited} s of that was spent waiting for the report after the loop."
        notes.append(
            f"Profiler overhead: {_seconds(cost.total_ns)} s of {of} ({100 * cost.share:.2g}%), excluded"
            f" from these figures.{wait}"
        )
    if cost is not None and cost.helper_cpu_ns is not None:
        notes.append(
            f"Traces were analyzed in a background process ({_seconds(cost.helper_cpu_ns)} s of CPU time)."
        )
    yield PERF_SUMMARY.table(rows, notes=tuple(notes))


def _left_out(facts: Facts) -> tuple[str, ...]:
    if not facts.exclusions:
        return ()
    loop = loop_of(facts.info.loop)
    reasons = ", ".join(f"{e.num_steps:,} {_EXCLUDED.get(e.reason, e.reason)}" for e in facts.exclusions)
    has_several = len(facts.exclusions) > 1
    once = f" A {loop.step} is counted under the first reason that applies." * has_several
    return (f"Excluded {loop.steps}: {reasons}.{once}",)


def _no_clean_steps(facts: Facts) -> str:
    loop = loop_of(facts.info.loop)
    if facts.num_steps == 0:
        return f"no {loop.name} {loop.step} finished"
    return f"none of the {facts.num_steps} {loop.steps} is clean; {_advice(facts)}"


def _advice(facts: Facts) -> str:
    """Advise on the reason that excluded the most steps and on any that excluded a third of them."""
    by_size = sorted(facts.exclusions, key=lambda exclusion: -exclusion.num_steps)
    large = [e for e in by_size if e is by_size[0] or 3 * e.num_steps >= facts.num_steps]
    loop = loop_of(facts.info.loop)
    advice = [
        _ADVICE.get(exclusion.reason, "{more}").format(more=loop.more, steps=loop.steps)
        for exclusion in large
    ]
    return "; ".join(dict.fromkeys(advice)) or loop.more


def _seconds(time_ns: float) -> str:
    seconds = time_ns / 1e9
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
