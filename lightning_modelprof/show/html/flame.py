"""A flame graph as boxes, with places and widths as shares of the graph's width.

The graph hangs from the top like icicles: pages are read from above, so the outermost boxes come first and
the deep, narrow ones need scrolling. Every displayed number is formatted here, except the share of search
matches.
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
"""Maximum boxes per graph: keeps browsers quick, and narrower boxes couldn't be told apart."""

_MAX_NAME: Final = 160
"""Maximum characters of a name in its box; no screen is wider. The line below the graph has all of them."""

_KINDS: Final = {
    "users": "your code",
    "installed": "library",
    "phase": "phase",
    "joined": "small frames, merged",
}
"""Class of a box → its word in the legend."""


class Box(Record, frozen=True, array_like=True):
    """One box; a list in JSON.

    Attributes:
        left, width: shares of the graph's width.
        row: 0 at the top.
        kind: one of ``_KINDS``.
        text: the name, short enough for a box.
        at: file and line; ``""`` if it has none.
        about: whole name and place; on a second line, time and share.
    """

    left: float
    width: float
    row: int
    kind: str
    text: str
    at: str
    about: str


class FlameView(Record, frozen=True, kw_only=True):
    """Everything that a page needs for a flame graph.

    Attributes:
        boxes: outer ones before those inside them.
        rows: how deep it is.
        kinds: class and word of the kinds of boxes, for a legend; empty if no box has code.
        total: what the full width stands for.
        has_places: whether any box has a line of code.
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
    """Draw a flame graph; ``None`` if no box has a width."""
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
    """Return the widest boxes in their order, and a sentence if there are others.

    No box is wider than its parent, so a box's ancestors are kept with it.
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
    kinds = [_kind(frame) for frame in frames]
    if not set(kinds) - {"phase", "joined"}:
        return ["phase"] * len(kinds), ()
    return kinds, tuple(one for one in _KINDS.items() if one[0] in kinds)


def _kind(frame: FlameFrame) -> str:
    """Classify a box; without code it's a phase at the top, else a sum of merged boxes."""
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
    """Format as ``Net.loss, train.py:12 (your code)`` and below it ``12.3 ms, 45.0%; self 1.20 ms``."""
    place = f", {printable(frame.detail)}" if frame.detail and frame.detail != frame.name else ""
    kind = "" if frame.is_users is None else f" ({_KINDS[_kind(frame)]})"
    own = "all self time" if frame.own == frame.total else f"self {format_amount(frame.own, unit)}"
    return (
        f"{printable(frame.name)}{place}{kind}\n{format_amount(frame.total, unit)},"
        f" {format_amount(share, Unit.RATIO)}; {own}"
    )
