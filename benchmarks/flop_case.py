"""One call of a benchmark model, with the true cost of this call.

Truths are multiply-adds (MACs) of contractions, derived by hand next to each model. Contractions are matrix
and vector products, convolutions, attention and the gates of recurrent layers. Norms, activations, biases,
pooling, look-ups and Fourier transforms count 0. Attention counts without its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import nn


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Yield all tensors in nested dicts, sequences and dataclasses."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output):
        output = [getattr(output, item.name) for item in fields(output)]
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for item in output for tensor in tensors_in(item)]
    return []


def total(output: Any) -> torch.Tensor:
    """Reduce any model's output to a loss, without contractions."""
    return sum((tensor.abs().sum() for tensor in tensors_in(output) if tensor.requires_grad), torch.zeros(()))


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss that a Hugging Face model computes itself."""
    return output.loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a model, and its truths.

    Attributes:
        model: in training mode, in which it's counted.
        args, kwargs: of the call.
        forward_macs: multiply-adds of the call.
        backward_macs: multiply-adds of the necessary gradients: those of every parameter, and of every input
            of a layer that depends on a parameter. For a hand-written backward, whatever it computes.
        recompute_macs: multiply-adds of the forward that a checkpoint repeats; ``None`` without one.
        method: to call; ``forward`` for the model itself.
        loss: reduces the output to a scalar.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    forward_macs: int
    backward_macs: int
    recompute_macs: int | None = None
    method: str = "forward"
    loss: Callable[[Any], torch.Tensor] = total

    def call(self) -> Any:
        run = self.model if self.method == "forward" else getattr(self.model, self.method)
        return run(*self.args, **self.kwargs)


def convolution_macs(
    batch: int, inputs: int, outputs: int, kernel: Sequence[int], positions: Sequence[int], *, groups: int = 1
) -> int:
    """Each output element sums over the kernel and its group's input channels.

    Args:
        batch: number of samples.
        inputs: channels.
        outputs: channels.
        kernel: its size in every dimension.
        positions: the output's size in every dimension.
        groups: of channels.
    """
    return batch * prod(positions) * outputs * (inputs // groups) * prod(kernel)
