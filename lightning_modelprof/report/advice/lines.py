"""What to change at a slow line, depending on what it runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Final

import numpy as np

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.source.hot_lines import HotLine, HotLines
from lightning_modelprof.analysis.source.source_lines import (
    SourceLine,
    by_place,
    costly_call,
    with_costly_call,
)
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.source import reads_attribute
from lightning_modelprof.report.model import Finding, Status
from lightning_modelprof.run.phases import PHASE_INDEX
from lightning_modelprof.run.steps import NOT_MEASURED

MANY_OPERATORS: Final = 64
"""From this many operators per step, a line is taken for a loop, most likely over rows or samples."""


IN_GENERAL: Final = (
    "Use operations on whole tensors in {where}. Look for loops over rows, lists of numbers (.tolist()),"
    " reads (.item()), sums over all past steps and self.log calls."
)


def advice_for(
    facts: Facts, file: str | None, line: int | None, where: str, *, outside_modules: bool = False
) -> str:
    """Advise on a slow function.

    Args:
        line: first line of the function.
        where: the function's name in a sentence.
        outside_modules: whether to ignore time in the model's modules.
    """
    source = _innermost_slow_line(facts, file, line, outside_modules)
    place = (file, line) if source is None else (source.file, source.line)
    growing = _growth_advice(facts, *place)
    if source is None or source.operators is None:
        return growing or IN_GENERAL.format(where=where)
    if not source.operators and outside_modules:
        source = _loop_below(facts, source) or source
    told = f"Line {source.line} (in {source.function})"
    if source.reductions >= LEAST_REDUCTIONS:
        return without_loop(source)
    if source.own_operators >= MANY_OPERATORS:
        return (
            f"Use operations on whole tensors instead of a loop. {told} runs {source.own_operators}"
            " operators per step."
        )
    if source.own_tensors:
        return (
            "Create the tensor once with register_buffer, or use torch.arange or torch.full."
            f" {told} creates or copies a tensor of Python numbers every step."
        )
    if source.waits:
        return f"Check tensor values in the Dataset, or only every N steps. {told} reads them every step."
    hot = facts.get(Facts.hot_lines)
    if growing:
        return growing
    if source.operators == 0 and hot is not None and hot.is_call(source.file, source.line):
        return IN_GENERAL.format(where=f"the code called by {_small(told)}")
    if source.operators == 0:
        return (
            "Run it only every N steps, or move it into the Dataset."
            f" {told} runs no torch operators; its time is spent in Python or a library."
        )
    return IN_GENERAL.format(where=where)


LEAST_REDUCTIONS: Final = 2
"""From this many reductions of parameters, a line is taken for a loop over them."""


def without_loop(source: SourceLine) -> str:
    """Advise on a line that reduces each parameter to a number."""
    told = f"Line {source.line} (in {source.function}) reduces {source.reductions} parameters one by one."
    if source.backward_operators:
        return (
            "Use the optimizer's weight_decay for a squared L2 penalty. Set it to 2 × the factor (not with"
            " AdamW); it then holds for all of the optimizer's parameters. Otherwise use"
            f" torch._foreach_norm. {told}"
        )
    return f"Use torch.nn.utils.get_total_norm (torch 2.6 or newer), only every N steps. {told}"


def _loop_below(facts: Facts, source: SourceLine | HotLine) -> SourceLine | None:
    """Return the step's own line with most operators if it's a loop and the source line calls it."""
    lines, hot = facts.get(Facts.source_lines), facts.get(Facts.hot_lines)
    if lines is None or hot is None:
        return None
    loop = _most_operators(lines)
    is_below = loop is not None and hot.calls((source.file, source.line), (loop.file, loop.line))
    return loop if is_below else None


def _most_operators(lines: Sequence[SourceLine]) -> SourceLine | None:
    own = [one for one in lines if [path for path, _ in one.by_module] == [""] and "forward" in one.phases]
    most = max(own, key=lambda one: one.own_operators, default=None)
    return most if most is not None and most.own_operators >= MANY_OPERATORS else None


def _small(place: str) -> str:
    return place[:1].lower() + place[1:]


def _growth_advice(facts: Facts, file: str | None, line: int | None) -> str:
    memory = facts.get(Facts.memory)
    growing = () if memory is None else memory.record.growing
    for one in growing:
        if file is None or line is None or not one.lines:
            continue
        classes = {one.owner, *(place.function.partition(".")[0] for place in one.lines)}
        if reads_attribute(file, line, one.name, classes, facts.info.created):
            return (
                f"Replace self.{one.name}, which grows every step (line"
                f" {one.lines[0].line}; {one.last_size:,} elements after {one.last_step:,} steps), with a"
                " running sum or count."
            )
    return ""


def _innermost_slow_line(
    facts: Facts, file: str | None, line: int | None, outside_modules: bool
) -> SourceLine | None:
    hot, lines = facts.get(Facts.hot_lines), facts.get(Facts.source_lines)
    if lines is None or file is None or line is None:
        return None
    found = None if hot is None else hot.inside(file, line, outside_modules=outside_modules)
    if found is not None:
        innermost = found.inner or found
        source = by_place(lines).get((innermost.file, innermost.line))
        return source or (_loop_below(facts, innermost) if outside_modules else None)
    if not outside_modules:
        return None
    # No line has most of the samples: guess the one that runs by far the most operators.
    return _most_operators(lines)


class PointsAt(Enum):
    """What a rule's findings point at."""

    TIME = auto()
    """Slow functions, refined to their slowest lines."""
    TIME_OUTSIDE_MODULES = auto()
    """As ``TIME``, without the time of the model's modules."""
    TIME_IN_LIBRARIES = auto()
    """As ``TIME``, including library code called there, such as a slow transform."""
    CHANGE = auto()
    """Code to change, wherever the time is spent."""
    NO_TIME = auto()
    """As ``CHANGE``, for findings that matter regardless of step time."""


