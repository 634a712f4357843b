"""FLOPs of products with packed operands: quantised, grouped, sparse, or in a backend's layout."""

# ruff: noqa: ARG001 - formulas take the operators' arguments

from __future__ import annotations

from math import prod
from typing import Any

import torch

from lightning_modelprof.inspect.flops.contractions import Formula, convolution_products, matrix_product

_PAIRS = getattr(torch, "float4_e2m1fn_x2", None)  # torch 2.8: one element holds two numbers

# ---- Matrix products that may be sparse: only stored elements are multiplied.


def _is_dense(matrix: Any) -> bool:
    return matrix.layout in (torch.strided, torch._mkldnn)  # type: ignore[attr-defined]


def stored_elements(matrix: Any) -> int:
    """Count a tensor's stored elements, including zeros that it stores."""
    if _is_dense(matrix):
        return int(matrix.numel())
    if matrix.layout is torch.sparse_coo:
        return int(matrix._nnz() * prod(matrix.shape[matrix.sparse_dim() :]))
    return int(matrix.values().numel())


def any_matrix_product(a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a matrix product, batched or nested, with at most one sparse operand."""
    if a.is_nested and b.is_nested:
        sizes = zip(a._nested_tensor_size().tolist(), b._nested_tensor_size().tolist(), strict=True)
        return sum(2 * prod(left) * int(right[-1]) for left, right in sizes)
    if _is_dense(a) and _is_dense(b):
        return matrix_product(a, b, out_val=None)
    if _is_dense(b):
        return 2 * stored_elements(a) * int(b.shape[-1])
    if _is_dense(a):
        return 2 * stored_elements(b) * int(a.shape[-2])
    raise ValueError("the FLOPs of a product of two sparse matrices depend on where their elements are")


def broadcast_product(a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a product of any shapes that arrives as one operator, in inference mode or of nested tensors."""
    if a.is_nested or b.is_nested:
        return any_matrix_product(a, b, out_val=None)
    return int(2 * out_val.numel() * a.shape[-1])


def broadcast_product_backward(grad: Any, a: Any, b: Any, wanted: Any, *, out_val: Any) -> int:
    """Count its gradients: the forward's products per operand that needs one."""
    return (int(wanted[0]) + int(wanted[1])) * broadcast_product(a, b, out_val=grad)


def any_added_matrix_product(added: Any, a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a matrix product that is added to something, with at most one sparse operand."""
    return any_matrix_product(a, b, out_val=None)


def any_matrix_by_vector(a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    return 2 * stored_elements(a)


def sampled_product(sampled: Any, a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count only the product's elements that the first operand stores."""
    return 2 * stored_elements(sampled) * int(a.shape[-1])


def half_sparse_left(compressed: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count half of the dense product: the left operand stores two of four elements."""
    return int(out_val.numel() * b.shape[-2])


def half_sparse_linear(x: Any, weight: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a linear layer whose weight stores two of four elements."""
    return int(x.numel() * out_val.shape[-1])


def half_sparse_product(a: Any, meta: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a matrix with two of four elements stored, times a dense one."""
    return int(2 * a.numel() * b.shape[-1])


def half_sparse_added_product(added: Any, a: Any, meta: Any, b: Any, *rest: Any, **options: Any) -> int:
    return int(2 * a.numel() * b.shape[-1])


# ---- Low precision


def scaled_product(a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a product of scaled matrices; an element holds two four-bit numbers."""
    return matrix_product(a, b, out_val=None) * (2 if a.dtype is _PAIRS else 1)


def grouped_product(a: Any, b: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count products of groups of rows, columns or both, as in a mixture of experts.

    Every row or column counts, even behind the last group: the group ends are on the device.
    """
    one_of_many = a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1  # a column meets its group's matrix
    return scaled_product(a, b, out_val=None) // int(one_of_many)


def rows_by_outputs(x: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a linear layer with a packed weight: every input row meets every output."""
    return int(2 * x.numel() * out_val.shape[-1])


def quantised_convolution(x: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a convolution whose weight is one of torch's script objects."""
    return 2 * convolution_products(out_val, _unpacked_weight(rest))


def quantised_transposed_convolution(x: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    return 2 * convolution_products(x, _unpacked_weight(rest))


def _unpacked_weight(arguments: tuple[Any, ...]) -> Any:
    packed: Any = next(value for value in arguments if isinstance(value, torch.ScriptObject))
    return packed.unpack()[0]


def pointwise_convolution(*arguments: Any, out_val: Any, **options: Any) -> int:
    """Count a convolution that compiled code fuses; the weight is two arguments before the padding."""
    padding = next(index for index, value in enumerate(arguments) if isinstance(value, (list, tuple)))
    return 2 * convolution_products(out_val, arguments[padding - 2])


def quantised_pointwise_convolution(
    x: Any, scale: Any, zero: Any, weight: Any, *rest: Any, out_val: Any
) -> int:
    return 2 * convolution_products(out_val, weight)


# ---- Time before batch before channels


def convolution_over_time(x: Any, weight: Any, *rest: Any, out_val: Any, **options: Any) -> int:
    """Count a convolution of (time, batch, channels)."""
    return int(2 * out_val.shape[0] * out_val.shape[1] * weight.numel())


def convolution_over_time_backward(grad: Any, x: Any, weight: Any, *rest: Any, **options: Any) -> int:
    """Count both gradients, which are always computed."""
    return int(4 * grad.shape[0] * grad.shape[1] * weight.numel())


_PACKED_LINEAR = (
    *(f"aten::_weight_int{name}" for name in ("8pack_mm", "4pack_mm", "4pack_mm_for_cpu")),
    "aten::_weight_int4pack_mm_with_scales_and_zeros",
    "aten::_dyn_quant_matmul_4bit",
    "aten::_mixed_dtypes_linear",
    "aten::_wrapped_quantized_linear_prepacked",
    *(f"aten::fbgemm_linear_{kind}_weight" for kind in ("int8", "fp16")),
    *(f"aten::fbgemm_linear_{kind}_weight_fp32_activation" for kind in ("int8", "fp16")),
    *(
        f"quantized::linear{kind}"
        for kind in (
            "",
            "_relu",
            "_leaky_relu",
            "_tanh",
            "_dynamic",
            "_relu_dynamic",
            "_dynamic_fp16",
            "_relu_dynamic_fp16",
            "_dynamic_fp16_unpacked_weight",
            "_with_input_q_dq_qweight_dq_output_fp32",
            "_with_input_q_dq_qweight_dq_relu_output_fp32",
        )
    ),
    "quantized::int4mm_packed_weight_cpu",
    "_quantized::linear",
    "_quantized::linear_dynamic",
    "_quantized::_wrapped_quantized_linear_prepacked",
    "onednn::qlinear_pointwise",
    "onednn::linear_dynamic_fp16",
    "onednn::linear_relu_dynamic_fp16",
    "mkldnn::_linear_pointwise",
    "mkl::_mkl_linear",
)
_DIMENSIONS = (1, 2, 3)

FORMULAS: dict[str, Formula] = {
    "aten::mm": any_matrix_product,
    "aten::bmm": any_matrix_product,
    "aten::addmm": any_added_matrix_product,
    "aten::addmm_": any_added_matrix_product,
    "aten::baddbmm": any_added_matrix_product,
    "aten::mv": any_matrix_by_vector,
    "aten::matmul": broadcast_product,
    "aten::matmul_backward": broadcast_product_backward,
    "aten::_sparse_mm": any_matrix_product,
    "aten::_sparse_addmm": any_added_matrix_product,
    "aten::sparse_sampled_addmm": sampled_product,
    "aten::_cslt_sparse_mm": half_sparse_left,
    "aten::_sparse_semi_structured_linear": half_sparse_linear,
    "aten::_sparse_semi_structured_mm": half_sparse_product,
    "aten::_sparse_semi_structured_addmm": half_sparse_added_product,
    "aten::_scaled_mm": scaled_product,
    "aten::_scaled_mm_v2": scaled_product,
    "aten::_grouped_mm": grouped_product,
    "aten::_scaled_grouped_mm": grouped_product,
    "aten::_scaled_grouped_mm_v2": grouped_product,
    "aten::conv_tbc": convolution_over_time,
    "aten::conv_tbc_backward": convolution_over_time_backward,
    "quantized::matmul": matrix_product,
    "mkldnn::_convolution_pointwise": pointwise_convolution,
    "mkldnn::_convolution_pointwise_": pointwise_convolution,
    **dict.fromkeys(_PACKED_LINEAR, rows_by_outputs),
    **{
        f"quantized::conv{dimension}d{kind}": quantised_convolution
        for dimension in _DIMENSIONS
        for kind in ("", "_relu", "_dynamic")
    },
    **{
        f"quantized::conv_transpose{dimension}d{kind}": quantised_transposed_convolution
        for dimension in _DIMENSIONS
        for kind in ("", "_dynamic")
    },
    "quantized::conv2d_add": quantised_convolution,
    "quantized::conv2d_add_relu": quantised_convolution,
    "onednn::qconv_pointwise": quantised_pointwise_convolution,
    **{f"onednn::qconv{dimension}d_pointwise": quantised_pointwise_convolution for dimension in _DIMENSIONS},
}
