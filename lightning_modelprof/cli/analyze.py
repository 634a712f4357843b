"""``lightning-modelprof analyze``: the report of any torch.profiler traces."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_modelprof.cli.arguments import (
    add_max_gib,
    add_output_options,
    add_table_options,
    checked,
    table_options,
)
from lightning_modelprof.report.options import parse_step_range

HELP = "Analyze torch.profiler traces"
DESCRIPTION = (
    "Analyze torch.profiler traces: .json or .json.gz files, or a zip or tar archive of them. Traces from"
    " multiple ranks are analyzed together. If the traces come from more than one window, only the newest"
    " window gets a full report; the others get one line each."
)
USAGE = "%(prog)s [options] TRACE [TRACE ...]"
EPILOG = "Exit status: 0 on success; 1 on error or a corrupt trace; 2 on invalid arguments."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "paths",
        nargs="+",
        metavar="TRACE",
        help="Trace file, or a directory or archive of traces (- for stdin)",
    )
    add_max_gib(command)
    command.add_argument(
        "--step-range",
        type=checked(parse_step_range),
        metavar="REGEX",
        help="Treat record_function ranges whose names match REGEX, such as execute_model, as steps (default:"
        " profiler.step() ranges, or a guess if there are none)",
    )
    add_output_options(command)
    add_table_options(command)


def run(options: argparse.Namespace) -> int:
    """Print or write the report; return 1 if a trace is cut off or damaged."""
    _keep_freed_memory()
    _import_numpy()
    from lightning_modelprof.cli.output import put_out
    from lightning_modelprof.reading_traces import analyze_files

    with _with_standard_input(options.paths) as paths:
        report = analyze_files(
            paths,
            table_options(options),
            int(options.max_gib * 2**30),
            options.step_range,
            is_brief=options.brief and options.json is None and options.html is None,
        )
    put_out(report, options)
    return int(any(trace.is_damaged for trace in report.summary.traces))


def _keep_freed_memory() -> None:
    """Free a large block, after which glibc keeps all smaller freed ones.

    By default each array gets new pages, and clearing them takes a tenth of the time.
    """
    bytes(2**24)


def _import_numpy() -> None:
    """Import it without its linear algebra's threads, which are slow to start and unneeded."""
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        return
    os.environ[name] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[name]


@contextmanager
def _with_standard_input(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yield the paths, with ``-`` replaced by a file of the standard input."""
    if "-" not in paths:
        yield list(paths)
        return
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory(prefix="modelprof_") as folder:
        file = Path(folder) / "standard_input.trace.json"
        with file.open("wb") as opened:
            shutil.copyfileobj(sys.stdin.buffer, opened)
        with file.open("rb") as opened:
            is_packed = opened.read(2) == b"\x1f\x8b"
        if is_packed:
            file = file.rename(file.with_name(f"{file.name}.gz"))
        yield [str(file) if path == "-" else path for path in paths]
