"""Flame graphs of call trees and modules."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.modules.module_tree import ModuleCost, ModuleTree, above, nearest
from lightning_modelprof.analysis.source.call_tree import CallNode, CallTree
from lightning_modelprof.report.charts.chart import flame
from lightning_modelprof.report.model import FlameFrame, FlameGraph, Unit
from lightning_modelprof.run.phases import PHASE_INDEX, PHASES
from lightning_modelprof.run.stacks import StackSamples
from lightning_modelprof.units import milliseconds

MIN_SHARE: Final = 0.002
"""Narrower boxes are merged because they'd be unreadable."""


_MOST_BOXES: Final = 1_000
"""Merged boxes at most double the number."""


_LOCALS: Final = "<locals>."


@flame(
    "call_stacks",
    title="Training thread (flame graph)",
    help="Phases are at the top and callees below their callers. Width is sampled time (see Source"
    " lines). Functions that only call another function are omitted and their time goes to the"
    ' caller. Boxes below 0.2% are merged into "other".',
    place=170,
    views=("modules",),
)
def call_flame(facts: Facts) -> FlameGraph:
    """Show the training thread's time by phase and function."""
    tree, hot = facts.call_tree, facts.get(Facts.hot_lines)
    notes = sampling_notes("the training thread", tree, None if hot is None else hot.samples)
    return FlameGraph(
        id="call_stacks",
        title="Training thread (flame graph)",
        unit=Unit.DURATION_NS,
        frames=boxes_of(tree),
        notes=notes,
    )


def boxes_of(tree: CallTree) -> tuple[FlameFrame, ...]:
    frames: list[FlameFrame] = []
    _add(frames, tree.phases, None, begin=0, depth=0, least=_min_width(tree))
    return tuple(frames)


def _min_width(tree: CallTree) -> float:
    """Return the width below which boxes are merged. No box is wider than its parent, so none is orphaned."""
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
                place=_place(node),
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
        return PHASES[PHASE_INDEX[node.function]].label if node.function in PHASE_INDEX else node.function
    return node.function.rpartition(_LOCALS)[2] or node.function


def _detail(node: CallNode) -> str:
    """Return file and line of the ``def``; a library's file keeps its own folder."""
    if node.file is None:
        return ""
    parts = PurePath(node.file).parts
    return f"{'/'.join(parts[-1:] if node.is_users else parts[-2:])}:{node.line}"


def _place(node: CallNode) -> str:
    """Return the full path of the user's files; for libraries, the detail."""
    return f"{node.file}:{node.line}" if node.is_users and node.file else _detail(node)


def sampling_notes(whose: str, tree: CallTree, samples: StackSamples | None) -> tuple[str, ...]:
    notes = [
        (
            f"{tree.samples:,} samples of {whose}, each weighted by the time since the previous sample."
            " Functions that only call another function are omitted."
        ),
    ]
    if samples is not None:
        first, last = samples.first_interval_ns, samples.last_interval_ns
        start, end = milliseconds(first), milliseconds(last)
        notes.append(
            f"One sample every {start}."
            if start == end
            else f"One sample every {start} at the start, every {end} at the end."
        )
    return tuple(notes)


_DEVICE: Final = "Times are between events on the GPU stream, so they include waiting for the CPU."


@flame(
    "modules",
    title="Modules, forward and backward",
    help="Forward plus backward latency per step from the Modules table. A module's self time excludes"
    " its submodules. Modules without a time of their own aren't shown. The graph is hidden if the"
    " model's time includes ignored modules.",
    place=190,
    views=("modules",),
)
def module_flame(facts: Facts) -> FlameGraph | None:
    """Draw the flame graph of a run's modules; ``None`` if no module was timed."""
    return flame_of_modules(facts.modules)


def flame_of_modules(tree: ModuleTree) -> FlameGraph | None:
    """Draw each module as wide as its time per step, forward plus backward.

    Times are the latencies in the table Modules. A module's self time excludes its submodules, so its self
    time and the widths of its child boxes add up exactly. A module without a time of its own (it ran inside
    compiled code, or not at all) has no box; its time is part of its parent's box.

    Returns:
        ``None`` if no module was timed, or if all times include ignored modules.
    """
    halves = [name for name in ("forward_ns", "backward_ns") if getattr(tree.root, name) is not None]
    totals = {
        module.path: sum(getattr(module, name) or 0 for name in halves)
        for module in tree.modules
        if any(getattr(module, name) for name in halves)
    }
    if not tree.steps or not totals:
        return None
    names = " and ".join(name.removesuffix("_ns") for name in halves)
    shown = [module for module in tree.modules if module.path in totals]
    steps = "one timed step" if tree.steps == 1 else f"{tree.steps} timed steps"
    missing = len(tree.modules) - len(shown)
    notes = [f"Median {names} time over {steps}. Each module includes its submodules."]
    if tree.clock == "device":
        notes.append(_DEVICE)
    if missing:
        has = (
            "module isn't shown because it has no time of its own"
            if missing == 1
            else "modules aren't shown because they have no time of their own"
        )
        notes.append(f"{missing:,} {has}.")
    return FlameGraph(
        id="modules",
        title=f"Modules, {names}",
        unit=Unit.DURATION_NS,
        frames=_frames(shown, totals),
        notes=tuple(notes),
    )


def _frames(modules: list[ModuleCost], totals: dict[str, int]) -> tuple[FlameFrame, ...]:
    own = dict(totals)
    places = {module.path: place for place, module in enumerate(modules)}
    parents = [
        places[nearest(above(module.path), places)] if place else None for place, module in enumerate(modules)
    ]
    for module, parent in zip(modules, parents, strict=True):
        if parent is not None:
            own[modules[parent].path] -= totals[module.path]
    frames: list[FlameFrame] = []
    next_begin: list[int] = []  # per box: where its next child starts
    for module, parent in zip(modules, parents, strict=True):
        total = totals[module.path]
        begin = 0 if parent is None else next_begin[parent]
        if parent is not None:
            next_begin[parent] += total
        next_begin.append(begin)
        frames.append(
            FlameFrame(
                name=f"{module.name} ({module.type_name})" if module.name else module.type_name,
                detail=module.path,
                parent=parent,
                depth=0 if parent is None else frames[parent].depth + 1,
                begin=float(begin),
                total=float(total),
                own=float(own[module.path]),
            )
        )
    return tuple(frames)
