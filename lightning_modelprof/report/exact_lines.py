"""Where a finding points at a function, its statement that takes the time, as far as samples tell."""

from __future__ import annotations

from dataclasses import replace

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.hot_lines import HotLine, HotLines
from lightning_modelprof.report.model import Finding, Location


def at_exact_lines(finding: Finding, hot: HotLines | Absent, *, outside_modules: bool) -> Finding:
    """The same finding, its locations at the lines that take the time, functions without such a line last.

    Args:
        finding: whose locations are functions that take the time at stake.
        hot: what samples of the training thread say.
        outside_modules: whether time in the model's modules is not what it is about.
    """
    if isinstance(hot, Absent):
        return finding
    locations = [_at_line(location, hot, outside_modules) for location in finding.locations]
    return replace(finding, locations=tuple(sorted(locations, key=lambda one: not one.is_exact)))


def _at_line(location: Location, hot: HotLines, outside_modules: bool) -> Location:
    if location.is_exact or location.file is None or location.line is None:
        return location
    line = hot.inside(location.file, location.line, outside_modules=outside_modules)
    if line is None:
        return location
    return replace(location_at(line), function=location.function, module=location.module)


def location_at(line: HotLine) -> Location:
    """A line that takes time, and the one further down at which most of that is spent."""
    return Location(
        file=line.file,
        line=line.line,
        function=line.function,
        is_exact=True,
        inner=None if line.inner is None else location_at(line.inner),
    )
