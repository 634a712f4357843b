"""Device-aware step bounds: each step lasts until the device events that it launched have ended.

Source: the Overview of torch_tb_profiler (pytorch/kineto, ``tb_plugin``, removed in 2026). It dropped a last
step with fewer than 0.8 times the device events of the step before it, even if there was simply less work;
here the launches decide.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.host_phases import Steps, recorded_steps
from lightning_modelprof.analysis.timeline.intervals import Intervals, different, length, locate, outermost
from lightning_modelprof.analysis.timeline.names import (
    LIGHTNING_PREFIX,
    is_module,
    is_shown_elsewhere,
    is_torch_range,
)
from lightning_modelprof.analysis.timeline.nesting import LaunchLinks
from lightning_modelprof.analysis.timeline.tally import by_name, sum_by
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category, Trace

_COMPLETE: Final = 0.8
"""Fraction of a step's launches that must have their device events; the plugin's factor."""


_GAP_FACTOR: Final = 1.0


_MIN_GAP_NS: Final = 1_000_000


_MAX_LISTED: Final = 3


class StepBounds(Record, frozen=True, kw_only=True, eq=False):
    """The steps between device-aware bounds, k of them.

    Attributes:
        intervals: start and end, shape (k, 2), in order and disjoint; a step may be empty.
        dropped: numbers of steps left out at the end: they launched nothing, or the profiler stopped before
            their device events arrived.
        stretches: spans of consecutive steps, an interval set; several if steps in between weren't recorded.
        notes: on what is left out, for tables about the kept steps as a whole.
    """

    intervals: NDArray[np.int64]
    numbers: tuple[int, ...]
    dropped: tuple[int, ...]
    stretches: Intervals
    notes: tuple[str, ...]


def bound_steps(trace: Trace, steps: Steps, launch: LaunchLinks) -> StepBounds:
    """Extend each step to the end of the device events launched in it; the next one starts there.

    The first step starts after the device events left over from before it.
    """
    launching = launching_steps(trace, steps.intervals, launch)
    num_kept = _without_tail(trace, steps.intervals, launch)
    intervals = _bounds(trace, steps.intervals, launching)[:num_kept]
    numbers, dropped = steps.numbers[:num_kept], steps.numbers[num_kept:]
    runs = _runs(numbers, steps.intervals[:num_kept])
    stretches = np.array([(intervals[run[0], 0], intervals[run[-1], 1]) for run in runs], np.int64)
    stretches = stretches.reshape(-1, 2)
    return StepBounds(
        intervals=intervals,
        numbers=numbers,
        dropped=dropped,
        stretches=stretches[stretches[:, 0] < stretches[:, 1]],
        notes=(*dropped_note(dropped), *_stretches_note(numbers, runs)),
    )


def num_whole_steps(trace: Trace, steps: Intervals, launch: LaunchLinks) -> int:
    """Number of steps before the first one that may have lost something in a file that is cut off.

    Files are written in order of time, or first the host's events and then the device's. So a step is whole
    if an event starts after it, and if each of its launches is followed, there or later, by one whose device
    event was read. If a file lists devices but has no device event, these are lost.
    """
    is_whole = steps[:, 1] <= trace.begin_ns.max(initial=0)
    if trace.metadata.get("deviceProperties") and not len(trace.device):
        is_whole[:] = False
    linked = np.concatenate((launch.runtime, launch.operator))
    linked = linked[linked >= 0]
    if len(linked):
        launches_by_name = np.zeros(len(trace.names), np.bool_)
        launches_by_name[trace.name[linked]] = True
        launches = trace.is_category(Category.RUNTIME, Category.CPU_OP) & launches_by_name[trace.name]
        lost_ns = trace.begin_ns[launches & (trace.begin_ns > trace.begin_ns[linked].max())]
        step = locate(lost_ns, steps)
        is_whole[step[step >= 0]] = False
    return len(steps) if is_whole.all() else int(np.argmin(is_whole))


def dropped_note(dropped: tuple[int, ...]) -> tuple[str, ...]:
    if not dropped:
        return ()
    return (
        f"Steps left out at the end: {', '.join(map(str, dropped))}. They launched nothing, or the profiler"
        " stopped before their GPU events arrived.",
    )


def long_gaps(steps: Intervals) -> NDArray[np.intp]:
    """Steps with a long time before the next one; consecutive steps touch."""
    if not len(steps):
        return np.zeros(0, np.intp)
    limit_ns = max(_MIN_GAP_NS, _GAP_FACTOR * float(np.median(steps[:, 1] - steps[:, 0])))
    return np.flatnonzero(steps[1:, 0] - steps[:-1, 1] > limit_ns)


def launching_steps(trace: Trace, steps: Intervals, launch: LaunchLinks) -> NDArray[np.intp]:
    """Index of the step in which any thread launched each device event, -1 without one, shape (m,)."""
    runtime = launch.runtime
    launching = np.full(len(runtime), -1, np.intp)
    known = np.flatnonzero(runtime >= 0)
    step = locate(trace.begin_ns[runtime[known]], steps)
    inside = (step >= 0) & (trace.end_ns[runtime[known]] <= steps[step, 1])  # entirely, as in the plugin
    launching[known[inside]] = step[inside]
    return launching


def _bounds(trace: Trace, steps: Intervals, launching: NDArray[np.intp]) -> NDArray[np.int64]:
    work = trace.device.event
    begin_ns, end_ns = trace.begin_ns[work], trace.end_ns[work]
    launched = launching >= 0
    last_ns = steps[:, 1].copy()
    np.maximum.at(last_ns, launching[launched], end_ns[launched])
    reached_ns = int(steps[0, 0])
    if (launching == 0).any():
        left_over = end_ns[~launched & (end_ns < begin_ns[launching == 0].min())]
        reached_ns = int(left_over.max(initial=reached_ns))
    bounds = []
    for host_begin_ns, end in zip(steps[:, 0].tolist(), last_ns.tolist(), strict=True):
        begin = max(reached_ns, host_begin_ns)
        reached_ns = max(end, begin)
        bounds.append((begin, reached_ns))
    return np.array(bounds, np.int64).reshape(-1, 2)


def _without_tail(trace: Trace, steps: Intervals, launch: LaunchLinks) -> int:
    """Number of steps to keep: the profiler may stop before the last ones' device events arrive.

    A step is complete if at least 0.8 of its launches have their device events, relative to the step with the
    largest fraction (some calls, e.g. a set of 0 bytes, never have any). Launches are runtime calls with
    names that launched device events anywhere. Steps at the end that launched nothing follow the last
    ``profiler.step()``, unless the callback noted that they were recorded.
    """
    launched = np.zeros(len(trace), np.bool_)
    launched[launch.runtime[launch.runtime >= 0]] = True
    launches_by_name = np.zeros(len(trace.names), np.bool_)
    launches_by_name[trace.name[launched]] = True
    calls = np.flatnonzero(
        (trace.category == Category.RUNTIME) & launches_by_name[trace.name] & (trace.correlation >= 0)
    )
    step = locate(trace.begin_ns[calls], steps)
    num_calls = np.bincount(step[step >= 0], minlength=len(steps))
    num_done = np.bincount(step[(step >= 0) & launched[calls]], minlength=len(steps))
    done = num_done / np.maximum(num_calls, 1)
    if not done.any():
        return len(steps)
    is_complete = np.where(num_calls > 0, done >= _COMPLETE * done.max(), recorded_steps(trace) is not None)
    return int(np.flatnonzero(is_complete)[-1]) + 1


def _runs(numbers: tuple[int, ...], steps: Intervals) -> list[NDArray[np.intp]]:
    """Indices of steps that are consecutive by number and in time, run by run."""
    if not numbers:
        return []
    ends = different(
        np.concatenate((np.flatnonzero(np.diff(np.array(numbers, np.int64)) != 1), long_gaps(steps)))
    )
    return np.split(np.arange(len(numbers)), ends.astype(np.intp) + 1)


def _stretches_note(numbers: tuple[int, ...], runs: list[NDArray[np.intp]]) -> tuple[str, ...]:
    if len(runs) < 2:
        return ()
    spans = [(numbers[run[0]], numbers[run[-1]]) for run in runs]
    texts = [f"{first} to {last}" if first != last else str(first) for first, last in spans[:_MAX_LISTED]]
    more = f" and {len(runs) - _MAX_LISTED} more" if len(runs) > _MAX_LISTED else ""
    return (
        f"The steps are {len(runs)} separate ranges, and no ratio includes the time in between:"
        f" {', '.join(texts)}{more}.",
    )


_LEAST_CALLS: Final = 3
"""Ranges that occur less often aren't steps."""


