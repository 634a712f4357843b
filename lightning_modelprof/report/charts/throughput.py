"""How many samples, or steps, ran per second in the course of the loop."""

from __future__ import annotations

import numpy as np

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.charts.bins import bin_sizes, bin_starts
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.steps import NOT_MEASURED


def throughput(analysis: Analysis) -> Chart | None:
    """Whether the loop became slower or faster; ``None`` with fewer than two finished steps.

    Definition: samples of the steps of a bin over their wall time; steps over wall time when the samples of
    any step are unknown. ``None`` where the clock stood still.
    """
    steps, loop = analysis.steps, loop_of(analysis.info.loop)
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
    name = f"{analysis.info.sample_unit if has_samples else loop.steps}/s"
    size = int(sizes[0])
    over = f"one {loop.step}" if size == 1 else f"{size:,} {loop.steps}"
    return Chart(
        id="throughput",
        title="Throughput",
        kind="line",
        x_label=loop.step,
        x=tuple(steps.step[starts].astype(float).tolist()),
        unit=Unit.RATE,
        series=(Series(key="throughput", label=name, values=tuple(rates)),),
        notes=(f"All finished {loop.steps}, clean or not. One point is over {over}.",),
    )
