"""The report of traces that anybody recorded."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lightning_modelprof.analysis.timeline.steps import nearest_ranges, steps_asked_for
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts, analyze_trace
from lightning_modelprof.errors import ConfigError, TraceError, given_path, quoted
from lightning_modelprof.report.build_trace import build_trace_report
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.options import DEFAULT_OPTIONS, TableOptions, parse_step_range
from lightning_modelprof.run.opening import MAX_TRACE_BYTES
from lightning_modelprof.trace.model import Trace
from lightning_modelprof.trace_reading import read_with_progress, trace_files


def analyze(*paths: str | os.PathLike[str], step_range: str | None = None) -> Report:
    """The report of traces that anybody recorded with torch.profiler, such as a loop of Fabric's.

    What ``lightning-modelprof analyze`` shows; ``print_report`` prints it.

    Args:
        paths: Chrome traces, packed or not, or folders with some; those of several ranks go together.
        step_range: regular expression for the names of the ranges that are the steps; without it those of
            ``profiler.step()``, else a guess, which the report tells of.

    Raises:
        ConfigError: when ``step_range`` is no regular expression.
        TraceError: when a file is no trace or is too large, has no such range, or a folder holds none.
    """
    try:
        wanted = None if step_range is None else parse_step_range(step_range)
    except ValueError as error:
        raise ConfigError(f"step_range: {error}") from None
    return analyze_files(paths, step_range=wanted)


def analyze_files(
    paths: Sequence[str | os.PathLike[str]],
    options: TableOptions = DEFAULT_OPTIONS,
    max_bytes: int = MAX_TRACE_BYTES,
    step_range: re.Pattern[str] | None = None,
) -> Report:
    """The report of trace files that anybody recorded.

    Args:
        paths: Chrome traces of torch.profiler, or folders with some.
        options: how the tables are cut and sorted.
        max_bytes: largest uncompressed trace to read.
        step_range: for the names of the ranges that are the steps.

    Raises:
        TraceError: when a file is no trace or is too large, has no such range, or a folder holds none.
    """
    traces: list[TraceFacts] = []
    skipped: list[str] = []
    seen: set[Path] = set()
    for path in [given_path(path, TraceError) for path in paths]:
        found = False
        for file in trace_files(path):
            # The same trace packed and not packed counts once.
            place = file.resolve().with_suffix("") if file.suffix == ".gz" else file.resolve()
            if place in seen:
                found = True
                continue
            seen.add(place)
            try:
                trace = read_with_progress(file, max_bytes)
                _check_step_range(trace, file, step_range)
                traces.append(analyze_trace(trace, step_range))
                found = True
            except TraceError as error:
                if file == path:  # it was asked for by its name
                    raise
                skipped.append(f"Skipped {error}")
        if not found:
            raise TraceError(f"{path}: expected a folder with traces, got none. {' '.join(skipped)}")
    return build_trace_report(traces, options, skipped)


def _check_step_range(trace: Trace, file: Path, step_range: re.Pattern[str] | None) -> None:
    if step_range is None or steps_asked_for(trace, step_range) is not None:
        return
    names = nearest_ranges(trace, step_range)
    known = f"The nearest: {', '.join(map(quoted, names))}." if names else "It has no ranges with names."
    raise TraceError(
        f"{file}: expected ranges whose names match the step range {quoted(step_range.pattern)}, got none."
        f" {known}"
    )
