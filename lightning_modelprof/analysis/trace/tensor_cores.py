"""Which kernels' time is of operators that tensor cores could do, and whether they did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from lightning_modelprof.analysis.trace.kernels import Kernels
from lightning_modelprof.record import Record

# Of torch_tb_profiler.
_KNOWN_TO_THE_PLUGIN: Final = """
_convolution _convolution_nogroup conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose cudnn_convolution_backward
cudnn_convolution_backward_input cudnn_convolution_backward_weight cudnn_convolution_transpose_backward
cudnn_convolution_transpose_backward_input cudnn_convolution_transpose_backward_weight
addmm addmm_ matmul mm linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
"""
# Since torch 1.11.
_NEWER: Final = """
convolution_backward cudnn_convolution_relu cudnn_convolution_add_relu _addmm_activation _scaled_mm
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
_flash_attention_forward _flash_attention_backward _efficient_attention_forward _efficient_attention_backward
_cudnn_rnn _cudnn_rnn_backward
"""
_PRODUCTS: Final = frozenset(f"aten::{name}" for name in (_KNOWN_TO_THE_PLUGIN + _NEWER).split())
"""Operators that multiply matrices or convolve, whose kernels can be on tensor cores.

Source: ``TC_OP_Allowlist`` of torch_tb_profiler (pytorch/kineto, ``profiler/tensor_core.py`` of its
``tb_plugin``), without those that multiply a matrix by a vector or nothing at all (``addmv``, ``mv``,
``addr``, ``prelu``, cells of recurrent networks), and with what torch has named since.
"""


class TensorCoreUse(Record, frozen=True, kw_only=True):
    """Time of kernels, in nanoseconds, over all calls in the file.

    Attributes:
        used_ns: of kernels of eligible operators whose names say that they are on tensor cores.
        unused_ns: the same of those whose names say that they are not.
        untold_ns: the same of those whose names do not tell.
        unused_by_operator_ns: operator → its part of ``unused_ns``, most first.
    """

    kernels_ns: int
    used_ns: int
    unused_ns: int
    untold_ns: int
    unused_by_operator_ns: Mapping[str, int]

    @property
    def eligible_ns(self) -> int:
        """Of kernels that eligible operators launched."""
        return self.used_ns + self.unused_ns + self.untold_ns


def tensor_core_use(ranks: Iterable[Kernels]) -> TensorCoreUse:
    """Add up the kernels of one or several traces by what their operators could do.

    Args:
        ranks: of devices with tensor cores.
    """
    kernels_ns = 0
    times_ns: dict[bool | None, int] = {True: 0, False: 0, None: 0}
    unused_ns: dict[str, int] = {}
    for rank in ranks:
        kernels_ns += rank.total_ns
        for kernel in rank.by_name:
            for operator, time_ns in kernel.operators.time_ns.items():
                if operator not in _PRODUCTS:
                    continue
                times_ns[kernel.uses_tensor_cores] += time_ns
                if kernel.uses_tensor_cores is False:
                    unused_ns[operator] = unused_ns.get(operator, 0) + time_ns
    return TensorCoreUse(
        kernels_ns=kernels_ns,
        used_ns=times_ns[True],
        unused_ns=times_ns[False],
        untold_ns=times_ns[None],
        unused_by_operator_ns=dict(sorted(unused_ns.items(), key=lambda one: (-one[1], one[0]))),
    )
