"""Two flame graphs of the same kind become one: as wide as after, with how each box changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from lightning_modelprof.report.model import FlameFrame, FlameGraph, Report, Unit
from lightning_modelprof.units import format_amount, percent, signed

FLAMES_HELP: Final = (
    "Box widths show the After run, and colors show each box's change. Boxes match if their names"
    " and all enclosing names match, even if lines moved. Call stacks compare shares of sampled time, in"
    " percentage points. Modules compare time per step. New boxes are marked; removed boxes have no width"
    " and are listed below. Functions in *other* on one side may have their own boxes on the other."
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
    what = "share of all samples, in percentage points" if is_share else "time per step"
    return FlameGraph(
        id=f"{after.id}_changes",
        title=f"Changes: {after.title}",
        unit=after.unit,
        frames=frames,
        change_unit=unit,
        notes=(
            f"Box widths show the After run. Color is the change in each box's {what}.",
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
    others = f", and {rest:,} more, including some nested in these" if rest else ""
    return [f"Removed: {', '.join(named)}{others}."]


def _written(value: float, unit: Unit) -> str:
    if unit is Unit.RATIO:
        return f"{signed(percent(value).removesuffix('%'))} points"
    return signed(format_amount(value, unit))


def _by_path(flame: FlameGraph) -> dict[_FramePath, FlameFrame]:
    """Names from the outside in → box; of boxes of one name beside each other each has its number."""
    paths: list[_FramePath] = []
    uses: Counter[tuple[_FramePath, str]] = Counter()
    for frame in flame.frames:
        around = () if frame.parent is None else paths[frame.parent]
        paths.append((*around, (frame.name, uses[around, frame.name])))
        uses[around, frame.name] += 1
    return dict(zip(paths, flame.frames, strict=True))
