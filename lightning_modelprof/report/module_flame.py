"""Which modules the time of forward and backward is spent in: the tree of modules as a flame graph."""

from __future__ import annotations

from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.modules.module_tree import ModuleCost, ModuleTree, above, nearest
from lightning_modelprof.report.model import FlameFrame, FlameGraph, Unit

_DEVICE: Final = "Times are between events on the device's stream, so they include waiting for the host."


def module_flame(analysis: Analysis) -> FlameGraph | None:
    """The flame graph of a run's modules; ``None`` when no module was timed."""
    return None if isinstance(analysis.modules, Absent) else flame_of_modules(analysis.modules)


def flame_of_modules(tree: ModuleTree) -> FlameGraph | None:
    """Each module as wide as its time in one step, forward and backward together.

    Definition: latency of forward and backward as in the table Modules. A module's own time is that without
    the modules inside of it, so the widths of what is on a box and its own time sum to it exactly. A module
    without a time of its own (it ran inside of something compiled, or not at all) has no box; what it took is
    in the box of the module that holds it.

    Returns:
        ``None`` when no module was timed, or all times hold those of ignored modules.
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
    notes = [f"Median {names} time of {steps}; each module with what is inside of it."]
    if tree.clock == "device":
        notes.append(_DEVICE)
    if missing:
        has = (
            "module has no time of its own and is"
            if missing == 1
            else "modules have no time of their own and are"
        )
        notes.append(f"{missing:,} {has} not shown.")
    return FlameGraph(
        id="modules",
        title=f"Modules, {names}",
        unit=Unit.DURATION_NS,
        frames=_frames(shown, totals),
        notes=tuple(notes),
    )


def _frames(modules: list[ModuleCost], totals: dict[str, int]) -> tuple[FlameFrame, ...]:
    """The boxes of modules, parents before their children, neighbours in the order of the model."""
    own = dict(totals)
    places = {module.path: place for place, module in enumerate(modules)}
    parents = [
        places[nearest(above(module.path), places)] if place else None for place, module in enumerate(modules)
    ]
    for module, parent in zip(modules, parents, strict=True):
        if parent is not None:
            own[modules[parent].path] -= totals[module.path]
    frames: list[FlameFrame] = []
    next_begin: list[int] = []  # of each box: where the next one on it begins
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
