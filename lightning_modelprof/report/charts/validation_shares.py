"""What share of the validations each part takes: one bar."""

from __future__ import annotations

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Chart, Series, Unit


def validation_shares(analysis: Analysis) -> Chart | None:
    """What the validations inside a fit spent their time on; ``None`` when there was none.

    Definition: self time of a part over that of all parts, as in the table Validation.
    """
    split = analysis.validation
    if isinstance(split, Absent) or not split.total_ns:
        return None
    return Chart(
        id="validation_shares",
        title="Where validation spends its time",
        kind="stacked",
        x_label="validations",
        x=(float(split.num_runs),),
        unit=Unit.RATIO,
        series=tuple(Series(key=part.key, label=part.label, values=(part.ratio,)) for part in split.parts),
    )
