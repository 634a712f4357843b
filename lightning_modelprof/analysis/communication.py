"""Which events communicate: by their names, and kernels by the ranges in which they were launched."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.kernel_names import is_communication_kernel, is_torch_kernel
from lightning_modelprof.analysis.launch_links import LaunchLinks
from lightning_modelprof.analysis.timeline.names import is_communication_operator, launches_communication
from lightning_modelprof.trace.model import Category, Trace


def find_communication(trace: Trace, parent: NDArray[np.int64], launch: LaunchLinks) -> NDArray[np.bool_]:
    """Which events are kernels that move data between ranks, or a backend's operators on the host.

    The names of NCCL's kernels tell. Those of others need not: a kernel launched in a range of the backend
    (``xccl:all_reduce``) or in an operator of symmetric memory communicates too, unless its name is that of
    one of torch's own kernels, which copy and concatenate around a collective.

    Args:
        trace: n events.
        parent: row of the event around each host event, shape (n,).
        launch: what launched each device event.

    Returns:
        Shape (n,).
    """
    kernel = trace.category == Category.KERNEL
    host = trace.is_category(Category.CPU_OP, Category.USER_ANNOTATION)
    communicates: NDArray[np.bool_] = (kernel & trace.is_named(is_communication_kernel)) | (
        host & trace.is_named(is_communication_operator)
    )
    launching = host & trace.is_named(launches_communication)
    if not launching.any():
        return communicates
    work = trace.device.event
    other = kernel & ~communicates & ~trace.is_named(is_torch_kernel)
    candidates = np.flatnonzero(other[work])
    runtime, operator = launch.runtime[candidates], launch.operator[candidates]
    around = np.where(runtime >= 0, runtime, operator)
    searching = np.flatnonzero(around >= 0)
    while len(searching):
        is_found = launching[around[searching]]
        communicates[work[candidates[searching[is_found]]]] = True
        searching = searching[~is_found]
        around[searching] = parent[around[searching]]
        searching = searching[around[searching] >= 0]
    return communicates
