"""``lightning-modelprof selftest``: check the profiler's numbers on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lightning_modelprof.cli.arguments import MAX_SECONDS, checked, parse_below

HELP = "Check the profiler's numbers on this machine"
DESCRIPTION = (
    "Train small models on random data and compare the profiler's numbers with independent measurements:"
    " events, sums over the raw trace, torch's counters and formulas. Takes up to seven minutes on a GPU and"
    " two on a CPU. Writes one file to attach to an issue, without user, host, path or file names."
)
EPILOG = "Exit code: 0 if no check failed, otherwise 1."


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device",
        choices=("cuda", "xpu", "mps", "cpu"),
        metavar="NAME",
        help="Device to check: cuda, xpu, mps or cpu; ROCm is cuda (default: the GPU if there is one, else"
        " the CPU)",
    )
    command.add_argument(
        "--budget",
        type=checked(lambda text: parse_below(text, MAX_SECONDS, "a number of seconds")),
        default=420.0,
        metavar="S",
        help="Seconds for all checks; checks that don't fit are skipped (default: %(default)g)",
    )
    command.add_argument(
        "--json",
        default="modelprof-selftest.json",
        metavar="FILE",
        help="Write the results to FILE (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the checks, and write the file after each so that it always exists."""
    from lightning_modelprof.errors import ArchiveError, ModelProfError, as_path
    from lightning_modelprof.run.opening import write_atomically
    from lightning_modelprof.selftest.runner import Check, Result, run_checks, run_child
    from lightning_modelprof.selftest.summary import attachment, closing, heading, line_of
    from lightning_modelprof.show.terminal.terminal import print_lines

    target = as_path(options.json, ArchiveError)
    if not target.absolute().parent.is_dir():
        raise ArchiveError(f"can't write {target}: no such directory: {target.parent}")
    _show_progress("importing torch")
    lines, ending = run_child("machine", options.device, 120)
    machine: dict[str, Any] = next((one["facts"] for one in lines if "facts" in one), {})
    if not machine:
        errors = [one["error"] for one in lines if "error" in one]
        raise ModelProfError(f"selftest: torch can't be used: {(errors or [ending])[0]}")
    if not machine["available"]:
        raise ModelProfError(f"selftest: torch finds no {machine['device']} device. Use --device cpu.")
    results: list[Result] = []

    def on_start(check: Check) -> None:
        _show_progress(f"{len(results) + 1} {check.name}")

    def on_result(result: Result) -> None:
        results.append(result)
        try:
            write_atomically(target, attachment(machine, results))
        except OSError as error:
            raise ArchiveError(f"can't write {target}: {error.strerror}") from None
        _show_progress("")
        print_lines([line_of(result)])

    print_lines(heading(machine))
    code = 0
    try:
        run_checks(machine["device"], options.budget, on_start, on_result)
    except KeyboardInterrupt:
        code = 130
    _show_progress("")
    print_lines(closing(results, str(options.json)))
    return code or int(any(one.status == "FAIL" for one in results))


def _show_progress(text: str) -> None:
    """Show a line that the next one replaces, only on a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r{'running ' + text if text else '':<60}\r", end="", file=sys.stderr, flush=True)
