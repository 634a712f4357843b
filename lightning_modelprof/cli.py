"""The command line: show a saved run again, analyze anybody's traces. Needs neither torch nor lightning."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_modelprof import __version__
from lightning_modelprof.analysis.analyze import analyze
from lightning_modelprof.analysis.model_summary import ModelSummary, summarize_model
from lightning_modelprof.analysis.trace_facts import analyze_trace
from lightning_modelprof.errors import ModelProfError, TraceError
from lightning_modelprof.report.build import build_report
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.tables.model_summary import NO_STEPS
from lightning_modelprof.run.archive import find_run, load_run, write_atomically
from lightning_modelprof.run.chrome import MAX_TRACE_BYTES, read_trace
from lightning_modelprof.run.records import Run, Window, WindowStatus
from lightning_modelprof.show.json import render_json
from lightning_modelprof.show.terminal import print_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 1 after one line on what went wrong."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "report":
            report = read_report(Path(options.path))
        else:
            max_bytes = int(options.max_gib * 2**30)
            report = analyze_files([Path(path) for path in options.paths], max_bytes)
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
        path: the run's folder, its run.json, or the logger's folder.

    Raises:
        ArchiveError: when there is no saved run.
    """
    run = load_run(path)
    summaries, notes = _read_windows(run, find_run(path).parent)
    return build_report(analyze(run, summaries, notes))


def analyze_files(paths: Sequence[Path], max_bytes: int = MAX_TRACE_BYTES) -> Report:
    """The report of trace files that anybody recorded.

    Args:
        paths: Chrome traces of torch.profiler, or folders with some.
        max_bytes: largest uncompressed trace to read.

    Raises:
        TraceError: when a file is no trace or is too large, or a folder holds none.
    """
    files = [file for path in paths for file in _trace_files(path)]
    return build_trace_report([analyze_trace(read_trace(file, max_bytes)) for file in files])


def _trace_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*.json*") if "trace" in file.name)
    if not files:
        raise TraceError(
            f"{path}: expected a folder with trace files (*trace*.json or *.json.gz), got none. Give the file"
            " itself, or the folder that torch.profiler wrote to."
        )
    return files


def _read_windows(run: Run, folder: Path) -> tuple[dict[int, ModelSummary], dict[int, str]]:
    """Model Summary by window; a trace that cannot be read any more is a note, not an end."""
    summaries: dict[int, ModelSummary] = {}
    notes: dict[int, str] = {}
    for window in run.ranks[0].windows:
        summary, note = _read_window(window, folder)
        if summary is not None:
            summaries[window.index] = summary
        elif note:
            notes[window.index] = note
    return summaries, notes


def _read_window(window: Window, folder: Path) -> tuple[ModelSummary | None, str]:
    """The Model Summary of a window, or why there is none in the words of the live report."""
    if window.trace_file is None:
        has_trace = window.status in (WindowStatus.COMPLETE, WindowStatus.PARTIAL)
        return None, "its trace was not saved" if has_trace and "trace" not in window.note else ""
    path = folder / window.trace_file
    try:
        summary = summarize_model(read_trace(path), window.recorded_steps)
    except TraceError as error:
        # By its name in the folder, as when the run was live.
        return None, str(error).replace(str(path), window.trace_file)
    return summary, "" if summary is not None else NO_STEPS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-modelprof", description="Shows where PyTorch Lightning training time goes."
    )
    parser.add_argument("--version", action="version", version=f"lightning-modelprof {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="show the report of a saved run")
    report.add_argument("path", help="the run's folder or one above it, e.g. lightning_logs/version_0")
    analyze_command = commands.add_parser("analyze", help="analyze trace files of torch.profiler")
    analyze_command.add_argument(
        "paths", nargs="+", metavar="TRACE", help="a trace file, or a folder of them"
    )
    analyze_command.add_argument(
        "--max-gib",
        type=float,
        default=MAX_TRACE_BYTES / 2**30,
        metavar="N",
        help="largest uncompressed trace to read (default: %(default)g)",
    )
    for command in (report, analyze_command):
        command.add_argument("--json", metavar="FILE", help="write JSON instead; - for the standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
