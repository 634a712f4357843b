"""Operators that cost nothing by convention, and operators that only communicate."""

from __future__ import annotations

from typing import Any

import torch

# Operators that certainly contain no contraction: norms, reductions, pooling, look-ups, copies and random
# numbers. Without the underscores of private and in-place forms, "_backward" and "native_".
_FAMILIES = frozenset(
    """
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d add add_relu
    affine_grid_generator alias_copy all allclose amax amin aminmax
    amp_foreach_non_finite_check_and_unscale amp_update_scale any arange argmax argmin argsort as_strided
    as_strided_copy as_strided_scatter assert_async assert_scalar assert_tensor_metadata avg_pool2d
    avg_pool3d batch_norm batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt
    batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_legit
    batch_norm_legit_no_training batch_norm_no_update batch_norm_stats batch_norm_update_stats
    batch_norm_with_update bernoulli binary_cross_entropy binary_cross_entropy_with_logits bincount
    binomial block_diag bucketize cat cauchy channel_shuffle chunk chunk_cat clone coalesce coalesced
    col2im complex constant_pad_nd convert_indices_from_coo_to_csr convert_indices_from_csr_to_coo
    convert_weight_to_int4pack convert_weight_to_int4pack_for_cpu copy copy_from copy_from_and_resize
    copy_sparse_to_sparse count_nonzero cross_entropy_loss cslt_compress ctc_loss cudnn_batch_norm
    cudnn_rnn_flatten_weight cummax cummax_helper cummin cummin_helper cumprod cumsum data dense_dim
    dequantize detach diag_embed diagonal diagonal_copy diagonal_scatter dimI dimV dirichlet_grad dist
    dropout dyn_quant_pack_4bit_weight elu embedding embedding_bag embedding_bag_dense
    embedding_bag_forward_only embedding_bag_per_sample_weights embedding_dense embedding_renorm
    empty_like empty_per_channel_affine_quantized empty_quantized equal exponential
    fake_quantize_learnable_per_channel_affine fake_quantize_learnable_per_tensor_affine
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
    fake_quantize_per_tensor_affine_cachemask_tensor_qparams fill fill_mem_eff_dropout_mask flip
    floor_divide foreach fractional_max_pool2d fractional_max_pool3d full_like functional_assert_async
    functional_assert_scalar functional_sym_constrain_range functional_sym_constrain_range_for_size
    fused_adagrad fused_adam fused_adamw fused_dropout fused_moving_avg_obs_fq_helper fused_rms_norm
    fused_sdp_choice fused_sgd gather gelu geometric glu glu_jvp grid_sampler grid_sampler_2d
    grid_sampler_2d_cpu_fallback grid_sampler_3d group_norm hardshrink hardsigmoid hardswish hardtanh
    has_same_storage_numel hash_tensor histc histogram histogramdd_bin_edges histogramdd_from_bin_cts
    histogramdd_from_bin_tensors huber_loss ilshift im2col index index_add index_copy index_fill index_put
    index_put_impl index_reduce index_select instance_norm int_repr irshift is_all_true is_any_true
    is_coalesced is_pinned is_same_size is_set_to isin jagged_to_padded_dense_forward kthvalue layer_norm
    lazy_clone leaky_relu lift lift_fresh linalg_check_errors linalg_cross linalg_diagonal linalg_norm
    linalg_vector_norm linspace local_scalar_dense log_normal log_sigmoid log_sigmoid_forward log_softmax
    log_softmax_data log_softmax_out logcumsumexp logspace logsumexp lu_unpack
    make_per_channel_quantized_tensor make_per_tensor_quantized_tensor masked_fill masked_scale
    masked_scatter masked_select masked_softmax max max_pool2d max_pool2d_with_indices
    max_pool3d_with_indices max_unpool2d max_unpool3d mean median min miopen_batch_norm miopen_ctc_loss
    mish mkldnn_adaptive_avg_pool2d mkldnn_max_pool2d mkldnn_max_pool3d mkldnn_reorder_conv2d_weight
    mkldnn_reorder_conv3d_weight mkldnn_reshape mkldnn_transpose mode mse_loss multi_margin_loss
    multilabel_margin_loss multilabel_margin_loss_forward multinomial nanmedian native_dropout
    nested_compute_contiguous_strides_offsets nested_from_padded nested_from_padded_and_nested_example
    nested_from_padded_tensor nested_get_jagged_dummy nested_get_lengths nested_get_max_seqlen
    nested_get_min_seqlen nested_get_offsets nested_get_ragged_idx nested_select nested_sum
    nested_tensor_from_mask nested_tensor_from_mask_left_aligned nested_tensor_from_tensor_list
    nested_tensor_size nested_tensor_softmax_with_shape nested_tensor_storage_offsets
    nested_tensor_strides new_empty new_empty_strided new_full new_ones new_zeros
    new_zeros_with_same_feature_meta nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nnz nonzero
    nonzero_static norm normal ones_like pack_padded_sequence padded_dense_to_jagged_forward
    philox_key_fold_in philox_key_split philox_normal philox_uniform pin_memory pixel_shuffle
    pixel_unshuffle poisson polar prelu prelu_kernel prod put q_per_channel_axis q_per_channel_scales
    q_per_channel_zero_points q_scale q_zero_point qscheme quantize_per_channel quantize_per_tensor
    quantize_per_tensor_dynamic quantized_batch_norm quantized_max_pool1d quantized_max_pool2d
    quantized_max_pool3d rand_like randint_like randn_like random record_stream reflection_pad1d
    reflection_pad2d reflection_pad3d renorm repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d reshape_alias resize resize_as resize_as_sparse resize_output rms_norm roll rot90
    rrelu_with_noise rsub safe_softmax sample_dirichlet scatter scatter_add scatter_reduce searchsorted
    segment_reduce select select_backward select_scatter set silu slice slice_backward slice_scatter
    smooth_l1_loss soft_margin_loss softmax softmax_data softplus softshrink sort sparse_broadcast_to
    sparse_compressed_tensor sparse_compressed_tensor_unsafe sparse_compressed_tensor_with_dims
    sparse_coo_tensor_unsafe sparse_coo_tensor_with_dims_and_tensors sparse_csr_prod sparse_csr_sum
    sparse_csr_tensor_unsafe sparse_dim sparse_log_softmax sparse_log_softmax_data sparse_mask
    sparse_mask_projection sparse_resize sparse_resize_and_clear sparse_softmax sparse_softmax_data
    sparse_sum spdiags split split_with_sizes_copy squeeze stack standard_gamma standard_gamma_grad std
    std_mean sum swap_axes t take thnn_differentiable_gru_cell thnn_fused_gru_cell thnn_fused_lstm_cell
    thnn_fused_lstm_cell_impl threshold to_copy to_dense to_mkldnn to_padded_tensor to_sparse
    to_sparse_bsc to_sparse_bsr to_sparse_csc to_sparse_csr to_sparse_semi_structured topk trace
    transform_bias_rescale_qkv transpose tril triu unbind unfold uniform unique unique2 unique_consecutive
    unique_dim unique_dim_consecutive unsafe_index unsafe_index_put unsafe_masked_index
    unsafe_masked_index_put_accumulate unsafe_split unsafe_split_with_sizes unsafe_view unsqueeze
    upsample_bicubic2d upsample_bicubic2d_aa upsample_bilinear2d upsample_bilinear2d_aa
    upsample_lanczos2d_aa upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d upsample_trilinear3d
    use_cudnn_ctc_loss use_miopen_ctc_loss validate_compressed_sparse_indices
    validate_sparse_compressed_tensor_args validate_sparse_coo_tensor_args validate_sparse_csr_tensor_args
    value_selecting_reduction var var_mean weight_norm_interface where zero zeros_like
    """.split()  # noqa: SIM905 - so many names read better without quotes
)
_ZERO_TAGS = tuple(
    tag for tag in (getattr(torch.Tag, name, None) for name in ("pointwise", "reduction")) if tag is not None
)


