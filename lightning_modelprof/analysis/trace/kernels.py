"""Kernel Summary: cost of each kernel by name, over all kernels of the file."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.analysis.lazy import NO_DEVICE, NotMeasured
from lightning_modelprof.analysis.pooling import Key
from lightning_modelprof.analysis.timeline.names import uses_tensor_cores
from lightning_modelprof.analysis.timeline.tally import (
    Groups,
    Tally,
    by_name,
    distinct,
    sum_by,
    tally_by,
)
from lightning_modelprof.analysis.timeline.timeline import Timeline
from lightning_modelprof.record import Record
from lightning_modelprof.trace.model import Category, Trace

_NO_KERNELS: Final = "the trace has GPU events but no kernels"


_NVIDIA_RUNTIME: Final = "cu"
"""Prefix of CUDA runtime and driver calls; those of ROCm, XPU and MTIA differ."""


class TimeMean(Record, frozen=True):
    """A time-weighted mean, in parts that can be added up.

    Attributes:
        weighted: sum of each value times its duration in nanoseconds.
        time_ns: nanoseconds with a value.
    """

    weighted: float
    time_ns: int

    @property
    def mean(self) -> float | None:
        """The mean; ``None`` without a value that has a duration."""
        return self.weighted / self.time_ns if self.time_ns else None


class LaunchingOperators(Record, frozen=True, kw_only=True):
    """Operators that launched something, with the device time of each one's launches.

    Attributes:
        time_ns: nanoseconds by operator name; empty if no launch is known.
    """

    time_ns: Mapping[str, int]

    @property
    def main(self) -> str | None:
        """The operator with most time; ``None`` if no launch is known."""
        return min(self.time_ns, key=lambda name: (-self.time_ns[name], name), default=None)

    @property
    def count(self) -> int | None:
        """Number of distinct operators; ``None`` if no launch is known."""
        return len(self.time_ns) or None


class KernelUse(Record, frozen=True, kw_only=True):
    """Cost of one kernel, over all its calls on all streams and devices.

    Attributes:
        name: complete, as in the file.
        tally: calls and their time; overlapping calls are added up.
        blocks_per_sm: thread blocks per streaming multiprocessor, over the calls that recorded it.
        occupancy: the profiler's estimate of the achieved occupancy, a fraction, over calls that recorded it.
        uses_tensor_cores: from the name; ``None`` if that doesn't show it, and for devices without any.
        is_communication: whether it moves data between ranks, in any of its calls.
    """

    name: Key[str]
    tally: Tally
    blocks_per_sm: TimeMean
    occupancy: TimeMean
    uses_tensor_cores: bool | None
    is_communication: bool
    operators: LaunchingOperators


class Kernels(Record, frozen=True, kw_only=True):
    """All kernels of a trace, or of several ranks together, by name.

    Attributes:
        by_name: in no particular order.
        total_ns: time of all calls of all kernels; overlapping ones are added up.
    """

    by_name: tuple[KernelUse, ...]
    total_ns: int


def summarize_kernels(timeline: Timeline) -> Kernels:
    """Add up the calls of each kernel, including those outside steps."""
    trace, device = timeline.trace, timeline.trace.device
    chosen = np.flatnonzero(trace.category[device.event] == Category.KERNEL)
    if not len(chosen):
        raise NotMeasured(_NO_KERNELS if timeline.has_device else NO_DEVICE)
    rows = device.event[chosen]
    names, group = by_name(trace, rows)
    size = len(names)
    duration_ns = trace.duration_ns[rows]
    names_tell = tell_tensor_cores(trace)
    communicating = np.bincount(group, weights=timeline.is_communication[rows], minlength=size) > 0
    return Kernels(
        by_name=tuple(
            KernelUse(
                name=name,
                tally=tally,
                blocks_per_sm=blocks,
                occupancy=occupancy,
                uses_tensor_cores=uses_tensor_cores(name) if names_tell else None,
                is_communication=communicates,
                operators=operators,
            )
            for name, communicates, tally, blocks, occupancy, operators in zip(
                names,
                communicating.tolist(),
                tally_by(group, duration_ns, size),
                _time_means(group, device.blocks_per_sm[chosen], duration_ns, size),
                _time_means(group, device.occupancy[chosen], duration_ns, size),
                launching_operators(timeline, chosen, group, size),
                strict=True,
            )
        ),
        total_ns=int(duration_ns.sum()),
    )


def tell_tensor_cores(trace: Trace) -> bool:
    """Whether the devices may have tensor cores, so that kernel names can be classified."""
    calls, _ = by_name(trace, np.flatnonzero(trace.category == Category.RUNTIME))
    if calls and not any(name.startswith(_NVIDIA_RUNTIME) for name in calls):
        return False
    return not any(one.lacks_tensor_cores for one in device_properties(trace).values())


def launching_operators(
    timeline: Timeline, chosen: NDArray[np.intp], group: Groups, size: int
) -> list[LaunchingOperators]:
    """Operators that launched each group's device events; ``chosen`` are positions in ``Trace.device``."""
    trace = timeline.trace
    operator = timeline.launch.operator[chosen]
    known = np.flatnonzero(operator >= 0)
    names, name = by_name(trace, operator[known])
    pairs, pair = distinct(group[known] * len(names) + name, size * len(names))
    total_ns = sum_by(pair, trace.duration_ns[trace.device.event[chosen[known]]], len(pairs))
    times: list[dict[str, int]] = [{} for _ in range(size)]
    for one, time_ns in zip(pairs.tolist(), total_ns.tolist(), strict=True):
        number, name_id = divmod(one, len(names))
        times[number][names[name_id]] = time_ns
    return [LaunchingOperators(time_ns=time) for time in times]


