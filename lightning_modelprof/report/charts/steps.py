"""What share of the steps each phase takes: one bar."""

from __future__ import annotations

from typing import Final

import numpy as np

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.charts.bins import bin_note, bin_sizes, bin_starts, layer_notes, split_layers
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.report.words import other_shares
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.steps import NOT_MEASURED


def phase_shares(facts: Facts) -> Chart | None:
    """Which phases the time of all finished steps went to; ``None`` when no step ran to its end.

    Definition: self time of a phase over the wall time of the steps, as in the table Phases.
    """
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


def phases_per_step(facts: Facts) -> Chart | None:
    """When the steps were slow, and which phase made them so; ``None`` when no step ran to its end.

    Definition: self time of each phase in a step, or its mean over the steps of a bin. The layers add up to
    the wall time of the step, unless a phase was not measured. The phases with the most time have layers of
    their own, the rest is one layer.
    """
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
"""Percentile up to which the bars go where the slowest step would squeeze them."""


def step_time(facts: Facts) -> Chart | None:
    """Whether the steps are alike, fall into groups or have a tail; ``None`` with fewer than two clean steps.

    Definition: number of clean steps by wall time without the phase Profiler, in bars as wide as numpy's rule
    ``auto`` says (the narrower of Freedman-Diaconis and Sturges), at most ``MAX_BARS`` of them. Where the
    slowest step took more than twice the 99th percentile, the bars end at this percentile and a note says how
    many steps lie beyond.
    """
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


def throughput(facts: Facts) -> Chart | None:
    """Whether the loop became slower or faster; ``None`` with fewer than two finished steps.

    Definition: samples of the steps of a bin over their wall time; steps over wall time when the samples of
    any step are unknown. ``None`` where the clock stood still.
    """
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


def validation_shares(facts: Facts) -> Chart | None:
    """What the validations inside a fit spent their time on; ``None`` if that took no time.

    Definition: self time of a part over that of all parts, as in the table Validation.
    """
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
