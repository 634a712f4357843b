"""What the name of a host event says about it: the words of torch, its backends and Lightning."""

from __future__ import annotations

import re
from typing import Final

from lightning_modelprof.run.phases import RANGE_PREFIX, STEP_RANGE_PREFIX

DATALOADER_PREFIXES: Final = ("enumerate(DataLoader)#", "enumerate(DataPipe)#")


ZERO_GRAD_PREFIX: Final = "Optimizer.zero_grad#"


OPTIMIZER_PREFIX: Final = "Optimizer.step#"


AUTOGRAD_PREFIX: Final = "autograd::engine::evaluate_function"


LIGHTNING_PREFIX: Final = "[pl]"


MODULE_PREFIXES: Final = ("nn.Module: ", "[pl][module]")
"""Of the ranges that torch (``with_modules``) and Lightning's PyTorchProfiler write around a module."""


_LIBRARY_RANGE: Final = re.compile(
    r"(?:\w*ccl|cncl|ucc):(?!:)"
    # Of any other backend, which writes what c10d calls the collective.
    r"|(?!gloo:|mpi:)[\w.-]+:_?(?:(?:sparse_)?all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|reduce"
    r"|gather|scatter|barrier|send|recv(?:AnySource|_any_source)?)"
    r"(?:_(?:base|coalesced|into|tensor|single|sparse|oop|uneven|v|object|list))*(?![\w.:(])"
)
"""Ranges of backends that may use kernels: ``nccl:all_reduce``, ``hccl:...``, ``anything:barrier``."""


_HOST_RANGES: Final = ("gloo:", "mpi:")
"""Of backends that communicate on the host: what else is launched in their ranges are copies."""


_NCCL: Final = "nccl:"
"""Also of RCCL: torch writes one name for both."""


SYMMETRIC_MEMORY_PREFIX: Final = "symm_mem::"


_COLLECTIVE_CALLS: Final = ("c10d::", "record_param_comms", SYMMETRIC_MEMORY_PREFIX)


_OPTIMIZERS: Final = "Optimizer."


_RANGES: Final = (
    STEP_RANGE_PREFIX,
    RANGE_PREFIX,
    LIGHTNING_PREFIX,
    _OPTIMIZERS,
    *DATALOADER_PREFIXES,
)
"""Torch 1.9 wrote annotations as operators: these are none."""


_TORCH_RANGES: Final = (
    "DataParallel.forward",
    "DistributedDataParallel.forward",
    "FullyShardedDataParallel.",
    "FSDP::",
    "PP:",  # pipeline schedules
    "rpc_sync#",
    "rpc_async#",
    "rpc_async_jit#",
    "rpc_remote#",
    "Torch-Compiled Region",
    "TorchDynamo Cache Lookup",
    "TORCHDYNAMO",
    "Pregraph bytecode",
    "AOTDispatcher Runtime Wrapper Prologue",
    "CompiledFunction",
    "## Call CompiledFxGraph",
    "fused_all_gather_",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)
"""Of ranges that torch writes itself, found by its calls of ``record_function`` in torch 2.13."""


_TORCH_ENDINGS: Final = (" (dynamo_timed)", "_inductor_wrapper_call")


def launches_communication(name: str) -> bool:
    """Whether the kernels launched in the host range of this name communicate.

    Not those of operators that also compute, such as ``symm_mem::fused_all_gather_matmul``.
    """
    if name.startswith(SYMMETRIC_MEMORY_PREFIX):
        return "matmul" not in name and "_mm" not in name.removeprefix(SYMMETRIC_MEMORY_PREFIX)
    return _LIBRARY_RANGE.match(name) is not None


def is_communication_operator(name: str) -> bool:
    """Whether the host range of this name is a communication backend's operator (``nccl:all_reduce``)."""
    return name.startswith(_HOST_RANGES) or asks_device_to_communicate(name)


