"""Costly call: how far down in libraries the time of a line goes, such as to the transform that takes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.source.hot_lines import HotLine, HotLines
from lightning_modelprof.run.stacks import StackFrame

_MIN_SAMPLES: Final = 3
_TRANSFORMS: Final = ("transform", "augment")
"""What modules of libraries that change samples have in their names."""

_Path = tuple[list[StackFrame], int, int]
"""Frames below the line, outermost first; samples; nanoseconds."""


def costly_call(
    hot: HotLines,
    phases: Collection[str],
    *,
    file: str,
    line: int | None = None,
    function_line: int | None = None,
) -> HotLine | None:
    """The function below a line, or a function, in which most of its time is spent, however deep.

    It is the user's, or a transform of a library; without either the deepest function of any library but
    torch, Lightning, NumPy and Python's own. Its ``share`` is of the time of the line.

    Args:
        hot: what was sampled.
        phases: whose samples count.
        file: of the line or function.
        line: the line; ``None`` means any line of the function.
        function_line: first line of the function, if ``line`` is ``None``.

    Returns:
        ``None`` if nothing below takes half of its time, or there are fewer than 3 samples.
    """
    paths: list[_Path] = []
    for stack in hot.samples.stacks:
        frames = [hot.samples.frames[number] for number in stack.frames] if stack.phase in phases else []
        begin = next(
            (
                at
                for at, one in enumerate(frames)
                if one.file == file
                and (one.line == line if line is not None else one.function_line == function_line)
            ),
            None,
        )
        if begin is not None:
            paths.append((frames[begin + 1 :], stack.samples, stack.time_ns))
    return _deepest(paths, _is_telling) or _deepest(paths, _is_named)


def _is_named(frame: StackFrame) -> bool:
    """Whether it is a library's function that has a name of its own, so no comprehension."""
    return bool(frame.package) and not frame.function.endswith(">")


def _is_telling(frame: StackFrame) -> bool:
    """Whether a name says what is done: the user's own, or a method of a transform."""
    if frame.is_users:
        return True
    is_method = "." in frame.function.rpartition("<locals>.")[2] or frame.function == "__call__"
    return bool(frame.package) and is_method and any(word in frame.module.lower() for word in _TRANSFORMS)


def _deepest(paths: Sequence[_Path], is_of_interest: Callable[[StackFrame], bool]) -> HotLine | None:
    """Down the calls of interest, as long as one function holds half of the whole time."""
    whole_ns = sum(time_ns for _, _, time_ns in paths)
    left = [([one for one in path if is_of_interest(one)], samples, ns) for path, samples, ns in paths]
    found: HotLine | None = None
    while top := _largest([one for one in left if one[0]], lambda frame: (frame.file, frame.function_line)):
        samples, time_ns = sum(one[1] for one in top), sum(one[2] for one in top)
        if samples < _MIN_SAMPLES or 2 * time_ns < whole_ns or not time_ns:
            break
        frame = _largest(top, lambda one: one.line)[0][0][0]
        found = HotLine(
            file=frame.file,
            line=frame.line,
            function=frame.function,
            function_line=frame.function_line,
            share=time_ns / whole_ns,
            samples=samples,
            time_ns=time_ns,
            package=frame.package,
        )
        left = [(path[1:], count, ns) for path, count, ns in top]
    return found


def _largest(paths: Sequence[_Path], key: Callable[[StackFrame], Hashable]) -> list[_Path]:
    """The paths whose first frames have the same key, of all such groups that with most time."""
    groups: dict[Hashable, list[_Path]] = {}
    for path in paths:
        groups.setdefault(key(path[0][0]), []).append(path)
    return max(groups.values(), key=lambda group: sum(one[2] for one in group), default=[])


def with_costly_call(hot: HotLines, phases: Collection[str], line: HotLine) -> HotLine:
    """A line with the costly call below it, unless the user's own code below it is known already."""
    if line.inner is not None:
        return line
    return replace(line, inner=costly_call(hot, phases, file=line.file, line=line.line))
