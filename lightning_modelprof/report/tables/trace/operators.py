"""Operator Summary: which operators take the time, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple

from lightning_modelprof.analysis.timeline.tally import Tally, add_up, share
from lightning_modelprof.analysis.trace.operator_costs import Child, MemoryChange, Operator, pool_operators
from lightning_modelprof.analysis.trace.operators import Operators, OperatorThread
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.rows import Ranks, is_of_memory, order_of, order_words, row_order
from lightning_modelprof.report.tables.trace.table import trace_table

_NAME: Final = ColumnSpec("name", "Name")
_SHAPE: Final = ColumnSpec("input_shapes", "Input Shapes", help="shapes of its inputs.", is_main=True)
_FIGURES: Final = (
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True, help="all calls.", is_main=True),
    ColumnSpec(
        "host_total_ns",
        "Total",
        Unit.DURATION_NS,
        "CPU",
        help=(
            "time including everything inside. A call within one of the same name counts in Calls and Self"
            " only, so Avg, Max and Min are over outermost calls."
        ),
    ),
    ColumnSpec(
        "host_self_ns",
        "Self",
        Unit.DURATION_NS,
        "CPU",
        adds_up=True,
        help=(
            "time with no nested operator or runtime call (cudaLaunchKernel, ...) running. It adds up to"
            " the union of each thread's operators minus their runtime calls."
        ),
        is_main=True,
    ),
    ColumnSpec("host_avg_ns", "Avg", Unit.DURATION_NS, "CPU"),
    ColumnSpec("host_max_ns", "Max", Unit.DURATION_NS, "CPU"),
    ColumnSpec("host_min_ns", "Min", Unit.DURATION_NS, "CPU"),
    ColumnSpec(
        "host_ratio", "Ratio(%)", Unit.RATIO, "CPU", adds_up=True, help="Self / Σ Self of all operators."
    ),
    ColumnSpec(
        "device_total_ns", "Total", Unit.DURATION_NS, "GPU", help="GPU Self including nested operators."
    ),
    ColumnSpec(
        "device_self_ns",
        "Self",
        Unit.DURATION_NS,
        "GPU",
        adds_up=True,
        help=(
            "summed durations of the GPU events (kernels, copies, memsets) the operator launched itself,"
            " whenever they ran; overlaps counted in full. A dash without GPU events."
        ),
        is_main=True,
    ),
    ColumnSpec("device_avg_ns", "Avg", Unit.DURATION_NS, "GPU"),
    ColumnSpec("device_max_ns", "Max", Unit.DURATION_NS, "GPU"),
    ColumnSpec("device_min_ns", "Min", Unit.DURATION_NS, "GPU"),
    ColumnSpec(
        "device_ratio",
        "Ratio(%)",
        Unit.RATIO,
        "GPU",
        adds_up=True,
        help="GPU Self / time of all GPU events.",
        is_main=True,
    ),
    ColumnSpec(
        "flops",
        "FLOPs",
        Unit.FLOPS,
        adds_up=True,
        help=(
            "from recorded input shapes (`record_shapes=True`), counting a multiply-add as two, for mm,"
            " addmm, bmm, baddbmm, convolution and convolution_backward (outermost only). A dash means"
            " unknown."
        ),
        is_main=True,
    ),
)
_MEMORY_CHANGE: Final = "allocated minus freed memory while the operator ran; Self excludes nested operators."
_MEMORY: Final = (
    ColumnSpec(
        "host_bytes",
        "Total",
        Unit.BYTES,
        "CPU memory",
        help=_MEMORY_CHANGE,
    ),
    ColumnSpec(
        "host_self_bytes",
        "Self",
        Unit.BYTES,
        "CPU memory",
        adds_up=True,
        help=_MEMORY_CHANGE,
    ),
    ColumnSpec(
        "device_bytes",
        "Total",
        Unit.BYTES,
        "GPU memory",
        help=_MEMORY_CHANGE,
    ),
    ColumnSpec(
        "device_self_bytes",
        "Self",
        Unit.BYTES,
        "GPU memory",
        adds_up=True,
        help=_MEMORY_CHANGE,
    ),
)
_MODULE: Final = ColumnSpec(
    "module",
    "Module",
    help=(
        "the innermost module around the calls with the most CPU time, and the number of other modules (if"
        " module calls were recorded)."
    ),
)
_CALLER: Final = ColumnSpec(
    "called_from",
    "Called from",
    help=(
        "the most frequent innermost frame outside torch, Lightning and lightning-modelprof (if stacks were"
        " recorded)."
    ),
    is_main=True,
)
_COMPARED: Final = ("device_total_ns", "host_self_ns")
OPERATORS: Final = TableSpec(
    id="operators",
    title="Operator Summary",
    help=(
        "One row per operator name, over all threads and ranks; `thread_sep` adds a section per CPU thread"
        " with its totals. With `op_detail`, the rows below an operator are the operators it calls directly"
        " and the GPU events it launched itself; their ratio is the share of its Total."
    ),
    columns=(_NAME, *_FIGURES, *_MEMORY, _MODULE, _CALLER),
    rows={
        "(no operator)": "GPU events that no operator launched, so GPU Self adds up to all GPU time.",
    },
    views=("operators",),
    names_slices=True,
    compared=CompareKey(keys=_COMPARED, sum_over="window"),
)
OPERATORS_BY_SHAPE: Final = TableSpec(
    id="operators_by_shape",
    title="Operator Summary by input shapes",
    help=(
        "The same figures by operator name and input shapes. Calls without recorded shapes have their own"
        " row with a dash. Requires `record_shapes=True`."
    ),
    columns=(_NAME, _SHAPE, *OPERATORS.columns[1:]),
    views=("operators",),
    names_slices=True,
    compared=CompareKey(keys=_COMPARED, sum_over="window", names=("name", "input_shapes")),
)


NO_OPERATOR: Final = "(no operator)"
"""Name of the row with the device events that no operator launched."""

_TIMES_NOTE: Final = (
    "CPU Total is an operator's time including everything it calls (recursive calls count once). Self"
    " excludes nested operators and runtime calls such as cudaLaunchKernel, and Ratio is the share of all"
    " operators' Self."
)
_DEVICE_NOTE: Final = (
    "GPU Self is the time of the GPU events (kernels, copies, memsets) an operator launched itself; Total"
    " adds"
    " those of the operators it calls. Ratio is Self as a share of all GPU events' time, with overlaps"
    " counted in full."
)
_FLOPS_NOTE: Final = (
    "FLOPs come from the recorded input shapes, counting a multiply-add as two, for mm, addmm, bmm,"
    " baddbmm, convolution and convolution_backward (outermost only)."
)
_NO_FLOPS_NOTE: Final = "FLOPs need input shapes; set record_shapes=True."
_MEMORY_NOTE: Final = (
    "Memory is the bytes allocated minus freed while an operator ran on its thread, so it can be negative."
    " Self excludes nested operators."
)
_NO_MEMORY_NOTE: Final = (
    "Memory wasn't recorded, so the rows keep their usual order; set profile_memory=True."
)
_DETAIL_NOTE: Final = (
    "The rows below an operator are the operators it calls directly and the GPU events it launched itself,"
    " with their share of its Total."
)


class _Row(NamedTuple):
    depth: int
    cells: tuple[Cell, ...]


@trace_table(OPERATORS, "operator", TraceFacts.operators)
def operators_table(ranks: Ranks[Operators], options: TableOptions) -> Table:
    """One row per operator name, the threads and ranks together.

    Args:
        options: ``sorted_by`` orders the rows, ``thread_sep`` gives each thread of each rank its own section,
            ``op_detail`` adds rows below each operator.
    """
    return _Writer(ranks, options, OPERATORS).table()


@trace_table(OPERATORS_BY_SHAPE, "operator", TraceFacts.operators_by_shape)
def operator_by_shape_table(ranks: Ranks[Operators], options: TableOptions) -> Table:
    """One row per operator name and shapes of inputs, the threads and ranks together.

    Args:
        options: ``sorted_by`` orders the rows, ``thread_sep`` gives each thread of each rank its own section.
    """
    return _Writer(ranks, options, OPERATORS_BY_SHAPE).table()


class _Writer:
    """Turns the operators of the ranks into rows."""

    def __init__(self, ranks: Ranks[Operators], options: TableOptions, kind: TableSpec) -> None:
        self.ranks = ranks
        self.options = options
        self.kind = kind
        self.with_shapes = kind is OPERATORS_BY_SHAPE
        facts = ranks.found.values()
        self.host_self_ns = sum(fact.host_self_ns for fact in facts)
        device_ns = [fact.device_ns for fact in facts if fact.device_ns is not None]
        self.device_ns = sum(device_ns) if device_ns else None
        self.has_modules = any(fact.has_modules for fact in facts)
        self.has_callers = any(fact.has_callers for fact in facts)
        self.asks_memory = is_of_memory(options.sorted_by)
        self.shows_memory = self.asks_memory and any(fact.has_memory for fact in facts)

    def table(self) -> Table:
        columns = (
            _NAME,
            *([_SHAPE] if self.with_shapes else []),
            *_FIGURES,
            *(_MEMORY if self.shows_memory else ()),
            *([_MODULE] if self.has_modules else []),
            *([_CALLER] if self.has_callers else []),
        )
        rows = [*self._rows(), *self._not_launched()]
        return self.kind.table(
            columns=columns,
            rows=tuple(row.cells for row in rows),
            depths=tuple(row.depth for row in rows) if any(row.depth for row in rows) else (),
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        has_shapes = any(fact.has_shapes for fact in self.ranks.found.values())
        order = order_of(
            self.options.sorted_by, has_device=self.device_ns is not None, has_memory=self.shows_memory
        )
        return (
            order_words(order),
            _TIMES_NOTE,
            *([_DEVICE_NOTE] if self.device_ns is not None else []),
            _FLOPS_NOTE if has_shapes else _NO_FLOPS_NOTE,
            *([_MEMORY_NOTE if self.shows_memory else _NO_MEMORY_NOTE] if self.asks_memory else []),
            *([_DETAIL_NOTE] if self._shows_details else []),
        )

    @property
    def _shows_details(self) -> bool:
        return self.options.op_detail and not self.with_shapes

    def _operators(self, thread: OperatorThread) -> tuple[Operator, ...]:
        return thread.by_shape if self.with_shapes else thread.operators

    def _rows(self) -> Iterator[_Row]:
        if not self.options.thread_sep:
            threads = [thread for fact in self.ranks.found.values() for thread in fact.threads]
            yield from self._section_rows(chain.from_iterable(map(self._operators, threads)), 0)
            return
        sections = [
            (self.ranks.prefix(rank) + thread.name, thread)
            for rank, fact in self.ranks.found.items()
            for thread in fact.threads
        ]
        sections.sort(key=lambda section: -sum(one.host_self_ns for one in self._operators(section[1])))
        for name, thread in sections:
            yield self._header(name, thread)
            yield from self._section_rows(self._operators(thread), 1)

    def _section_rows(self, operators: Iterable[Operator], depth: int) -> Iterator[_Row]:
        for operator in sorted(pool_operators(operators), key=self._order):
            yield self._row(
                depth,
                operator.name,
                operator.calls,
                _host(operator.host, operator.host_self_ns, self.host_self_ns),
                _device(operator.device, operator.device_self_ns, self.device_ns),
                shape=operator.shape,
                flops=operator.flops,
                memory=operator.memory,
                module=_main_module(operator.modules),
                caller=max(operator.callers.items(), key=lambda item: item[::-1], default=(None, 0))[0],
            )
            if self._shows_details:
                yield from self._details(operator, depth + 1)

    def _order(self, row: Operator | Child) -> tuple[object, ...]:
        """By what was asked for, then by total time on the host."""
        by_figure = row_order(
            self.options.sorted_by,
            calls=row.calls,
            host=row.host,
            device=row.device,
            has_device=self.device_ns is not None,
            self_ns=(row.host_self_ns, row.device_self_ns) if isinstance(row, Operator) else None,
            memory=row.memory if isinstance(row, Operator) else None,
        )
        shape = row.shape if isinstance(row, Operator) else None
        return by_figure, -row.host.total_ns, row.name, shape or ""

    def _details(self, operator: Operator, depth: int) -> Iterator[_Row]:
        for child in sorted(operator.children.values(), key=self._order):
            yield self._row(
                depth,
                child.name,
                child.calls,
                _parts(child.host, operator.host.total_ns),
                _parts(child.device, None if operator.device is None else operator.device.total_ns),
            )
            yield from self._kernels(child.kernels, child, depth + 1)
        yield from self._kernels(operator.kernels, operator, depth)

    def _kernels(
        self, kernels: Mapping[str, Tally], launcher: Operator | Child, depth: int
    ) -> Iterator[_Row]:
        """What an operator launched itself, the longest first."""
        whole_ns = None if launcher.device is None else launcher.device.total_ns
        for name, tally in sorted(kernels.items(), key=lambda item: (-item[1].total_ns, item[0])):
            yield self._row(depth, name, tally.calls, _UNKNOWN, _parts(tally, whole_ns))

    def _header(self, name: str, thread: OperatorThread) -> _Row:
        operators = self._operators(thread)
        self_ns = sum(operator.host_self_ns for operator in operators)
        device_self_ns = [one.device_self_ns for one in operators if one.device_self_ns is not None]
        device_ns = sum(device_self_ns) if device_self_ns else None
        flops = [operator.flops for operator in operators if operator.flops is not None]
        return self._row(
            0,
            name,
            sum(operator.calls for operator in operators),
            (thread.host_ns, self_ns, None, None, None, share(self_ns, self.host_self_ns)),
            (device_ns, device_ns, None, None, None, share(device_ns, self.device_ns)),
            flops=sum(flops) if flops else None,
        )

    def _not_launched(self) -> Iterator[_Row]:
        tally = add_up(fact.not_launched for fact in self.ranks.found.values())
        if tally.calls:
            ratio = share(tally.total_ns, self.device_ns)
            device = (tally.total_ns, tally.total_ns, None, None, None, ratio)
            yield self._row(0, NO_OPERATOR, None, _UNKNOWN, device)

    def _row(
        self,
        depth: int,
        name: str,
        calls: int | None,
        host: tuple[Cell, ...],
        device: tuple[Cell, ...],
        *,
        shape: str | None = None,
        flops: int | None = None,
        memory: MemoryChange | None = None,
        module: str | None = None,
        caller: str | None = None,
    ) -> _Row:
        shapes = [shape] if self.with_shapes else []
        modules = [module] if self.has_modules else []
        callers = [caller] if self.has_callers else []
        sizes: tuple[Cell, ...] = (memory or (None,) * len(_MEMORY)) if self.shows_memory else ()
        return _Row(depth, (name, *shapes, calls, *host, *device, flops, *sizes, *modules, *callers))


_UNKNOWN: Final[tuple[Cell, ...]] = (None,) * 6


def _host(tally: Tally, self_ns: int, whole_ns: int) -> tuple[Cell, ...]:
    return tally.total_ns, self_ns, tally.avg_ns, tally.max_ns, tally.min_ns, share(self_ns, whole_ns)


def _device(tally: Tally | None, self_ns: int | None, whole_ns: int | None) -> tuple[Cell, ...]:
    if tally is None:
        return _UNKNOWN
    return tally.total_ns, self_ns, tally.avg_ns, tally.max_ns, tally.min_ns, share(self_ns, whole_ns)


def _parts(tally: Tally | None, whole_ns: int | None) -> tuple[Cell, ...]:
    """Cells of a row below an operator: its ratio is the share of that operator's total."""
    if tally is None:
        return _UNKNOWN
    ratio = share(tally.total_ns, whole_ns)
    return tally.total_ns, None, tally.avg_ns, tally.max_ns, tally.min_ns, ratio


def _main_module(modules: Mapping[str, int]) -> str | None:
    """The module in which most of the time was spent, and how many others there are."""
    if not modules:
        return None
    name, _ = max(modules.items(), key=lambda item: (item[1], item[0]))
    others = len(modules) - 1
    return name if not others else f"{name} and {others} more"
