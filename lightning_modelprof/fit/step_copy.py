"""A step run once more, on a copy of the module: original, batch and generators stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

from lightning_modelprof.errors import ModelProfError, told
from lightning_modelprof.inspect.core.copies import (
    fake_copy,
    fake_inputs,
    plain_copy,
    reaches_outside,
    values_are_missing,
)
from lightning_modelprof.inspect.core.counter import FlopCounter
from lightning_modelprof.inspect.core.untouched import random_states_kept
from lightning_modelprof.inspect.flops.formulas import Formula
from lightning_modelprof.inspect.flops.fvcore_table import forward_table
from lightning_modelprof.run.loops import Loop
from lightning_modelprof.run.model_cost import ForwardTable

_CONTEXTS: Final = {
    "fit": "train_step_context",
    "validate": "val_step_context",
    "test": "test_step_context",
    "predict": "predict_step_context",
}
"""Loop → the context of the precision plugin in which Lightning runs a step."""

_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, slots=True)
class StepCopy:
    """What is needed to run a step on a copy.

    ``arguments`` are those of the step's method; ``instead`` is what to do where a copy cannot be counted, as
    a sentence.
    """

    module: nn.Module
    loop: Loop
    trainer: Any
    arguments: tuple[Any, ...]
    instead: str = ""

    def count(self, formulas: Mapping[Any, Formula] | None) -> FlopCounter:
        """Count the step and its backward on tensors that hold no data.

        Raises:
            ModelProfError: when the module cannot be copied, needs values, communicates, or reaches what is
                not copied.
        """
        if self.loop.is_fit and not getattr(self.module, "automatic_optimization", True):
            raise ModelProfError(
                f"a copy has no optimizers to step by hand (manual optimization). {self.instead}".rstrip()
            )
        _refuse_closures(self.module)
        device = self.trainer.strategy.root_device
        with random_states_kept((device,)):
            copied, mode = fake_copy(self.module)
            counter = FlopCounter(copied, formulas, refuse_collectives=True)
            with values_are_missing("flops=True", self.instead), mode, counter:
                output = self._run(copied, fake_inputs(mode, self.arguments))
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if self.loop.is_fit and isinstance(loss, torch.Tensor) and loss.requires_grad:
                    if reaches_outside(loss):
                        raise ModelProfError(
                            "expected a loss of the module's own parameters, got one of others too: a copy"
                            " of the module would change their gradients"
                        )
                    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
        return counter

    def forward_table(self) -> ForwardTable:
        """Let fvcore count the step's forward.

        Raises:
            ModelProfError: when something cannot be copied or traced, or other ranks would have to take part.
        """
        if self.trainer.world_size > 1:
            raise ModelProfError("a forward on one of several ranks could wait for the others for ever")
        _refuse_closures(self.module)
        module = plain_copy(self.module)
        try:
            arguments = deepcopy(
                self.arguments
            )  # a step may change its batch, which a dataset may give again
        except Exception as error:
            raise ModelProfError(f"the batch cannot be copied: {told(error)}") from error
        return forward_table(module, lambda: self._run(module, arguments))

    def _run(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        with getattr(self.trainer.precision_plugin, _CONTEXTS[self.loop.key])():
            step: Callable[..., Any] = getattr(module, self.loop.step_hook)
            return step(*arguments)


def _refuse_closures(model: nn.Module) -> None:
    """What a hook's function closes over is not copied: a copy's hook would change it for the model too."""
    for path, module in model.named_modules():
        for kind in _HOOKS:
            for hook in getattr(module, kind, {}).values():
                if isinstance(hook, FunctionType) and hook.__closure__:
                    raise ModelProfError(
                        f"{path or type(module).__name__}: expected hooks that can be copied, got"
                        f" {hook.__qualname__}, which closes over variables"
                    )
