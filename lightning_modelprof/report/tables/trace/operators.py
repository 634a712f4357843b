"""Operator Summary: CPU and GPU time by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from lightning_modelprof.analysis.pooling import pool_alike, sum_of_known
from lightning_modelprof.analysis.timeline.tally import Tally, add_up, share
from lightning_modelprof.analysis.trace.operator_costs import Child, MemoryChange, Operator
from lightning_modelprof.analysis.trace.operators import Operators, OperatorThread
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec, tally_cells, tally_columns
from lightning_modelprof.report.tables.rows import Ranks, is_of_memory, order_of, order_words, row_order
from lightning_modelprof.report.tables.trace.table import trace_table

_HOST_TOTAL, *_HOST_EACH = tally_columns(
    "host_",
    "CPU",
    lambda one: one.host,
    help=(
        "time including everything inside. A call within one of the same name counts in Calls and Self only,"
        " so Avg, Max and Min are over outermost calls."
    ),
)
_DEVICE_TOTAL, *_DEVICE_EACH = tally_columns(
    "device_", "GPU", lambda one: one.device, help="GPU Self including nested operators."
)
_NAME: Final = ColumnSpec("name", "Name")
_SHAPE: Final = ColumnSpec(
    "input_shapes", "Input Shapes", help="shapes of its inputs.", is_main=True, of=lambda one: one.shape
)
_FIGURES: Final = (
    ColumnSpec("calls", "Calls", Unit.COUNT, adds_up=True, help="all calls.", is_main=True),
    _HOST_TOTAL,
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
    *_HOST_EACH,
    ColumnSpec(
        "host_ratio", "Ratio(%)", Unit.RATIO, "CPU", adds_up=True, help="Self / Σ Self of all operators."
    ),
    _DEVICE_TOTAL,
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
    *_DEVICE_EACH,
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


def _memory(key: str, label: str, group: str, of: Callable[[MemoryChange], int]) -> ColumnSpec:
    return ColumnSpec(
        key,
        label,
        Unit.BYTES,
        group,
        adds_up=label == "Self",
        help="allocated minus freed memory while the operator ran; Self excludes nested operators.",
        of=lambda one: None if one.memory is None else of(one.memory),
    )


_MEMORY: Final = (
    _memory("host_bytes", "Total", "CPU memory", lambda change: change.host),
    _memory("host_self_bytes", "Self", "CPU memory", lambda change: change.host_self),
    _memory("device_bytes", "Total", "GPU memory", lambda change: change.device),
    _memory("device_self_bytes", "Self", "GPU memory", lambda change: change.device_self),
)
_MODULE: Final = ColumnSpec(
    "module",
    "Module",
    help=(
        "the innermost module around the calls with the most CPU time, and the number of other modules (if"
        " module calls were recorded)."
    ),
    of=lambda one: _main_module(one.modules),
)
_CALLER: Final = ColumnSpec(
    "called_from",
    "Called from",
    help=(
        "the most frequent innermost frame outside torch, Lightning and lightning-modelprof (if stacks were"
        " recorded)."
    ),
    is_main=True,
    of=lambda one: max(one.callers.items(), key=lambda item: item[::-1], default=(None, 0))[0],
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


_Row = tuple[int, Operator | Mapping[str, Any]]
"""A row's depth and content."""

NO_OPERATOR: Final = "(no operator)"
"""Name of the row with the GPU events that no operator launched."""

_NO_FLOPS_NOTE: Final = "FLOPs need input shapes; set record_shapes=True."
_NO_MEMORY_NOTE: Final = (
    "Memory wasn't recorded, so the rows keep their usual order; set profile_memory=True."
)


@trace_table(OPERATORS, "operator", TraceFacts.operators)
def operators_table(ranks: Ranks[Operators], options: TableOptions) -> Table:
    """Build one row per operator name over all threads and ranks.

    Args:
        options: ``sorted_by`` orders the rows, ``thread_sep`` gives each thread of each rank its own section,
            ``op_detail`` adds rows below each operator.
    """
    return _Writer(ranks, options, OPERATORS).table()


@trace_table(OPERATORS_BY_SHAPE, "operator", TraceFacts.operators_by_shape)
def operator_by_shape_table(ranks: Ranks[Operators], options: TableOptions) -> Table:
    """Build one row per operator name and input shapes over all threads and ranks.

    Args:
        options: ``sorted_by`` orders the rows, ``thread_sep`` gives each thread of each rank its own section.
    """
    return _Writer(ranks, options, OPERATORS_BY_SHAPE).table()


