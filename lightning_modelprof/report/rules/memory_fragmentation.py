"""Does torch's allocator hold memory of the device that nothing uses?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.byte_sizes import size
from lightning_modelprof.report.model import Evidence, Finding, Severity, Unit
from lightning_modelprof.report.rules.base import Rule, count, percent, ratio


@dataclass(frozen=True, kw_only=True)
class MemoryFragmentation(Rule):
    """The most that was reserved less the most that was allocated, and whether the cache was given back.

    Attributes:
        unused_share: of the most that was reserved.
        unused_bytes: what must be unused too.

    Source: the thresholds are choices; TraceML warns where twice as much is reserved as allocated.

    Caveats: the two peaks may be of different moments, and then more was unused at some of them than is said.
    """

    kind: ClassVar[str] = "memory_fragmentation"
    title: ClassVar[str] = "Much of the reserved memory is unused"
    rests_on_time: ClassVar[bool] = False
    takes_time_there: ClassVar[bool] = False

    unused_share: float = 0.30
    unused_bytes: float = 2**30

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where torch does not count."""
        use = analysis.memory
        if isinstance(use, Absent):
            return self.not_evaluated(use.reason)
        record, unused, share = use.record, use.unused_bytes, use.unused_share
        if unused is None or share is None:
            return self.not_evaluated("torch does not count what it reserves on this device")
        retries = record.num_retries or 0
        evidence = [
            Evidence(label="most reserved", value=record.peak_reserved_bytes, unit=Unit.BYTES),
            Evidence(label="most allocated", value=record.peak_allocated_bytes, unit=Unit.BYTES),
            ratio("unused", share),
            count("times that cached memory had to be given back", record.num_retries),
        ]
        is_unused = share >= self.unused_share and unused >= self.unused_bytes
        if not is_unused and not retries:
            return self.clean(f"{percent(share)} of the reserved memory was never used.", evidence)
        reasons = []
        if is_unused:
            reasons.append(f"{size(unused)} ({percent(share)}) of what was reserved was never in use")
        if retries:
            times = "once" if retries == 1 else f"{retries:,} times"
            reasons.append(f"the allocator gave all of its cache back {times} and waited for the device")
        summary = "; ".join(reasons)
        return (
            self.found(
                f"{summary[0].upper()}{summary[1:]}.",
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; batches of one shape, or padded to few"
                " shapes; the largest shape first; a smaller batch if memory is nearly full.",
                Severity.WARNING,
                evidence=evidence,
            ),
        )
