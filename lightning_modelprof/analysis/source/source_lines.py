"""Source lines: what each of the user's lines runs per step, and its share of the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.source.hot_lines import HotLine, HotLines
from lightning_modelprof.place import Place
from lightning_modelprof.run.sites import (
    DEVICE_TO_HOST,
    HOST_TENSOR,
    HOST_TO_DEVICE,
    SYNCHRONISATION,
    StepSites,
)
from lightning_modelprof.run.stacks import StackFrame


class SourceLine(Place, frozen=True, kw_only=True):
    """One line of the user's.

    Counts are from the one inspected step, and 0 for a line that ran no operator there; ``None`` when no step
    was inspected.

    Attributes:
        module: the first one that ran it.
        operators: that it ran itself, without views.
        backward_operators: that backward ran for it, without views.
        waits: values, or numbers of values, that Python needed; on a device, the host waits for each.
        copies: between the host and a device.
        host_tensors: tensors made from Python numbers or NumPy arrays.
        num_bytes: of these copies and tensors; ``None`` if any is unknown.
        share: of all sampled time of the training thread; ``None`` without samples.
        function_line: first line of the function; ``None`` for a line that was only sampled.
        by_module: each module's path, and the operators that the line ran itself in it, without logging.
        phases: in which it ran those, without backward.
        logging_share, logging_samples: part of its share and samples in which it logged or used a
            torchmetrics metric.
        logging_operators, logging_tensors: part of its operators, and of its copies and host tensors.
        constant_operators: operators that compute the same in every step.
        reductions: operators that reduce a trained parameter to one number.
    """

    file: str
    line: int
    operators: int | None = None
    backward_operators: int | None = None
    waits: int | None = None
    copies: int | None = None
    host_tensors: int | None = None
    num_bytes: int | None = None
    share: float | None = None
    samples: int | None = None
    function_line: int | None = None
    by_module: tuple[tuple[str, int], ...] = ()
    phases: tuple[str, ...] = ()
    logging_share: float = 0.0
    logging_samples: int = 0
    logging_operators: int = 0
    logging_tensors: int = 0
    constant_operators: int = 0
    reductions: int = 0

    @property
    def own_operators(self) -> int:
        """Without logging; 0 if unknown."""
        return (self.operators or 0) - self.logging_operators

    @property
    def own_tensors(self) -> int:
        """Copies and host tensors without logging; 0 if unknown."""
        return (self.copies or 0) + (self.host_tensors or 0) - self.logging_tensors


@dataclass(slots=True)
class _LineSums:
    function: str
    function_line: int | None = None
    module: str = ""
    by_module: Counter[str] = field(default_factory=Counter)
    phases: set[str] = field(default_factory=set)
    operators: int = 0
    backward_operators: int = 0
    waits: int = 0
    copies: int = 0
    host_tensors: int = 0
    num_bytes: int | None = 0
    logging_operators: int = 0
    logging_tensors: int = 0
    constant_operators: int = 0
    reductions: int = 0


def source_lines(sites: StepSites | None, hot: HotLines | None) -> tuple[SourceLine, ...]:
    """All lines that run operators or take time, sorted by time, then by waits, copies and operators."""
    if sites is None and hot is None:
        raise NotMeasured(
            'no step was inspected (set flops=True) and nothing was sampled (set inspect={"sampling": True})'
        )
    sums = _sums(sites)
    seen = {} if hot is None else {(one.file, one.line): one for one in hot.lines}
    for place, top in seen.items():
        sums.setdefault(place, _LineSums(top.function))
    lines = []
    for (file, line), one in sums.items():
        sample = seen.get((file, line))
        lines.append(
            SourceLine(
                file=file,
                line=line,
                function=sample.function if sample else one.function,  # the former is qualified
                module=one.module,
                operators=None if sites is None else one.operators,
                backward_operators=None if sites is None else one.backward_operators,
                waits=None if sites is None else one.waits,
                copies=None if sites is None else one.copies,
                host_tensors=None if sites is None else one.host_tensors,
                num_bytes=None if sites is None else one.num_bytes,
                share=sample.share if sample else None if hot is None else 0.0,
                samples=sample.samples if sample else None if hot is None else 0,
                function_line=one.function_line,
                by_module=tuple(sorted(one.by_module.items())),
                phases=tuple(sorted(one.phases)),
                logging_share=sample.logging_share if sample else 0.0,
                logging_samples=sample.logging_samples if sample else 0,
                logging_operators=one.logging_operators,
                logging_tensors=one.logging_tensors,
                constant_operators=one.constant_operators,
                reductions=one.reductions,
            )
        )
    return tuple(sorted(lines, key=_rank))


def _sums(sites: StepSites | None) -> dict[tuple[str, int], _LineSums]:
    sums: dict[tuple[str, int], _LineSums] = {}
    if sites is None:
        return sums
    for count in sites.lines:
        if count.file is None or count.line is None:
            continue
        one = sums.setdefault((count.file, count.line), _LineSums(count.function, count.function_line))
        one.module = one.module or count.module
        if not count.calls:  # a line that only has gradients computed
            continue
        if count.phase == "backward":
            one.backward_operators += count.calls - count.views
        else:
            one.operators += count.calls - count.views
            one.logging_operators += count.logging
            one.constant_operators += count.constant
            one.reductions += count.reductions
            one.by_module[count.module] += count.calls - count.views - count.logging
            one.phases.add(count.phase)
    for site in sites.sites:
        if site.file is None or site.line is None:
            continue
        one = sums.setdefault((site.file, site.line), _LineSums(site.function, site.function_line))
        one.by_module[site.module] += 0
        one.phases.add(site.phase)
        one.module = one.module or site.module
        one.waits += site.calls * (site.kind == SYNCHRONISATION)
        one.copies += site.calls * (site.kind in (DEVICE_TO_HOST, HOST_TO_DEVICE))
        one.host_tensors += site.calls * (site.kind == HOST_TENSOR)
        one.logging_tensors += site.calls * (site.kind != SYNCHRONISATION and site.is_logging)
        if site.kind != SYNCHRONISATION and one.num_bytes is not None:
            one.num_bytes = None if site.num_bytes is None else one.num_bytes + site.num_bytes
    return sums


def _rank(one: SourceLine) -> tuple[float, int, int, str, int]:
    told = (one.waits or 0) + (one.copies or 0) + (one.host_tensors or 0)
    operators = (one.operators or 0) + (one.backward_operators or 0)
    return -(one.share or 0.0), -told, -operators, one.file, one.line


def by_place(lines: Iterable[SourceLine]) -> dict[tuple[str, int], SourceLine]:
    return {(one.file, one.line): one for one in lines}


_MIN_SAMPLES: Final = 3


_TRANSFORMS: Final = ("transform", "augment")
"""Markers in the module names of libraries that transform samples."""


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
    """The deepest function that holds most of the time of a line or function above it.

    It's the user's, or a library's transform; without either, any library's except torch, Lightning, NumPy
    and the standard library. Its ``share`` is of the line's time.

    Args:
        phases: whose samples count.
        line: ``None`` means any line of the function.
        function_line: first line of the function, if ``line`` is ``None``.

    Returns:
        ``None`` if no function below holds half of the time, or there are fewer than 3 samples.
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
    """Whether it's a named function of a library, not a comprehension."""
    return bool(frame.package) and not frame.function.endswith(">")


def _is_telling(frame: StackFrame) -> bool:
    """Whether the name is informative: the user's own, or a method of a transform."""
    if frame.is_users:
        return True
    is_method = "." in frame.function.rpartition("<locals>.")[2] or frame.function == "__call__"
    return (
        bool(frame.package) and is_method and any(word in frame.python_module.lower() for word in _TRANSFORMS)
    )


def _deepest(paths: Sequence[_Path], is_of_interest: Callable[[StackFrame], bool]) -> HotLine | None:
    """Follow calls of interest down while one function holds half of the whole time."""
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
    """Group paths by their first frame's key and return the group with most time."""
    groups: dict[Hashable, list[_Path]] = {}
    for path in paths:
        groups.setdefault(key(path[0][0]), []).append(path)
    return max(groups.values(), key=lambda group: sum(one[2] for one in group), default=[])


def with_costly_call(hot: HotLines, phases: Collection[str], line: HotLine) -> HotLine:
    """Add the costly call below a line, unless the user's own code below it is known already."""
    if line.inner is not None:
        return line
    return replace(line, inner=costly_call(hot, phases, file=line.file, line=line.line))
