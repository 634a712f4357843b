"""Modules: parameters, multiply-adds and time by module and by class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.modules.module_tree import Figure, ModuleTree
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
    ColumnSpec(
        "module",
        "Module",
        of=lambda one: f"{one.name} ({one.type_name})" if one.name else one.type_name,
    ),
    ColumnSpec(
        "parameters",
        "Params",
        Unit.COUNT,
        help=(
            "number of elements. Tied parameters count at the first module that has them. A dash means not"
            " initialized yet."
        ),
        is_optional=True,
    ),
    ColumnSpec(
        "parameters_ratio",
        "%",
        Unit.RATIO,
        help="share of the model's.",
        of=lambda one: one.parameters_share,
        is_optional=True,
    ),
    ColumnSpec(
        "forward_macs",
        "MACs",
        Unit.MACS,
        "Forward",
        help="of the counted step's forward.",
        is_optional=True,
    ),
    ColumnSpec(
        "forward_macs_ratio",
        "%",
        Unit.RATIO,
        "Forward",
        help="share of the model's.",
        of=lambda one: one.macs_share,
        is_optional=True,
    ),
    ColumnSpec("forward_ns", "Latency", Unit.DURATION_NS, "Forward", help=_LATENCY, is_optional=True),
    ColumnSpec(
        "forward_ratio",
        "%",
        Unit.RATIO,
        "Forward",
        help="share of the model's.",
        of=lambda one: one.forward_share,
        is_optional=True,
    ),
    ColumnSpec(
        "forward_flops_per_s",
        "FLOP/s",
        Unit.FLOPS_PER_S,
        "Forward",
        help=_FLOP_RATE,
        is_optional=True,
    ),
    ColumnSpec(
        "backward_ns",
        "Latency",
        Unit.DURATION_NS,
        "Backward",
        help=_BACKWARD_LATENCY,
        is_optional=True,
    ),
    ColumnSpec(
        "backward_flops_per_s",
        "FLOP/s",
        Unit.FLOPS_PER_S,
        "Backward",
        help=_FLOP_RATE,
        is_optional=True,
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
    depth_of=lambda one: one.depth,
    views=("modules",),
    place_in_views=-1,
)


_CLASS_COLUMNS: Final = (
    ColumnSpec("depth", "Depth"),
    ColumnSpec(
        "parameters_class",
        "Class",
        group="By parameters",
        help="class with the most.",
        is_optional=True,
    ),
    ColumnSpec(
        "parameters",
        "Params",
        Unit.COUNT,
        "By parameters",
        help="number of elements. Tied parameters count at the first module that has them.",
        is_optional=True,
    ),
    ColumnSpec("macs_class", "Class", group="By MACs", help="class with the most.", is_optional=True),
    ColumnSpec(
        "forward_macs",
        "MACs",
        Unit.MACS,
        "By MACs",
        help="of the counted step's forward.",
        is_optional=True,
    ),
    ColumnSpec("forward_class", "Class", group="By forward", help="class with the most.", is_optional=True),
    ColumnSpec("forward_ns", "Latency", Unit.DURATION_NS, "By forward", help=_LATENCY, is_optional=True),
    ColumnSpec("backward_class", "Class", group="By backward", help="class with the most.", is_optional=True),
    ColumnSpec(
        "backward_ns",
        "Latency",
        Unit.DURATION_NS,
        "By backward",
        help=_BACKWARD_LATENCY,
        is_optional=True,
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
    place=210,
    views=("modules",),
    place_in_views=-1,
)


_SLOWEST_COLUMNS: Final = (
    ColumnSpec("module", "Module", of=lambda slow: slow.module.path or slow.module.type_name),
    ColumnSpec("type_name", "Class", help="class of the module.", of=lambda slow: slow.module.type_name),
    ColumnSpec("forward_ns", "Forward", Unit.DURATION_NS, help=_LATENCY, is_optional=True),
    ColumnSpec("backward_ns", "Backward", Unit.DURATION_NS, help=_BACKWARD_LATENCY, is_optional=True),
    ColumnSpec(
        "ratio",
        "Ratio(%)",
        Unit.RATIO,
        help="share of the model's forward and backward time.",
        of=lambda slow: slow.share,
    ),
)
SLOWEST_MODULES: Final = TableSpec(
    id="slowest_modules",
    title="Slowest modules",
    help="The five modules with the most self time, forward and backward, excluding submodules.",
    columns=_SLOWEST_COLUMNS,
    place=200,
    views=("modules",),
    place_in_views=-1,
)

_NUM_SLOWEST: Final = 5

_CLASS_KEYS: Final[Mapping[Figure, str]] = {
    "parameters": "parameters_class",
    "forward_macs": "macs_class",
    "forward_ns": "forward_class",
    "backward_ns": "backward_class",
}
"""Figure → column with its class."""


@run_table(SLOWEST_MODULES, needs=Facts.modules)
def slowest_modules_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    if facts.modules.steps:
        yield _slowest(facts.modules)


@run_table(TOP_MODULES, MODULE_TREE, needs=Facts.cost)
def module_tree_tables(facts: Facts, options: TableOptions) -> Iterator[Table]:
    depth = _depth(facts.modules, options.module_depth)
    # Pages show the slowest modules and fold these.
    yield replace(_classes(facts.modules, depth, options.top_modules), is_detail=True)
    yield replace(_modules(facts.modules, depth), is_detail=True)


def module_tables(
    tree: ModuleTree,
    *,
    module_depth: int | None = None,
    top_modules: int = 3,
    detailed: bool = True,
) -> tuple[Table, ...]:
    """Build the tables of the slowest modules, the top classes at each depth, and all modules.

    Args:
        module_depth: deepest level shown, 0 being the model; ``None`` means all.
        top_modules: number of classes per depth and figure.
        detailed: whether to include the table of all modules.
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
    return SLOWEST_MODULES.table(
        found,
        notes=(f"Median of {tree.steps} timed steps.",) if found else (),
        absent_reason=None if found else "no module was timed",
    )


def _modules(tree: ModuleTree, depth: int) -> Table:
    shown = [module for module in tree.modules if module.depth <= depth]
    notes = tree.notes
    if len(shown) < len(tree.modules):
        notes = (f"Shows modules to depth {depth} of {tree.depth} (module_depth={depth}).", *notes)
    return MODULE_TREE.table(shown, notes=notes)


def _classes(tree: ModuleTree, deepest: int, count: int) -> Table:
    rows: list[dict[str, Cell]] = []
    for depth in range(deepest + 1):
        ranked = {figure: tree.top_classes(depth, figure, count) for figure in _CLASS_KEYS}
        for place in range(max(map(len, ranked.values()))):
            row: dict[str, Cell] = {"depth": str(depth)}
            for figure, ranking in ranked.items():
                if place < len(ranking):
                    row[_CLASS_KEYS[figure]], row[figure] = ranking[place]
            rows.append(row)
    return TOP_MODULES.table(rows, absent_reason=None if rows else "nothing was measured")
