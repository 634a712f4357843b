"""Flame graphs to test pages with."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_modelprof.report.model import FlameFrame, FlameGraph, Unit

ATTACKS = (
    "<img src=x onerror=alert(1)>",
    "'\"><script>alert(1)</script>",
    "x" * 1_000,
    "שלום עולם \u202e",
)


def flame_of(tree: Sequence[tuple], *, detail: str = "", **fields: str) -> FlameGraph:
    """A flame graph of nodes (name, self time, whether it's the user's, child nodes)."""
    frames: list[FlameFrame | None] = []

    def put(node: tuple, parent: int | None, begin: float, depth: int) -> float:
        name, own, is_users, inner = node
        place = len(frames)
        frames.append(None)
        end = begin
        for one in inner:
            end = put(one, place, end, depth + 1)
        end += own
        frames[place] = FlameFrame(
            name=name,
            detail=detail,
            parent=parent,
            depth=depth,
            begin=begin,
            total=end - begin,
            own=own,
            is_users=is_users,
            place="" if is_users is None else detail,
        )
        return end

    begin = 0.0
    for node in tree:
        begin = put(node, None, begin, 0)
    usual = {"id": "stacks", "title": "Lines", "unit": Unit.DURATION_NS}
    return FlameGraph(**(usual | fields), frames=tuple(frames))


def stacks_flame() -> FlameGraph:
    """100 ms: 30 in the dataset, 40 of forward's 50 in the loss, 20 in the optimizer."""
    loss = ("weighted_nll", 25e6, True, (("log_softmax", 15e6, False, ()),))
    model = ("Net.forward", 1e6, True, (("Module._call_impl", 8e6, False, ()),))
    dataset = ("Digits.__getitem__", 2e6, True, (("Image.convert", 28e6, False, ()),))
    return flame_of(
        (
            ("Dataloader", 0.0, None, (dataset,)),
            ("Forward", 1e6, None, (("Net.training_step", 0.0, True, (model, loss)),)),
            ("Optimizer", 0.0, None, (("Adam.step", 20e6, False, ()),)),
        ),
        detail="train.py:12",
    )


def hostile_flame(names: Sequence[str]) -> FlameGraph:
    """Boxes of equal width with these names and some malicious ones."""
    names = (*names, *ATTACKS)
    inner = tuple((name, 1e6, index % 2 == 0, ()) for index, name in enumerate(names))
    root = ("<b>all</b>", 0.0, None, inner)
    return flame_of((root,), detail=ATTACKS[1], id="hostile", title=ATTACKS[0])


def wide_flame(count: int = 2_000) -> FlameGraph:
    """A graph of ``count`` boxes on 40 levels, most of them narrow; each box holds up to four."""
    levels, frames = 40, []
    waiting = [(None, 0, 0.0, 1e9)]  # parent, depth, begin and total of boxes to come, widest first
    while len(frames) < count:
        waiting.sort(key=lambda one: -one[3])
        parent, depth, begin, total = waiting.pop(0)
        place = len(frames)
        parts = (0.5, 0.25, 0.15, 0.05) if depth < levels else ()
        frames.append(
            FlameFrame(
                name=f"function_{place}",
                detail=f"train.py:{place}",
                parent=parent,
                depth=depth,
                begin=begin,
                total=total,
                own=total * (1 - sum(parts)),
                is_users=place % 2 == 0,
            )
        )
        for part in parts:
            waiting.append((place, depth + 1, begin, total * part))
            begin += total * part
    return FlameGraph(id="wide", title="Many boxes", unit=Unit.DURATION_NS, frames=tuple(frames))