_MOST: Final = 0.5
"""Least share of the trace's time that guessed steps cover, of the device work launched in them, and of
their kind's ranges on their thread."""


_ROUNDING_NS: Final = 1_000
"""Timestamps of old traces are whole microseconds."""


_OF_SERVER: Final = re.compile(r"execute_(?:\w+_)?context_\d+\(.*generation_\d+\(|step\[[A-Z_]+[ \]]")
"""Ranges of vLLM and SGLang: ``execute_context_1(128)_generation_0(0)``, ``step[DECODE bs=4]``."""


_IN_BRACKETS: Final = re.compile(r"\[[^\[\]()]*\]|\([^\[\]()]*\)")


_NUMBER: Final = re.compile(r"\d+")


_BRACKETS: Final = "…"


_MAX_COMPARED: Final = 500


_MAX_KINDS: Final = 50


_MAX_NAME: Final = 100
"""Longest compared name; comparing takes quadratic time."""


def steps_asked_for(trace: Trace, wanted: re.Pattern[str]) -> Steps | None:
    """The ranges whose names match the expression, ``None`` without any."""
    is_host = (trace.category == Category.CPU_OP) | (trace.category == Category.USER_ANNOTATION)
    rows = np.flatnonzero(is_host & trace.is_named(lambda name: wanted.search(name) is not None))
    steps = _steps_of(trace, rows)
    if steps is None:
        return None
    origin = f"The steps are the {len(steps.numbers):,} ranges whose names match {wanted.pattern!r}."
    return replace(steps, notes=(origin,), origin=origin)


