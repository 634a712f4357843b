"""FLOPs of single-operator attention, unmasked: a causal or block-sparse kernel may do less.

A fused kernel's backward does five products: the scores again, and the gradients of scores, values, queries
and keys. The first repeats the forward's work and counts as recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lightning_modelprof.inspect.flops.contractions import Formula, WithRecompute

# ruff: noqa: ARG001 - formulas take the operators' arguments


def attention(query: Any, key: Any, value: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count the scores and the weighted sum; with grouped heads, each query head meets its group's keys."""
    rows = prod(query.shape[:-1])
    return int(2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _backward(query: Any, key: Any, value: Any) -> WithRecompute:
    rows = prod(query.shape[:-1])
    scores = int(2 * rows * key.shape[-2] * query.shape[-1])
    weighted_sum = int(2 * rows * key.shape[-2] * value.shape[-1])
    return WithRecompute(gradients=2 * (scores + weighted_sum), recompute=scores)


def attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_val: Any, **options: Any
) -> WithRecompute:
    """Count twice the forward, and the scores again."""
    return _backward(query, key, value)


def flex_attention_backward(
    query: Any, key: Any, value: Any, *rest: Any, out_val: Any, **options: Any
) -> WithRecompute:
    """Count twice the forward, and the scores again; here the gradient is a later argument."""
    return _backward(query, key, value)


def packed_attention_backward(total_of: Callable[..., int]) -> Formula:
    """Split torch's count for a kernel with sequences of different lengths into gradients and scores.

    All five products have the same rows and columns, so the depths alone determine the share.
    """

    def formula(
        grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_val: Any, **options: Any
    ) -> WithRecompute:
        total = total_of(grad, query, key, value, *rest, out_val=out_val, **options)
        depth, value_depth = query.shape[-1], value.shape[-1]
        recompute = total * depth // (3 * depth + 2 * value_depth)
        return WithRecompute(gradients=total - recompute, recompute=recompute)

    return formula


def native_attention(
    query: Any, key: Any, value: Any, embed_dim: int, num_heads: int, *rest: Any, out_val: Any, **options: Any
) -> int:
    """Count the fast path of nn.MultiheadAttention: four projections, scores and weighted sum."""
    batch, target = query.shape[:2]
    source = key.shape[1]
    projections = 2 * batch * (target + source) * embed_dim**2
    return int(2 * (projections + 2 * batch * target * source * embed_dim))


def encoder_layer(x: Any, embed_dim: int, num_heads: int, *weights: Any, out_val: Any, **options: Any) -> int:
    """Count the fast path of nn.TransformerEncoderLayer; nested batches by each sequence's length."""
    nested = x.is_nested
    lengths = [int(size[0]) for size in x._nested_tensor_size()] if nested else [x.shape[1]] * x.shape[0]
    # Weights of four products: query-key-value, projection, and the feed-forward part's two.
    products = sum(weights[index].numel() for index in (0, 2, 11, 13))
    return int(2 * sum(length * products + 2 * length**2 * embed_dim for length in lengths))


FORMULAS: dict[str, Formula] = {
    "aten::_native_multi_head_attention": native_attention,
    "aten::_transformer_encoder_layer_fwd": encoder_layer,
    "flex_attention": attention,
    "flex_attention_backward": flex_attention_backward,
    **{
        f"aten::_scaled_dot_product_{kernel}": attention
        for kernel in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
            "attention_math_for_mps",
        )
    },
    **{
        f"aten::_scaled_dot_product_{kernel}_backward": attention_backward
        for kernel in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
    **{
        f"aten::{kernel}": packed_attention_backward(flop_registry[getattr(torch.ops.aten, kernel)])
        for kernel in ("_flash_attention_backward", "_efficient_attention_backward")
        if getattr(torch.ops.aten, kernel, None) in flop_registry
    },
}


# ruff: noqa: ARG001 - formulas take the operators' arguments


def fused_layer(
    x: Any, weight_input: Any, weight_hidden: Any, *rest: Any, out_val: Any, **options: Any
) -> int:
    """Count one layer and direction of oneDNN's recurrent kernel."""
    return int(2 * prod(x.shape[:2]) * (weight_input.numel() + weight_hidden.numel()))


def fused_layer_backward(
    x: Any, weight_input: Any, weight_hidden: Any, *rest: Any, out_val: Any, **options: Any
) -> int:
    """Count both gradients of every product: the kernel always computes the input's gradient."""
    return 2 * fused_layer(x, weight_input, weight_hidden, out_val=None)


def recurrent_network(x: Any, weights: Sequence[Any], *rest: Any, out_val: Any, **options: Any) -> int:
    """Count all layers of cuDNN's or MIOpen's recurrent kernel; packed sequences have one row dimension."""
    return int(2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2))


def recurrent_network_backward(
    x: Any, weights: Sequence[Any], *rest: Any, out_val: Any, **options: Any
) -> int:
    """Count the data gradient, and the weight gradient if the trailing mask requests it."""
    return recurrent_network(x, weights, out_val=None) * (1 + int(rest[-1][3]))


RECURRENT_FORMULAS: dict[str, Formula] = {
    "aten::mkldnn_rnn_layer": fused_layer,
    "aten::mkldnn_rnn_layer_backward": fused_layer_backward,
    "aten::_cudnn_rnn": recurrent_network,
    "aten::_cudnn_rnn_backward": recurrent_network_backward,
    "aten::miopen_rnn": recurrent_network,
    "aten::miopen_rnn_backward": recurrent_network_backward,
}
