"""Charts of steps: phase shares, step times, throughput, validation and ready batches."""

from __future__ import annotations

from typing import Final

import numpy as np

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.charts.chart import (
    bin_note,
    bin_sizes,
    bin_starts,
    chart,
    layer_notes,
    split_layers,
)
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.report.words import other_shares
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.steps import NOT_MEASURED


@chart(
    "phase_shares",
    title="Step time by phase",
    help="The Ratio column of the Phases table as a bar.",
    place=10,
    views=("overview",),
)
def phase_shares(facts: Facts) -> Chart | None:
    """Show the time of all finished steps by phase; ``None`` if no step finished."""
    layers, rest = split_layers(facts.phases)
    if not layers:
        return None
    series = [Series(key=phase.key, label=phase.label, values=(phase.ratio,)) for phase in layers]
    if rest:
        share = sum(phase.ratio or 0 for phase in rest)
        series.append(Series(key="rest", label="Other phases", values=(share,)))
    steps = loop_of(facts.info.loop).steps
    return Chart(
        id="phase_shares",
        title=f"{loop_of(facts.info.loop).step.capitalize()} time by phase",
        kind="stacked",
        x_label=steps,
        x=(float(facts.num_steps),),
        unit=Unit.RATIO,
        series=tuple(series),
        notes=(*other_shares(facts), *layer_notes(facts.phases, rest)),
    )


@chart(
    "phases_per_step",
    title="Phase times per step",
    help="Self time of each phase in each step. Runs of more than 400 steps are averaged into at most"
    " 400 points. The seven largest phases have their own layers and the rest share one. Unmeasured"
    " phases are listed in a note.",
    place=30,
)
def phases_per_step(facts: Facts) -> Chart | None:
    """Show each step's phase times; ``None`` if no step finished."""
    steps, loop = facts.steps, loop_of(facts.info.loop)
    layers, rest = split_layers(facts.phases)
    num_steps = len(steps)
    if num_steps == 0 or not layers:
        return None
    starts = bin_starts(num_steps)
    sizes = bin_sizes(starts, num_steps)

    def layer(key: str, label: str, keys: list[str]) -> Series:
        time_ns = steps.phases_ns[:, [PHASE_INDEX[one] for one in keys]].sum(axis=1)
        return Series(key=key, label=label, values=tuple((np.add.reduceat(time_ns, starts) / sizes).tolist()))

    series = [layer(phase.key, phase.label, [phase.key]) for phase in layers]
    if rest:
        series.append(layer("rest", "Other phases", [phase.key for phase in rest]))
    per_point = bin_note(starts, num_steps, loop.step, loop.steps)
    which = "All" if num_steps == facts.num_steps else "Saved"
    return Chart(
        id="phases_per_step",
        title=f"Phase times per {loop.step}",
        kind="stacked",
        x_label=loop.step,
        x=tuple(steps.step[starts].astype(float).tolist()),
        unit=Unit.DURATION_NS,
        series=tuple(series),
        notes=(
            f"{which} {loop.steps}, including excluded ones. {per_point}",
            *layer_notes(facts.phases, rest),
        ),
    )


MAX_BARS: Final = 60


_TAIL: Final = 99
"""Percentile at which the histogram ends if the slowest step would squeeze it."""


