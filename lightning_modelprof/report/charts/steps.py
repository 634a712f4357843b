"""What share of the steps each phase takes: one bar."""

from __future__ import annotations

from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.charts.layers import layer_notes, split_layers
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.report.words import other_shares
from lightning_modelprof.run.loops import loop_of


def phase_shares(analysis: Analysis) -> Chart | None:
    """Which phases the time of all finished steps went to; ``None`` when no step ran to its end.

    Definition: self time of a phase over the wall time of the steps, as in the table Phases.
    """
    layers, rest = split_layers(analysis.phases)
    if not layers:
        return None
    series = [Series(key=phase.key, label=phase.label, values=(phase.ratio,)) for phase in layers]
    if rest:
        share = sum(phase.ratio or 0 for phase in rest)
        series.append(Series(key="rest", label="Other phases", values=(share,)))
    steps = loop_of(analysis.info.loop).steps
    return Chart(
        id="phase_shares",
        title=f"Where the {steps} spend their time",
        kind="stacked",
        x_label=steps,
        x=(float(analysis.num_steps),),
        unit=Unit.RATIO,
        series=tuple(series),
        notes=(*other_shares(analysis), *layer_notes(analysis.phases, rest)),
    )
