"""Charts of FLOPs by phase and memory by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.charts.chart import chart
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.memory import MemoryPoint


@chart(
    "flops_by_phase",
    title="FLOPs per step",
    help="The FLOPs table by phase, without Fourier transforms.",
    place=100,
    views=("modules",),
)
def flops_by_phase(facts: Facts) -> Chart | None:
    """Show the counted step's FLOPs by phase; ``None`` if all are zero."""
    flops = facts.flops
    if not any(flops.phases.values()):
        return None
    return Chart(
        id="flops_by_phase",
        title="FLOPs per step",
        kind="stacked",
        x_label="step",
        x=(float(flops.count.step or 0),),
        unit=Unit.FLOPS,
        series=tuple(
            Series(key=phase, label=phase.replace("_", " ").capitalize(), values=(float(number),))
            for phase, number in flops.phases.items()
        ),
        notes=(
            "Matmuls, convolutions, attention and recurrent gates in one step of one process. 1 MAC is 2"
            " FLOPs.",
        ),
    )


_SERIES: Final = (
    ("rss", "Resident memory (RSS)", "rss_bytes"),
    ("anonymous", "Private memory", "anonymous_bytes"),
    ("allocated", "Device, allocated", "allocated_bytes"),
    ("reserved", "Device, reserved", "reserved_bytes"),
)


@chart(
    "memory_curve",
    title="Memory by step",
    help="Memory at the first sample of each step: process memory (private excludes file-backed and shared"
    " memory), and GPU memory that torch's allocator handed to tensors or reserved.",
    place=110,
    views=("memory",),
)
def memory_curve(facts: Facts) -> Chart | None:
    """Show memory by step; ``None`` with fewer than two points."""
    curve = facts.memory.record.curve
    every = (Series(key=key, label=label, values=_values(curve, name)) for key, label, name in _SERIES)
    series = tuple(one for one in every if any(value is not None for value in one.values))
    if len(curve) < 2 or not series:
        return None
    return Chart(
        id="memory_curve",
        title="Memory by step",
        kind="line",
        x_label=loop_of(facts.info.loop).step,
        x=tuple(float(point.step) for point in curve),
        unit=Unit.BYTES,
        series=series,
        notes=(
            "Each point is the first memory sample in its step. Private memory excludes file-backed and"
            " shared memory.",
        ),
    )


def _values(curve: Sequence[MemoryPoint], name: str) -> tuple[float | None, ...]:
    return tuple(getattr(point, name) for point in curve)