def _time_means(
    group: Groups, values: NDArray[np.float64], duration_ns: NDArray[np.int64], size: int
) -> list[TimeMean]:
    """Mean of each group's recorded values (not NaN), weighted by duration."""
    known = np.flatnonzero(np.isfinite(values))
    weighted = np.bincount(group[known], weights=values[known] * duration_ns[known], minlength=size)
    time_ns = sum_by(group[known], duration_ns[known], size)
    return [TimeMean(value, time) for value, time in zip(weighted.tolist(), time_ns.tolist(), strict=True)]


_WITHOUT_TENSOR_CORES: Final = re.compile(
    r"\b(?:AMD|ATI|Radeon|Instinct|MI\d+\w*|gfx\w+|Intel|XPU|MTIA|Gaudi|GTX 16\d\d\w*|MX\d{3})\b", re.I
)
"""In the names of other vendors' devices, and of NVIDIA's small models of newer generations."""


_FIRST_WITH_TENSOR_CORES: Final = 7
"""Major compute capability of Volta."""


class DeviceProperties(Record, frozen=True, kw_only=True):
    """A device's model name, total memory and compute capability (``8.0``); ``None`` if not in the file."""

    name: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None

    @property
    def lacks_tensor_cores(self) -> bool:
        """Whether it's known to have none: another vendor's, or a model without."""
        if self.name is not None and _WITHOUT_TENSOR_CORES.search(self.name):
            return True
        major = (self.compute_capability or "").partition(".")[0]
        return major.isdecimal() and int(major) < _FIRST_WITH_TENSOR_CORES


def device_properties(trace: Trace) -> dict[int, DeviceProperties]:
    """Properties of each device by number; invalid entries are skipped.

    ``deviceProperties`` is a list, or its text in JSON or Python, as some tools save it.
    """
    written = trace.metadata.get("deviceProperties")
    entries = _from_text(written) if isinstance(written, str) else written
    found: dict[int, DeviceProperties] = {}
    for entry in entries if isinstance(entries, list) else []:
        number = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(number, int):
            continue
        name = entry.get("name")
        major, minor = whole(entry.get("computeMajor")), whole(entry.get("computeMinor"))
        memory_bytes = whole(entry.get("totalGlobalMem"))
        found[number] = DeviceProperties(
            name=name if isinstance(name, str) and name else None,
            memory_bytes=memory_bytes or None,
            compute_capability=None if major is None or minor is None else f"{major}.{minor}",
        )
    return found


def amount(value: object) -> int | float | None:
    """The value if it's a nonnegative number; files may have been edited."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value < 2**63 else None


def whole(value: object) -> int | None:
    number = amount(value)
    return number if isinstance(number, int) else None


def _from_text(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


# From torch_tb_profiler.
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
"""Operators that multiply matrices or convolve, whose kernels can use tensor cores.

Source: ``TC_OP_Allowlist`` of torch_tb_profiler (pytorch/kineto, ``profiler/tensor_core.py`` of its
``tb_plugin``), without those that multiply a matrix by a vector or nothing at all (``addmv``, ``mv``,
``addr``, ``prelu``, cells of recurrent networks), and with operators that torch has added since.
"""


class TensorCoreUse(Record, frozen=True, kw_only=True):
    """Time of kernels, in nanoseconds, over all calls in the file.

    Attributes:
        used_ns: kernels of eligible operators that use tensor cores.
        unused_ns: kernels of eligible operators that don't.
        untold_ns: kernels of eligible operators that couldn't be classified.
        unused_by_operator_ns: parts of ``unused_ns`` by operator, largest first.
    """

    kernels_ns: int
    used_ns: int
    unused_ns: int
    untold_ns: int
    unused_by_operator_ns: Mapping[str, int]

    @property
    def eligible_ns(self) -> int:
        """Time of kernels that eligible operators launched."""
        return self.used_ns + self.unused_ns + self.untold_ns


def tensor_core_use(ranks: Iterable[Kernels]) -> TensorCoreUse:
    """Add up the kernels of one or several traces by the capability of their operators.

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
