"""Source lines: which lines of the user's code take the time, run operators, wait and copy."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.source_lines import SourceLine
from lightning_modelprof.report.kinds import TableKind
from lightning_modelprof.report.model import Column, Table, Unit
from lightning_modelprof.report.options import TableOptions
from lightning_modelprof.report.tables.rows import common_folder
from lightning_modelprof.run.loops import loop_of

_OF_SAMPLES: Final = (
    "samples of the training thread, and their share. A sample counts for the innermost line of"
    " yours on the stack, with all that libraries do for it, and stands for the time since the"
    " look before it. A share p of n samples has a standard error of sqrt(p (1 - p) / n), somewhat"
    " more as samples that follow each other are not independent."
)
_COLUMNS: Final = (
    Column("place", "Line"),
    Column("function", "Function", help="that the line is in."),
    Column("module", "Module", help="of the model that ran it."),
    Column(
        "share",
        "Time(%)",
        Unit.RATIO,
        adds_up=True,
        help=_OF_SAMPLES,
    ),
    Column(
        "samples",
        "Samples",
        Unit.COUNT,
        adds_up=True,
        help=_OF_SAMPLES,
    ),
    Column(
        "operators",
        "Operators",
        Unit.COUNT,
        adds_up=True,
        help="operators, without views, that the line ran itself in the one inspected step.",
    ),
    Column(
        "backward_operators",
        "in backward",
        Unit.COUNT,
        adds_up=True,
        help="operators that backward ran for the line.",
    ),
    Column(
        "waits",
        "Values read",
        Unit.COUNT,
        adds_up=True,
        help=(
            "how often a value, or how many there are, had to be known (`.item()`, `if tensor`, masks,"
            " `nonzero`, printing): on a device the host waits each time."
        ),
    ),
    Column("copies", "Copies", Unit.COUNT, adds_up=True, help="between host and device."),
    Column("host_tensors", "Host tensors", Unit.COUNT, adds_up=True, help="made of Python numbers or NumPy."),
    Column("num_bytes", "Bytes", Unit.BYTES, adds_up=True, help="of copies and host tensors."),
)
SOURCE_LINES: Final = TableKind(
    id="source_lines",
    title="Source lines",
    help=(
        "Every line of your code that ran an operator in the inspected step, or was seen by the"
        " sampler; most time first, then most values read, copies and host tensors, then most operators."
        ' A dash in Time and Samples: not sampled (`inspect={"sampling": False}`); in the'
        " others: no step was inspected itself (`flops=False`, or the model is compiled)."
    ),
    columns=_COLUMNS,
    views=("operators",),
    place=1,
)


_SAMPLED: Final = (
    "Time: share of all samples of the training thread whose innermost line of yours it is, with all that"
    " libraries do for it. The more samples, the more exact it is."
)
_RUN: Final = (
    "Operators, values read (.item(), if tensor, masks), copies and host tensors (made of Python numbers or"
    " NumPy) are those of one {step}. On a device the host waits for each value that is read."
)


def source_lines_table(analysis: Analysis, options: TableOptions) -> tuple[Table, ...]:  # noqa: ARG001
    """Which lines to look at."""
    lines = analysis.source_lines
    if isinstance(lines, Absent) and analysis.cost is None and isinstance(analysis.hot_lines, Absent):
        return ()  # nobody asked for it
    absent_reason = lines.reason if isinstance(lines, Absent) else None
    found = () if isinstance(lines, Absent) else lines
    if absent_reason is None and not found:
        absent_reason = "no line of yours was seen"
    folder = common_folder({line.file for line in found})
    notes = [f"Files are in {folder}."] if folder else []
    if any(line.share is not None for line in found):
        notes.append(_SAMPLED)
    if any(line.operators is not None for line in found):
        notes.append(_RUN.format(step=loop_of(analysis.info.loop).step))
    elif found and analysis.cost is not None and analysis.cost.sites_note:
        notes.append(f"What lines run is not known: {analysis.cost.sites_note}.")
    return (
        SOURCE_LINES.table(
            rows=tuple(_row(line, folder) for line in found),
            notes=tuple(notes),
            absent_reason=absent_reason,
            row_limit=20,
        ),
    )


def _row(line: SourceLine, folder: str) -> tuple[str | int | float | None, ...]:
    file = line.file[len(folder) :].lstrip("/\\") if folder else line.file
    return (f"{file}:{line.line}", *(getattr(line, column.key) for column in _COLUMNS[1:]))
