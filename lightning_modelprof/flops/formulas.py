"""FLOPs of operators: torch's own registry, with what it lacks or gets wrong.

A formula is called with the operator's own arguments and its result as ``out_val``, and returns FLOPs: one
multiply-add is two. Only contractions count (matrix products, convolutions, attention, recurrent gates);
biases, norms, activations, pooling and look-ups are zero by convention. Fourier transforms are no
contractions: they have formulas, and whoever adds up keeps them apart.
"""

# ruff: noqa: ARG001, PLR0917 - formulas take what the operators take

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log2, prod
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import flop_registry

Formula: TypeAlias = Callable[..., int]
"""``formula(*args, **kwargs, out_val=result)`` → FLOPs."""

# ---- Convolutions: every element of the weight meets every position of the batch once.


def _convolution_products(positions_of: Any, weight: Any) -> int:
    """Multiply-adds of one pass; ``positions_of`` is the output, or of a transposed one the input."""
    return int(positions_of.shape[0] * prod(positions_of.shape[2:]) * weight.numel())


def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *rest: Any,
    out_val: Any,
) -> int:
    """A convolution in any number of dimensions, grouped or transposed."""
    return 2 * _convolution_products(x if transposed else out_val, weight)


def direct_convolution(x: Any, weight: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """A backend's convolution, whose arguments never make it a transposed one."""
    return 2 * _convolution_products(out_val, weight)


def transposed_convolution(x: Any, weight: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """A backend's transposed convolution."""
    return 2 * _convolution_products(x, weight)


def convolution_backward(
    grad: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    out_val: Any,
) -> int:
    """As many products for the input's gradient as forward, and as many for the weight's, if asked for."""
    wanted = int(output_mask[0]) + int(output_mask[1])
    return 2 * wanted * _convolution_products(x if transposed else grad, weight)


# ---- Attention


def attention(query: Any, key: Any, value: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Scores and the weighted sum, unmasked: a causal kernel may do half."""
    rows = prod(query.shape[:-1])
    return int(2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_val: Any, **options: Any
) -> int:
    """Five products: the kernel computes the scores again, then dP, dV, dQ and dK."""
    rows = prod(query.shape[:-1])
    return int(2 * rows * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1]))


def native_attention(
    query: Any, key: Any, value: Any, embed_dim: int, num_heads: int, *rest: Any, out_val: Any, **options: Any
) -> int:
    """The fast path of nn.MultiheadAttention: four projections, scores and weighted sum."""
    batch, target = query.shape[:2]
    source = key.shape[1]
    projections = 2 * batch * (target + source) * embed_dim**2
    return int(2 * (projections + 2 * batch * target * source * embed_dim))


def encoder_layer(x: Any, embed_dim: int, num_heads: int, *weights: Any, out_val: Any, **options: Any) -> int:
    """The fast path of nn.TransformerEncoderLayer; nested batches by the length of each sequence."""
    nested = x.is_nested
    lengths = [int(size[0]) for size in x._nested_tensor_size()] if nested else [x.shape[1]] * x.shape[0]
    # The weights of four products: query-key-value, projection, and the two of the feed-forward part.
    products = sum(weights[index].numel() for index in (0, 2, 11, 13))
    return int(2 * sum(length * products + 2 * length**2 * embed_dim for length in lengths))


# ---- Recurrent layers: at every time step the gates multiply the input and the state.


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


# ---- Products of matrices and vectors


def linear(x: Any, weight: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """A linear layer that arrives as one operator, as in inference mode."""
    return int(2 * x.numel() * (weight.shape[0] if weight.dim() == 2 else 1))


def first_by_vector(a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Every element of the first operand meets one of the second: matrix by vector, and vector by vector."""
    return int(2 * a.numel())


def added_first_by_vector(added: Any, a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """A matrix-vector product that is added to something."""
    return int(2 * a.numel())


def matrix_product(a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """A matrix product, batched or not."""
    return int(2 * a.numel() * b.shape[-1])


def matrix_products(a: Sequence[Any], b: Sequence[Any], *rest: Any, out_val: Any, **options: Any) -> int:
    """Several matrix products in one call."""
    return sum(matrix_product(one, other, out_val=None) for one, other in zip(a, b, strict=True))


def added_matrix_product(added: Any, a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """A matrix product that is added to something."""
    return int(2 * a.numel() * b.shape[-1])


def outer_product(added: Any, a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """An outer product that is added to something."""
    return int(2 * a.numel() * b.numel())


def euclidean_distance(a: Any, b: Any, *rest: Any, out_val: Any) -> int:
    """Distances by one matrix product, whose operands get two columns more for the squares."""
    return int(2 * out_val.numel() * (a.shape[-1] + 2))


def trilinear(
    first: Any,
    second: Any,
    third: Any,
    expand_first: Sequence[int],
    expand_second: Sequence[int],
    expand_third: Sequence[int],
    summed: Sequence[int],
    *rest: Any,
    out_val: Any,
) -> int:
    """nn.Bilinear: one operand meets the second, then the result the third.

    The kernel multiplies the three over all dimensions and sums; one multiply and one multiply-add each.
    """
    sizes = [1] * (first.dim() + len(expand_first))
    pairs = ((first, expand_first), (second, expand_second), (third, expand_third))
    for operand, expanded in pairs:
        lengths = iter(operand.shape)
        for dimension in range(len(sizes)):
            if dimension not in expanded:
                sizes[dimension] = max(sizes[dimension], next(lengths))
    return 2 * prod(sizes)


# ---- Fourier transforms: 5 N log2 N for complex numbers, half of it where one side is real.


def _transform(signal: Any, dimensions: Sequence[int], per_point: float) -> int:
    points = prod(signal.shape[dimension] for dimension in dimensions)
    return round(float(per_point * signal.numel() * log2(max(points, 1))))


def fft_complex(x: Any, dimensions: Sequence[int], *rest: Any, out_val: Any) -> int:
    """From complex to complex."""
    return _transform(x, dimensions, 5)


def fft_from_real(x: Any, dimensions: Sequence[int], *rest: Any, out_val: Any) -> int:
    """From real to complex."""
    return _transform(x, dimensions, 2.5)


def fft_to_real(x: Any, dimensions: Sequence[int], *rest: Any, out_val: Any) -> int:
    """From complex to real."""
    return _transform(out_val, dimensions, 2.5)


FOURIER_OPERATORS = ("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r")

_OWN: dict[str, Formula] = {
    "aten::convolution": convolution,
    "aten::_convolution": convolution,
    "aten::cudnn_convolution": direct_convolution,
    "aten::cudnn_convolution_transpose": transposed_convolution,
    "aten::mkldnn_convolution": direct_convolution,
    "aten::miopen_convolution": direct_convolution,
    "aten::convolution_backward": convolution_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "aten::_scaled_dot_product_fused_attention_overrideable": attention,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": attention_backward,
    "aten::_native_multi_head_attention": native_attention,
    "aten::_transformer_encoder_layer_fwd": encoder_layer,
    "aten::mkldnn_rnn_layer": fused_layer,
    "aten::mkldnn_rnn_layer_backward": fused_layer_backward,
    "aten::_cudnn_rnn": recurrent_network,
    "aten::_cudnn_rnn_backward": recurrent_network_backward,
    "aten::miopen_rnn": recurrent_network,
    "aten::miopen_rnn_backward": recurrent_network_backward,
    "aten::linear": linear,
    "aten::mv": first_by_vector,
    "aten::dot": first_by_vector,
    "aten::vdot": first_by_vector,
    "aten::addmv": added_first_by_vector,
    "aten::addmv_": added_first_by_vector,
    "aten::addr": outer_product,
    "aten::addmm_": added_matrix_product,
    "aten::addbmm": added_matrix_product,
    "aten::addbmm_": added_matrix_product,
    "aten::baddbmm_": added_matrix_product,
    "aten::_int_mm": matrix_product,
    "aten::_foreach_mm": matrix_products,
    "aten::_euclidean_dist": euclidean_distance,
    "aten::_trilinear": trilinear,
    "aten::_fft_c2c": fft_complex,
    "aten::_fft_r2c": fft_from_real,
    "aten::_fft_c2r": fft_to_real,
}


def operator_called(name: str) -> Any | None:
    """``"aten::mm"`` → ``torch.ops.aten.mm``; ``None`` where this torch has no such operator."""
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator, None)


def all_formulas(own: Mapping[Any, Formula] | None = None) -> dict[Any, Formula]:
    """Formulas by operator, without overloads: the user's before ours before torch's.

    Args:
        own: formulas by ``torch.ops.namespace.operator``, by one of its overloads or by
            ``"namespace::operator"``.

    Raises:
        KeyError: when a name is no operator of this torch.
    """
    formulas: dict[Any, Formula] = dict(flop_registry)
    known = ((operator_called(name), formula) for name, formula in _OWN.items())
    formulas.update({operator: formula for operator, formula in known if operator is not None})
    for key, formula in (own or {}).items():
        operator = operator_called(key) if isinstance(key, str) else getattr(key, "overloadpacket", key)
        if operator is None:
            raise KeyError(f"formulas: expected an operator of this torch, got {key!r}")
        formulas[operator] = formula
    return formulas


# ---- What surely holds no contraction and is not worth a line: norms, reductions, pooling, look-ups, copies,
# random numbers; without the underscores of private and in-place forms, "_backward" and "native_".

_FAMILIES = frozenset(
    """
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d add alias_copy all
    amax amin aminmax amp_foreach_non_finite_check_and_unscale amp_update_scale any arange argmax argmin
    argsort as_strided as_strided_copy assert_async assert_scalar avg_pool2d avg_pool3d batch_norm
    batch_norm_no_update batch_norm_update_stats batch_norm_with_update bernoulli bincount bucketize cat
    channel_shuffle chunk chunk_cat clone col2im constant_pad_nd copy copy_from count_nonzero
    cross_entropy_loss cudnn_batch_norm cummax cummin cumprod cumsum data detach diagonal diagonal_copy
    dropout elu embedding embedding_bag embedding_bag_dense embedding_bag_forward_only embedding_dense
    embedding_renorm empty_like equal exponential fill flip foreach full_like functional_assert_async
    fused_adagrad fused_adam fused_adamw fused_dropout fused_rms_norm fused_sgd gather gelu glu
    grid_sampler_2d grid_sampler_3d group_norm hardshrink hardswish hardtanh histc im2col index
    index_add index_copy index_fill index_put index_select instance_norm is_all_true is_any_true isin
    kthvalue layer_norm leaky_relu lift_fresh linalg_check_errors linalg_vector_norm local_scalar_dense
    log_softmax log_softmax_data log_softmax_out logcumsumexp logsumexp masked_fill masked_scatter
    masked_select masked_softmax max max_pool2d_with_indices max_pool3d_with_indices max_unpool2d mean
    median min miopen_batch_norm mish mkldnn_max_pool2d mode multi_margin_loss multilabel_margin_loss
    multinomial nanmedian native_dropout nested_tensor_from_mask nested_tensor_from_mask_left_aligned
    nested_tensor_size new_empty new_empty_strided new_full new_ones new_zeros nll_loss nll_loss2d
    nll_loss2d_forward nll_loss_forward nonzero norm normal ones_like pixel_shuffle pixel_unshuffle
    prelu prelu_kernel prod rand_like randint_like randn_like reflection_pad1d reflection_pad2d
    reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
    reshape_alias resize rms_norm roll rot90 rrelu_with_noise safe_softmax scatter scatter_add
    scatter_reduce searchsorted segment_reduce select select_backward select_scatter set silu slice
    slice_backward slice_scatter softmax softmax_data softplus softshrink sort split
    split_with_sizes_copy squeeze stack std std_mean sum swap_axes t take thnn_differentiable_gru_cell
    thnn_fused_gru_cell thnn_fused_lstm_cell thnn_fused_lstm_cell_impl to_copy to_padded_tensor topk
    transform_bias_rescale_qkv transpose tril triu unbind unfold uniform unique unique2
    unique_consecutive unsafe_split unsafe_view unsqueeze upsample_bicubic2d upsample_bicubic2d_aa
    upsample_bilinear2d upsample_bilinear2d_aa upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_nearest_exact1d upsample_nearest_exact2d upsample_trilinear3d
    value_selecting_reduction var var_mean weight_norm_interface where zero zeros_like
    """.split()  # noqa: SIM905 - so many names read better without quotes
)
_ZERO_TAGS = tuple(
    tag for tag in (getattr(torch.Tag, name, None) for name in ("pointwise", "reduction")) if tag is not None
)


def holds_no_contraction(func: Any) -> bool:
    """Whether ``func``, an overload of an operator, surely is no contraction.

    Views, element-wise operators, reductions and whatever takes no tensors are known by their schemas and
    tags, the rest of torch's by name. Operators of other libraries can do anything.
    """
    if isinstance(func, torch._ops.HigherOrderOperator) or func.namespace not in ("aten", "prims", "prim"):
        return False
    if func.namespace == "prim":
        return True  # reads what a tensor is
    if func.is_view or any(tag in func.tags for tag in _ZERO_TAGS):
        return True
    if not any("Tensor" in str(argument.type) for argument in func._schema.arguments):
        return True
    name = func.overloadpacket.__name__.strip("_")
    plain = name.replace("_backward", "").removeprefix("native_").removeprefix("cudnn_")
    return name in _FAMILIES or plain in _FAMILIES or name.startswith("foreach_")
