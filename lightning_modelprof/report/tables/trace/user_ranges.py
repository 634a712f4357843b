"""UserDefined Summary: the user's own ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from lightning_modelprof.analysis.pooling import pool_alike, sum_of_known
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.analysis.trace.user_ranges import UserRange, UserRanges
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec, tally_columns
from lightning_modelprof.report.tables.rows import Ranks, row_order
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True),
    *tally_columns(
        "host_",
        "CPU",
        lambda one: one.host,
        help=(
            "time of the outermost calls including everything inside (a range inside one of the same name"
            " counts in Calls only)."
        ),
    ),
    ColumnSpec(
        "host_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "CPU",
        help=(
            "share of step time. Ranges outside the steps and on multiple threads count in full, so it can"
            " exceed 100%. A dash without steps or operators."
        ),
        share_of="host_total_ns",
    ),
    *tally_columns(
        "device_",
        "GPU",
        lambda one: one.device,
        help=(
            "summed durations of the GPU events launched in the range on its own thread, whenever they ran."
            " Launches from autograd's threads aren't included."
        ),
    ),
    ColumnSpec(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        help="share of all GPU time.",
        share_of="device_total_ns",
    ),
    ColumnSpec(
        "written_by",
        "Written by",
        help="marks ranges that torch writes itself, judged by name.",
        of=lambda one: "torch" if one.is_torch else "user",
    ),
)
USER_RANGES: Final = TableSpec(
    id="user_ranges",
    title="UserDefined Summary",
    help=(
        'Ranges from `torch.profiler.record_function("name")`, one row per name. Ranges that torch writes'
        " itself (DistributedDataParallel, FSDP, compiled regions) come last. Steps, phases, `[pl]` ranges,"
        " modules, data loading, optimizers and communication have their own tables."
    ),
    columns=_COLUMNS,
    views=("operators",),
    names_slices=True,
    compared=CompareKey(keys=("host_total_ns",), sum_over="window"),
)


@trace_table(USER_RANGES, "userdefined", TraceFacts.user_ranges)
def user_ranges_table(ranks: Ranks[UserRanges], options: TableOptions) -> Table:
    """Build one row per range name over all threads and ranks, the user's before torch's.

    Args:
        options: ``sorted_by`` orders the rows, ``thread_sep`` gives each thread of each rank its own section.
    """
    steps_ns = sum_of_known(fact.steps_ns for fact in ranks.found.values())
    device_ns = sum_of_known(fact.device_ns for fact in ranks.found.values())

    def order(row: UserRange) -> tuple[object, ...]:
        by_figure = row_order(
            options.sorted_by,
            calls=row.calls,
            host=row.host,
            device=row.device,
            has_device=device_ns is not None,
        )
        return row.is_torch, by_figure, -row.host.total_ns, row.name

    rows: list[object] = []
    depths: list[int] = []
    for header, ranges in _sections(ranks, options):
        below = sorted(pool_alike(ranges), key=order)
        rows += [*header, *below]
        depths += [*(0 for _ in header), *(len(header) for _ in below)]
    return USER_RANGES.table(
        rows,
        wholes={"host_ratio": steps_ns, "device_ratio": device_ns},
        depths=tuple(depths) if any(depths) else (),
    )


def _sections(
    ranks: Ranks[UserRanges], options: TableOptions
) -> Iterator[tuple[list[Mapping[str, Cell]], list[UserRange]]]:
    """Yield each thread's header and ranges, or all ranges without a header."""
    if not options.thread_sep:
        yield [], [one for fact in ranks.found.values() for thread in fact.threads for one in thread.ranges]
        return
    threads = [
        (ranks.prefix(rank) + thread.name, thread)
        for rank, fact in ranks.found.items()
        for thread in fact.threads
    ]
    for name, thread in sorted(threads, key=lambda item: -item[1].host_ns):
        header: Mapping[str, Cell] = {
            "name": name,
            "calls": sum(one.calls for one in thread.ranges),
            "host_total_ns": thread.host_ns,
            "device_total_ns": thread.device_ns,
        }
        yield [header], list(thread.ranges)
