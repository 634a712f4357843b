"""The arguments of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Final, NoReturn, TypeVar

from lightning_modelprof import __version__
from lightning_modelprof.errors import one_line, quoted
from lightning_modelprof.report.options import (
    DEFAULT_OPTIONS,
    SORT_KEYS,
    TIME_UNITS,
    VIEWS,
    TableOptions,
    parse_row_limit,
    parse_sort_key,
    parse_step_range,
    parse_time_unit,
    parse_views,
    parse_whole_number,
)
from lightning_modelprof.run.chrome import MAX_TRACE_BYTES

T = TypeVar("T")

DEFAULT_TOLERANCE: Final = 0.05
"""Of ``compare``."""

_MAX_GIB: Final = 1_000_000

COMPARE_REPEATS: Final = "lightning-modelprof compare [options] --before A1 A2 ... --after B1 B2 ..."


class _Parser(argparse.ArgumentParser):
    """A parser whose messages quote what it was given, without what a terminal would obey."""

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser: argparse.ArgumentParser = _Parser(
        prog="lightning-modelprof", description="Shows where PyTorch Lightning training time goes."
    )
    parser.add_argument("--version", action="version", version=f"lightning-modelprof {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="show the report of a saved run")
    report.add_argument("path", help="the run's folder or one above it, e.g. lightning_logs/version_0")
    analyze_command = commands.add_parser("analyze", help="analyze trace files of torch.profiler")
    analyze_command.add_argument(
        "paths", nargs="+", metavar="TRACE", help="a trace file, or a folder of them"
    )
    _add_max_gib(analyze_command)
    analyze_command.add_argument(
        "--step-range",
        type=_checked(parse_step_range),
        metavar="REGEX",
        help="the steps are the ranges (record_function) whose names match, such as execute_model (default:"
        " those of profiler.step(), else a guess)",
    )
    _add_compare(commands)
    _add_tensorboard(commands)
    _add_module_options(report)
    for command in (report, analyze_command):
        command.add_argument("--json", metavar="FILE", help="write JSON instead; - for the standard output")
        command.add_argument("--html", metavar="FILE", help="also write a page for a browser")
        command.add_argument("--full", action="store_true", help="print all tables, not the short report")
        _add_report_options(command)
    return parser


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "compare",
        help="tell whether a run is faster than another, and how sure that is",
        usage=f"%(prog)s [options] BEFORE AFTER\n       {COMPARE_REPEATS}",
        description="Tells whether the runs AFTER are faster than the runs BEFORE, by how much, how sure that"
        " is, and where the difference lies. Several runs a side tell much more than one; let them take"
        " turns.",
        epilog="exit status: 0 faster or the same, 3 slower than the tolerance, 4 cannot tell, 1 an error"
        " (2 wrong arguments).",
    )
    a_run = "folder of a run or one above it, run.json or report.json"
    command.add_argument("sides", nargs="*", metavar="BEFORE AFTER", help=f"one run a side: {a_run}")
    command.add_argument("--before", nargs="+", metavar="RUN", default=[], help="one or more runs")
    command.add_argument("--after", nargs="+", metavar="RUN", default=[], help="one or more runs")
    command.add_argument(
        "--tolerance",
        type=_checked(_parse_tolerance),
        default=DEFAULT_TOLERANCE,
        metavar="RATIO",
        help="change of the time per step that does not matter, as a fraction (default: %(default)g)",
    )
    command.add_argument("--json", metavar="FILE", help="write JSON instead; - for the standard output")
    command.set_defaults(full=True)


def _add_tensorboard(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "tensorboard",
        help="bring saved runs or traces into a log directory of TensorBoard",
        description="Writes what TensorBoard's tab Model Profile shows: of runs that were saved without"
        " TensorBoard, and of traces of torch.profiler, such as those of torch_tb_profiler. A run that logs"
        " to TensorBoard needs none of this.",
    )
    command.add_argument(
        "paths", nargs="+", metavar="PATH", help="folder of a saved run, a trace file, or a folder of either"
    )
    command.add_argument(
        "--logdir",
        required=True,
        metavar="DIR",
        help="what TensorBoard is started with, by --logdir DIR",
    )
    _add_max_gib(command)


def _add_max_gib(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-gib",
        type=_checked(_parse_gib),
        default=MAX_TRACE_BYTES / 2**30,
        metavar="N",
        help="largest uncompressed trace to read (default: %(default)g)",
    )


def compared_paths(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The runs before and after that ``compare`` was given.

    Raises:
        ValueError: when they are neither two paths nor some for ``--before`` and ``--after``.
    """
    sides, before, after = arguments.sides, arguments.before, arguments.after
    if len(sides) == 2 and not before and not after:
        return [sides[0]], [sides[1]]
    if not sides and before and after:
        return before, after
    got = [f"{len(sides)} without a name"] if sides else []
    got += [f"{len(paths)} for {name}" for name, paths in (("--before", before), ("--after", after)) if paths]
    raise ValueError(
        f"compare: expected two runs, or runs for both --before and --after, got {', '.join(got) or 'none'}."
        f" Write: lightning-modelprof compare BEFORE AFTER, or {COMPARE_REPEATS}"
    )


