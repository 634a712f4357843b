"""Where a finding points at a function, its statement that takes the time, as far as samples tell."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.source.hot_lines import HotLine, HotLines
from lightning_modelprof.analysis.source.source_lines import costly_call, with_costly_call
from lightning_modelprof.report.model import Finding, Location, Status


def at_exact_lines(
    finding: Finding,
    hot: HotLines | Absent,
    *,
    outside_modules: bool,
    phases: Collection[str] = (),
    libraries: Collection[str] = (),
    into_libraries: bool = False,
) -> Finding:
    """The same finding, its locations at the lines that take the time, functions without such a line last.

    Args:
        finding: whose locations are functions that take the time at stake.
        hot: what samples of the training thread say.
        outside_modules: whether time in the model's modules is not what it is about.
        phases: whose time it is about, if that is all of theirs: where lines of the user's hold most of it,
            they are the places, in whatever function they are.
        libraries: packages whose lines are the places where the user's do not hold most of it.
        into_libraries: whether a place is followed into what any library runs for it.
    """
    if isinstance(hot, Absent) or finding.status is not Status.FOUND:
        return finding
    names = {(one.file, one.line): one.function for one in finding.locations}
    lines = hot.statements_in(phases, libraries) if phases else ()
    if lines:
        if into_libraries:
            lines = tuple(with_costly_call(hot, phases, line) for line in lines)
        return replace(finding, locations=tuple(_location(line, names) for line in lines))
    exact: list[tuple[float, Location]] = []
    others: list[Location] = []
    for location in finding.locations:
        lines = _lines_of(location, hot, outside_modules)
        if into_libraries and (called := _called(location, hot, phases)) is not None:
            exact.append((called.time_ns, replace(location, inner=location_at(called))))
            continue
        exact += [(line.time_ns, replace(_location(line, names), module=location.module)) for line in lines]
        if location.is_exact:
            exact.append((math.inf, location))
        elif not lines:
            others.append(location)
    exact.sort(key=lambda one: -one[0])
    return replace(finding, locations=(*dict.fromkeys(one for _, one in exact), *others))


def _called(location: Location, hot: HotLines, phases: Collection[str]) -> HotLine | None:
    if location.file is None or location.is_exact:
        return None
    return costly_call(hot, phases, file=location.file, function_line=location.line)


def _lines_of(location: Location, hot: HotLines, outside_modules: bool) -> tuple[HotLine, ...]:
    if location.is_exact:
        return ()
    if location.file is None or location.line is None:  # torch's or Lightning's, as far as there is anything
        return hot.statements_below(location.function) if location.function else ()
    if location.package and (lines := hot.statements_below(location.function or "")):
        return lines
    return hot.statements(location.file, location.line, outside_modules=outside_modules)


def _location(line: HotLine, names: Mapping[tuple[str | None, int | None], str | None]) -> Location:
    """With the function's name as the finding says it: samples of Python 3.10 do not have its class."""
    location = location_at(line)
    return replace(location, function=names.get((line.file, line.function_line)) or location.function)


def location_at(line: HotLine) -> Location:
    """A line that takes time, and the one further down at which most of that is spent."""
    return Location(
        file=line.file,
        line=line.line,
        function=line.function,
        is_exact=True,
        inner=None if line.inner is None else location_at(line.inner),
        package=line.package,
    )
