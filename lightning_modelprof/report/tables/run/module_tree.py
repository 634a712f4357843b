"""The model's modules: where parameters, multiply-adds and time are, module by module and class by class."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.modules.module_tree import Figure, ModuleCost, ModuleTree
from lightning_modelprof.report.model import Cell, Column, Table, Unit
from lightning_modelprof.report.options import TableOptions

_TREE_COLUMNS: Final = (
    Column("module", "Module"),
    Column("parameters", "Params", Unit.COUNT),
    Column("parameters_ratio", "%", Unit.RATIO),
    Column("forward_macs", "MACs", Unit.MACS, "Forward"),
    Column("forward_macs_ratio", "%", Unit.RATIO, "Forward"),
    Column("forward_ns", "Latency", Unit.DURATION_NS, "Forward"),
    Column("forward_ratio", "%", Unit.RATIO, "Forward"),
    Column("forward_flops_per_s", "FLOP/s", Unit.FLOPS_PER_S, "Forward"),
    Column("backward_ns", "Latency", Unit.DURATION_NS, "Backward"),
    Column("backward_flops_per_s", "FLOP/s", Unit.FLOPS_PER_S, "Backward"),
)

_CLASS_COLUMNS: Final = (
    Column("depth", "Depth"),
    Column("parameters_class", "Class", group="By parameters"),
    Column("parameters", "Params", Unit.COUNT, "By parameters"),
    Column("macs_class", "Class", group="By MACs"),
    Column("forward_macs", "MACs", Unit.MACS, "By MACs"),
    Column("forward_class", "Class", group="By forward"),
    Column("forward_ns", "Latency", Unit.DURATION_NS, "By forward"),
    Column("backward_class", "Class", group="By backward"),
    Column("backward_ns", "Latency", Unit.DURATION_NS, "By backward"),
)

_SLOWEST_COLUMNS: Final = (
    Column("module", "Module"),
    Column("type_name", "Class"),
    Column("forward_ns", "Forward", Unit.DURATION_NS),
    Column("backward_ns", "Backward", Unit.DURATION_NS),
    Column("ratio", "Ratio(%)", Unit.RATIO),
)
_NUM_SLOWEST: Final = 5

_FIGURES: Final[tuple[Figure, ...]] = ("parameters", "forward_macs", "forward_ns", "backward_ns")

_DEFINITION: Final = (
    "Each module with all modules inside of it, and its share of the model's. MACs are those of contractions,"
    " each two FLOPs; latency is the median of the timed steps, and FLOP/s are FLOPs over latency. A dash is"
    " not measured, or did not run."
)
_BACKWARD: Final = (
    "Backward latency is that of the autograd nodes that a module's forward made, with what a checkpoint"
    " computes again there; the FLOP/s count that too."
)
_DEVICE: Final = (
    "Latency is the time between events on the device's stream: it includes waiting for the host."
)
_SLOWEST_DEFINITION: Final = (
    "Time that a module takes by itself, without the modules inside of it; Ratio: of the model's forward and"
    " backward."
)
_CLASS_DEFINITION: Final = (
    "All modules of a class at one depth added up, with what is inside of them, by parameters, forward MACs"
    " and latency; depth 0 is the model."
)

_DETAILS: Final = frozenset({"module_tree", "top_modules"})
"""Folded at first: a page of a run has the slowest modules."""


def run_module_tables(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:
    """The tables of the modules of a run's model; none when it was not inspected."""
    if analysis.cost is None:
        return ()
    tables = module_tables(
        analysis.modules, module_depth=options.module_depth, top_modules=options.top_modules
    )
    return tuple(replace(table, is_detail=table.id in _DETAILS) for table in tables)