def guess_steps(trace: Trace, launch: LaunchLinks, is_annotation: NDArray[np.bool_]) -> Steps | None:
    """The ranges that a server writes around its steps, else those that repeat; ``None`` without any.

    Repeating ranges are of one kind, on one thread, never nested in each other, and cover most of the trace.
    Names that differ only in numbers, or in brackets, are of one kind. The steps launch more than half of the
    device's work. Of several kinds, the one that covers most is chosen.

    Args:
        trace: without ``ProfilerStep`` ranges.
        is_annotation: shape (n,).
    """
    of_server = np.flatnonzero(is_annotation & trace.is_named(lambda name: bool(_OF_SERVER.match(name))))
    whole_ns = _recorded_ns(trace)
    best: tuple[tuple[bool, int, int], Steps] | None = None
    for rows in _kinds(trace, is_annotation):
        is_known = bool(np.isin(rows, of_server).all())
        steps = _steps_of(trace, rows)
        if steps is None or len(steps.numbers) < _MOST * len(rows):  # on several threads at the same time
            continue
        if _overlap(trace, rows, steps.track) or not _contain_most_launches(steps, launch):
            continue
        bounds = bound_steps(trace, steps, launch).intervals
        covered_ns = int((bounds[:, 1] - bounds[:, 0]).sum())
        repeats = len(steps.numbers) >= _LEAST_CALLS and covered_ns > _MOST * whole_ns
        key = (is_known, covered_ns, length(steps.intervals))
        if (is_known or repeats) and (best is None or key > best[0]):
            best = key, replace(steps, rows=of_server) if is_known else steps
    if best is None:
        return None
    steps = best[1]
    example = trace.name_of(int(steps.rows[0]))[:_MAX_NAME]
    origin = (
        f"The trace has no ProfilerStep ranges. Its steps are a guess: ranges like {example!r}"
        f" ({len(steps.numbers):,} of them). To use others, run lightning-modelprof analyze --step-range"
        " REGEX."
    )
    return replace(steps, notes=(origin,), origin=origin)


