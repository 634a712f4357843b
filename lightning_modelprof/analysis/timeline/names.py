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

_LIBRARY_RANGE: Final = re.compile(r"(?:\w*ccl|cncl|ucc):(?!:)")
"""Ranges of backends that communicate by kernels: ``nccl:all_reduce``, ``hccl:...``, ``xccl:...``."""
_HOST_RANGES: Final = ("gloo:", "mpi:")
"""Of backends that communicate on the host: what else is launched in their ranges are copies."""
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


def is_torch_range(name: str) -> bool:
    """Whether torch writes a range of this name by itself."""
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
