"""What the name of an event says about it: the words of torch, CUDA, ROCm, NCCL and Lightning."""

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

_COMMUNICATION_KERNELS: Final = (
    "nccl",
    "rccl",
    "msccl",
    "oneccl",
    # Without a library: symmetric memory of torch, custom all-reduces of vLLM, FlashInfer and TensorRT-LLM.
    "multimem_",
    "one_shot_all_reduce",
    "two_shot_all_reduce",
    "oneshotallreduce",
    "twoshotallreduce",
    "cross_device_reduce",
)
_ONECCL_KERNEL: Final = re.compile(r"\bccl(?:_|::)")
"""``ccl_allreduce_kernel``, but not ``nccl_...``."""
_COMMUNICATION_OPERATORS: Final = ("nccl:", "rccl:", "gloo:", "mpi:", "ucc:", "xccl:")
_LAUNCHING_BACKENDS: Final = ("nccl:", "rccl:", "ucc:", "xccl:")
"""Those that communicate by kernels: what else is launched in gloo's ranges are copies."""
SYMMETRIC_MEMORY_PREFIX: Final = "symm_mem::"
_COLLECTIVE_CALLS: Final = ("c10d::", "record_param_comms", SYMMETRIC_MEMORY_PREFIX)

_RANGES: Final = (
    STEP_RANGE_PREFIX,
    RANGE_PREFIX,
    LIGHTNING_PREFIX,
    "Optimizer.",
    *DATALOADER_PREFIXES,
)
"""Torch 1.9 wrote annotations as operators: these are none."""

_TENSOR_CORE_KERNELS: Final = (
    "h884",
    "s884",
    "h1688",
    "s1688",
    "hmma",
    "i8816",
    "16816",
    "dgrad_1x1_stride_2x2",
    "first_layer_wgrad_kernel",
    "conv1x1",
    "conv2d_c1_k1",
    "direct_group",
    "xmma_implicit_gemm",
    "xmma_sparse_conv",
    "xmma_warp_specialized_implicit_gemm",
    "xmma_gemm",
    "xmma_sparse_gemm",
    "c1688",
    # Newer than the list of torch_tb_profiler: cuBLAS and CUTLASS on Hopper, attention kernels.
    "nvjet",
    "tensorop",
    "gmma",
    "flash_fwd",
    "flash_bwd",
    "fmha",
)


def uses_tensor_cores(kernel: str) -> bool:
    """Whether the kernel of this name works on tensor cores.

    Source: the list of torch_tb_profiler (pytorch/kineto, ``profiler/tensor_core.py`` of its
    ``tb_plugin``), which takes it from NVIDIA's names, and names of newer kernels.

    Caveats: a guess from names; kernels of a compiler (Triton) do not tell.
    """
    return any(part in kernel for part in _TENSOR_CORE_KERNELS)


def is_communication_kernel(kernel: str) -> bool:
    """Whether the kernel of this name moves data between ranks."""
    lower = kernel.lower()
    return any(part in lower for part in _COMMUNICATION_KERNELS) or bool(_ONECCL_KERNEL.search(lower))


def launches_communication(name: str) -> bool:
    """Whether the kernels launched in the host range of this name communicate.

    Not those of operators that also compute, such as ``symm_mem::fused_all_gather_matmul``.
    """
    if name.startswith(SYMMETRIC_MEMORY_PREFIX):
        return "matmul" not in name and "_mm" not in name.removeprefix(SYMMETRIC_MEMORY_PREFIX)
    return name.startswith(_LAUNCHING_BACKENDS)


def is_torch_kernel(kernel: str) -> bool:
    """Whether torch's own operators have a kernel of this name, such as copies around a collective."""
    return "at::native" in kernel


def is_communication_operator(name: str) -> bool:
    """Whether the host range of this name is a communication backend's operator (``nccl:all_reduce``)."""
    return name.startswith(_COMMUNICATION_OPERATORS)


def is_collective_call(name: str) -> bool:
    """Whether the operator of this name asks for communication, such as ``c10d::allreduce_``."""
    return name.startswith(_COLLECTIVE_CALLS)


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
    """Whether the range of this name is one call of a module."""
    return name.startswith(MODULE_PREFIXES)
