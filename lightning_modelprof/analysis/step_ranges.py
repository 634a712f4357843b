"""Steps of traces without ``ProfilerStep`` ranges, as of servers: other ranges, asked for or guessed."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.grouping import by_name
from lightning_modelprof.analysis.launch_links import LaunchLinks
from lightning_modelprof.analysis.timeline.host_phases import Steps
from lightning_modelprof.analysis.timeline.intervals import length, locate, outermost
from lightning_modelprof.analysis.timeline.names import (
    LIGHTNING_PREFIX,
    is_module,
    is_shown_elsewhere,
    is_torch_range,
)
from lightning_modelprof.analysis.timeline.steps import bound_steps
from lightning_modelprof.analysis.timeline.tally import sum_by
from lightning_modelprof.trace.model import Category, Trace

_LEAST_CALLS: Final = 3
"""Ranges that come less often are no steps."""

_MOST: Final = 0.5
"""Of the trace's time that guessed steps cover, of the device's work that is launched in them, and of the
ranges of their kind that are on their thread."""

_ROUNDING_NS: Final = 1_000
"""Stamps of old traces are whole microseconds."""

_OF_SERVER: Final = re.compile(r"execute_(?:\w+_)?context_\d+\(.*generation_\d+\(|step\[[A-Z_]+[ \]]")
"""Ranges of vLLM and SGLang: ``execute_context_1(128)_generation_0(0)``, ``step[DECODE bs=4]``."""

_IN_BRACKETS: Final = re.compile(r"\[[^\[\]()]*\]|\([^\[\]()]*\)")
_NUMBER: Final = re.compile(r"\d+")
_BRACKETS: Final = "…"
_MAX_COMPARED: Final = 500
_MAX_KINDS: Final = 50
_MAX_NAME: Final = 100
"""Names are compared in the square of their length."""


def steps_asked_for(trace: Trace, wanted: re.Pattern[str]) -> Steps | None:
    """The ranges whose names the expression is found in, ``None`` without any."""
    is_host = (trace.category == Category.CPU_OP) | (trace.category == Category.USER_ANNOTATION)
    rows = np.flatnonzero(is_host & trace.is_named(lambda name: wanted.search(name) is not None))
    steps = _steps_of(trace, rows)
    if steps is None:
        return None
    origin = f"The steps are the {len(steps.numbers):,} ranges whose names match {wanted.pattern!r}."
    return replace(steps, notes=(origin,), origin=origin)


def guess_steps(trace: Trace, launch: LaunchLinks, is_annotation: NDArray[np.bool_]) -> Steps | None:
    """The ranges that a server writes around its steps, else those that repeat; ``None`` without such.

    Ranges that repeat are of one kind, on one thread and never one in the other, and cover most of the trace.
    Names that differ in numbers, or in brackets, are of one kind. More than half of the device's work is
    launched in the steps. Of several kinds it is the one that covers most.

    Args:
        trace: without ``ProfilerStep`` ranges.
        launch: what launched each device event.
        is_annotation: shape (n,).
    """
    of_server = np.flatnonzero(is_annotation & trace.is_named(lambda name: bool(_OF_SERVER.match(name))))
    whole_ns = _recorded_ns(trace)
    best: tuple[tuple[bool, int, int], Steps] | None = None
    for rows in _kinds(trace, is_annotation):
        is_known = bool(np.isin(rows, of_server).all())
        steps = _steps_of(trace, rows)
        if steps is None or len(steps.numbers) < _MOST * len(rows):  # on several threads at once
            continue
        if _overlap(trace, rows, steps.track) or not _launch_most(steps, launch):
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
        f" ({len(steps.numbers):,} of them). lightning-modelprof analyze --step-range REGEX takes others."
    )
    return replace(steps, notes=(origin,), origin=origin)


def _launch_most(steps: Steps, launch: LaunchLinks) -> bool:
    """Whether most of the device's work whose launch is known is launched in the steps, by any thread."""
    launch_ns = launch.begin_ns[launch.begin_ns >= 0]
    return bool(np.count_nonzero(locate(launch_ns, steps.intervals) >= 0) >= _MOST * len(launch_ns))


def nearest_ranges(trace: Trace, wanted: re.Pattern[str]) -> list[str]:
    """Names of ranges that may have been meant: the most alike, else the most frequent."""
    names = Counter(trace.name[trace.category == Category.USER_ANNOTATION].tolist())
    known = list(dict.fromkeys(trace.names[one][:_MAX_NAME] for one, _ in names.most_common(_MAX_COMPARED)))
    alike = difflib.get_close_matches(wanted.pattern[:_MAX_NAME], known, cutoff=0.3)
    return alike or known[:3]


def _steps_of(trace: Trace, rows: NDArray[np.int64]) -> Steps | None:
    """The ranges on the thread that has most of them, numbered as they come; ``None`` without any."""
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
    """From the begin of the first event of the program to the end of the last."""
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
    """Rows of the ranges of each kind that may be steps; of many kinds those with the most time.

    A kind is a name without its numbers, ``step[DECODE bs=#]``, or without what is in brackets as well.
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
    """``step[…]``; the name itself where that says nothing else."""
    short, before = name[:_MAX_NAME], ""
    while before != short:  # from the innermost brackets on
        before, short = short, _IN_BRACKETS.sub(_BRACKETS, short)
    return _without_numbers(short if short.strip(f"{_BRACKETS} ") else name)


def _may_be_step(name: str) -> bool:
    if is_module(name) or is_torch_range(name):
        return False
    return name.startswith(LIGHTNING_PREFIX) or not is_shown_elsewhere(name)


def _overlap(trace: Trace, rows: NDArray[np.int64], track: int) -> bool:
    """Whether any of the ranges on a thread begins inside another of them."""
    own = rows[trace.track[rows] == track]
    reached = np.maximum.accumulate(trace.end_ns[own])
    return bool((trace.begin_ns[own[1:]] < reached[:-1] - _ROUNDING_NS).any())
