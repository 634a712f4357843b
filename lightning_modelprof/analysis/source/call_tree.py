"""Call tree: time per function and caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.run.stacks import StackFrame, StackSamples

_PLUMBING: Final = {
    "torch.nn.modules.module": ("_wrapped_call_impl", "_call_impl", "_slow_forward"),
    "torch.utils._contextlib": ("decorate_context",),
    "torch._dynamo.eval_frame": ("_fn", "compile_wrapper", "__call__"),
    "torch.optim.optimizer": ("wrapper", "_use_grad"),
    "contextlib": ("inner",),
    "lightning.pytorch.trainer.call": None,
    "pytorch_lightning.trainer.call": None,
}
"""Functions that only call another one, by module; ``None`` means all functions of a module."""


class CallNode(Place, frozen=True, kw_only=True):
    """A phase, or a function reached through one chain of callers.

    Attributes:
        file, line, function: of its definition; a phase has only its key, as ``function``.
        is_users: whether it's the user's code; ``None`` for a phase.
        samples: samples in this function itself, excluding its children.
        own_ns: time of those samples.
        total_ns: time including children.
        children: called functions, longest first.
    """

    is_users: bool | None
    samples: int
    own_ns: int
    total_ns: int
    children: tuple[CallNode, ...]


class CallTree(Record, frozen=True, kw_only=True):
    """All sampled stacks of one rank, merged from the outermost frame.

    The roots are phases, with functions below. Calls of the same function from the same callers are one node,
    whichever line made them. Functions that only call another one (``Module._call_impl``, wrappers of
    decorators, Lightning's ``call_hook``) are left out, and their self time goes to their caller.

    Attributes:
        phases: longest first.
        samples: all samples in the tree.
        total_ns: time of all samples: the sum of every ``own_ns``.
    """

    phases: tuple[CallNode, ...]
    samples: int
    total_ns: int


@dataclass(slots=True)
class _Node:
    frame: StackFrame | None = None
    samples: int = 0
    own_ns: int = 0
    children: dict[tuple[str, int, str], _Node] = field(default_factory=dict)


def call_tree(samples: StackSamples | None) -> CallTree:
    if samples is None:
        raise NotMeasured('not measured (set inspect={"sampling": True})')
    phases: dict[str, _Node] = {}
    shown = [not _is_plumbing(frame) for frame in samples.frames]
    for stack in samples.stacks:
        node = phases.setdefault(stack.phase, _Node())
        for index in stack.frames:
            if shown[index]:
                frame = samples.frames[index]
                key = (frame.file, frame.function_line, frame.function)
                node = node.children.setdefault(key, _Node(frame))
        node.samples += stack.samples
        node.own_ns += stack.time_ns
    nodes = _ranked([_finished(node, phase) for phase, node in phases.items()])
    if not any(node.total_ns for node in nodes):
        raise NotMeasured("the loop ended before the first sample")
    return CallTree(
        phases=nodes,
        samples=sum(stack.samples for stack in samples.stacks),
        total_ns=sum(node.total_ns for node in nodes),
    )


def _is_plumbing(frame: StackFrame) -> bool:
    if frame.is_users or frame.python_module not in _PLUMBING:
        return False
    names = _PLUMBING[frame.python_module]
    return names is None or frame.function.rpartition(".")[2] in names


def _finished(node: _Node, phase: str = "") -> CallNode:
    """Recurse to the depth of a sampled stack at most."""
    children = _ranked([_finished(child) for child in node.children.values()])
    frame = node.frame
    return CallNode(
        function=phase if frame is None else frame.function,
        file=None if frame is None else frame.file,
        line=None if frame is None else frame.function_line,
        is_users=None if frame is None else frame.is_users,
        samples=node.samples,
        own_ns=node.own_ns,
        total_ns=node.own_ns + sum(child.total_ns for child in children),
        children=children,
    )


def _ranked(nodes: Sequence[CallNode]) -> tuple[CallNode, ...]:
    return tuple(sorted(nodes, key=lambda node: -node.total_ns))
