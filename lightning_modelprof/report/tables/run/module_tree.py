"""The model's modules: where parameters, multiply-adds and time are, module by module and class by class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.modules.module_tree import Figure, ModuleCost, ModuleTree
from lightning_modelprof.report.model import Cell, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.tables.run.table import run_table

_LATENCY: Final = (
    "time from start to end of the module's calls in one step. On the CPU it's wall time; on a device it's"
    " the time between events on its stream, including waiting for the CPU. It's the median over the timed"
    " steps, so one slow step doesn't count; with three steps on a busy machine it's still rough."
)
_FLOP_RATE: Final = (
    "FLOPs / latency. Backward includes recomputation. A dash means that a part with FLOPs took no"
    " measurable time, or that the timed and counted steps had different batch sizes."
)
_BACKWARD_LATENCY: Final = (
    "time of the autograd nodes created by the module's forward, including checkpoint recomputation and"
    " gradient accumulation. The engine's own time between nodes belongs to no module."
)
_TREE_COLUMNS: Final = (
    ColumnSpec("module", "Module"),
    ColumnSpec(
        "parameters",
        "Params",
        Unit.COUNT,
        help=(
            "number of elements. Tied parameters count at the first module that has them. A dash means not"
            " initialized yet."
        ),
    ),
    ColumnSpec("parameters_ratio", "%", Unit.RATIO, help="share of the model's."),
    ColumnSpec("forward_macs", "MACs", Unit.MACS, "Forward", help="of the counted step's forward."),
    ColumnSpec("forward_macs_ratio", "%", Unit.RATIO, "Forward", help="share of the model's."),
    ColumnSpec(
        "forward_ns",
        "Latency",
        Unit.DURATION_NS,
        "Forward",
        help=_LATENCY,
    ),
    ColumnSpec("forward_ratio", "%", Unit.RATIO, "Forward", help="share of the model's."),
    ColumnSpec(
        "forward_flops_per_s",
        "FLOP/s",
        Unit.FLOPS_PER_S,
        "Forward",
        help=_FLOP_RATE,
    ),
    ColumnSpec(
        "backward_ns",
        "Latency",
        Unit.DURATION_NS,
        "Backward",
        help=_BACKWARD_LATENCY,
    ),
    ColumnSpec(
        "backward_flops_per_s",
        "FLOP/s",
        Unit.FLOPS_PER_S,
        "Backward",
        help=_FLOP_RATE,
    ),
)
MODULE_TREE: Final = TableSpec(
    id="module_tree",
    title="Modules",
    help=(
        "One row per module, including everything inside it, under its first path. If `training_step` calls"
        " submodules directly rather than `self(...)`, the LightningModule's row is their sum and excludes"
        " the loss. Compiled modules are timed as a whole; their submodules, TorchScript and modules that"
        " didn't run show dashes. `ignore_modules` removes modules (by class or path) from all figures of"
        " these tables, totals included, but not from other tables. `module_depth` only"
        " hides rows."
    ),
    columns=_TREE_COLUMNS,
    views=("modules",),
    place=-1,
)


_CLASS_COLUMNS: Final = (
    ColumnSpec("depth", "Depth"),
    ColumnSpec("parameters_class", "Class", group="By parameters", help="class with the most."),
    ColumnSpec(
        "parameters",
        "Params",
        Unit.COUNT,
        "By parameters",
        help="number of elements. Tied parameters count at the first module that has them.",
    ),
    ColumnSpec("macs_class", "Class", group="By MACs", help="class with the most."),
    ColumnSpec("forward_macs", "MACs", Unit.MACS, "By MACs", help="of the counted step's forward."),
    ColumnSpec("forward_class", "Class", group="By forward", help="class with the most."),
    ColumnSpec(
        "forward_ns",
        "Latency",
        Unit.DURATION_NS,
        "By forward",
        help=_LATENCY,
    ),
    ColumnSpec("backward_class", "Class", group="By backward", help="class with the most."),
    ColumnSpec(
        "backward_ns",
        "Latency",
        Unit.DURATION_NS,
        "By backward",
        help=_BACKWARD_LATENCY,
    ),
)
TOP_MODULES: Final = TableSpec(
    id="top_modules",
    title="Top modules by depth",
    help=(
        "The classes with the most parameters, forward MACs and latency (forward and backward) at each depth"
        " (0 is the model). All modules of a class at the same depth are added up, including everything"
        " inside them."
    ),
    columns=_CLASS_COLUMNS,
    views=("modules",),
    place=-1,
)


_SLOWEST_COLUMNS: Final = (
    ColumnSpec("module", "Module"),
    ColumnSpec("type_name", "Class", help="class of the module."),
    ColumnSpec(
        "forward_ns",
        "Forward",
        Unit.DURATION_NS,
        help=_LATENCY,
    ),
    ColumnSpec(
        "backward_ns",
        "Backward",
        Unit.DURATION_NS,
        help=_BACKWARD_LATENCY,
    ),
    ColumnSpec("ratio", "Ratio(%)", Unit.RATIO, help="share of the model's forward and backward time."),
)
SLOWEST_MODULES: Final = TableSpec(
    id="slowest_modules",
    title="Slowest modules",
    help="The five modules with the most self time, forward and backward, excluding submodules.",
    columns=_SLOWEST_COLUMNS,
    views=("modules",),
    place=-1,
)

_NUM_SLOWEST: Final = 5

_FIGURES: Final[tuple[Figure, ...]] = ("parameters", "forward_macs", "forward_ns", "backward_ns")

_DEFINITION: Final = (
    "Rows include submodules. MACs cover the same operations as FLOPs, latency is the median of the timed"
    " steps, and FLOP/s is FLOPs / latency."
)
_BACKWARD: Final = (
    "Backward latency is the time spent in the autograd nodes created by a module's forward, including"
    " checkpoint recomputation. Backward FLOP/s includes the recomputation too."
)
_DEVICE: Final = (
    "Latency is the time between events on the device's stream, so it includes waiting for the CPU."
)
_SLOWEST_DEFINITION: Final = (
    "Self time, excluding submodules. Ratio is the share of the model's forward and backward time."
)
_CLASS_DEFINITION: Final = (
    "Totals for all modules of one class at the same depth, with their submodules, ranked by parameters,"
    " forward MACs and latency. Depth 0 is the model."
)


@run_table(SLOWEST_MODULES, needs=Facts.modules)
def slowest_modules_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    if facts.modules.steps:
        yield _slowest(facts.modules)


@run_table(TOP_MODULES, MODULE_TREE, needs=Facts.cost)
def module_tree_tables(facts: Facts, options: TableOptions) -> Iterator[Table]:
    depth = _depth(facts.modules, options.module_depth)
    # A page has the slowest modules, and folds these.
    yield replace(_classes(facts.modules, depth, options.top_modules), is_detail=True)
    yield replace(_modules(facts.modules, depth), is_detail=True)


def module_tables(
    tree: ModuleTree,
    *,
    module_depth: int | None = None,
    top_modules: int = 3,
    detailed: bool = True,
) -> tuple[Table, ...]:
    """Which modules hold the parameters, do the work and take the time; and which classes at each depth.

    Args:
        module_depth: deepest modules that are shown, 0 being the model; ``None`` means all.
        top_modules: classes that are named for each depth and figure.
        detailed: whether the tree itself is there.
    """
    depth = _depth(tree, module_depth)
    tables = [_slowest(tree)] if tree.steps else []
    tables.append(_classes(tree, depth, top_modules))
    if detailed:
        tables.append(_modules(tree, depth))
    return tuple(tables)


def _depth(tree: ModuleTree, asked: int | None) -> int:
    return tree.depth if asked is None else min(asked, tree.depth)


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
    return SLOWEST_MODULES.table(
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
    return MODULE_TREE.table(
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
            cells: list[Cell] = [str(depth)]
            for ranking in ranked:
                cells += ranking[place] if place < len(ranking) else (None, None)
            rows.append(tuple(cells))
    columns, shown = _measured_only(_CLASS_COLUMNS, rows)
    return TOP_MODULES.table(
        columns=columns,
        rows=shown,
        notes=(_CLASS_DEFINITION,),
        absent_reason=None if shown else "nothing was measured",
    )


def _measured_only(
    columns: tuple[ColumnSpec, ...], rows: list[tuple[Cell, ...]]
) -> tuple[tuple[ColumnSpec, ...], tuple[tuple[Cell, ...], ...]]:
    """Without the columns in which no row has anything: the notes say what was not measured."""
    filled = [i for i in range(len(columns)) if i == 0 or any(row[i] is not None for row in rows)]
    return tuple(columns[i] for i in filled), tuple(tuple(row[i] for i in filled) for row in rows)