def _add_module_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("what is shown of the model")
    group.add_argument(
        "--module-depth",
        type=_checked(lambda text: parse_whole_number(text, 0)),
        metavar="N",
        help="deepest modules of the tree, 0 being the model (default: all)",
    )
    group.add_argument(
        "--top-modules",
        type=_checked(lambda text: parse_whole_number(text, 1)),
        metavar="N",
        help=f"classes that are named for each depth (default: {DEFAULT_OPTIONS.top_modules})",
    )


def _add_report_options(command: argparse.ArgumentParser) -> None:
    """The arguments of ``TableOptions``; what is not given is ``None``, to be told from a default."""
    group = command.add_argument_group("what is shown of a trace")
    group.add_argument(
        "--views",
        type=_checked(lambda text: parse_views(text.split(","))),
        metavar="NAME,...",
        help=f"which tables: {', '.join(VIEWS)} (default: all)",
    )
    group.add_argument(
        "--sorted-by",
        type=_checked(parse_sort_key),
        metavar="KEY",
        help=f"order of operators, kernels and ranges: {', '.join(SORT_KEYS)} (default: gpu_total where there"
        " are device events, else cpu_total)",
    )
    group.add_argument(
        "--time-unit",
        type=_checked(parse_time_unit),
        metavar="UNIT",
        help=f"unit of durations: {', '.join(TIME_UNITS)} (default: one that fits each table)",
    )
    group.add_argument(
        "--thread-sep", action=argparse.BooleanOptionalAction, help="show operators and ranges by host thread"
    )
    group.add_argument(
        "--op-detail",
        action=argparse.BooleanOptionalAction,
        help="show below each operator what it calls and launches",
    )
    group.add_argument(
        "--row-limit",
        type=_checked(parse_row_limit),
        metavar="N",
        help="most rows of a table, and most below any one row; JSON has all"
        f" (default: {DEFAULT_OPTIONS.row_limit})",
    )


def report_options(arguments: argparse.Namespace, default: TableOptions = DEFAULT_OPTIONS) -> TableOptions:
    """What was asked for on the command line.

    Args:
        arguments: as parsed.
        default: what holds where nothing was asked for.
    """
    asked = {field.name: getattr(arguments, field.name, None) for field in fields(TableOptions)}
    return replace(default, **{name: value for name, value in asked.items() if value is not None})


def _parse_gib(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < _MAX_GIB:
        raise ValueError(f"expected a number of GiB above 0 and below {_MAX_GIB:,}, got {quoted(text)}")
    return number


def _parse_tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1:
        raise ValueError(f"expected a fraction above 0 and below 1, such as 0.05 for 5 %, got {quoted(text)}")
    return number


def _checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser whose message argparse shows; of another ValueError it tells only the function's name."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked
