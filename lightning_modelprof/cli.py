"""The command line: show a saved run again. Needs neither torch nor lightning."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_modelprof import __version__
from lightning_modelprof.analysis.analyze import analyze
from lightning_modelprof.analysis.model_summary import ModelSummary, summarize_model
from lightning_modelprof.errors import ModelProfError, TraceError
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.archive import load_run, write_atomically
from lightning_modelprof.run.chrome import read_trace
from lightning_modelprof.run.records import Run
from lightning_modelprof.show.json import render_json
from lightning_modelprof.show.terminal import print_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 1 after one line on what went wrong."""
    options = _parser().parse_args(arguments)
    try:
        report = read_report(Path(options.path))
        if options.json is None:
            print_report(report)
        elif options.json == "-":
            sys.stdout.buffer.write(render_json(report))
        else:
            write_atomically(Path(options.json), render_json(report))
    except ModelProfError as error:
        print(f"lightning-modelprof: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"lightning-modelprof: could not write {options.json}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def read_report(path: Path) -> Report:
    """The report of a saved run, derived anew from what was measured.

    Args:
        path: the run's folder, or its run.json.

    Raises:
        ArchiveError: when there is no saved run.
    """
    run = load_run(path)
    folder = path if path.is_dir() else path.parent
    summaries, notes = _read_windows(run, folder)
    return build_report(analyze(run, summaries, notes))


def _read_windows(run: Run, folder: Path) -> tuple[dict[int, ModelSummary], dict[int, str]]:
    """Model Summary by window; a trace that cannot be read any more is a note, not an end."""
    summaries: dict[int, ModelSummary] = {}
    notes: dict[int, str] = {}
    for window in run.ranks[0].windows:
        if window.trace_file is None:
            continue
        try:
            summary = summarize_model(read_trace(folder / window.trace_file), window.recorded_steps)
        except TraceError as error:
            notes[window.index] = str(error)
            continue
        if summary is not None:
            summaries[window.index] = summary
    return summaries, notes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-modelprof", description="Shows where PyTorch Lightning training time goes."
    )
    parser.add_argument("--version", action="version", version=f"lightning-modelprof {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="show the report of a saved run")
    report.add_argument(
        "path", help="the run's folder or its run.json, e.g. lightning_logs/version_0/modelprof"
    )
    report.add_argument("--json", metavar="FILE", help="write JSON instead; - for the standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
