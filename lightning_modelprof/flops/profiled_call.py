"""One call of a model on a batch, with errors that say what was called how."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_modelprof.errors import ModelProfError, told


def kind_of(value: Any) -> str:
    """Shape and dtype of a tensor, or what else it is, for a person."""
    if isinstance(value, torch.Tensor):
        return f"{' × '.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


class ProfiledCall:
    """One call of the model with the batch, and of what makes a loss of it."""

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_fn: Callable[[Any], torch.Tensor] | None,
    ) -> None:
        self._target, self._args, self._kwargs, self._loss_fn = target, args, kwargs, loss_fn

    def grad_mode(self) -> AbstractContextManager[Any]:
        """Gradients are recorded for a loss only."""
        return torch.no_grad() if self._loss_fn is None else torch.enable_grad()

    def forward(self) -> Any:
        """Call the model.

        Raises:
            ModelProfError: when that fails, for whatever reason.
        """
        try:
            return self._target(*self._args, **self._kwargs)
        except Exception as error:
            passed = [*(kind_of(value) for value in self._args)]
            passed += [f"{name}={kind_of(value)}" for name, value in self._kwargs.items()]
            raise ModelProfError(
                f"profile_model: expected a batch that the model can take, got"
                f" {told(error)}. It was called with ({', '.join(passed)})."
            ) from error

    def loss(self, output: Any) -> torch.Tensor | None:
        """The loss of an output; ``None`` where there is none to be made.

        Raises:
            ModelProfError: when there is no loss that has a backward.
        """
        if self._loss_fn is None:
            return None
        try:
            loss = self._loss_fn(output)
        except Exception as error:
            raise ModelProfError(
                f"profile_model(loss_fn): expected a function of the model's output ({kind_of(output)}), got"
                f" {told(error)}."
            ) from error
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            lacking = (
                " without a gradient" if isinstance(loss, torch.Tensor) and not loss.requires_grad else ""
            )
            raise ModelProfError(
                "profile_model(loss_fn): expected it to return a tensor with one element and a gradient,"
                f" got {kind_of(loss)}{lacking}."
            )
        return loss

    def backward(self, loss: torch.Tensor | None) -> None:
        """Run backward.

        Raises:
            ModelProfError: when it fails.
        """
        if loss is None:
            return
        try:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
        except Exception as error:
            raise ModelProfError(
                f"profile_model: expected the loss to have a backward pass, got {told(error)}."
            ) from error

    def run(self, model: nn.Module) -> None:
        """All of it, from no gradients."""
        model.zero_grad(set_to_none=True)
        self.backward(self.loss(self.forward()))
