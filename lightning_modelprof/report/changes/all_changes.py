"""The change for each finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.report.changes.loaders import with_kept_workers, with_pinned_memory, with_workers
from lightning_modelprof.report.changes.statements import (
    frozen,
    with_fused_step,
    with_logging_by_epoch,
    with_mixed_precision,
    with_rarer_logging,
    without_anomaly_detection,
    without_bias,
    without_item,
    without_profiler,
)
from lightning_modelprof.report.model import CodeChange, Finding, Status

_Make: TypeAlias = Callable[[Finding, Facts], CodeChange | None]

CHANGES: Final[Mapping[str, _Make]] = {
    "input_bound": with_workers,
    "synchronous_loader": with_workers,
    "worker_startup": with_kept_workers,
    "slow_transfer": with_pinned_memory,
    "host_to_device_copy": with_pinned_memory,
    "amp_off": with_mixed_precision,
    "slow_logger": with_rarer_logging,
    "profiler_left_on": without_profiler,
    "anomaly_detection": without_anomaly_detection,
    "optimizer_not_fused": with_fused_step,
    "slow_logging_calls": with_logging_by_epoch,
    "host_device_sync": without_item,
    "conv_bias_before_batchnorm": without_bias,
    "unused_gradients": frozen,
}
"""By finding kind."""


def with_change(finding: Finding, facts: Facts) -> Finding:
    """Add the code to write to a finding, if known; a change that fails leaves the finding unchanged."""
    make = CHANGES.get(finding.kind)
    if make is None or finding.status is not Status.FOUND:
        return finding
    try:
        return replace(finding, change=make(finding, facts))
    except Exception:  # arbitrary source, or a measurement is missing
        return finding
