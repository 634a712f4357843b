"""Memory in a window, in layers by what holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.timeline.memory_layers import LAYERS, MemoryLayers
from lightning_modelprof.analysis.trace.memory import CPU_NAME, DeviceMemory
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.charts.chart import chart, trace_chart
from lightning_modelprof.report.model import Chart, Series, Unit
from lightning_modelprof.report.tables.rows import split_ranks
from lightning_modelprof.run.model_cost import ModelSize

_LABELS: Final = {
    "before": "Allocated before the window",
    "optimizer_state": "Optimizer state",
    "gradients": "Gradients",
    "batch": "Batch",
    "activations": "Activations",
    "temporary": "Temporary",
    "other": "Allocated in other phases",
}
_HELD: Final = (
    ("parameters", "Parameters", ("trainable parameters", "frozen parameters", "packed weights")),
    ("buffers", "Buffers", ("buffers",)),
    ("optimizer_state_before", "Earlier optimizer state", ("optimizer state",)),
)
"""Layers of the model's own tensors allocated before the window: key, label, and kinds of sizes."""

_NOTES: Final = (
    "Each point is the peak of its time slice.",
    (
        "Blocks are attributed to the phase that allocated them and kept them: activations to forward,"
        " gradients to backward, optimizer state to the optimizer, batches to the loader. Blocks freed"
        " within the phase are temporary."
    ),
)
_BY_SIZE: Final = (
    "This trace has no block addresses, so each release is matched to the newest block of its size."
)
_NOT_WHOLE: Final = (
    "Only blocks allocated or freed in the window are known. Memory that was there before and stayed isn't"
    " shown."
)
_NO_PHASES: Final = "This trace has no phases, so everything allocated in the window is one layer."


_WINDOW_MEMORY: Final = (
    "Memory allocated during a window with `profile_memory=True`, in layers that add up to the total. It"
    " shows the GPU with the highest peak over all ranks, or the CPU if there is no GPU. A block belongs to"
    " the phase that allocated it: activations (forward), gradients (backward), optimizer state (optimizer)"
    " or batch (dataloader and transfer). Blocks freed within the same phase are temporary. Memory"
    " allocated before the window is a layer of its own; for a run it's split into parameters, buffers and"
    " optimizer state. On the CPU and with torch 1.9, memory that stays from before the window is missing."
    " Traces without addresses (torch 1) match each release to the newest block of its size. The curve has"
    " at most 400 points, each the peak of its time slice."
)


@trace_chart(
    "window_memory",
    title="Memory in the window",
    help=_WINDOW_MEMORY,
    place=120,
    views=("memory",),
)
def window_memory(by_rank: Mapping[int, TraceFacts]) -> Chart | None:
    """Show what holds memory during the window; ``None`` if no memory was recorded."""
    ranks = split_ranks(by_rank, TraceFacts.memory)
    known = [(rank, device) for rank, memory in ranks.found.items() for device in memory.devices]
    return _chart(known, several=ranks.are_several)


@chart(
    "window_memory",
    title="Memory in the window",
    help=_WINDOW_MEMORY,
    place=120,
    views=("memory",),
)
def window_memory_of_run(facts: Facts) -> Chart | None:
    """Draw the same for a run's newest window with memory, with layers for its model's own tensors."""
    windows = [memory for trace in facts.traces if (memory := trace.get(TraceFacts.memory)) is not None]
    if not windows:
        return None
    cost = facts.get(Facts.cost)
    devices = [(0, device) for device in windows[-1].devices]
    return _chart(devices, size=None if cost is None else cost.size)


def _chart(
    known: Iterable[tuple[int, DeviceMemory]], *, several: bool = False, size: ModelSize | None = None
) -> Chart | None:
    found = [(rank, device, device.curve) for rank, device in known if device.curve is not None]
    if not found:
        return None
    rank, device, curve = max(found, key=lambda one: (one[1].total.name != CPU_NAME, one[2].peak_bytes))
    name = f"rank {rank} {device.total.name}" if several else device.total.name
    return Chart(
        id="window_memory",
        title=f"Memory in the window ({name})",
        kind="stacked",
        x_label="ms since the first allocation",
        x=tuple(round(place * curve.part_ns / 1e6, 6) for place in range(len(curve.layers_bytes[0]))),
        unit=Unit.BYTES,
        series=tuple(_series(curve, size)),
        notes=(
            *_NOTES,
            *((_BY_SIZE,) if curve.joined == "size" else ()),
            *(() if curve.is_whole else (_NOT_WHOLE,)),
            *(() if curve.has_phases else (_NO_PHASES,)),
        ),
        level=float(curve.peak_bytes),
        level_label="peak",
    )


def _series(curve: MemoryLayers, size: ModelSize | None) -> Iterable[Series]:
    layers = {key: np.array(values) for key, values in zip(LAYERS, curve.layers_bytes, strict=True)}
    if size is not None and curve.is_whole:
        # The model's tensors existed before the window, except optimizer state created in it.
        for key, label, kinds in _HELD:
            if key == "optimizer_state_before" and layers["optimizer_state"].any():
                continue
            held = sum(one.num_bytes for one in size.sizes if one.kind in kinds)
            part = np.minimum(layers["before"], held)
            layers["before"] = layers["before"] - part
            if part.any():
                yield Series(key=key, label=label, values=tuple(part.astype(float).tolist()))
    for key, values in layers.items():
        if values.any():
            yield Series(key=key, label=_LABELS[key], values=tuple(values.astype(float).tolist()))
