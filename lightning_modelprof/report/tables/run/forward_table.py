"""Forward tables: parameters, multiply-adds and activations of one forward pass, as fvcore counts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.modules.forward_check import ForwardFacts, ForwardModule
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, CompareKey, TableSpec
from lightning_modelprof.report.tables.run.table import run_table

_MODEL: Final = "(model)"
_MOST_NAMED: Final = 8
"""At most this many disagreements or modules are named; the rest are counted."""


def _depth(module: ForwardModule) -> int:
    return len(module.path.split(".")) if module.path else 0


_ONE_MAC: Final = 'one multiply-add, which is two FLOPs and one fvcore "flop".'
_COLUMNS: Final = (
    ColumnSpec("module", "Module", of=lambda module: module.path.rpartition(".")[2] or _MODEL),
    ColumnSpec("type", "Class", help="class of the module.", of=lambda module: module.type_name),
    ColumnSpec(
        "parameters",
        "Parameters",
        Unit.COUNT,
        help="number of elements. Tied parameters count at their first occurrence.",
    ),
    ColumnSpec(
        "macs",
        "MACs",
        Unit.MACS,
        help=_ONE_MAC,
    ),
    ColumnSpec("share", "MACs(%)", Unit.RATIO, help="of the model's MACs."),
    ColumnSpec(
        "activations", "Activations", Unit.COUNT, help="elements in the first outputs of contractions."
    ),
)
FORWARD_MODULES: Final = TableSpec(
    id="forward_modules",
    title="Forward pass by module (fvcore)",
    help=(
        'Requires `inspect={"fvcore": True}`. fvcore counts one forward pass of a copy of the module on the'
        " counted batch, in one process. Work that `training_step` does outside the module runs twice"
        " more. Only contractions count; fvcore's formulas for norms, pooling and resampling are off. It has"
        " none for attention and recurrent layers, among others, so such modules differ from the step count."
        " Rows include submodules, and modules without parameters, MACs or activations are omitted."
    ),
    columns=_COLUMNS,
    depth_of=_depth,
    place=220,
    views=("modules",),
    compared=CompareKey(keys=("macs",)),
    heading="Forward pass by module and by operator (fvcore)",
)

_OPERATOR_COLUMNS: Final = (
    ColumnSpec("operator", "Operator"),
    ColumnSpec(
        "macs",
        "MACs",
        Unit.MACS,
        adds_up=True,
        help=_ONE_MAC,
    ),
    ColumnSpec("share", "MACs(%)", Unit.RATIO, adds_up=True, help="of the model's MACs."),
)
FORWARD_OPERATORS: Final = TableSpec(
    id="forward_operators",
    title="Forward pass by operator (fvcore)",
    help="The same MACs by fvcore's operator names.",
    columns=_OPERATOR_COLUMNS,
    place=230,
    views=("modules",),
    compared=CompareKey(keys=("macs",)),
)


@run_table(FORWARD_MODULES, needs=Facts.cost)
def forward_modules_table(facts: Facts, options: TableOptions) -> Iterator[Table]:
    """List parameters, multiply-adds and activations by module of a forward pass."""
    forward = facts.forward
    shown = [module for module in forward.modules if _is_shown(module, options.module_depth)]
    yield FORWARD_MODULES.table(
        shown, notes=(*_check_notes(forward), *_coverage_notes(forward)), is_detail=True
    )


@run_table(FORWARD_OPERATORS, needs=Facts.forward)
def forward_operators_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    if not facts.forward.operators:
        raise NotMeasured("fvcore counted no multiply-adds")
    yield FORWARD_OPERATORS.table(facts.forward.operators, is_detail=True)


def _is_shown(module: ForwardModule, module_depth: int | None) -> bool:
    if module_depth is not None and _depth(module) > module_depth:
        return False
    return bool(not module.path or module.parameters or module.macs or module.activations)


def _check_notes(facts: ForwardFacts) -> tuple[str, ...]:
    if facts.agrees is None:
        return (f"Not checked against the step count: {facts.check_note}.",)
    notes = [
        f"{found.module or _MODEL}: the counted step has {found.ours_macs} MACs, fvcore {found.fvcore_macs}."
        for found in facts.disagreements[:_MOST_NAMED]
    ]
    if facts.agrees:
        notes.append("The result agrees with the forward FLOPs of a real step within 0.1% in every module.")
    more = len(facts.disagreements) - _MOST_NAMED
    if more > 0:
        notes.append(f"{more} more modules differ.")
    if facts.placed_differently:
        places = _some(tuple(path or _MODEL for path in facts.placed_differently))
        notes.append(f"Both counts assign the same work to different modules inside {places}.")
    return tuple(notes)


def _coverage_notes(facts: ForwardFacts) -> tuple[str, ...]:
    notes = []
    if facts.unsupported:
        calls = ", ".join(f"{name} ({number})" for name, number in facts.unsupported.items())
        notes.append(f"Operators that fvcore doesn't support (calls): {calls}.")
    if facts.uncalled:
        notes.append(
            f"Not called: {_some(facts.uncalled)}. Work that uses their weights counts at their parents."
        )
    return tuple(notes)


def _some(paths: tuple[str, ...]) -> str:
    more = len(paths) - _MOST_NAMED
    return ", ".join(paths[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
