"""Keeps the gradients that torch would compute in another way while a dispatch mode is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modelprof.flops.backward_times import compiles_backward
from lightning_modelprof.flops.mode_stack import enter_mode, leave_mode, modes_on

_OTHER_BACKWARD: Final = frozenset(("aten::prod", "aten::masked_fill", "aten::masked_fill_"))
"""Operators whose gradient has other last bits under any mode: torch asks ``isTensorSubclassLike`` there and
takes another path. None of them holds a contraction, so no FLOPs are missed while the mode is off."""
_IN_A_VIEW: Final = "CopySlices"
"""End of the name of the node that runs the gradient of what was written into a view."""


class SameGradients:
    """Takes a mode off while autograd runs the nodes whose gradients the mode would change.

    A node can be reached only when its operator has returned, so results wait here until :meth:`settle`,
    which the next operator calls and whoever knows that a backward pass begins.

    Args:
        mode: which is on.
        on_error: called with an error in here; the step goes on.

    Attributes:
        waiting: results whose nodes are still to be found.
    """

    def __init__(self, mode: TorchDispatchMode, on_error: Callable[[Exception], None]) -> None:
        self.waiting: list[torch.Tensor] = []
        self._mode = mode
        self._on_error = on_error
        self._handles: list[Any] = []

    @staticmethod
    def is_needed_for(operator: str) -> bool:
        """Whether the results of an operator, such as ``aten::prod``, are to be noted."""
        return operator in _OTHER_BACKWARD

    def note(self, args: tuple[Any, ...], result: Any) -> None:
        """Such an operator ran; without gradients there is nothing to keep."""
        wants_gradient = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in args
        )
        if wants_gradient and isinstance(result, torch.Tensor) and not compiles_backward():
            self.waiting.append(result)

    def settle(self) -> None:
        """Put hooks on the nodes of all results that wait."""
        results, self.waiting = self.waiting, []
        try:
            for result in results:
                self._put_hooks(result)
        except Exception as error:  # the user's step must not notice
            self._on_error(error)

    def _put_hooks(self, result: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            node = result.grad_fn
        if node is None:
            return
        before_it = [found for found, _ in node.next_functions if found is not None]
        for found in (node, *(one for one in before_it if one.name().endswith(_IN_A_VIEW))):
            before, after = self._hooks()
            self._handles.append(found.register_prehook(before))
            self._handles.append(found.register_hook(after))

    def remove(self) -> None:
        """Take all hooks off again, as far as their nodes are still there."""
        self.waiting.clear()
        while self._handles:
            self._handles.pop().remove()

    def _hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """What runs before and after a node, in the node's thread. A node that fails leaves the mode off."""
        taken_off = False

        def before(_gradients: Any) -> None:
            nonlocal taken_off
            taken_off = self._mode in modes_on()
            leave_mode(self._mode)

        def after(_results: Any, _gradients: Any) -> None:
            nonlocal taken_off
            if taken_off:
                taken_off = False
                enter_mode(self._mode)

        return before, after
