"""Details of single events beyond name and time, as texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.timeline.names import is_collective_call, is_module, is_place
from lightning_modelprof.analysis.timeline.tally import distinct
from lightning_modelprof.analysis.timeline.timeline import Timeline as TraceTimeline
from lightning_modelprof.analysis.trace.dataloader import is_fetch
from lightning_modelprof.report.timeline.idle_slices import STACK_HEADING
from lightning_modelprof.run.phases import STEP_RANGE_PREFIX
from lightning_modelprof.trace.model import Category, Collective, InputShapes, Trace

_Column = tuple[list[str], NDArray[np.int64]]
"""Texts, and each event's index into them, -1 without one."""


def find_details(trace: Trace) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Collect the distinct texts, with one line per fact.

    They show an operator's input shapes and values, a collective, the bytes of a copy or memset, a kernel's
    blocks and estimated occupancy, and the call stack, if recorded.

    Returns:
        The texts, and each event's index into them, -1 without one, shape (n,).
    """
    columns: list[_Column] = [
        ([_shapes_text(shapes) for shapes in trace.shapes], trace.shape.astype(np.int64)),
        ([_collective_text(one) for one in trace.collectives], trace.collective.astype(np.int64)),
        *_device_columns(trace),
        ([_stack_text(stack) for stack in trace.stacks], trace.stack.astype(np.int64)),
    ]
    texts, place = columns[0]
    for column in columns[1:]:
        texts, place = _joined((texts, place), column)
    number_of: dict[str, int] = {}
    number = [number_of.setdefault(text, len(number_of)) if text else -1 for text in texts]
    return tuple(number_of), np.array([*number, -1], np.int64)[place]


def _joined(first: _Column, second: _Column) -> _Column:
    """Join each event's texts on separate lines, building only the pairs that occur."""
    (texts, place), (more_texts, more_place) = first, second
    if not more_texts:
        return first
    width = len(more_texts) + 1
    pairs, pair_of = distinct((place + 1) * width + more_place + 1, (len(texts) + 1) * width)
    joined = []
    for pair in pairs.tolist():
        one, other = divmod(pair, width)
        joined.append("\n".join(filter(None, (["", *texts][one], ["", *more_texts][other]))))
    return joined, pair_of


def _device_columns(trace: Trace) -> Iterator[_Column]:
    work = trace.device
    yield _device_column(trace, work.size_bytes, work.size_bytes >= 0, "{:,} bytes")
    yield _device_column(trace, work.blocks_per_sm, np.isfinite(work.blocks_per_sm), "blocks per SM: {}")
    occupancy = np.isfinite(work.occupancy)
    yield _device_column(trace, work.occupancy, occupancy, "estimated occupancy: {} of 1")


def _device_column(
    trace: Trace,
    values: NDArray[np.int64] | NDArray[np.float64],
    is_known: NDArray[np.bool_],
    text: str,
) -> _Column:
    """Turn a figure of the m device events into a column of all n events."""
    distinct_values, place_of = np.unique(values[is_known], return_inverse=True)
    place = np.full(len(trace), -1, np.int64)
    place[trace.device.event[is_known]] = place_of
    return [text.format(value) for value in distinct_values.tolist()], place


def _shapes_text(shapes: InputShapes) -> str:
    dims = f"input shapes: {shapes.dims}"
    has_values = bool(shapes.concrete.strip('[]", '))  # tensors have no value, only ""
    return f"{dims}\ninput values: {shapes.concrete}" if has_values else dims


def _stack_text(stack: str) -> str:
    return "\n".join((STACK_HEADING, *_frames(stack))) if stack else ""


def _frames(stack: str) -> Sequence[str]:
    return [frame.strip() for frame in stack.split(";") if frame.strip()]


def _collective_text(collective: Collective) -> str:
    group = None
    if collective.group is not None or collective.group_size is not None:
        size = None if collective.group_size is None else f"of {collective.group_size:,} ranks"
        group = " ".join(filter(None, ("group", collective.group, size)))
    elements = [
        f"{number:,} {'elements' if collective.dtype is None else collective.dtype} {way}"
        for number, way in ((collective.in_elements, "in"), (collective.out_elements, "out"))
        if number is not None
    ]
    known = [part for part in (collective.name, group, *elements) if part]
    return f"collective: {', '.join(known)}" if known else ""


_OF_CATEGORY: Final = {
    Category.OTHER: "other event",
    Category.CPU_OP: "operator",
    Category.USER_ANNOTATION: "user range",
    Category.RUNTIME: "runtime call",
    Category.KERNEL: "kernel",
    Category.MEMCPY: "memcpy",
    Category.MEMSET: "memset",
    Category.DEVICE_ANNOTATION: "device range",
    Category.PYTHON_FUNCTION: "python function",
    Category.DEVICE_SYNC: "synchronization",
    Category.OVERHEAD: "profiler overhead",
}


_STEP, _PHASE, _MODULE, _FETCH = "step", "phase", "module", "data loading"


_COMMUNICATION: Final = "communication"


WORDS: Final = (*_OF_CATEGORY.values(), _STEP, _PHASE, _MODULE, _FETCH, _COMMUNICATION)


def find_kinds(shared: TraceTimeline) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Find the kinds that occur, and each event's index into them, shape (n,).

    Names identify ranges: steps, phases and hooks (of lightning-modelprof and Lightning), modules and batch
    fetches; all others are user ranges. Communication takes precedence over everything else.
    """
    trace = shared.trace
    kind_of = np.zeros(256, np.int64)
    for category, word in _OF_CATEGORY.items():
        kind_of[category] = WORDS.index(word)
    kind: NDArray[np.int64] = kind_of[trace.category]
    kind[shared.is_annotation] = WORDS.index("user range")
    for test, word in (
        (is_place, _PHASE),
        (is_module, _MODULE),
        (is_fetch, _FETCH),
        (lambda name: name.startswith(STEP_RANGE_PREFIX), _STEP),
    ):
        kind[shared.is_annotation & trace.is_named(test)] = WORDS.index(word)
    on_host = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION)
    asks = on_host & trace.is_named(is_collective_call)
    kind[shared.is_communication | asks] = WORDS.index(_COMMUNICATION)
    used, place = distinct(kind, len(WORDS))
    return tuple(WORDS[index] for index in used.tolist()), place
