"""Dataloader: where the time to fetch a batch goes, and how much of it the device hides."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.timeline.tally import Tally, share
from lightning_modelprof.analysis.trace.dataloader import DataloaderTime, HostToDevice, pool_dataloader
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

_NOTE: Final = (
    "Fetch is the time the training thread spends waiting for or making batches within the steps. Ratio is"
    " the share of step time."
)
_HIDDEN_NOTE: Final = (
    "Hidden is fetch time while a GPU was busy. Exposed is the rest, the most that faster data loading can"
    " save."
)
_NO_DEVICE_NOTE: Final = "Hidden and exposed time are unknown because the trace has no GPU events."
_LOADING_NOTES: Final = {
    ("workers",): "Workers make the batches. More workers may shorten the wait.",
    ("main thread",): (
        "The training process makes the batches itself (num_workers=0). Workers could make them in parallel."
    ),
    ("workers", "main thread"): "Some batches are made by workers, some by the training process.",
}
_OPERATOR_NOTE: Final = (
    "Operators are those the training thread ran during fetches, excluding nested ones. The rest, outside"
    " operators, is Python, the data set and waiting."
)
_COPY_NOTE: Final = "The Memcpy rows cover the CPU-to-GPU copies launched in the steps, in GPU time."
_PAGEABLE_NOTE: Final = (
    "Copies from pageable memory block the CPU. DataLoader(pin_memory=True) makes them asynchronous."
)

_Line = tuple[int, Unit, tuple[Cell, ...]]
"""Depth, unit and cells of a row."""


@trace_table(DATALOADER, "dataloader", TraceFacts.dataloader)
def dataloader_table(ranks: Ranks[DataloaderTime]) -> Table:
    """Where the fetch time goes, the ranks together and the fetches also by rank."""
    pooled = pool_dataloader(list(ranks.found.values()))
    lines = [_time_line(0, "Fetch", pooled.fetches, pooled.steps_ns)]
    if ranks.are_several:
        lines += [
            _time_line(1, f"rank {rank}", fact.fetches, fact.steps_ns) for rank, fact in ranks.found.items()
        ]
    lines += [*_fetch_lines(pooled), *(line for copy in pooled.copies for line in _copy_lines(copy))]
    return DATALOADER.table(
        rows=tuple(cells for _, _, cells in lines),
        depths=tuple(depth for depth, _, _ in lines),
        row_units=tuple(unit for _, unit, _ in lines),
        notes=_notes(pooled),
    )


def _time_line(depth: int, name: str, tally: Tally, steps_ns: int, *, has_calls: bool = True) -> _Line:
    calls = tally.calls if has_calls else None
    times = (tally.total_ns, tally.avg_ns, tally.max_ns, tally.min_ns)
    return depth, Unit.DURATION_NS, (name, calls, *times, share(tally.total_ns, steps_ns))


def _fetch_lines(fact: DataloaderTime) -> list[_Line]:
    """What the fetches consist of, in three ways: by step, by what the device does, by what the host does."""
    steps_ns = fact.steps_ns
    lines = [_time_line(1, "per step", fact.per_step, steps_ns)]
    for name, tally in (("hidden behind GPU work", fact.hidden), ("exposed", fact.exposed)):
        if tally is not None:
            lines.append(_time_line(1, name, tally, steps_ns, has_calls=False))
    shown, rest = fact.operators[:_MOST_OPERATORS], fact.operators[_MOST_OPERATORS:]
    lines += [_time_line(1, f"in {name}", tally, steps_ns) for name, tally in shown]
    for name, total_ns in (
        ("in other operators", sum(tally.total_ns for _, tally in rest) if rest else None),
        ("outside operators", fact.outside_operators_ns),
    ):
        if total_ns is not None:
            ratio = share(total_ns, steps_ns)
            lines.append((1, Unit.DURATION_NS, (name, None, total_ns, None, None, None, ratio)))
    return lines


def _copy_lines(copy: HostToDevice) -> list[_Line]:
    tally, size = copy.tally, copy.size_bytes
    times = (copy.name, tally.calls, tally.total_ns, tally.avg_ns, tally.max_ns, tally.min_ns, None)
    mean_size = None if size is None else size / tally.calls
    return [
        (0, Unit.DURATION_NS, times),
        (1, Unit.BYTES, ("size", None, size, mean_size, None, None, None)),
    ]


def _notes(fact: DataloaderTime) -> tuple[str, ...]:
    return (
        _NOTE,
        *([_LOADING_NOTES[fact.loading]] if fact.loading else []),
        _NO_DEVICE_NOTE if fact.hidden is None else _HIDDEN_NOTE,
        *([_OPERATOR_NOTE] if fact.operators else []),
        *([_COPY_NOTE] if fact.copies else []),
        *([_PAGEABLE_NOTE] if any("pageable" in copy.name.lower() for copy in fact.copies) else []),
    )
