"""Layer hooks: the time in functions that torch calls for modules and tensors, as hooks for debugging are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.source.hot_lines import MODULE_CALLS, FoundCalls, HotLines
from lightning_modelprof.run.stacks import StackFrame

_PHASES: Final = ("forward", "backward")
_NOT_HOOKS_OF_ANYBODY: Final = ("torch", "lightning", "pytorch_lightning", "lightning_modelprof")
"""Packages whose hooks belong to the training or to this profiler."""


def layer_hooks(hot: HotLines | Absent) -> FoundCalls | Absent:
    """The time in such hooks in Forward and Backward, without the modules that they call.

    Caveats:
        On a device, hooks of a backward run in a thread of torch's own, of which nothing is seen.
    """
    if isinstance(hot, Absent):
        return hot
    calls = {hot.samples.frames[number] for number in hot.samples.hook_calls}
    return hot.found_by(lambda path: _hook(path, calls), _PHASES)


def _hook(path: Sequence[StackFrame], calls: set[StackFrame]) -> int | None:
    """Where the innermost hook is on a stack; ``None`` where there is none, or it has called a module."""
    for position in range(len(path) - 1, 0, -1):
        frame = path[position]
        if path[position - 1] in calls and frame.module.partition(".")[0] not in _NOT_HOOKS_OF_ANYBODY:
            return position
        if frame.module == MODULE_CALLS:
            return None
    return None
