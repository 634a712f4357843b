"""Source lines: time, operators, waits and copies by line of the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.report.model import Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.specs import ColumnSpec, TableSpec
from lightning_modelprof.report.tables.rows import common_folder, shortened
from lightning_modelprof.report.tables.run.table import run_table

_OF_SAMPLES: Final = (
    "samples of the training thread and their share. A sample counts for your innermost line on the stack,"
    " including library code it calls, weighted by the time since the previous sample. A share p of n samples"
    " has a standard error of about sqrt(p (1 - p) / n)."
)
_COLUMNS: Final = (
    ColumnSpec("place", "Line"),
    ColumnSpec("function", "Function", help="function containing the line."),
    ColumnSpec("module", "Module", help="module that ran it."),
    ColumnSpec(
        "share",
        "Time(%)",
        Unit.RATIO,
        adds_up=True,
        help=_OF_SAMPLES,
    ),
    ColumnSpec(
        "samples",
        "Stack samples",
        Unit.COUNT,
        adds_up=True,
        help=_OF_SAMPLES,
    ),
    ColumnSpec(
        "operators",
        "Operators",
        Unit.COUNT,
        adds_up=True,
        help="operators (without views) that the line ran in the inspected step.",
    ),
    ColumnSpec(
        "backward_operators",
        "Backward operators",
        Unit.COUNT,
        adds_up=True,
        help="operators that backward ran for the line.",
    ),
    ColumnSpec(
        "waits",
        "Syncs",
        Unit.COUNT,
        adds_up=True,
        help=(
            "values or sizes read back from a tensor (`.item()`, a tensor in an `if` condition, boolean"
            " masks, `nonzero`,"
            " printing). On a GPU, each one makes the CPU wait."
        ),
    ),
    ColumnSpec("copies", "Copies", Unit.COUNT, adds_up=True, help="copies between CPU and GPU."),
    ColumnSpec(
        "host_tensors",
        "Host tensors",
        Unit.COUNT,
        adds_up=True,
        help="tensors made from Python numbers or NumPy arrays.",
    ),
    ColumnSpec(
        "num_bytes", "Bytes copied", Unit.BYTES, adds_up=True, help="bytes of copies and host tensors."
    ),
)
SOURCE_LINES: Final = TableSpec(
    id="source_lines",
    title="Source lines",
    help=(
        "Each of your lines that ran an operator in the inspected step or was sampled, sorted by time, then"
        " by syncs, copies and host tensors, then by operators. Time and Samples are dashes without"
        ' sampling (`inspect={"sampling": False}`); the other columns are dashes if no step was inspected'
        " (`flops=False` or a compiled model)."
    ),
    columns=_COLUMNS,
    place=110,
    views=("operators",),
    place_in_views=1,
)


@run_table(SOURCE_LINES)
def source_lines_table(facts: Facts, options: TableOptions) -> Iterator[Table]:  # noqa: ARG001
    cost = facts.get(Facts.cost)
    if cost is None and facts.get(Facts.hot_lines) is None:
        return  # not requested
    lines = facts.source_lines
    if not lines:
        raise NotMeasured("none of your lines was sampled or inspected")
    folder = common_folder({line.file for line in lines})
    notes = [f"Paths are relative to {folder}."] if folder else []
    if cost is not None and cost.sites_note and all(line.operators is None for line in lines):
        notes.append(f"Operators per line are unknown: {cost.sites_note}.")
    yield SOURCE_LINES.table(
        lines,
        of={"place": lambda line: f"{shortened(line.file, folder)}:{line.line}"},
        notes=tuple(notes),
        row_limit=20,
    )
