"""Meaning of host event and kernel names: the vocabulary of torch, its backends and Lightning."""

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
"""Prefixes of torch's (``with_modules``) and Lightning's (PyTorchProfiler) ranges around a module."""


_LIBRARY_RANGE: Final = re.compile(
    r"(?:\w*ccl|cncl|ucc):(?!:)"
    # Any other backend, which writes c10d's name of the collective.
    r"|(?!gloo:|mpi:)[\w.-]+:_?(?:(?:sparse_)?all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|reduce"
    r"|gather|scatter|barrier|send|recv(?:AnySource|_any_source)?)"
    r"(?:_(?:base|coalesced|into|tensor|single|sparse|oop|uneven|v|object|list))*(?![\w.:(])"
)
"""Ranges of backends that may use kernels: ``nccl:all_reduce``, ``hccl:...``, ``anything:barrier``."""


_HOST_RANGES: Final = ("gloo:", "mpi:")
"""Backends that communicate on the host; anything launched in their ranges is a copy."""


_NCCL: Final = "nccl:"
"""Also RCCL's: torch writes one name for both."""


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
"""Torch 1.9 wrote annotations as operators; these aren't operators."""


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
"""Prefixes of ranges that torch writes itself: its calls of ``record_function`` in torch 2.13."""


_TORCH_ENDINGS: Final = (" (dynamo_timed)", "_inductor_wrapper_call")


def launches_communication(name: str) -> bool:
    """Whether kernels launched in the host range of this name communicate.

    Not those of operators that also compute, such as ``symm_mem::fused_all_gather_matmul``.
    """
    if name.startswith(SYMMETRIC_MEMORY_PREFIX):
        return "matmul" not in name and "_mm" not in name.removeprefix(SYMMETRIC_MEMORY_PREFIX)
    return _LIBRARY_RANGE.match(name) is not None


def is_communication_operator(name: str) -> bool:
    """Whether this is a communication backend's operator on the host (``nccl:all_reduce``)."""
    return name.startswith(_HOST_RANGES) or asks_device_to_communicate(name)


def asks_device_to_communicate(name: str) -> bool:
    """Whether this host range only asks a device to communicate, as NCCL's do."""
    return _LIBRARY_RANGE.match(name) is not None


def communicates_on_host(name: str, *, launches: bool) -> bool:
    """Whether a host range of this name is communication itself; NCCL's only ask a device for it.

    Args:
        launches: whether it launched a communication kernel.
    """
    return name.startswith(_HOST_RANGES) or not (launches or name.startswith(_NCCL))


def is_collective_call(name: str) -> bool:
    """Whether this operator asks for communication, e.g. ``c10d::allreduce_``."""
    return name.startswith(_COLLECTIVE_CALLS)


_LIKE_COLLECTIVE: Final = re.compile(
    r"(?<![a-z])(?:\w*_)?(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)(?![a-z])", re.IGNORECASE
)


def looks_like_communication(name: str) -> bool:
    """Whether this operator or range may communicate, although its backend is unknown."""
    is_known = is_communication_operator(name) or is_collective_call(name) or is_place(name)
    return not is_known and _LIKE_COLLECTIVE.search(name) is not None


def is_dataloader(name: str) -> bool:
    """Whether this host range is a batch fetch by torch's DataLoader."""
    loader, pipe = DATALOADER_PREFIXES
    return name.startswith(pipe) or (name.startswith(loader) and name.endswith(".__next__"))


def is_range(name: str) -> bool:
    """Whether this operator is really an annotation of torch, Lightning or this package."""
    return name.startswith(_RANGES)


def is_place(name: str) -> bool:
    """Whether this range shows where the host is, not that it works (a step, a phase, a hook)."""
    return name.startswith((STEP_RANGE_PREFIX, RANGE_PREFIX, LIGHTNING_PREFIX))


def is_module(name: str) -> bool:
    return name.startswith(MODULE_PREFIXES)


def is_torch_range(name: str) -> bool:
    return name.startswith(_TORCH_RANGES) or name.endswith(_TORCH_ENDINGS)


def is_shown_elsewhere(name: str) -> bool:
    """Whether another table covers these ranges: steps, phases, modules, communication."""
    return (
        is_place(name)
        or is_module(name)
        or is_communication_operator(name)
        or is_collective_call(name)
        or name.startswith((_OPTIMIZERS, *DATALOADER_PREFIXES))
    )


_COMMUNICATION: Final = re.compile(
    # Libraries: NCCL, RCCL, HCCL, XCCL, MSCCL(++), oneCCL (also mangled: N3ccl2v1...), NVSHMEM, rocSHMEM,
    # DeepEP and other expert exchanges, Transformer Engine's userbuffers.
    r"[nrhx]ccl|msccl|oneccl|(?<![a-z])ccl(?=_|::|\d)|nvshmem|rocshmem|(?:barrier|sync)(?:_all)?_on_stream_kernel"
    r"|deep_ep|::ep::|(?:inter|intra)_?node|userbuffers"
    # Without a library: torch's symmetric memory, custom collectives of vLLM, FlashInfer and TensorRT-LLM.
    r"|multimem_|cross_device_reduce"
    r"|(?<!warp)(?<!warp_)(?<!block)(?<!block_)(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"
)