def asks_device_to_communicate(name: str) -> bool:
    """Whether the host range of this name only asks a device for communication, as those of NCCL do."""
    return _LIBRARY_RANGE.match(name) is not None


def communicates_on_host(name: str, *, launches: bool) -> bool:
    """Whether a host range of this name is communication itself; NCCL's only ask a device for it.

    Args:
        launches: whether a kernel that communicates was launched in it.
    """
    return name.startswith(_HOST_RANGES) or not (launches or name.startswith(_NCCL))


def is_collective_call(name: str) -> bool:
    """Whether the operator of this name asks for communication, such as ``c10d::allreduce_``."""
    return name.startswith(_COLLECTIVE_CALLS)


_LIKE_COLLECTIVE: Final = re.compile(
    r"(?<![a-z])(?:\w*_)?(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)(?![a-z])", re.IGNORECASE
)


def looks_like_communication(name: str) -> bool:
    """Whether the operator or range of this name may communicate, though it is of no known backend."""
    is_known = is_communication_operator(name) or is_collective_call(name) or is_place(name)
    return not is_known and _LIKE_COLLECTIVE.search(name) is not None


def is_dataloader(name: str) -> bool:
    """Whether the host range of this name is a fetch of a batch by torch's DataLoader."""
    loader, pipe = DATALOADER_PREFIXES
    return name.startswith(pipe) or (name.startswith(loader) and name.endswith(".__next__"))


def is_range(name: str) -> bool:
    """Whether the operator of this name is none, but an annotation of torch, Lightning or this package."""
    return name.startswith(_RANGES)


def is_place(name: str) -> bool:
    """Whether the range of this name says where the host is, not that it works (a step, a phase, a hook)."""
    return name.startswith((STEP_RANGE_PREFIX, RANGE_PREFIX, LIGHTNING_PREFIX))


def is_module(name: str) -> bool:
    return name.startswith(MODULE_PREFIXES)


def is_torch_range(name: str) -> bool:
    return name.startswith(_TORCH_RANGES) or name.endswith(_TORCH_ENDINGS)


def is_shown_elsewhere(name: str) -> bool:
    """Whether ranges of this name are what another table is about: steps, phases, modules, communication."""
    return (
        is_place(name)
        or is_module(name)
        or is_communication_operator(name)
        or is_collective_call(name)
        or name.startswith((_OPTIMIZERS, *DATALOADER_PREFIXES))
    )


_COMMUNICATION: Final = re.compile(
    # Libraries: NCCL, RCCL, HCCL, XCCL, MSCCL(++), oneCCL (also mangled: N3ccl2v1...), NVSHMEM, rocSHMEM,
    # DeepEP and other exchanges between experts, userbuffers of Transformer Engine.
    r"[nrhx]ccl|msccl|oneccl|(?<![a-z])ccl(?=_|::|\d)|nvshmem|rocshmem|(?:barrier|sync)(?:_all)?_on_stream_kernel"
    r"|deep_ep|::ep::|(?:inter|intra)_?node|userbuffers"
    # Without a library: symmetric memory of torch, custom collectives of vLLM, FlashInfer and TensorRT-LLM.
    r"|multimem_|cross_device_reduce"
    r"|(?<!warp)(?<!warp_)(?<!block)(?<!block_)(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"
)


_COMPUTES_TOO: Final = re.compile(r"^triton_\w+_fused|gemm|matmul|_mm(?:_|\b)")
"""In names of kernels that also multiply, or that a compiler made of what is around a collective."""


_AROUND_PRODUCTS: Final = re.compile(
    # What a compiler made of elementwise operators, reductions and loops, whatever it fused.
    r"^triton_(?:poi|red|per|for)_fused|elementwise_kernel"
    # Changes of layout, sums of split products, and the steps around attention.
    r"|nchwtonhwc|nhwctonchw|splitk_?reduce|flash\w*(?:combine|convert_d|dot_do_o|clear_d|pre_?process|post_?process)"
    # Products of fused multiply-adds.
    r"|ffma|hfma|dfma|simt|scudnn|universalfma"
)
"""In names, in lower case, of kernels that leave tensor cores alone, whatever else stands there."""