def _contain_most_launches(steps: Steps, launch: LaunchLinks) -> bool:
    launch_ns = launch.begin_ns[launch.begin_ns >= 0]
    return bool(np.count_nonzero(locate(launch_ns, steps.intervals) >= 0) >= _MOST * len(launch_ns))


def nearest_ranges(trace: Trace, wanted: re.Pattern[str]) -> list[str]:
    """Names of ranges close to ``wanted``, else the most frequent."""
    names = Counter(trace.name[trace.category == Category.USER_ANNOTATION].tolist())
    known = list(dict.fromkeys(trace.names[one][:_MAX_NAME] for one, _ in names.most_common(_MAX_COMPARED)))
    alike = difflib.get_close_matches(wanted.pattern[:_MAX_NAME], known, cutoff=0.3)
    return alike or known[:3]


def _steps_of(trace: Trace, rows: NDArray[np.int64]) -> Steps | None:
    """The ranges on the thread with most of them, numbered in order; ``None`` without any."""
    if not len(rows):
        return None
    track = int(np.bincount(trace.track[rows]).argmax())
    chosen = rows[trace.track[rows] == track]
    intervals, kept = outermost(trace.begin_ns[chosen], trace.end_ns[chosen])
    if not len(kept):
        return None
    return Steps(
        intervals=intervals,
        numbers=tuple(range(len(kept))),
        track=track,
        notes=(),
        are_numbered=False,
        rows=rows,
    )


def _recorded_ns(trace: Trace) -> int:
    """From the start of the program's first event to the end of its last."""
    rows = np.flatnonzero(
        trace.is_category(
            Category.CPU_OP,
            Category.USER_ANNOTATION,
            Category.RUNTIME,
            Category.KERNEL,
            Category.MEMCPY,
            Category.MEMSET,
        )
    )
    return int(trace.end_ns[rows].max(initial=0) - trace.begin_ns[rows[:1]].sum())


def _kinds(trace: Trace, is_annotation: NDArray[np.bool_]) -> Iterator[NDArray[np.int64]]:
    """Rows of each kind's ranges that may be steps; of many kinds, those with the most time.

    A kind is a name without its numbers, ``step[DECODE bs=#]``, or also without text in brackets.
    """
    rows = np.flatnonzero(is_annotation)
    rows = rows[trace.is_named(_may_be_step)[rows]]
    names, name = by_name(trace, rows)
    for shorten in (_without_numbers, _without_brackets):
        kinds: dict[str, int] = {}
        kind_of_name = np.array([kinds.setdefault(shorten(one), len(kinds)) for one in names], np.int64)
        kind = kind_of_name[name]
        time_ns = sum_by(kind, trace.duration_ns[rows], len(kinds))
        for chosen in np.argsort(-time_ns, kind="stable")[:_MAX_KINDS].tolist():
            yield rows[kind == chosen]


def _without_numbers(name: str) -> str:
    return _NUMBER.sub("#", name[:_MAX_NAME])


def _without_brackets(name: str) -> str:
    """``step[…]``; the name without its numbers if nothing else is left."""
    short, before = name[:_MAX_NAME], ""
    while before != short:  # from the innermost brackets outward
        before, short = short, _IN_BRACKETS.sub(_BRACKETS, short)
    return _without_numbers(short if short.strip(f"{_BRACKETS} ") else name)


def _may_be_step(name: str) -> bool:
    if is_module(name) or is_torch_range(name):
        return False
    return name.startswith(LIGHTNING_PREFIX) or not is_shown_elsewhere(name)


def _overlap(trace: Trace, rows: NDArray[np.int64], track: int) -> bool:
    own = rows[trace.track[rows] == track]
    reached = np.maximum.accumulate(trace.end_ns[own])
    return bool((trace.begin_ns[own[1:]] < reached[:-1] - _ROUNDING_NS).any())
