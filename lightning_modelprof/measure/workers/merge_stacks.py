"""Samples of several workers, or of several processes of one, as those of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_modelprof.run.stacks import SampledStack, StackFrame, StackSamples


def merge_stacks(
    pieces: Sequence[StackSamples], *, most: int | None = None, without: str = ""
) -> StackSamples:
    """The samples of several threads or processes as those of one.

    Args:
        pieces: at least one.
        most: stacks that are kept, those with most time; the samples of others are dropped. ``None`` is all.
        without: what modules begin with whose frames are left out; ``""`` leaves out none.

    Caveats:
        What other threads did is left out: their frames are those of a process of its own.
    """
    numbers: dict[StackFrame, int] = {}
    stacks: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    hooks: set[int] = set()
    for piece in pieces:
        places = [
            -1
            if without and frame.python_module.startswith(without)
            else numbers.setdefault(frame, len(numbers))
            for frame in piece.frames
        ]
        hooks |= {places[number] for number in piece.hook_calls}
        for stack in piece.stacks:
            frames = tuple(places[number] for number in stack.frames if places[number] >= 0)
            counts = stacks.setdefault((stack.phase, stack.part, frames), [0, 0])
            counts[0] += stack.samples
            counts[1] += stack.time_ns
    merged = sorted(
        (
            SampledStack(phase=phase, part=part, frames=frames, samples=samples, time_ns=time_ns)
            for (phase, part, frames), (samples, time_ns) in stacks.items()
        ),
        key=lambda stack: -stack.time_ns,
    )
    kept, known = merged[:most], list(numbers)
    used = {old: new for new, old in enumerate(sorted({one for stack in kept for one in stack.frames}))}
    return StackSamples(
        frames=tuple(known[old] for old in used),
        stacks=tuple(replace(stack, frames=tuple(used[one] for one in stack.frames)) for stack in kept),
        samples=sum(piece.samples for piece in pieces),
        first_interval_ns=min(piece.first_interval_ns for piece in pieces),
        last_interval_ns=max(piece.last_interval_ns for piece in pieces),
        dropped=sum(piece.dropped for piece in pieces) + sum(stack.samples for stack in merged[len(kept) :]),
        cost_ns=sum(piece.cost_ns for piece in pieces),
        log_calls=tuple(dict.fromkeys(call for piece in pieces for call in piece.log_calls)),
        hook_calls=tuple(sorted(used[one] for one in hooks & used.keys())),
        loop_ns=sum(piece.loop_ns for piece in pieces),
        notes=tuple(dict.fromkeys(note for piece in pieces for note in piece.notes)),
    )