def at_exact_lines(
    finding: Finding,
    hot: HotLines | None,
    *,
    points_at: PointsAt = PointsAt.TIME,
    phases: Collection[str] = (),
    libraries: Collection[str] = (),
) -> Finding:
    """Refine a finding's locations to the slowest lines; functions without such a line come last.

    Args:
        finding: finding whose locations are slow functions.
        phases: phases whose whole time it is about, if any: user lines with most of that time become the
            locations, whatever function they are in.
        libraries: packages whose lines count if user lines don't have most of the time.
    """
    if hot is None or finding.status is not Status.FOUND:
        return finding
    places = exact_places(finding.locations, hot, points_at=points_at, phases=phases, libraries=libraries)
    return replace(finding, locations=places)


def exact_places(
    places: Sequence[Place],
    hot: HotLines,
    *,
    points_at: PointsAt = PointsAt.TIME,
    phases: Collection[str] = (),
    libraries: Collection[str] = (),
) -> tuple[Place, ...]:
    """Refine places as :func:`at_exact_lines` does."""
    into_libraries = points_at is PointsAt.TIME_IN_LIBRARIES
    names = {(one.file, one.line): one.function for one in places}
    lines = hot.statements_in(phases, libraries) if phases else ()
    if lines:
        if into_libraries:
            lines = tuple(with_costly_call(hot, phases, line) for line in lines)
        return tuple(_location(line, names) for line in lines)
    exact: list[tuple[float, Place]] = []
    others: list[Place] = []
    for location in places:
        lines = _lines_of(location, hot, points_at)
        if into_libraries and (called := _called(location, hot, phases)) is not None:
            exact.append((called.time_ns, replace(location, inner=location_at(called))))
            continue
        exact += [(line.time_ns, replace(_location(line, names), module=location.module)) for line in lines]
        if location.is_exact:
            exact.append((math.inf, location))
        elif not lines:
            others.append(location)
    exact.sort(key=lambda one: -one[0])
    return (*dict.fromkeys(one for _, one in exact), *others)


def _called(location: Place, hot: HotLines, phases: Collection[str]) -> HotLine | None:
    if location.file is None or location.is_exact:
        return None
    return costly_call(hot, phases, file=location.file, function_line=location.line)


def _lines_of(location: Place, hot: HotLines, points_at: PointsAt) -> tuple[HotLine, ...]:
    if location.is_exact:
        return ()
    if location.file is None or location.line is None:  # at most a function of torch or Lightning
        return hot.statements_below(location.function) if location.function else ()
    if location.package and (lines := hot.statements_below(location.function or "")):
        return lines
    outside_modules = points_at is PointsAt.TIME_OUTSIDE_MODULES
    return hot.statements(location.file, location.line, outside_modules=outside_modules)


def _location(line: HotLine, names: Mapping[tuple[str | None, int | None], str | None]) -> Place:
    """Take the function's name from the finding: Python 3.10 samples lack its class."""
    location = location_at(line)
    return replace(location, function=names.get((line.file, line.function_line)) or location.function)


def location_at(line: HotLine) -> Place:
    """Return the place of a slow line, with the inner line that takes most of its time."""
    return line.exact(package=line.package, inner=None if line.inner is None else location_at(line.inner))


_FORWARD = PHASE_INDEX["forward"]


def module_pace(facts: Facts) -> float:
    """Return the factor from a module's time in the timed steps to its time in a clean step.

    Definition: median Forward of the clean steps over its median in the timed steps, on the modules' clock; 1
    if either is unknown.

    Caveats:
        Module timing has overhead, part of it in Forward, so the product is too small by that share.
    """
    cost, costs = facts.get(Facts.cost), facts.get(Facts.step_costs)
    if cost is None or cost.times is None or costs is None:
        return 1.0
    is_timed = np.isin(facts.steps.step, cost.times.step_numbers)
    on_device = cost.times.clock == "device"
    phases_ns = facts.steps.device_phases_ns if on_device else facts.steps.phases_ns
    timed = phases_ns[is_timed, _FORWARD]
    means = costs.typical
    typical = means.device_ns.get("forward") if on_device else means.medians_ns.get("forward")
    if not len(timed) or (timed == NOT_MEASURED).any() or not typical or not np.median(timed):
        return 1.0
    return typical / float(np.median(timed))