_COMPUTES_TOO: Final = re.compile(r"^triton_\w+_fused|gemm|matmul|_mm(?:_|\b)")
"""In names of kernels that also multiply, or that a compiler generated from code around a collective."""


_AROUND_PRODUCTS: Final = re.compile(
    # Compiler output for elementwise operators, reductions and loops, whatever it fused.
    r"^triton_(?:poi|red|per|for)_fused|elementwise_kernel"
    # Layout changes, sums of split products, and the steps around attention.
    r"|nchwtonhwc|nhwctonchw|splitk_?reduce|flash\w*(?:combine|convert_d|dot_do_o|clear_d|pre_?process|post_?process)"
    # Products from fused multiply-adds.
    r"|ffma|hfma|dfma|simt|scudnn|universalfma"
)
"""In lower-case names of kernels that don't use tensor cores, whatever else the names contain."""


_TENSOR_CORES: Final = re.compile(
    # Instructions and their shapes.
    r"hmma|gmma|wmma|umma|tcgen05|(?<![a-z])[idbq]mma(?![a-z])|[hsd]884|[hsdc]1688|i8816|16816|161616|16832|16864"
    r"|m(?:8|16|32|64)n\d+k\d+"
    # Libraries that only multiply matrices on tensor cores; cuDNN's older names.
    r"|tensorop|nvjet|marlin::marlin<|machete|deep_gemm::|xmma_(?:gemm|sparse_gemm|sparse_conv|fprop|dgrad|wgrad)"
    r"|xmma_(?:warp_specialized_)?implicit_gemm|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1"
    r"|conv2d_c1_k1|direct_group"
    # CUTLASS since Hopper, and any products for newer devices or of eight bits and fewer.
    r"|cutlass::device_kernel<.*(?:gemm|mainloop)|(?:gemm|bmm).*(?:fp8|e4m3|e5m2|e2m1|fp4|sm90|sm1\d\d)"
    r"|(?:fp8|e4m3|e5m2|e2m1|fp4|sm90|sm1\d\d).*(?:gemm|bmm)"
    # Attention: FlashAttention, cuDNN, CUTLASS, TensorRT-LLM, FlashInfer's prefill.
    r"|flash_(?:fwd|bwd|fprop|bprop)|fmha|flash::(?:flashattn|compute_attn|collectivemainloop|enable_sm)"
    r"|attention(?:backward)?kernel<.*cutlass|prefillwith\w+kernel"
)
"""In lower-case names of kernels that multiply matrices on tensor cores."""


_NO_PRODUCTS: Final = re.compile(
    r"\bcub::|\bthrust::|multi_tensor_apply|fft2d|winograd|embedding|cudnn::(?:bn_|ops::|pooling)|layer_?norm|rms_?norm"
    r"|batch_?norm|soft_?max|rotary|memset|transpose|cast_to_fp8|gemv|gemmsn|(?<![a-z])[dhszc]gemm"
)
"""In lower-case names of kernels of other operators, or of products that don't need tensor cores."""


_PRODUCTS_OF_TORCH: Final = re.compile(r"gemm|matmul|mm_|conv(?!ert)|attention")


def uses_tensor_cores(kernel: str) -> bool | None:
    """Whether the kernel of this name uses tensor cores, on a device that has them.

    Source: the list of torch_tb_profiler (pytorch/kineto, ``profiler/tensor_core.py`` of its ``tb_plugin``),
    which takes it from NVIDIA's names, and names that libraries have used since.

    Returns:
        ``None`` if the name doesn't show it, as for most custom or generated kernels.

    Caveats: a guess from names.
    """
    lower = kernel.lower().replace("fbgemm", "")  # a library of many other kernels
    if is_communication_kernel(kernel) or _AROUND_PRODUCTS.search(lower):
        return False
    if _TENSOR_CORES.search(lower):
        return True
    is_other_of_torch = is_torch_kernel(kernel) and not _PRODUCTS_OF_TORCH.search(lower)
    return False if is_other_of_torch or _NO_PRODUCTS.search(lower) else None


def is_communication_kernel(kernel: str) -> bool:
    """Whether this kernel moves data between ranks, or is from a library that does nothing else."""
    lower = kernel.lower()
    return _COMMUNICATION.search(lower) is not None and _COMPUTES_TOO.search(lower) is None


def is_torch_kernel(kernel: str) -> bool:
    """Whether torch's own operators have a kernel of this name, e.g. copies around a collective."""
    return "at::native" in kernel
