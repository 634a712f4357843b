"""What the floating-point operations of a step are for: one bar."""

from __future__ import annotations

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Chart, Series, Unit


def flops_by_phase(analysis: Analysis) -> Chart | None:
    """How many FLOPs each phase of the counted step has; ``None`` when nothing was counted, or only zeros.

    Definition: FLOPs of contractions, one multiply-add being two, without Fourier transforms.
    """
    if isinstance(analysis.flops, Absent) or not any(analysis.flops.phases.values()):
        return None
    facts = analysis.flops
    return Chart(
        id="flops_by_phase",
        title="FLOPs of a step",
        kind="stacked",
        x_label="step",
        x=(float(facts.count.step or 0),),
        unit=Unit.FLOPS,
        series=tuple(
            Series(key=phase, label=phase.replace("_", " ").capitalize(), values=(float(flops),))
            for phase, flops in facts.phases.items()
        ),
        notes=("Contractions in one step of one process; a multiply-add is two FLOPs.",),
    )
