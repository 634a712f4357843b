"""What kinds of kernels the device's time goes to: one bar."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.kernels import KernelUse, pool_kernels
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Chart, Series, Unit

_LABELS = {
    "tensor_cores": "Tensor Cores",
    "kernel": "Other kernels",
    "communication": "Communication",
}


def kernel_types(by_rank: Mapping[int, TraceFacts]) -> Chart | None:
    """How much of the kernels' time uses tensor cores or communicates; ``None`` with fewer than two kinds.

    Definition: time of all kernels as in the Kernel Summary, those of all ranks added up, by what the name of
    each says. One that communicates counts as that, whatever else its name says.
    """
    found = [facts.kernels for facts in by_rank.values() if not isinstance(facts.kernels, Absent)]
    time_ns = dict.fromkeys(_LABELS, 0)
    for kernel in pool_kernels(found).by_name:
        time_ns[_kind(kernel)] += kernel.tally.total_ns
    kinds = [kind for kind, ns in time_ns.items() if ns]
    if len(kinds) < 2:
        return None
    return Chart(
        id="kernel_types",
        title="Time of the kernels",
        kind="stacked",
        x_label="trace",
        x=(0.0,),
        unit=Unit.DURATION_NS,
        series=tuple(Series(key=kind, label=_LABELS[kind], values=(float(time_ns[kind]),)) for kind in kinds),
        notes=(
            "By the names of the kernels, also of those outside the steps; those that overlap count in full."
            " Kernels whose names do not tell of tensor cores are among the others.",
        ),
    )


def _kind(kernel: KernelUse) -> str:
    if kernel.is_communication:
        return "communication"
    return "tensor_cores" if kernel.uses_tensor_cores else "kernel"
