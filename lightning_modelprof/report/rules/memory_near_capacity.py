"""Is the device's memory nearly full?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.report.model import Evidence, Finding, Severity, Unit
from lightning_modelprof.report.rules.base import NO_CUDA, NO_SETUP, Rule, percent, ratio


@dataclass(frozen=True, kw_only=True)
class MemoryNearCapacity(Rule):
    """The most memory that torch's allocator held, over that of the CUDA device.

    Attributes:
        warning, critical: shares.

    Source: 92 % and 97 % are the bands of TraceML.
    """

    kind: ClassVar[str] = "memory_near_capacity"
    title: ClassVar[str] = "The device's memory is nearly full"

    warning: float = 0.92
    critical: float = 0.97

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated without CUDA."""
        setup = analysis.setup
        if setup is None:
            return self.not_evaluated(NO_SETUP)
        if setup.cuda is None:
            return self.not_evaluated(NO_CUDA)
        share = setup.cuda.reserved_bytes / setup.cuda.total_bytes
        evidence = [
            Evidence(label="most reserved", value=setup.cuda.reserved_bytes, unit=Unit.BYTES),
            Evidence(label="memory of the device", value=setup.cuda.total_bytes, unit=Unit.BYTES),
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
