"""Two flame graphs of the same kind become one: as wide as after, with how each box changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from lightning_modelprof.report.model import FlameFrame, FlameGraph, Report, Unit
from lightning_modelprof.units import format_amount, percent, signed

FLAMES_HELP: Final = (
    "As wide as after; the colour is how each box changed. Boxes are the same when their names and those of"
    " all boxes around them are; lines may move. Of call stacks the change is the share of all sampled time"
    " after less that before, in percentage points, because runs differ in length; of modules it is the"
    " time of one step after less that before. A box of one side alone has 0 on the other: new ones are"
    " marked, gone ones have no width and are named below. So the changes of what is on a box and of its own"
    " time sum to that of the box. What is joined into *other* on one side may be boxes of their own on the"
    " other."
)
"""The definition."""

_MOST_GONE: Final = 5
"""How many of the boxes that are gone are named."""

_SHARED: Final = "call_stacks"
"""The graph whose widths are sums over a run; those of others are of one step."""

_FramePath = tuple[tuple[str, int], ...]


def flame_changes(before: Report, after: Report) -> tuple[FlameGraph, ...]:
    """The flame graphs that both reports have, each as one graph of what changed."""
    others = {flame.id: flame for flame in before.flames}
    return tuple(
        changed
        for flame in after.flames
        if flame.id in others and (changed := flame_change(others[flame.id], flame)) is not None
    )


def flame_change(before: FlameGraph, after: FlameGraph) -> FlameGraph | None:
    """The graph of after, with the change of each box; ``None`` where a side has no width.

    Definition: ``FLAMES_HELP``.
    """
    wholes = [sum(frame.total for frame in one.frames if frame.depth == 0) for one in (before, after)]
    if not all(wholes):
        return None
    is_share = after.id == _SHARED
    divisors = wholes if is_share else [1.0, 1.0]
    unit = Unit.RATIO if is_share else after.unit
    old = {path: frame.total / divisors[0] for path, frame in _by_path(before).items()}
    new = _by_path(after)
    frames = tuple(
        replace(frame, change=frame.total / divisors[1] - old.get(path, 0.0), is_new=path not in old)
        for path, frame in new.items()
    )
    what = "share of all samples, in percentage points" if is_share else "time of one step"
    return FlameGraph(
        id=f"{after.id}_changes",
        title=f"{after.title}: what changed",
        unit=after.unit,
        frames=frames,
        change_unit=unit,
        notes=(
            f"As wide as after; the colour is the change of each box's {what}.",
            *_gone({path: value for path, value in old.items() if path not in new}, unit),
        ),
    )


def _gone(gone: Mapping[_FramePath, float], unit: Unit) -> list[str]:
    """A sentence on boxes of before alone: the outermost and widest of them."""
    outer = {path: value for path, value in gone.items() if path[:-1] not in gone}
    widest = sorted(outer, key=lambda path: (-outer[path], path))[:_MOST_GONE]
    if not widest:
        return []
    named = [f"{path[-1][0]} {_written(-outer[path], unit)}" for path in widest]
    rest = len(gone) - len(widest)
    others = f", and {rest:,} more, some of them in these" if rest else ""
    return [f"Gone, so without a box here: {', '.join(named)}{others}."]


def _written(value: float, unit: Unit) -> str:
    return signed(percent(value) if unit is Unit.RATIO else format_amount(value, unit))


def _by_path(flame: FlameGraph) -> dict[_FramePath, FlameFrame]:
    """Names from the outside in → box; of boxes of one name beside each other each has its number."""
    paths: list[_FramePath] = []
    uses: Counter[tuple[_FramePath, str]] = Counter()
    for frame in flame.frames:
        around = () if frame.parent is None else paths[frame.parent]
        paths.append((*around, (frame.name, uses[around, frame.name])))
        uses[around, frame.name] += 1
    return dict(zip(paths, flame.frames, strict=True))