class _Writer:
    def __init__(self, ranks: Ranks[Operators], options: TableOptions, kind: TableSpec) -> None:
        self.ranks = ranks
        self.options = options
        self.kind = kind
        self.with_shapes = kind is OPERATORS_BY_SHAPE
        self.facts = tuple(ranks.found.values())
        self.host_self_ns = sum(fact.host_self_ns for fact in self.facts)
        self.device_ns = sum_of_known(fact.device_ns for fact in self.facts)

    def table(self) -> Table:
        asks_memory = is_of_memory(self.options.sorted_by)
        shows_memory = asks_memory and any(fact.has_memory for fact in self.facts)
        hidden = {
            *(() if shows_memory else _MEMORY),
            *(() if any(fact.has_modules for fact in self.facts) else (_MODULE,)),
            *(() if any(fact.has_callers for fact in self.facts) else (_CALLER,)),
        }
        ratios: dict[str, Callable[[Operator], Cell]] = {
            "host_ratio": lambda one: share(one.host_self_ns, self.host_self_ns),
            "device_ratio": lambda one: share(one.device_self_ns, self.device_ns),
        }
        columns = (column for column in self.kind.columns if column not in hidden)
        order = order_of(
            self.options.sorted_by, has_device=self.device_ns is not None, has_memory=shows_memory
        )
        rows = [*self._rows(), *self._not_launched()]
        return self.kind.table(
            [row for _, row in rows],
            columns=tuple(replace(one, of=ratios.get(one.key, one.of)) for one in columns),
            depths=tuple(depth for depth, _ in rows) if any(depth for depth, _ in rows) else (),
            notes=(
                order_words(order),
                *(() if any(fact.has_shapes for fact in self.facts) else (_NO_FLOPS_NOTE,)),
                *((_NO_MEMORY_NOTE,) if asks_memory and not shows_memory else ()),
            ),
        )

    def _operators(self, thread: OperatorThread) -> tuple[Operator, ...]:
        return thread.by_shape if self.with_shapes else thread.operators

    def _rows(self) -> Iterator[_Row]:
        if not self.options.thread_sep:
            threads = [thread for fact in self.facts for thread in fact.threads]
            yield from self._section_rows(chain.from_iterable(map(self._operators, threads)), 0)
            return
        sections = [
            (self.ranks.prefix(rank) + thread.name, thread)
            for rank, fact in self.ranks.found.items()
            for thread in fact.threads
        ]
        sections.sort(key=lambda section: -sum(one.host_self_ns for one in self._operators(section[1])))
        for name, thread in sections:
            yield 0, self._header(name, thread)
            yield from self._section_rows(self._operators(thread), 1)

    def _section_rows(self, operators: Iterable[Operator], depth: int) -> Iterator[_Row]:
        for operator in sorted(pool_alike(operators), key=self._order):
            yield depth, operator
            if self.options.op_detail and not self.with_shapes:
                yield from self._details(operator, depth + 1)

    def _order(self, row: Operator | Child) -> tuple[object, ...]:
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
            cells = _parts("host_", child.host, operator.host) | _parts(
                "device_", child.device, operator.device
            )
            yield depth, {"name": child.name, "calls": child.calls, **cells}
            yield from _kernels(child, depth + 1)
        yield from _kernels(operator, depth)

    def _header(self, name: str, thread: OperatorThread) -> Mapping[str, Cell]:
        operators = self._operators(thread)
        self_ns = sum(operator.host_self_ns for operator in operators)
        device_ns = sum_of_known(operator.device_self_ns for operator in operators)
        return {
            "name": name,
            "calls": sum(operator.calls for operator in operators),
            "host_total_ns": thread.host_ns,
            "host_self_ns": self_ns,
            "host_ratio": share(self_ns, self.host_self_ns),
            **self._device(device_ns),
            "flops": sum_of_known(operator.flops for operator in operators),
        }

    def _not_launched(self) -> Iterator[_Row]:
        tally = add_up(fact.not_launched for fact in self.facts)
        if tally.calls:
            yield 0, {"name": NO_OPERATOR, **self._device(tally.total_ns)}

    def _device(self, self_ns: int | None) -> dict[str, Cell]:
        ratio = share(self_ns, self.device_ns)
        return {"device_total_ns": self_ns, "device_self_ns": self_ns, "device_ratio": ratio}


def _kernels(launcher: Operator | Child, depth: int) -> Iterator[_Row]:
    for name, tally in sorted(launcher.kernels.items(), key=lambda item: (-item[1].total_ns, item[0])):
        yield depth, {"name": name, "calls": tally.calls, **_parts("device_", tally, launcher.device)}


def _parts(prefix: str, tally: Tally | None, whole: Tally | None) -> dict[str, Cell]:
    """Fill a row below an operator; its ratio is the share of that operator's total."""
    if tally is None:
        return {}
    ratio = None if whole is None else share(tally.total_ns, whole.total_ns)
    return {**tally_cells(prefix, tally), f"{prefix}ratio": ratio}


def _main_module(modules: Mapping[str, int]) -> str | None:
    if not modules:
        return None
    name, _ = max(modules.items(), key=lambda item: (item[1], item[0]))
    others = len(modules) - 1
    return name if not others else f"{name} and {others} more"
