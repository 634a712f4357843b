"""FLOPs of convolutions, matrix and vector products, and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2, prod
from typing import Any, NamedTuple, TypeAlias

# ruff: noqa: ARG001, PLR0917 - formulas take the operators' arguments


# ---- Convolutions: each weight element meets each position of the batch once.


def convolution_products(positions_of: Any, weight: Any) -> int:
    """Multiply-adds per pass; ``positions_of`` is the output, or the input if transposed."""
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
    """Count a convolution in any number of dimensions, grouped or transposed."""
    return 2 * convolution_products(x if transposed else out_val, weight)


def direct_convolution(x: Any, weight: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a backend's convolution, which is never transposed."""
    return 2 * convolution_products(out_val, weight)


def transposed_convolution(x: Any, weight: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    return 2 * convolution_products(x, weight)


def convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, out_val: Any) -> int:
    """Count the forward's products for the input gradient and again for the weight gradient, as requested.

    ``transposed`` is the fourth last of ``rest``, before the mask at the end, as in all of torch's versions.
    """
    *_, transposed, _output_padding, _groups, wanted = rest
    passes = int(wanted[0]) + int(wanted[1])
    return 2 * passes * convolution_products(x if transposed else grad, weight)


# ---- Products of matrices and vectors


def linear(x: Any, weight: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a linear layer that arrives as one operator, as in inference mode."""
    return int(2 * x.numel() * (weight.shape[0] if weight.dim() == 2 else 1))


def first_by_vector(a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Each element of the first operand meets one of the second: matrix by vector, and vector by vector."""
    return int(2 * a.numel())


def added_first_by_vector(added: Any, a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a matrix-vector product that is added to something."""
    return int(2 * a.numel())


def matrix_product(a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a matrix product, batched or not."""
    return int(2 * a.numel() * b.shape[-1])


def matrix_products(a: Sequence[Any], b: Sequence[Any], *rest: Any, out_val: Any, **options: Any) -> int:
    return sum(matrix_product(one, other, out_val=None) for one, other in zip(a, b, strict=True))


def added_matrix_product(added: Any, a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    return int(2 * a.numel() * b.shape[-1])


def two_matrix_products(a: Any, b: Any, c: Any, d: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count the sum of two matrix products, as fused in compiled code."""
    return matrix_product(a, b, out_val=None) + matrix_product(c, d, out_val=None)


def outer_product(added: Any, a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    return int(2 * a.numel() * b.numel())


def euclidean_distance(a: Any, b: Any, *rest: Any, out_val: Any) -> int:
    """Count distances by one matrix product, whose operands get two extra columns for the squares."""
    return int(2 * out_val.numel() * (a.shape[-1] + 2))


def trilinear(
    first: Any,
    second: Any,
    third: Any,
    expand_first: Sequence[int],
    expand_second: Sequence[int],
    expand_third: Sequence[int],
    summed: Sequence[int],
    unrolled: int = 1,
    *rest: Any,
    out_val: Any,
) -> int:
    """Count nn.Bilinear and its gradients: two batched matrix products per index of one dimension.

    The first product sums over the dimensions that the third operand lacks, the second over the rest. So per
    output, a forward takes rows x in1 x in2 multiply-adds for x1 @ weight, and rows x in2 for its product
    with x2. A product without a sum is elementwise and counts as zero, as elsewhere.

    Source: ``at::native::_trilinear`` and ``sumproduct_pair`` in ATen/native/Linear.cpp.
    """
    pairs = ((first, expand_first), (second, expand_second), (third, expand_third))
    operands = []
    for operand, expanded in pairs:
        lengths = iter(operand.shape)
        num_dimensions = operand.dim() + len(expanded)
        operands.append([1 if i in expanded else next(lengths) for i in range(num_dimensions)])
    num_slices = max(sizes[unrolled] for sizes in operands)
    for sizes in operands:
        sizes[unrolled] = 1
    a, b, c = operands
    inner = {*summed} - {unrolled}  # slices are added up
    of_two = inner & {*expand_third}
    both = [1 if i in of_two else max(pair) for i, pair in enumerate(zip(a, b, strict=True))]
    products = _products(a, b, of_two) + _products(both, c, inner - of_two)
    return int(2 * num_slices * products) if all(x.numel() for x, _ in pairs) else 0


def _products(a: Sequence[int], b: Sequence[int], summed: set[int]) -> int:
    """Multiply-adds of a two-operand product; a dimension that one operand lacks is summed beforehand."""
    sizes = (min(pair) if i in summed else max(pair) for i, pair in enumerate(zip(a, b, strict=True)))
    return prod(sizes) if summed else 0


# ---- Fourier transforms: 5 N log2 N for complex numbers, half of that where one side is real.


def _transform(signal: Any, dimensions: Sequence[int], per_point: float) -> int:
    points = prod(signal.shape[dimension] for dimension in dimensions)
    return round(float(per_point * signal.numel() * log2(max(points, 1))))


def fft_complex(x: Any, dimensions: Sequence[int], *rest: Any, out_val: Any) -> int:
    return _transform(x, dimensions, 5)


def fft_from_real(x: Any, dimensions: Sequence[int], *rest: Any, out_val: Any) -> int:
    return _transform(x, dimensions, 2.5)


def fft_to_real(x: Any, dimensions: Sequence[int], *rest: Any, out_val: Any) -> int:
    return _transform(out_val, dimensions, 2.5)


FORMULAS: dict[str, Formula] = {
    "aten::convolution": convolution,
    "aten::_convolution": convolution,
    "aten::convolution_overrideable": convolution,
    "aten::convolution_backward": convolution_backward,
    "aten::convolution_backward_overrideable": convolution_backward,
    "aten::cudnn_convolution": direct_convolution,
    "aten::cudnn_convolution_relu": direct_convolution,
    "aten::cudnn_convolution_add_relu": direct_convolution,
    "aten::cudnn_convolution_transpose": transposed_convolution,
    "aten::mkldnn_convolution": direct_convolution,
    "aten::miopen_convolution": direct_convolution,
    "aten::miopen_convolution_relu": direct_convolution,
    "aten::miopen_convolution_add_relu": direct_convolution,
    "aten::miopen_depthwise_convolution": direct_convolution,
    "aten::miopen_convolution_transpose": transposed_convolution,
    "aten::_mps_convolution": direct_convolution,
    "aten::_mps_convolution_transpose": transposed_convolution,
    "aten::_conv_depthwise2d": direct_convolution,
    "aten::conv_depthwise3d": direct_convolution,
    "aten::slow_conv_dilated2d": direct_convolution,
    "aten::slow_conv_dilated3d": direct_convolution,
    "aten::slow_conv3d_forward": direct_convolution,
    "aten::slow_conv_transpose2d": transposed_convolution,
    "aten::slow_conv_transpose3d": transposed_convolution,
    "aten::_nnpack_spatial_convolution": direct_convolution,
    "mkldnn::_convolution_transpose_pointwise": transposed_convolution,
    "aten::linear": linear,
    "aten::mkldnn_linear": linear,
    "aten::dot": first_by_vector,
    "aten::vdot": first_by_vector,
    "aten::addmv": added_first_by_vector,
    "aten::addmv_": added_first_by_vector,
    "aten::addr": outer_product,
    "aten::addr_": outer_product,
    "aten::_addmm_activation": added_matrix_product,
    "aten::addbmm": added_matrix_product,
    "aten::addbmm_": added_matrix_product,
    "aten::baddbmm_": added_matrix_product,
    "aten::_int_mm": matrix_product,
    "aten::_foreach_mm": matrix_products,
    "inductor::_mm_plus_mm": two_matrix_products,
    "aten::_euclidean_dist": euclidean_distance,
    "aten::_trilinear": trilinear,
    "aten::_fft_c2c": fft_complex,
    "aten::_fft_r2c": fft_from_real,
    "aten::_fft_c2r": fft_to_real,
}


class WithRecompute(NamedTuple):
    """FLOPs of a backward kernel that recomputes part of the forward.

    Attributes:
        gradients: FLOPs that the gradients need.
        recompute: FLOPs that repeat the forward.
    """

    gradients: int
    recompute: int


Formula: TypeAlias = Callable[..., "int | WithRecompute"]
"""``formula(*args, **kwargs, out_val=result)`` returns FLOPs."""