def module_tables(
    tree: ModuleTree | Absent,
    *,
    module_depth: int | None = None,
    top_modules: int = 3,
    detailed: bool = True,
) -> tuple[Table, ...]:
    """Which modules hold the parameters, do the work and take the time; and which classes at each depth.

    Definition: see the notes. What was not measured at all has no columns.

    Args:
        tree: the modules.
        module_depth: deepest modules that are shown, 0 being the model; ``None`` means all.
        top_modules: classes that are named for each depth and figure.
        detailed: whether the tree itself is there.
    """
    if isinstance(tree, Absent):
        tables = [_absent("top_modules", "Top modules by depth", _CLASS_COLUMNS, tree.reason)]
        if detailed:
            tables.append(_absent("module_tree", "Modules", _TREE_COLUMNS, tree.reason))
        return tuple(tables)
    depth = tree.depth if module_depth is None else min(module_depth, tree.depth)
    tables = [_slowest(tree)] if tree.steps else []
    tables.append(_classes(tree, depth, top_modules))
    if detailed:
        tables.append(_modules(tree, depth))
    return tuple(tables)


def _absent(key: str, title: str, columns: tuple[Column, ...], reason: str) -> Table:
    return Table(id=key, title=title, columns=columns, rows=(), absent_reason=reason)


def _slowest(tree: ModuleTree) -> Table:
    found = tree.slowest(_NUM_SLOWEST)
    columns, rows = _measured_only(
        _SLOWEST_COLUMNS,
        [
            (
                slow.module.path or slow.module.type_name,
                slow.module.type_name,
                slow.forward_ns,
                slow.backward_ns,
                slow.share,
            )
            for slow in found
        ],
    )
    return Table(
        id="slowest_modules",
        title="Slowest modules",
        columns=columns,
        rows=rows,
        notes=(f"{_SLOWEST_DEFINITION} Median of {tree.steps} timed steps.",) if rows else (),
        absent_reason=None if rows else "no module was timed",
    )


def _modules(tree: ModuleTree, depth: int) -> Table:
    shown = [module for module in tree.modules if module.depth <= depth]
    notes = [_DEFINITION]
    if tree.root.backward_ns is not None:
        notes.append(_BACKWARD)
    if tree.clock == "device":
        notes.append(_DEVICE)
    if len(shown) < len(tree.modules):
        notes.append(f"Shows modules to depth {depth} of {tree.depth} (module_depth={depth}).")
    columns, rows = _measured_only(_TREE_COLUMNS, [_row(module) for module in shown])
    return Table(
        id="module_tree",
        title="Modules",
        columns=columns,
        rows=rows,
        depths=tuple(module.depth for module in shown),
        notes=(*notes, *tree.notes),
    )


def _row(module: ModuleCost) -> tuple[Cell, ...]:
    name = f"{module.name} ({module.type_name})" if module.name else module.type_name
    return (
        name,
        module.parameters,
        module.parameters_share,
        module.forward_macs,
        module.macs_share,
        module.forward_ns,
        module.forward_share,
        module.forward_flops_per_s,
        module.backward_ns,
        module.backward_flops_per_s,
    )


def _classes(tree: ModuleTree, deepest: int, count: int) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for depth in range(deepest + 1):
        ranked = [tree.top_classes(depth, figure, count) for figure in _FIGURES]
        for place in range(max(map(len, ranked))):
            cells: list[Cell] = [str(depth) if place == 0 else ""]
            for ranking in ranked:
                cells += ranking[place] if place < len(ranking) else (None, None)
            rows.append(tuple(cells))
    columns, shown = _measured_only(_CLASS_COLUMNS, rows)
    return Table(
        id="top_modules",
        title="Top modules by depth",
        columns=columns,
        rows=shown,
        notes=(_CLASS_DEFINITION,),
        absent_reason=None if shown else "nothing was measured",
    )


def _measured_only(
    columns: tuple[Column, ...], rows: list[tuple[Cell, ...]]
) -> tuple[tuple[Column, ...], tuple[tuple[Cell, ...], ...]]:
    """Without the columns in which no row has anything: the notes say what was not measured."""
    filled = [i for i in range(len(columns)) if i == 0 or any(row[i] is not None for row in rows)]
    return tuple(columns[i] for i in filled), tuple(tuple(row[i] for i in filled) for row in rows)
