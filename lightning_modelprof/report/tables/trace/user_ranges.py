"""UserDefined Summary: the user's own ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from lightning_modelprof.analysis.timeline.tally import Tally, share
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.analysis.trace.user_ranges import (
    UserRange,
    UserRanges,
    UserRangeThread,
    pool_user_ranges,
)
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks, row_order
from lightning_modelprof.report.tables.trace.table import trace_table

_COLUMNS: Final = (
    ColumnSpec("name", "Name"),
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True),
    ColumnSpec(
        "host_total_ns",
        "Total",
        Unit.DURATION_NS,
        "CPU",
        help=(
            "time of the outermost calls including everything inside (a range inside one of the same name"
            " counts in Calls only)."
        ),
    ),
    ColumnSpec("host_avg_ns", "Avg", Unit.DURATION_NS, "CPU"),
    ColumnSpec("host_max_ns", "Max", Unit.DURATION_NS, "CPU"),
    ColumnSpec("host_min_ns", "Min", Unit.DURATION_NS, "CPU"),
    ColumnSpec(
        "host_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "CPU",
        help=(
            "share of step time. Ranges outside the steps and on multiple threads count in full, so it can"
            " exceed 100%. A dash without steps or operators."
        ),
    ),
    ColumnSpec(
        "device_total_ns",
        "Total",
        Unit.DURATION_NS,
        "GPU",
        help=(
            "summed durations of the GPU events launched in the range on its own thread, whenever they ran."
            " Launches from autograd's threads aren't included."
        ),
    ),
    ColumnSpec("device_avg_ns", "Avg", Unit.DURATION_NS, "GPU"),
    ColumnSpec("device_max_ns", "Max", Unit.DURATION_NS, "GPU"),
    ColumnSpec("device_min_ns", "Min", Unit.DURATION_NS, "GPU"),
    ColumnSpec("device_ratio", "Ratio(%)", Unit.RATIO, "GPU", help="share of all GPU time."),
    ColumnSpec("written_by", "Written by", help="marks ranges that torch writes itself, judged by name."),
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


_HOST_NOTE: Final = (
    "CPU Total is a range's time including everything inside (recursive ranges count once). Ratio is"
    " relative to step time and can exceed 100%, since ranges outside the steps and on multiple threads"
    " count in full."
)
_DEVICE_NOTE: Final = (
    "GPU Total is the time of the GPU events launched in the range on its own thread, excluding launches"
    " from autograd's threads. Ratio is the share of all GPU events' time."
)
_TORCH_NOTE: Final = (
    "Ranges that torch writes itself come last. Steps, data loading, optimizers, modules and communication"
    " have their own tables."
)


@trace_table(USER_RANGES, "userdefined", TraceFacts.user_ranges)
def user_ranges_table(ranks: Ranks[UserRanges], options: TableOptions) -> Table:
    """One row per range name, the user's before torch's, the threads and ranks together.

    Args:
        options: ``sorted_by`` orders the rows, ``thread_sep`` gives each thread of each rank its own section.
    """
    steps_ns = _sum_known(fact.steps_ns for fact in ranks.found.values())
    device_ns = _sum_known(fact.device_ns for fact in ranks.found.values())

    def order(row: UserRange) -> tuple[object, ...]:
        """The user's first, then by what was asked for, then by total time on the host."""
        by_figure = row_order(
            options.sorted_by,
            calls=row.calls,
            host=row.host,
            device=row.device,
            has_device=device_ns is not None,
        )
        return row.is_torch, by_figure, -row.host.total_ns, row.name

    rows: list[tuple[Cell, ...]] = []
    depths: list[int] = []
    for header, ranges in _sections(ranks, options):
        if header is not None:
            name, thread = header
            rows.append(_header(name, thread, steps_ns, device_ns))
            depths.append(0)
        for one in sorted(pool_user_ranges(ranges), key=order):
            host, device = _cells(one.host, steps_ns), _cells(one.device, device_ns)
            rows.append((one.name, one.calls, *host, *device, "torch" if one.is_torch else "user"))
            depths.append(0 if header is None else 1)
    return USER_RANGES.table(
        rows=tuple(rows),
        depths=tuple(depths) if any(depths) else (),
        notes=(
            _HOST_NOTE,
            *([_DEVICE_NOTE] if device_ns is not None else []),
            _TORCH_NOTE,
        ),
    )


def _sections(
    ranks: Ranks[UserRanges], options: TableOptions
) -> Iterator[tuple[tuple[str, UserRangeThread] | None, list[UserRange]]]:
    """What stands below each thread's header, or all of it below none."""
    if not options.thread_sep:
        yield None, [one for fact in ranks.found.values() for thread in fact.threads for one in thread.ranges]
        return
    threads = [
        (ranks.prefix(rank) + thread.name, thread)
        for rank, fact in ranks.found.items()
        for thread in fact.threads
    ]
    threads.sort(key=lambda item: -item[1].host_ns)
    for name, thread in threads:
        yield (name, thread), list(thread.ranges)


def _header(
    name: str, thread: UserRangeThread, steps_ns: int | None, device_ns: int | None
) -> tuple[Cell, ...]:
    return (
        name,
        sum(one.calls for one in thread.ranges),
        *(thread.host_ns, None, None, None, share(thread.host_ns, steps_ns)),
        *(thread.device_ns, None, None, None, share(thread.device_ns, device_ns)),
        None,
    )


def _cells(tally: Tally | None, whole_ns: int | None) -> tuple[Cell, ...]:
    if tally is None:
        return (None,) * 5
    return tally.total_ns, tally.avg_ns, tally.max_ns, tally.min_ns, share(tally.total_ns, whole_ns)


def _sum_known(values: Iterable[int | None]) -> int | None:
    """``None`` when none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
