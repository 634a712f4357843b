"""How the times of the clean steps are distributed."""

from __future__ import annotations

from typing import Final

import numpy as np

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.run.loops import loop_of

MAX_BARS: Final = 60
_TAIL: Final = 99
"""Percentile up to which the bars go where the slowest step would squeeze them."""


def step_time(analysis: Analysis) -> Chart | None:
    """Whether the steps are alike, fall into groups or have a tail; ``None`` with fewer than two clean steps.

    Definition: number of clean steps by wall time without the phase Profiler, in bars as wide as numpy's rule
    ``auto`` says (the narrower of Freedman-Diaconis and Sturges), at most ``MAX_BARS`` of them. Where the
    slowest step took more than twice the 99th percentile, the bars end at this percentile and a note says how
    many steps lie beyond.
    """
    times_ms = analysis.steps.clean().duration_ns / 1e6
    if len(times_ms) < 2:
        return None
    loop = loop_of(analysis.info.loop)
    end = float(times_ms.max())
    tail = float(np.percentile(times_ms, _TAIL))
    if end > 2 * tail:
        end = tail
    shown = times_ms[times_ms <= end]
    edges = np.histogram_bin_edges(shown, "auto")
    if len(edges) - 1 > MAX_BARS:
        edges = np.histogram_bin_edges(shown, MAX_BARS)
    counts, _ = np.histogram(shown, edges)
    kept = "" if len(analysis.steps) == analysis.num_steps else ", as far as they were kept"
    notes = [f"The {len(times_ms):,} clean {loop.steps}, which the benchmark is made of{kept}."]
    num_beyond = len(times_ms) - len(shown)
    if num_beyond:
        which = f"{loop.step} lies" if num_beyond == 1 else f"{loop.steps} lie"
        notes.append(f"{num_beyond:,} slower {which} beyond the right edge.")
    return Chart(
        id="step_time",
        title=f"{loop.step.capitalize()} times",
        kind="histogram",
        x_label=f"time of a {loop.step} (ms)",
        x=tuple(edges[:-1].tolist()),
        unit=Unit.COUNT,
        series=(
            Series(key="steps", label=loop.steps.capitalize(), values=tuple(counts.astype(float).tolist())),
        ),
        notes=tuple(notes),
    )
