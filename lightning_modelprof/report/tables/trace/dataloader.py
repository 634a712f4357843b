"""Dataloader: time to fetch batches, and how much of it GPU work hides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from lightning_modelprof.analysis.pooling import pool, sum_of_known
from lightning_modelprof.analysis.timeline.tally import Tally, share
from lightning_modelprof.analysis.trace.dataloader import DataloaderTime, HostToDevice, Loading
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT),
    ColumnSpec("total", "Total", Unit.BY_ROW),
    ColumnSpec("avg", "Avg", Unit.BY_ROW),
    ColumnSpec("max", "Max", Unit.BY_ROW),
    ColumnSpec("min", "Min", Unit.BY_ROW),
    ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, help="share of step time."),
)
DATALOADER: Final = TableSpec(
    id="dataloader",
    title="Dataloader",
    help=(
        "Time to fetch batches on the thread that runs the steps, within the steps. A fetch is our range"
        " `modelprof: dataloader`; traces without it use `enumerate(DataLoader)#...__next__` (or"
        " `DataPipe`). The rows below show copies from CPU to GPU launched in the steps by kind, with GPU"
        " time and bytes (a dash if any size is unknown). A note says whether workers or the training"
        " process make the batches. Multiple ranks are pooled, with a row per rank under Fetch."
    ),
    columns=_COLUMNS,
    rows={
        "Fetch": "fetches: total, avg, max, min and share of step time.",
        "per step": "fetch time per step, 0 for steps without a fetch.",
        "hidden behind GPU work": (
            "fetch time while a GPU of the process was busy. Hidden without GPU events."
        ),
        "exposed": (
            "fetch time while no GPU was busy, the most that faster data loading can save. Hidden without"
            " GPU events."
        ),
        "in other operators": (
            "time in operators inside fetches. The five largest have their own rows, without operators"
            " nested in others; this row is the rest."
        ),
        "outside operators": (
            "Python, the data set and waiting. Together with the operator rows it adds up to Fetch."
        ),
        "size": "bytes of the copies.",
    },
    views=("steps",),
    compared=CompareKey(keys=("total",), sum_over="window"),
)


_MOST_OPERATORS: Final = 5

_NO_DEVICE_NOTE: Final = "Hidden and exposed time are unknown because the trace has no GPU events."
_LOADING_NOTES: Final[Mapping[frozenset[Loading], str]] = {
    frozenset({"workers"}): "Workers make the batches. More workers may shorten the wait.",
    frozenset({"main thread"}): (
        "The training process makes the batches itself (num_workers=0). Workers could make them in parallel."
    ),
    frozenset({"workers", "main thread"}): (
        "Some batches are made by workers, some by the training process."
    ),
}
_PAGEABLE_NOTE: Final = (
    "Copies from pageable memory block the CPU. DataLoader(pin_memory=True) makes them asynchronous."
)

_Line = tuple[int, Mapping[str, Cell]]
"""Depth and cells of a row."""


@trace_table(DATALOADER, "dataloader", TraceFacts.dataloader)
def dataloader_table(ranks: Ranks[DataloaderTime]) -> Table:
    """Split the fetch time over all ranks, with a fetch row per rank."""
    pooled = pool(ranks.found.values())
    copies = sorted(pooled.copies, key=lambda copy: (-copy.tally.total_ns, copy.name))
    lines = [
        *_fetch_lines(pooled, ranks.found if ranks.are_several else {}),
        *(line for copy in copies for line in _copy_lines(copy)),
    ]
    is_pageable = any("pageable" in copy.name.lower() for copy in copies)
    return DATALOADER.table(
        [cells for _, cells in lines],
        depths=tuple(depth for depth, _ in lines),
        row_units=tuple(Unit.BYTES if cells["name"] == "size" else Unit.DURATION_NS for _, cells in lines),
        notes=(
            *((_LOADING_NOTES[pooled.loading],) if pooled.loading else ()),
            *((_NO_DEVICE_NOTE,) if pooled.hidden is None else ()),
            *((_PAGEABLE_NOTE,) if is_pageable else ()),
        ),
    )


def _fetch_lines(fact: DataloaderTime, by_rank: Mapping[int, DataloaderTime]) -> Iterator[_Line]:
    steps_ns = fact.steps_ns
    yield 0, _timed("Fetch", fact.fetches, steps_ns)
    for rank, one in by_rank.items():
        yield 1, _timed(f"rank {rank}", one.fetches, one.steps_ns)
    yield 1, _timed("per step", fact.per_step, steps_ns)
    for name, tally in (("hidden behind GPU work", fact.hidden), ("exposed", fact.exposed)):
        if tally is not None:
            yield 1, _timed(name, tally, steps_ns) | {"calls": None}
    operators = sorted(fact.operators.items(), key=lambda item: (-item[1].total_ns, item[0]))
    for name, tally in operators[:_MOST_OPERATORS]:
        yield 1, _timed(f"in {name}", tally, steps_ns)
    rest_ns = sum_of_known(tally.total_ns for _, tally in operators[_MOST_OPERATORS:])
    for name, total_ns in (("in other operators", rest_ns), ("outside operators", fact.outside_operators_ns)):
        if total_ns is not None:
            yield 1, {"name": name, "total": total_ns, "ratio": share(total_ns, steps_ns)}


def _timed(name: str, tally: Tally, steps_ns: int) -> dict[str, Cell]:
    return {
        "name": name,
        "calls": tally.calls,
        "total": tally.total_ns,
        "avg": tally.avg_ns,
        "max": tally.max_ns,
        "min": tally.min_ns,
        "ratio": share(tally.total_ns, steps_ns),
    }


def _copy_lines(copy: HostToDevice) -> Iterator[_Line]:
    size = copy.size_bytes
    yield 0, _timed(copy.name, copy.tally, 0)
    yield 1, {"name": "size", "total": size, "avg": None if size is None else size / copy.tally.calls}
