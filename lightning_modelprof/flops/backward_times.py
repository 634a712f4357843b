"""Hooks around the nodes of an autograd graph, so that backward can be timed node by node.

Hooks for whole modules (``register_full_backward_hook``) are no way to do it: they refuse in-place
activations, and see nothing of modules whose input needs no gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, TypeVar

import torch

_Owner = TypeVar("_Owner")

NUMBERLESS: Final = 2**63
"""Sequence numbers from here on are no numbers: the node accumulates a tensor's gradient."""

REENTRANT_CHECKPOINT: Final = "CheckpointFunctionBackward"
"""Name of the node that runs a part of the forward again, and a backward of its own in there."""


def compiles_backward() -> bool:
    """Whether autograd itself is compiled now: hooks would become a part of what is compiled."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


class NodeHooks(Generic[_Owner]):
    """Calls ``begin(owner)`` before and ``end(owner)`` after each node of a graph runs.

    The hooks are on the nodes only and hold none of them, so the graph is freed as without them.

    Args:
        owner_of: who a node belongs to.
        begin: called with the owner in the thread and on the stream that the node runs in.
        end: called likewise; not for a node that failed.
    """

    def __init__(
        self,
        owner_of: Callable[[Any], _Owner],
        begin: Callable[[_Owner], None],
        end: Callable[[_Owner], None],
    ) -> None:
        self._owner_of = owner_of
        self._begin = begin
        self._end = end
        self._handles: list[Any] = []

    def attach(self, loss: torch.Tensor) -> int:
        """Put hooks on all nodes that lead to ``loss``, and none on any other; returns how many there are."""
        self.remove()
        with torch._C.DisableTorchFunctionSubclass():  # the loss may be of a class of the user's
            waiting = [loss.grad_fn]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            owner = self._owner_of(node)
            self._handles.append(node.register_prehook(partial(self._before, owner)))
            self._handles.append(node.register_hook(partial(self._after, owner)))
            waiting += [following for following, _ in node.next_functions]
        return len(seen)

    def remove(self) -> None:
        """Take all hooks off again, as far as their nodes are still there."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, owner: _Owner, _gradients: Any) -> None:
        self._begin(owner)

    def _after(self, owner: _Owner, _results: Any, _gradients: Any) -> None:
        self._end(owner)
