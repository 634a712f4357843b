"""Classification of kernels by their names, as libraries write them."""

from __future__ import annotations

import pytest

from lightning_modelprof.analysis.timeline.names import is_communication_kernel, uses_tensor_cores


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "rcclGenericKernel<1>(ncclDevKernelArgsStorage)",
        "mscclKernel_Sum_half_Simple_0(ncclDevComm*, mscclAlgo*, mscclWork*)",
        "void mscclpp::allgather6<__half>(mscclpp::DeviceHandle<mscclpp::MemoryChannel>*, int)",
        "oneccl_allreduce_ring_bfloat16",
        "ccl_allreduce_kernel",
        "_ZTSN3ccl2v112allgatherv_kernelIfEE",
        "void nvshmemi_proxy_quiet_entrypoint<false>(int)",
        "barrier_all_on_stream_kernel_threadgroup(int)",
        "void deep_ep::internode::dispatch<false, 8, true, 2>(int4*, float*)",
        "void deep_ep::internode_ll::combine<true, 7168, 9>(void*, void*)",
        "void deep_ep::intranode::cached_notify_combine<4>(void**, int*)",
        "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*, float*)",
        "void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(mori::moe::Args)",
        "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<16>(int, int)",
        "void vllm::cross_device_reduce_2stage<__half, 8>(vllm::RankData*, vllm::RankSignals)",
        "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>(Params)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1>(Params)",
        "void quickreduce::allreduce_prototype_twoshot<quickreduce::CodecFP>(void*)",
        "void tensorrt_llm::kernels::moe_comm::moeAllToAllKernel<1>(Params)",
    ],
)
def test_communication_kernels(name):
    assert is_communication_kernel(name)
    assert uses_tensor_cores(name) is False


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_add_all_gather_into_tensor_wait_tensor_3",
        "void fused_all_gather_matmul_kernel<__half>(Params)",
        "void oneflow::cuda::layer_norm::LayerNormWarpAllReduceImpl<float>(float*)",
        "void rowwise_blockReduceSum_BlockAllReduce<float>(float*)",
        "successful_kernel",
        "void moe::dev::routing::routingIndicesHistogramKernel<Params>(Params)",
        "_Z9matrixMulPfS_S_",
        "void at::native::reduce_kernel<512, 1>(int)",
    ],
)
def test_kernels_with_similar_words_do_not_communicate(name):
    assert not is_communication_kernel(name)


@pytest.mark.parametrize(
    "name",
    [
        # CUTLASS 3, DeepGEMM, TensorRT-LLM and others since Hopper
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>>>(Params)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm90<cutlass::gemm::kernel::X>>",
        "void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c::GemmKernel>(Params)",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 512u, 4096u>(float*)",
        "bmm_Bfloat16_E2m1E2m1_Fp32_t128x16x256_s5_et64x32_m64x8x64_rN_TN_schS_tma_sm100f",
        "nvjet_tst_128x152_64x6_2x1_v_bz_TNT",
        "void marlin::Marlin<__nv_bfloat16, 1125899906909960l, 256, 4, 16, 4>(int4 const*)",
        # attention
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<Traits>>>(Params)",
        "void cutlass::device_kernel<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<2>>>(Params)",
        "void flash::compute_attn_ws<Flash_fwd_kernel_traits<192, 128, 128>, true>(Params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits>(Flash_bwd_params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x128_4x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<Half>)",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<1>>(Params)",
        # cuDNN and cuBLAS since Ampere
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tensor16x8x8_kernel_cudnn",
        "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_cudnn",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64>(Params)",
        "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_nn",
        "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_nn_align8",
    ],
)
def test_kernels_using_tensor_cores(name):
    assert uses_tensor_cores(name) is True


@pytest.mark.parametrize(
    "name",
    [
        "volta_sgemm_128x64_nn",
        "ampere_sgemm_32x32_sliced1x4_tn",
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_ffma_aligna4_execute_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(Params)",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>(Params)",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(Params)",
        "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Params)",
        "void flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>>(Params)",
        "void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<cutlass::arch::Sm90>>(Params)",
        "void at::native::vectorized_elementwise_kernel<4, fbgemm_gpu::_float_to_hfp8_gpu()::lambda>(int)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16>(c10::BFloat16*)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>(Params)",
        "triton_poi_fused_addmm_gelu_2",
        "triton_per_fused__softmax_bmm_5",
    ],
)
def test_kernels_without_tensor_cores(name):
    assert uses_tensor_cores(name) is False


@pytest.mark.parametrize(
    "name",
    [
        "triton_tem_fused_mm_4",
        "_fwd_kernel",
        "matmul_kernel_persistent",
        "my_kernel(float*, int)",
        "void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(float const*)",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float, int>(Params)",
        "",
    ],
)
def test_kernels_with_unknown_tensor_core_use(name):
    assert uses_tensor_cores(name) is None
