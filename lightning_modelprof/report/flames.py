"""The call tree as a flame graph."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.call_tree import CallNode, CallTree
from lightning_modelprof.report.model import FlameFrame, FlameGraph, Unit
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES

MIN_SHARE: Final = 0.002
"""Narrower boxes are joined: nobody could read them."""
_MOST_BOXES: Final = 1_000
"""With their share of joined ones there are no more than twice as many."""
_LOCALS: Final = "<locals>."


def call_flame(analysis: Analysis) -> FlameGraph | None:
    """Where the thread that runs the loop spent its time, by phase and function; ``None`` without samples.

    Definition: the width of a box is the time that the samples stand for in which the function was on the
    stack. Boxes of less than 0.2 % of all sampled time are joined into one box, ``other``, beside the rest of
    what the same function called, and the widths still add up.
    """
    tree = analysis.call_tree
    if isinstance(tree, Absent):
        return None
    frames: list[FlameFrame] = []
    _add(frames, tree.phases, None, begin=0, depth=0, least=_least(tree))
    return FlameGraph(
        id="call_stacks",
        title="Where the training thread was",
        unit=Unit.DURATION_NS,
        frames=tuple(frames),
        notes=_notes(analysis, tree),
    )


def _least(tree: CallTree) -> float:
    """The narrowest box that is shown: a box is never wider than the one below it, so none is left alone."""
    widths: list[int] = []
    nodes = list(tree.phases)
    while nodes:
        node = nodes.pop()
        widths.append(node.total_ns)
        nodes += node.children
    widths.sort(reverse=True)
    floor = MIN_SHARE * tree.total_ns
    return floor if len(widths) <= _MOST_BOXES else max(floor, widths[_MOST_BOXES] + 1)


def _add(
    frames: list[FlameFrame],
    nodes: tuple[CallNode, ...],
    parent: int | None,
    *,
    begin: int,
    depth: int,
    least: float,
) -> None:
    """Put boxes beside each other, and on each what it called."""
    rest_ns = num_rest = 0
    for node in nodes:
        if node.total_ns < least:
            rest_ns += node.total_ns
            num_rest += 1
            continue
        place = len(frames)
        frames.append(
            FlameFrame(
                name=_name(node),
                detail=_detail(node),
                parent=parent,
                depth=depth,
                begin=begin,
                total=node.total_ns,
                own=node.own_ns,
                is_users=node.is_users,
            )
        )
        _add(frames, node.children, place, begin=begin, depth=depth + 1, least=least)
        begin += node.total_ns
    if rest_ns:
        detail = f"{num_rest} function{'' if num_rest == 1 else 's'}"
        frames.append(
            FlameFrame(
                name="other",
                detail=detail,
                parent=parent,
                depth=depth,
                begin=begin,
                total=rest_ns,
                own=rest_ns,
            )
        )


def _name(node: CallNode) -> str:
    if node.file is None:
        return PHASES[PHASE_INDEX[node.name]].label if node.name in PHASE_INDEX else node.name
    return node.name.rpartition(_LOCALS)[2] or node.name


def _detail(node: CallNode) -> str:
    """File and line of the ``def``; of a library the file with the folder that it is in."""
    if node.file is None:
        return ""
    parts = PurePath(node.file).parts
    return f"{'/'.join(parts[-1:] if node.is_users else parts[-2:])}:{node.line}"


def _notes(analysis: Analysis, tree: CallTree) -> tuple[str, ...]:
    stacks = analysis.hot_lines
    notes = [
        f"{tree.samples:,} samples of the thread that runs the loop; each stands for the time since the one"
        " before it. Functions that only call another one are left out.",
    ]
    if not isinstance(stacks, Absent):
        first, last = stacks.samples.first_interval_ns, stacks.samples.last_interval_ns
        notes.append(f"One sample every {first / 1e6:.3g} ms at first, every {last / 1e6:.3g} ms in the end.")
    return tuple(notes)
