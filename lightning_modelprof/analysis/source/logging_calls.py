"""The user's lines that log values, call loggers or use metrics, and their time."""

from __future__ import annotations

from collections import Counter
from typing import Final

from lightning_modelprof.analysis.source.hot_lines import COLLECTIVES, HotLines
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.run.sites import LOG, LOGGER
from lightning_modelprof.run.stacks import LogCall, StackFrame

FORWARD: Final = "forward"
UPDATE: Final = "update"
COMPUTE: Final = "compute"
RANKS: Final = "ranks"
"""Waiting for other ranks, in any call."""

_STEP: Final = ("forward", "backward", "optimizer")


class LoggingLine(Place, frozen=True, kw_only=True):
    """One line of the user's that logs or calls a metric.

    Attributes:
        kind: where most of its time goes: ``LOG`` for ``self.log`` and ``self.log_dict``; ``LOGGER`` for
            calls of a logger; ``FORWARD``, ``UPDATE``, ``COMPUTE`` for calls of a metric; ``RANKS``.
        logs: the call in the source; ``None`` if unknown.
        share: of all sampled time, 0..1.
    """

    file: str
    line: int
    kind: str
    logs: LogCall | None
    share: float
    samples: int


class LoggingCalls(Record, frozen=True, kw_only=True):
    """All samples below logging calls, except where ranks meet inside a library, or a loss is computed.

    Attributes:
        lines: longest first.
        share: of all sampled time, 0..1.
        share_in_step: the part in the model's own phases, which no other phase's rule covers.
    """

    lines: tuple[LoggingLine, ...]
    share: float
    share_in_step: float
    samples: int


def logging_calls(hot: HotLines) -> LoggingCalls:
    known = {(call.file, call.line): call for call in hot.samples.log_calls}
    times: dict[StackFrame, Counter[str]] = {}
    samples: Counter[StackFrame] = Counter()
    in_step_ns = 0
    for stack in hot.samples.stacks:
        frames = [hot.samples.frames[number] for number in stack.frames]
        begins = hot.logging_begins(frames)
        if begins is None:
            continue
        caller, first = begins
        kind = _kind(frames[first:])
        if kind == RANKS and any(frame.package for frame in frames[caller:first]):
            continue  # in a library, where the user can't change it
        times.setdefault(frames[caller], Counter())[kind] += stack.time_ns
        samples[frames[caller]] += stack.samples
        in_step_ns += stack.time_ns * (stack.phase in _STEP)
    whole_ns = hot.time_ns
    lines = [
        LoggingLine(
            file=frame.file,
            line=frame.line,
            function=frame.function,
            kind=kinds.most_common(1)[0][0],
            logs=known.get((frame.file, frame.line)),
            share=kinds.total() / whole_ns,
            samples=samples[frame],
            package=frame.package,
        )
        for frame, kinds in times.items()
    ]
    return LoggingCalls(
        lines=tuple(sorted(lines, key=lambda one: (-one.share, one.file, one.line))),
        share=sum(kinds.total() for kinds in times.values()) / whole_ns,
        share_in_step=in_step_ns / whole_ns,
        samples=samples.total(),
    )


def _kind(frames: list[StackFrame]) -> str:
    if any(frame.python_module.startswith(COLLECTIVES) for frame in frames):
        return RANKS
    kind = frames[0].logging_kind
    if kind in (LOG, LOGGER, FORWARD, UPDATE, COMPUTE):
        return kind
    # The wrapper around update and compute; from Python 3.11, its own name tells which one it wraps.
    names = [frame.function for frame in frames[:2]]
    return COMPUTE if "_wrap_compute" in names[0] or names[-1].endswith(COMPUTE) else UPDATE