@chart(
    "step_time",
    title="Step times",
    help="Histogram of clean step times, without profiler overhead. Bin widths follow numpy's `auto`"
    " rule, with at most 60 bins. If the slowest step took more than twice p99, the histogram ends"
    " at p99 and a note counts the slower steps.",
    place=40,
    views=("overview", "steps"),
)
def step_time(facts: Facts) -> Chart | None:
    """Show the distribution of step times; ``None`` with fewer than two clean steps."""
    times_ms = facts.steps.clean().duration_ns / 1e6
    if len(times_ms) < 2:
        return None
    loop = loop_of(facts.info.loop)
    end = float(times_ms.max())
    tail = float(np.percentile(times_ms, _TAIL))
    if end > 2 * tail:
        end = tail
    shown = times_ms[times_ms <= end]
    edges = np.histogram_bin_edges(shown, "auto")
    if len(edges) - 1 > MAX_BARS:
        edges = np.histogram_bin_edges(shown, MAX_BARS)
    counts, _ = np.histogram(shown, edges)
    kept = "" if len(facts.steps) == facts.num_steps else " saved"
    notes = [f"{len(times_ms):,}{kept} clean {loop.steps}."]
    num_beyond = len(times_ms) - len(shown)
    if num_beyond:
        which = f"{loop.step} is" if num_beyond == 1 else f"{loop.steps} are"
        notes.append(f"{num_beyond:,} slower {which} past the right edge.")
    return Chart(
        id="step_time",
        title=f"{loop.step.capitalize()} times",
        kind="histogram",
        x_label=f"{loop.step} time (ms)",
        x=tuple(edges[:-1].tolist()),
        unit=Unit.COUNT,
        series=(
            Series(key="steps", label=loop.steps.capitalize(), values=tuple(counts.astype(float).tolist())),
        ),
        notes=tuple(notes),
    )


@chart(
    "throughput",
    title="Throughput",
    help="Samples per second over all steps in a point, including excluded ones. Shows steps per second"
    " if any step's sample count is unknown.",
    place=50,
    views=("overview",),
)
def throughput(facts: Facts) -> Chart | None:
    """Show whether the loop became slower or faster; ``None`` with fewer than two finished steps."""
    steps, loop = facts.steps, loop_of(facts.info.loop)
    num_steps = len(steps)
    if num_steps < 2:
        return None
    starts = bin_starts(num_steps)
    sizes = bin_sizes(starts, num_steps)
    has_samples = bool((steps.samples != NOT_MEASURED).all())
    amounts = np.add.reduceat(steps.samples, starts) if has_samples else sizes
    times_ns = np.add.reduceat(steps.duration_ns, starts)
    rates = [
        1e9 * amount / time_ns if time_ns else None
        for amount, time_ns in zip(amounts.tolist(), times_ns.tolist(), strict=True)
    ]
    name = f"{facts.info.sample_unit if has_samples else loop.steps}/s"
    size = int(sizes[0])
    per_point = f"One point per {loop.step}" if size == 1 else f"Each point covers {size:,} {loop.steps}"
    return Chart(
        id="throughput",
        title="Throughput",
        kind="line",
        x_label=loop.step,
        x=tuple(steps.step[starts].astype(float).tolist()),
        unit=Unit.RATE,
        series=(Series(key="throughput", label=name, values=tuple(rates)),),
        notes=(f"All {loop.steps}, including excluded ones. {per_point}.",),
    )


@chart(
    "validation_shares",
    title="Validation time by part",
    help="The Ratio column of the Validation table as a bar.",
    place=20,
    views=("overview",),
)
def validation_shares(facts: Facts) -> Chart | None:
    """Show validation time inside a fit by part; ``None`` if it took no time."""
    split = facts.validation
    if not split.total_ns:
        return None
    return Chart(
        id="validation_shares",
        title="Validation time by part",
        kind="stacked",
        x_label="validations",
        x=(float(split.num_runs),),
        unit=Unit.RATIO,
        series=tuple(Series(key=part.key, label=part.label, values=(part.ratio,)) for part in split.parts),
    )


@chart(
    "queue_depth",
    title="Batches ready at fetch",
    help="How many batches were ready when training fetched one. Every thirteenth clean step is sampled,"
    " and at least seven samples are needed. At 0, training waits; if the queue is always full, you"
    " have more workers than you need. With multiple loaders, it shows the one with the fewest ready"
    " batches. On macOS it only shows whether any batch was ready.",
    place=80,
    views=("workers",),
)
def queue_depth(facts: Facts) -> Chart | None:
    """Show how many batches were ready at a fetch; ``None`` if too few fetches were sampled."""
    depths = facts.batch_cpu.depths
    if not depths:
        return None
    return Chart(
        id="queue_depth",
        title="Batches ready at fetch",
        kind="stacked",
        x_label="ready batches",
        x=tuple(map(float, range(len(depths)))),
        unit=Unit.RATIO,
        series=(Series(key="fetches", label="Share of fetches", values=depths),),
    )
