"""Where the time of each step went, step after step."""

from __future__ import annotations

import numpy as np

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.charts.bins import bin_note, bin_sizes, bin_starts
from lightning_modelprof.report.charts.layers import layer_notes, split_layers
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.phases import PHASE_INDEX


def phases_per_step(analysis: Analysis) -> Chart | None:
    """When the steps were slow, and which phase made them so; ``None`` when no step ran to its end.

    Definition: self time of each phase in a step, or its mean over the steps of a bin. The layers add up to
    the wall time of the step, unless a phase was not measured. The phases with the most time have layers of
    their own, the rest is one layer.
    """
    steps, loop = analysis.steps, loop_of(analysis.info.loop)
    layers, rest = split_layers(analysis.phases)
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
    which = "finished" if num_steps == analysis.num_steps else "kept"
    return Chart(
        id="phases_per_step",
        title=f"Phases of each {loop.step}",
        kind="stacked",
        x_label=loop.step,
        x=tuple(steps.step[starts].astype(float).tolist()),
        unit=Unit.DURATION_NS,
        series=tuple(series),
        notes=(
            f"All {which} {loop.steps}, clean or not. {per_point}",
            *layer_notes(analysis.phases, rest),
        ),
    )
