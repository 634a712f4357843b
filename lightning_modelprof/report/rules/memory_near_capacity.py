"""Is the device's memory nearly full?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.model import Evidence, Finding, Severity, Unit
from lightning_modelprof.report.rules.base import NO_CUDA, NO_SETUP, Rule, percent, ratio


@dataclass(frozen=True, kw_only=True)
class MemoryNearCapacity(Rule):
    """The most memory that torch's allocator held, over that of the device.

    Attributes:
        warning, critical: shares.

    Source: 92 % and 97 % are the bands of TraceML.
    """

    kind: ClassVar[str] = "memory_near_capacity"
    title: ClassVar[str] = "The device's memory is nearly full"
    rests_on_time: ClassVar[bool] = False

    warning: float = 0.92
    critical: float = 0.97

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where torch does not count."""
        found = _reserved_of(analysis)
        if isinstance(found, Absent):
            return self.not_evaluated(found.reason)
        reserved, total = found
        share = reserved / total
        evidence = [
            Evidence(label="most reserved", value=reserved, unit=Unit.BYTES),
            Evidence(label="memory of the device", value=total, unit=Unit.BYTES),
            ratio("share", share),
        ]
        if share < self.warning:
            return self.clean(f"At most {percent(share)} of the memory was reserved.", evidence)
        return (
            self.found(
                f"{percent(share)} of the device's memory was reserved: a longer batch may not fit, and the"
                " allocator may have to free and ask again, which waits for the device.",
                "A smaller batch with accumulate_grad_batches, activation checkpointing, or"
                " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if much of it is unused.",
                Severity.CRITICAL if share >= self.critical else Severity.WARNING,
                evidence=evidence,
            ),
        )


def _reserved_of(analysis: Analysis) -> tuple[int, int] | Absent:
    """The most that was reserved and how much there is; from the setup where memory was not looked at."""
    use = analysis.memory
    if not isinstance(use, Absent) and use.record.peak_reserved_bytes is not None and use.record.total_bytes:
        return use.record.peak_reserved_bytes, use.record.total_bytes
    if analysis.setup is None:
        return Absent(NO_SETUP)
    if analysis.setup.cuda is None:
        return Absent(NO_CUDA)
    return analysis.setup.cuda.reserved_bytes, analysis.setup.cuda.total_bytes
