"""Charts of workers: predicted step time by worker count, busy workers, and their flame graph."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.source.worker_stacks import worker_stacks
from lightning_modelprof.analysis.steps.fetch_queue import fetch_queue
from lightning_modelprof.analysis.steps.loader_queue import PredictedStep
from lightning_modelprof.analysis.steps.worker_curve import worker_curve
from lightning_modelprof.analysis.steps.workers import measured_workers
from lightning_modelprof.report.advice.workers import busiest_workers
from lightning_modelprof.report.charts.chart import chart, flame
from lightning_modelprof.report.charts.flames import boxes_of, sampling_notes
from lightning_modelprof.report.model import Chart, FlameGraph, Series, Unit


@chart(
    "num_workers",
    title="Predicted step time by worker count",
    help="The Number of workers table at the current prefetch factor. *Measured* is the measured step"
    " time, and the horizontal line is the step time without waiting for data. With multiple"
    " loaders, it shows the one with the longest predicted step.",
    place=60,
    views=("workers",),
)
def workers_prediction(facts: Facts) -> Chart | None:
    """Predict the step time by worker count, next to the measured one; ``None`` without a prediction."""
    loaders = facts.get(measured_workers)
    known = [facts.read(fetch_queue)] if loaders is None else [one.queue for one in loaders]
    queues = [one for one in known if one is not None]
    if not queues:
        return None
    queue = max(queues, key=lambda one: one.present.step_ns)
    factor = queue.present.prefetch_factor
    line = {one.workers: one for one in queue.predictions if not one.workers or one.prefetch_factor == factor}
    x = sorted({*line, queue.advised.workers})

    is_other = bool(queue.advised.workers) and queue.advised.prefetch_factor != factor
    other = ", except for the recommended point" if is_other else ""

    def series(key: str, label: str, values: Mapping[int, float]) -> Series:
        return Series(key=key, label=label, values=tuple(values.get(number) for number in x))

    def of(name: str) -> dict[int, float]:
        return {number: getattr(one, name) for number, one in line.items()}

    return Chart(
        id="num_workers",
        title="Predicted step time by worker count",
        kind="line",
        x_label="num_workers",
        x=tuple(map(float, x)),
        unit=Unit.DURATION_NS,
        series=(
            series("predicted", "Predicted", of("step_ns")),
            series("now", f"Measured ({_named(queue.present)})", {queue.present.workers: queue.step_ns}),
            series(
                "advised",
                f"Recommended ({_named(queue.advised)})",
                {queue.advised.workers: queue.advised.step_ns},
            ),
            series("low", "95% low", of("low_ns")),
            series("high", "95% high", of("high_ns")),
        ),
        notes=(
            f"All points use prefetch_factor={factor}{other}.",
            *(
                ()
                if queue.present.workers
                else ("num_workers is 0, so the predicted step time is extrapolated from fetch times.",)
            ),
        ),
        level=queue.rest_ns,
        level_label="no waiting",
    )


def _named(one: PredictedStep) -> str:
    prefetch = f", prefetch_factor={one.prefetch_factor}" if one.workers else ""
    return f"num_workers={one.workers}{prefetch}"


@chart(
    "worker_queue",
    title="Busy workers over time",
    help="How many workers are making a batch, and how many finished batches wait behind an unfinished"
    " one. Covers the newest 1,000 batches in at most 200 time slices. If all workers are busy,"
    " they're too slow or too few; idle workers have filled the queue. With multiple loaders, it"
    " shows the one with the busiest workers.",
    place=70,
    views=("workers",),
)
def workers_over_time(facts: Facts) -> Chart | None:
    """Show busy workers and batches that wait for an earlier one; ``None`` without batches."""
    loader = busiest_workers(facts.read(measured_workers))
    curve = None if loader is None else worker_curve(loader.record)
    if loader is None or curve is None:
        return None
    return Chart(
        id="worker_queue",
        title="Busy workers over time",
        kind="line",
        x_label="ms since the first batch",
        x=tuple(round(place * curve.part_ns / 1e6, 6) for place in range(len(curve.making))),
        unit=Unit.COUNT,
        series=(
            Series(key="making", label="Workers making a batch", values=curve.making),
            Series(
                key="held_back", label="Batches ready, waiting for an earlier one", values=curve.held_back
            ),
        ),
        notes=(f"Newest {len(loader.record.batches):,} batches.",),
        level=float(loader.record.num_workers),
        level_label="workers",
    )


@flame(
    "worker_stacks",
    title="Workers (flame graph)",
    help="Functions in the DataLoader workers by caller, all workers of a loader together. Width is"
    " sampled time, as in *Training thread (flame graph)*. With multiple loaders, it shows the one"
    " with the busiest workers.",
    place=180,
    views=("workers",),
)
def worker_flame(facts: Facts) -> FlameGraph:
    """Show where the busiest loader's workers spent time, by function."""
    stacks = facts.read(worker_stacks)
    notes = sampling_notes("the workers", stacks.call_tree, stacks.hot_lines.samples)
    workers = facts.get(measured_workers)
    if workers is not None and len(workers) > 1:
        notes = (f"Loader {stacks.loader}, the one with the busiest workers.", *notes)
    return FlameGraph(
        id="worker_stacks",
        title="Workers (flame graph)",
        unit=Unit.DURATION_NS,
        frames=boxes_of(stacks.call_tree),
        notes=notes,
    )
