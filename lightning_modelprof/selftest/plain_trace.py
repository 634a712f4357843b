"""Sum over the JSON of a trace, event by event, with only the standard library."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

_WORK: Final = {
    **dict.fromkeys(("kernel", "concurrent_kernel"), "kernel"),
    **dict.fromkeys(("gpu_memcpy", "memcpy", "gpu_memset", "memset"), "copy"),
}

Span = tuple[int, int]


@dataclass
class PlainEvent:
    """A timed event, in whole nanoseconds."""

    name: str
    begin: int
    end: int
    more: dict[str, Any] = field(repr=False)
    where: tuple[Any, Any] = (0, 0)
    launch: PlainEvent | None = None

    @property
    def ns(self) -> int:
        return self.end - self.begin


class PlainTrace:
    """Events of a trace file: device work, runtime calls, operators and ranges."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        document = json.loads(text, parse_float=Decimal)  # a stamp since 1970 has too many digits for a float
        self.kernels: list[PlainEvent] = []
        self.copies: list[PlainEvent] = []
        self.calls: list[PlainEvent] = []
        self.ranges: list[PlainEvent] = []
        self.operators: Counter[str] = Counter()
        for one in document["traceEvents"] if isinstance(document, dict) else document:
            if one.get("ph") == "X" and "dur" in one:
                self._add(one, str(one.get("cat", "")).lower())
        launches = {one.more.get("correlation"): one for one in reversed(self.calls)}
        for work in self.work:
            work.launch = launches.get(work.more.get("correlation"))
        steps = [one for one in self.ranges if one.name.startswith("ProfilerStep#")]
        self.steps = sorted(steps, key=lambda one: one.begin)

    def _add(self, one: dict[str, Any], kind: str) -> None:
        more, begin = one.get("args") or {}, round(one["ts"] * 1000)
        event = PlainEvent(one["name"], begin, begin + round(one["dur"] * 1000), more)
        if kind in _WORK:
            event.where = (more.get("device", one.get("pid")), more.get("stream", one.get("tid")))
            (self.kernels if _WORK[kind] == "kernel" else self.copies).append(event)
        elif kind == "runtime" or kind.endswith(("_runtime", "_driver")):
            self.calls.append(event)
        elif kind == "user_annotation":
            self.ranges.append(event)
        elif kind in {"cpu_op", "operator"}:
            self.operators[event.name] += 1

    @property
    def work(self) -> list[PlainEvent]:
        """Kernels and copies."""
        return [*self.kernels, *self.copies]

    def launched_in(self, span: PlainEvent) -> list[PlainEvent]:
        """Work with its launching call inside a range."""
        inside = (one for one in self.work if one.launch is not None)
        return [one for one in inside if span.begin <= one.launch.begin and one.launch.end <= span.end]  # type: ignore[union-attr]

    def step_bounds(self) -> list[Span]:
        """Start and end of each step; it ends with the work that it launched, where the next one starts."""
        known = {id(one) for step in self.steps for one in self.launched_in(step)}
        start = min((one.begin for one in self.launched_in(self.steps[0])), default=0)
        before = [one.end for one in self.work if id(one) not in known and one.end < start]
        reached, bounds = max([self.steps[0].begin, *before]), []
        for step in self.steps:
            begin = max(reached, step.begin)
            reached = max([begin, step.end, *(one.end for one in self.launched_in(step))])
            bounds.append((begin, reached))
        return bounds


def spans(events: Iterable[PlainEvent]) -> list[Span]:
    return [(one.begin, one.end) for one in events]


def covered(events: Iterable[Span], low: int | None = None, high: int | None = None) -> int:
    """Total time within any of the spans, between two times."""
    total, reached = 0, -(10**30) if low is None else low
    for begin, end in sorted(events):
        last = end if high is None else min(end, high)
        total += max(0, last - max(begin, reached))
        reached = max(reached, last)
    return total
