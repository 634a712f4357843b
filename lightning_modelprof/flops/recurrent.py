"""FLOPs of recurrent layers in one operator: at every step the gates multiply the input and the state."""

# ruff: noqa: ARG001 - formulas take what the operators take

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from lightning_modelprof.flops.result import Formula


def fused_layer(
    x: Any, weight_input: Any, weight_hidden: Any, *rest: Any, out_val: Any, **options: Any
) -> int:
    """One layer and direction of oneDNN's recurrent kernel."""
    return int(2 * prod(x.shape[:2]) * (weight_input.numel() + weight_hidden.numel()))


def fused_layer_backward(
    x: Any, weight_input: Any, weight_hidden: Any, *rest: Any, out_val: Any, **options: Any
) -> int:
    """Both gradients of every product: the kernel computes the input's also where nobody asked for it."""
    return 2 * fused_layer(x, weight_input, weight_hidden, out_val=None)


def recurrent_network(x: Any, weights: Sequence[Any], *rest: Any, out_val: Any, **options: Any) -> int:
    """All layers of cuDNN's or MIOpen's recurrent kernel; packed sequences have one dimension of rows."""
    return int(2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2))


def recurrent_network_backward(
    x: Any, weights: Sequence[Any], *rest: Any, out_val: Any, **options: Any
) -> int:
    """The gradient of the data, and of the weights if the mask at the end asks for it."""
    return recurrent_network(x, weights, out_val=None) * (1 + int(rest[-1][3]))


FORMULAS: dict[str, Formula] = {
    "aten::mkldnn_rnn_layer": fused_layer,
    "aten::mkldnn_rnn_layer_backward": fused_layer_backward,
    "aten::_cudnn_rnn": recurrent_network,
    "aten::_cudnn_rnn_backward": recurrent_network_backward,
    "aten::miopen_rnn": recurrent_network,
    "aten::miopen_rnn_backward": recurrent_network_backward,
}
