"""How many batches were ready when the loop fetched one."""

from __future__ import annotations

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.charts.chart import chart
from lightning_modelprof.report.model import Chart, Series, Unit


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
    """How many batches were made when the loop fetched one; ``None`` where too few fetches were looked at."""
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
