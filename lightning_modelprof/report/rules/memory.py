"""Does memory grow from step to step?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.memory import LEAST_POINTS, EpochGrowth, Growth, MemoryUse
from lightning_modelprof.report.byte_sizes import size
from lightning_modelprof.report.model import Evidence, Finding, Severity, Unit
from lightning_modelprof.report.rules.base import Rule, count, duration
from lightning_modelprof.run.memory import MemoryRecord

_PER: Final = 1_000
"""Steps that growth is told for."""
_HOUR_NS: Final = 3_600e9

_NAMES: Final = {
    "anonymous": "the process's own memory",
    "rss": "the process's resident memory",
    "allocated": "the device's allocated memory",
}
_ACTION: Final = (
    "Find what is kept from step to step: a list of losses or outputs that still have their graphs"
    " (losses.append(loss) → loss.detach(), or .item() every n steps), self.total += loss, a cache without a"
    " limit, a logger or metric that keeps every value, tensors in a callback's attributes."
)
_EPOCH_ACTION: Final = (
    "Find what is collected in each step and cleared when the epoch ends, often self.outputs.append(loss) for"
    " on_train_epoch_end: append loss.detach(), which lets the graph go; keep a running sum or a torchmetrics"
    " metric with a fixed-size state instead of all predictions, or move them to the CPU every n steps."
)


@dataclass(frozen=True, kw_only=True)
class MemoryCreep(Rule):
    """The growth of memory in the second half of the loop, by a slope that single points cannot bend.

    Attributes:
        growth_bytes: growth in 1,000 steps from which on it is found.
        growth_share: the same as a share of the level.
        seen_bytes: growth that must have been seen in this loop.
        steadiness: share of the third quarter's slope that the last quarter's must have: what levels off is
            no creep.
        critical_hours: it is critical if the memory is full in so many hours.
        epoch_bytes: growth within an epoch, gone after it, from which on that is found. The share of the
            level and the steadiness hold for it too.

    Source: the floors are choices; a model of a few parameters that keeps each step's graph grows by some ten
    KiB a step, which is some ten MiB in 1,000.
    """

    kind: ClassVar[str] = "memory_creep"
    title: ClassVar[str] = "Memory grows from step to step"
    rests_on_time: ClassVar[bool] = False
    takes_time_there: ClassVar[bool] = False

    growth_bytes: float = 16 * 2**20
    growth_share: float = 0.01
    seen_bytes: float = 4 * 2**20
    steadiness: float = 0.5
    critical_hours: float = 24.0
    epoch_bytes: float = 16 * 2**20

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each kind of memory that grows."""
        use = analysis.memory
        if isinstance(use, Absent):
            return self.not_evaluated(use.reason)
        if not use.growth:
            return self.not_evaluated(
                f"memory was looked at less than {2 * LEAST_POINTS} times"
                " (inspect={'sampling': True} looks every 100 ms)"
            )
        step_ns = None if isinstance(analysis.step_costs, Absent) else analysis.step_costs.steady.wall_ns
        found = []
        for one in use.growth:
            if self._is_creep(one):
                found.append(self._creep(one, use, step_ns))
            elif one.in_epochs is not None and self._is_collected(one.in_epochs):
                found.append(self._collected(one.kind, one.in_epochs))
        if found:
            return tuple(found)
        return self.clean(
            "Memory does not keep growing.",
            [evidence for one in use.growth for evidence in _evidence(one)],
        )

    def _is_creep(self, growth: Growth) -> bool:
        per = growth.bytes_per_step * _PER
        return (
            growth.low > 0
            and per >= max(self.growth_bytes, self.growth_share * growth.level_bytes)
            and growth.seen_bytes >= self.seen_bytes
            and growth.fourth >= self.steadiness * growth.third
        )

    def _is_collected(self, growth: EpochGrowth) -> bool:
        return (
            growth.falls
            and growth.grown_bytes >= max(self.epoch_bytes, self.growth_share * growth.level_bytes)
            and growth.second >= self.steadiness * growth.first
        )

    def _collected(self, kind: str, growth: EpochGrowth) -> Finding:
        name = _NAMES[kind]
        return self.found(
            f"{name[0].upper()}{name[1:]} grows by {size(growth.grown_bytes)} within an epoch and falls by"
            f" {size(growth.fallen_bytes)} when it ends (median of {growth.num_epochs} epochs;"
            f" {size(growth.bytes_per_step)} a step).",
            _EPOCH_ACTION,
            Severity.WARNING,
            evidence=(
                Evidence(label=f"growth in an epoch, {name}", value=growth.grown_bytes, unit=Unit.BYTES),
                Evidence(label="fall after it", value=growth.fallen_bytes, unit=Unit.BYTES),
                Evidence(label="growth a step", value=growth.bytes_per_step, unit=Unit.BYTES),
                Evidence(label="least, 95 % interval", value=growth.low, unit=Unit.BYTES),
                Evidence(label="most, 95 % interval", value=growth.high, unit=Unit.BYTES),
                Evidence(label="highest level", value=growth.level_bytes, unit=Unit.BYTES),
                count("epochs", growth.num_epochs),
            ),
        )

    def _creep(self, growth: Growth, use: MemoryUse, step_ns: float | None) -> Finding:
        name, per = _NAMES[growth.kind], growth.bytes_per_step * _PER
        full_ns = _full_in_ns(growth, use.record, step_ns)
        summary = (
            f"{name[0].upper()}{name[1:]} grows by {size(per)} in {_PER:,} steps"
            f" (95 % interval {size(growth.low * _PER)} to {size(growth.high * _PER)})"
        )
        if full_ns is not None:
            summary += f"; at that rate it is full in about {full_ns / _HOUR_NS:.2g} hours"
        evidence = list(_evidence(growth))
        if full_ns is not None:
            evidence.append(duration("full in", full_ns))
        is_critical = full_ns is not None and full_ns <= self.critical_hours * _HOUR_NS
        return self.found(
            f"{summary}.",
            _ACTION,
            Severity.CRITICAL if is_critical else Severity.WARNING,
            evidence=evidence,
        )


def _evidence(growth: Growth) -> tuple[Evidence, ...]:
    name = _NAMES[growth.kind]
    return (
        Evidence(
            label=f"growth in {_PER:,} steps, {name}", value=growth.bytes_per_step * _PER, unit=Unit.BYTES
        ),
        Evidence(label="least, 95 % interval", value=growth.low * _PER, unit=Unit.BYTES),
        Evidence(label="most, 95 % interval", value=growth.high * _PER, unit=Unit.BYTES),
        Evidence(label="level", value=growth.level_bytes, unit=Unit.BYTES),
        count("from step", growth.first_step),
        count("to step", growth.last_step),
    )


def _full_in_ns(growth: Growth, record: MemoryRecord, step_ns: float | None) -> float | None:
    """When there is no memory left, at the pace of the steady steps; ``None`` if that is not known."""
    total = record.total_bytes if growth.kind == "allocated" else record.host_total_bytes
    if total is None or not step_ns or growth.bytes_per_step <= 0:
        return None
    return max(0.0, total - growth.level_bytes) / growth.bytes_per_step * step_ns
