"""A flame graph as boxes, whose places and widths are shares of the graph's.

The graph hangs from the top, as icicles do: a page is read from above, so the outermost boxes are seen first
and the deep and narrow ones need scrolling. Every number that is read is written here, except the share of
what a search finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from lightning_modelprof.errors import printable
from lightning_modelprof.record import Record
from lightning_modelprof.report.definitions import definition
from lightning_modelprof.report.model import FlameFrame, FlameGraph, Unit
from lightning_modelprof.show.layout import shorten
from lightning_modelprof.units import format_amount, format_cell

MAX_BOXES: Final = 2_000
"""Boxes of one graph: a browser stays quick, and narrower ones could not be told apart."""

_MAX_NAME: Final = 160
"""Characters of a name in its box; no screen is wider. The line below the graph has all of them."""

_KINDS: Final = {
    "users": "your code",
    "installed": "library",
    "phase": "phase",
    "joined": "small frames, merged",
}
"""Class of a box, and its word in the legend."""


class Box(Record, frozen=True, array_like=True):
    """One box; in JSON a list.

    Attributes:
        left, width: shares of the graph's width.
        row: 0 at the top.
        kind: one of ``_KINDS``.
        text: the name, short enough for a box.
        at: its file and line; ``""`` if it has none.
        about: the whole name, where it is; in a second line how long it takes and what share that is.
    """

    left: float
    width: float
    row: int
    kind: str
    text: str
    at: str
    about: str


class FlameView(Record, frozen=True, kw_only=True):
    """What a page needs of a flame graph.

    Attributes:
        boxes: outer ones before those in them.
        rows: how deep it is.
        kinds: class and word of the kinds of boxes, for a legend; empty where no box is anybody's code.
        total: what the full width is.
        has_places: whether any box is at a line of code.
    """

    id: str
    title: str
    about: str
    total: str
    boxes: tuple[Box, ...]
    rows: int
    kinds: tuple[tuple[str, str], ...]
    has_places: bool
    notes: tuple[str, ...]


def flame_view(flame: FlameGraph) -> FlameView | None:
    """Draw a flame graph; ``None`` when no box has a width."""
    frames = [frame for frame in flame.frames if math.isfinite(frame.total) and frame.total > 0]
    if not frames:
        return None
    total = sum(frame.total for frame in frames if frame.depth == 0)
    shown, note = _widest(frames, total)
    kinds, words = _kinds(shown)
    return FlameView(
        id=flame.id,
        title=printable(flame.title),
        about=definition("flame", flame.id),
        total=format_amount(total, flame.unit),
        boxes=tuple(_box(frame, total, kind, flame.unit) for frame, kind in zip(shown, kinds, strict=True)),
        rows=1 + max(frame.depth for frame in shown),
        kinds=words,
        has_places=any(frame.place for frame in shown),
        notes=tuple(text for one in (*flame.notes, note) if (text := printable(" ".join(one.split())))),
    )


def _widest(frames: Sequence[FlameFrame], total: float) -> tuple[Sequence[FlameFrame], str]:
    """The widest boxes in their order, and a sentence if there are others.

    No box is wider than the one that holds it, so with a box all those around it are kept.
    """
    if len(frames) <= MAX_BOXES:
        return frames, ""
    ranked = sorted(range(len(frames)), key=lambda place: (-frames[place].total, frames[place].depth))
    kept, left_out = sorted(ranked[:MAX_BOXES]), len(frames) - MAX_BOXES
    widest = format_cell(frames[ranked[MAX_BOXES]].total / total, Unit.RATIO)
    boxes = "box" if left_out == 1 else "boxes"
    return (
        [frames[place] for place in kept],
        f"{format_cell(left_out, Unit.COUNT)} {boxes} below {widest}% not shown.",
    )


def _kinds(frames: Sequence[FlameFrame]) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """The class of each box, and the classes with their words for a legend."""
    kinds = [_kind(frame) for frame in frames]
    if not set(kinds) - {"phase", "joined"}:
        return ["phase"] * len(kinds), ()
    return kinds, tuple(one for one in _KINDS.items() if one[0] in kinds)


def _kind(frame: FlameFrame) -> str:
    """What a box is in a graph of functions: what is nobody's code is a phase, or on it a sum of others."""
    if frame.is_users is None:
        return "phase" if frame.depth == 0 else "joined"
    return "users" if frame.is_users else "installed"


def _box(frame: FlameFrame, total: float, kind: str, unit: Unit) -> Box:
    share = frame.total / total
    return Box(
        left=float(f"{frame.begin / total:.9g}"),
        width=float(f"{share:.9g}"),
        row=frame.depth,
        kind=kind,
        text=shorten(printable(frame.name), _MAX_NAME),
        at=printable(frame.place),
        about=_about(frame, share, unit),
    )


def _about(frame: FlameFrame, share: float, unit: Unit) -> str:
    """Such as ``Net.loss, train.py:12 (your code)`` and below it ``12.3 ms, 45.00 %; itself 1.20 ms``."""
    place = f", {printable(frame.detail)}" if frame.detail and frame.detail != frame.name else ""
    kind = "" if frame.is_users is None else f" ({_KINDS[_kind(frame)]})"
    own = "all self time" if frame.own == frame.total else f"self {format_amount(frame.own, unit)}"
    return (
        f"{printable(frame.name)}{place}{kind}\n{format_amount(frame.total, unit)},"
        f" {format_amount(share, Unit.RATIO)}; {own}"
    )