_COMMUNICATION = frozenset(
    ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
)


def communicates(func: Any) -> bool:
    """Whether ``func``, an operator overload, moves data between processes."""
    return getattr(func, "namespace", "") in _COMMUNICATION


def holds_no_contraction(func: Any) -> bool:
    """Whether ``func``, an operator overload, is certainly no contraction.

    Views, element-wise operators, reductions and operators without tensor arguments are recognized by schema
    and tags, torch's others by name. Communication isn't a contraction unless fused with a matrix product.
    Other libraries' operators can do anything.
    """
    if isinstance(func, torch._ops.HigherOrderOperator):
        return False
    if communicates(func):
        name = func.overloadpacket.__name__
        return "_mm" not in name and "matmul" not in name
    if func.namespace not in ("aten", "prims", "prim", "profiler"):
        return False
    if func.namespace in ("prim", "profiler"):
        return True  # reads a tensor's metadata, or marks a time range
    if func.is_view or _is_tagged(func):
        return True
    if not any("Tensor" in str(argument.type) for argument in func._schema.arguments):
        return True
    name = func.overloadpacket.__name__.strip("_")
    plain = name.replace("_backward", "").removeprefix("native_").removeprefix("cudnn_")
    return name in _FAMILIES or plain in _FAMILIES or name.startswith("foreach_")


def _is_tagged(func: Any) -> bool:
    """Whether torch tags the operator, or its out-of-place form, as element-wise or a reduction."""
    if any(tag in func.tags for tag in _ZERO_TAGS):
        return True
    name = func.overloadpacket.__name__
    if not name.endswith("_") or name.endswith("__"):
        return False
    plain = getattr(torch.ops.aten, name[:-1], None)
    overloads = [getattr(plain, overload) for overload in plain.overloads()] if plain is not None else []
    return any(tag in overload.tags for overload in overloads for tag in _ZERO_TAGS)