_TENSOR_CORES: Final = re.compile(
    # Instructions and their shapes.
    r"hmma|gmma|wmma|umma|tcgen05|(?<![a-z])[idbq]mma(?![a-z])|[hsd]884|[hsdc]1688|i8816|16816|161616|16832|16864"
    r"|m(?:8|16|32|64)n\d+k\d+"
    # Libraries that multiply matrices with nothing else; cuDNN's older names.
    r"|tensorop|nvjet|marlin::marlin<|machete|deep_gemm::|xmma_(?:gemm|sparse_gemm|sparse_conv|fprop|dgrad|wgrad)"
    r"|xmma_(?:warp_specialized_)?implicit_gemm|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1"
    r"|conv2d_c1_k1|direct_group"
    # CUTLASS since Hopper, and anybody's products for newer devices or of eight bits and fewer.
    r"|cutlass::device_kernel<.*(?:gemm|mainloop)|(?:gemm|bmm).*(?:fp8|e4m3|e5m2|e2m1|fp4|sm90|sm1\d\d)"
    r"|(?:fp8|e4m3|e5m2|e2m1|fp4|sm90|sm1\d\d).*(?:gemm|bmm)"
    # Attention: FlashAttention, cuDNN, CUTLASS, TensorRT-LLM, FlashInfer's prefill.
    r"|flash_(?:fwd|bwd|fprop|bprop)|fmha|flash::(?:flashattn|compute_attn|collectivemainloop|enable_sm)"
    r"|attention(?:backward)?kernel<.*cutlass|prefillwith\w+kernel"
)
"""In names, in lower case, of kernels that multiply matrices on tensor cores."""


_NO_PRODUCTS: Final = re.compile(
    r"\bcub::|\bthrust::|multi_tensor_apply|fft2d|winograd|embedding|cudnn::(?:bn_|ops::|pooling)|layer_?norm|rms_?norm"
    r"|batch_?norm|soft_?max|rotary|memset|transpose|cast_to_fp8|gemv|gemmsn|(?<![a-z])[dhszc]gemm"
)
"""In names, in lower case, of kernels of other operators, or of products that need none of them."""


_PRODUCTS_OF_TORCH: Final = re.compile(r"gemm|matmul|mm_|conv(?!ert)|attention")


def uses_tensor_cores(kernel: str) -> bool | None:
    """Whether the kernel of this name works on tensor cores, of a device that has them.

    Source: the list of torch_tb_profiler (pytorch/kineto, ``profiler/tensor_core.py`` of its
    ``tb_plugin``), which takes it from NVIDIA's names, and what libraries since then write into theirs.

    Returns:
        ``None`` where the name does not tell, as of most kernels that somebody wrote or generated.

    Caveats: a guess from names.
    """
    lower = kernel.lower().replace("fbgemm", "")  # a library of much else
    if is_communication_kernel(kernel) or _AROUND_PRODUCTS.search(lower):
        return False
    if _TENSOR_CORES.search(lower):
        return True
    is_other_of_torch = is_torch_kernel(kernel) and not _PRODUCTS_OF_TORCH.search(lower)
    return False if is_other_of_torch or _NO_PRODUCTS.search(lower) else None


def is_communication_kernel(kernel: str) -> bool:
    """Whether the kernel of this name moves data between ranks, or is of a library that does nothing else."""
    lower = kernel.lower()
    return _COMMUNICATION.search(lower) is not None and _COMPUTES_TOO.search(lower) is None


def is_torch_kernel(kernel: str) -> bool:
    """Whether torch's own operators have a kernel of this name, such as copies around a collective."""
    return "at::native" in kernel
