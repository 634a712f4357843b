"""Arguments shared by several commands, and their error messages."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Final, TypeVar

from lightning_modelprof.errors import quoted
from lightning_modelprof.report.options import (
    DEFAULT_OPTIONS,
    SORT_KEYS,
    TIME_UNITS,
    VIEWS,
    TableOptions,
    parse_row_limit,
    parse_sort_key,
    parse_time_unit,
    parse_views,
    parse_whole_number,
)
from lightning_modelprof.run.opening import MAX_TRACE_BYTES

T = TypeVar("T")

JSON_HELP: Final = "Write the report as JSON to FILE instead of printing it (- for stdout)"

_MAX_GIB: Final = 1_000_000

MAX_SECONDS: Final = 1_000_000_000

_OF_TABLES: Final = tuple(field.name for field in fields(TableOptions))
"""Each of these options asks for the tables."""


def add_output_options(command: argparse.ArgumentParser) -> None:
    """Add the options for printed and written output."""
    group = command.add_mutually_exclusive_group()
    group.add_argument("--full", action="store_true", help="Print all tables instead of the short report")
    group.add_argument("--brief", action="store_true", help="Print a one-line summary")
    command.add_argument("--json", metavar="FILE", help=JSON_HELP)
    command.add_argument(
        "--html", metavar="FILE", help="Write the report as an HTML page to FILE instead of printing it"
    )


def add_max_gib(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-gib",
        type=checked(lambda text: parse_below(text, _MAX_GIB, "a number of GiB")),
        default=MAX_TRACE_BYTES / 2**30,
        metavar="N",
        help="Maximum uncompressed trace size to read, in GiB (default: %(default)g)",
    )


def add_module_options(command: argparse.ArgumentParser) -> None:
    """Add the model options of ``TableOptions``; omitted ones are ``None``."""
    group = command.add_argument_group("model tables")
    group.add_argument(
        "--module-depth",
        type=checked(lambda text: parse_whole_number(text, 0)),
        metavar="N",
        help="Levels of the module tree to show; 0 shows only the model (default: all)",
    )
    group.add_argument(
        "--top-modules",
        type=checked(lambda text: parse_whole_number(text, 1)),
        metavar="N",
        help=f"Number of classes to list at each level (default: {DEFAULT_OPTIONS.top_modules})",
    )


def add_table_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``TableOptions``; omitted ones are ``None``, to differ from a default."""
    group = command.add_argument_group("trace tables")
    group.add_argument(
        "--views",
        type=checked(lambda text: parse_views(text.split(","))),
        metavar="NAME,...",
        help=f"Tables to show: {', '.join(VIEWS)} (default: all)",
    )
    group.add_argument(
        "--sorted-by",
        type=checked(parse_sort_key),
        metavar="KEY",
        help=f"Sort key for operators, kernels and ranges: {', '.join(SORT_KEYS)} (default: gpu_self if the"
        " trace has device events, otherwise cpu_self)",
    )
    group.add_argument(
        "--time-unit",
        type=checked(parse_time_unit),
        metavar="UNIT",
        help=f"Time unit: {', '.join(TIME_UNITS)} (default: one that fits each table)",
    )
    group.add_argument(
        "--thread-sep",
        action=argparse.BooleanOptionalAction,
        help="Group operators and ranges by CPU thread",
    )
    group.add_argument(
        "--op-detail",
        action=argparse.BooleanOptionalAction,
        help="Show what each operator calls and launches",
    )
    group.add_argument(
        "--row-limit",
        type=checked(parse_row_limit),
        metavar="N",
        help="Maximum rows per table, and child rows per row; JSON output has all rows"
        f" (default: {DEFAULT_OPTIONS.row_limit})",
    )


def table_options(arguments: argparse.Namespace, default: TableOptions = DEFAULT_OPTIONS) -> TableOptions:
    """Table options from the command line.

    Args:
        default: values of omitted options.
    """
    asked = {field.name: getattr(arguments, field.name, None) for field in fields(TableOptions)}
    return replace(default, **{name: value for name, value in asked.items() if value is not None})


def asks_for_tables(arguments: argparse.Namespace) -> bool:
    """Whether an option that only affects tables was given."""
    return any(getattr(arguments, name, None) is not None for name in _OF_TABLES)


def parse_below(text: str, most: float, what: str, example: str = "") -> float:
    """Parse a number above 0 and below ``most``.

    Raises:
        ValueError: for anything else.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < most:
        raise ValueError(f"expected {what} above 0 and below {most:,}{example}, got {quoted(text)}")
    return number


def parse_number(text: str, least: float) -> float:
    """Parse a finite number of at least ``least``.

    Raises:
        ValueError: for anything else.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise ValueError(f"expected a number of at least {least:g}, got {quoted(text)}.")
    return number


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser so that argparse shows its message instead of only the function's name."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked
