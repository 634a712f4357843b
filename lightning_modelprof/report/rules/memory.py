"""Does memory grow from step to step?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.memory import LEAST_POINTS, EpochGrowth, Growth, MemoryUse
from lightning_modelprof.place import Place
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Finding, Severity, Unit
from lightning_modelprof.report.rules.base import (
    NO_CUDA,
    NO_SETUP,
    Rule,
    RuleHelp,
    count,
    duration,
    ratio,
    text,
)
from lightning_modelprof.run.memory import GrowingAttribute, MemoryRecord, OutOfMemory
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.units import percent, size

_PER: Final = 1_000
"""Steps that growth is told for."""


_HOUR_NS: Final = 3_600e9


_NAMES: Final = {
    "anonymous": "private process memory",
    "rss": "resident process memory",
    "allocated": "allocated GPU memory",
}


_ACTION: Final = (
    "Detach stored losses and outputs (losses.append(loss.detach())), and limit caches and stored values."
)


_EPOCH_ACTION: Final = "Append loss.detach() to self.outputs, or keep running sums instead."


class MemoryCreep(Rule, frozen=True, kw_only=True):
    """The growth of memory in the second half of the loop, by a slope that single points cannot bend.

    Attributes:
        growth_bytes: growth in 1,000 steps from which on it is found.
        growth_share: the same as a share of the level.
        seen_bytes: growth that must have been seen in this loop.
        steadiness: share of the third quarter's slope that the last quarter's must have: what levels off is
            no creep. It must grow without the largest jump, too.
        critical_hours: it is critical if the memory is full in so many hours.
        sure_s: seconds that the process's own memory must have been looked at for that.
        epoch_bytes: growth within an epoch, gone after it, from which on that is found. The share of the
            level and the steadiness hold for it too.

    Source: the floors are choices; a model of a few parameters that keeps each step's graph grows by some ten
    KiB a step, which is some ten MiB in 1,000.
    """

    kind: ClassVar[str] = "memory_creep"
    title: ClassVar[str] = "Memory usage keeps growing"
    healthy: ClassVar[str] = "Memory usage is stable"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "slope (Theil-Sen) of the second half of the memory curve per 1,000 steps, with a 95%"
            " confidence interval above 0, at least 4 MiB of growth, no levelling off and no single jump;"
            " for private process"
            " memory, critical"
            " only after 30 s. Or growth within epochs of which at least half is freed at their end (doesn't"
            " show if the process keeps memory that CPU tensors free). Attributes of the model and callbacks"
            " that grew in at least 4 checks in a row by at least one element per step are named if"
            " they may hold a quarter of the growth"
        ),
        levels="16 MiB (also per epoch) and 1% of the level; critical if full within 24 h",
    )
    points_at: ClassVar[PointsAt] = PointsAt.NO_TIME

    growth_bytes: float = 16 * 2**20
    growth_share: float = 0.01
    seen_bytes: float = 4 * 2**20
    steadiness: float = 0.5
    critical_hours: float = 24.0
    sure_s: float = 30.0
    epoch_bytes: float = 16 * 2**20

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """One finding for each kind of memory that grows."""
        use = analysis.memory
        if isinstance(use, Absent):
            return self.not_evaluated(use.reason)
        if not use.growth:
            return self.not_evaluated(
                f"memory was measured fewer than {2 * LEAST_POINTS} times (every 100 ms, unless sampling is"
                " off)"
            )
        step_ns = None if isinstance(analysis.step_costs, Absent) else analysis.step_costs.steady.wall_ns
        found = []
        for one in use.growth:
            if self._is_creep(one):
                able = _able_to(one.bytes_per_step, use.record.growing)
                found.append(_with_growing(self._creep(one, use, step_ns, able), able, use.record.growing))
            elif one.in_epochs is not None and self._is_collected(one.in_epochs):
                able = _able_to(one.in_epochs.bytes_per_step, use.record.growing)
                collected = self._collected(one.kind, one.in_epochs)
                found.append(_with_growing(collected, able, use.record.growing))
        if found:
            return tuple(found)
        return self.clean(
            "Memory doesn't keep growing.",
            [evidence for one in use.growth for evidence in _evidence(one)],
        )

    def _is_creep(self, growth: Growth) -> bool:
        per = growth.bytes_per_step * _PER
        return (
            growth.low > 0
            and per >= max(self.growth_bytes, self.growth_share * growth.level_bytes)
            and growth.seen_bytes >= self.seen_bytes
            and growth.fourth >= self.steadiness * growth.third
            and growth.low_without_jump > 0
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
            f"{name[0].upper()}{name[1:]} grows by {size(growth.grown_bytes)} within each epoch"
            f" ({size(growth.bytes_per_step)} per step) and falls by {size(growth.fallen_bytes)} at its end"
            f" (median of {growth.num_epochs} epochs).",
            _EPOCH_ACTION,
            Severity.WARNING,
            evidence=(
                Evidence(label=f"{name} growth per epoch", value=growth.grown_bytes, unit=Unit.BYTES),
                Evidence(label="freed at the end of an epoch", value=growth.fallen_bytes, unit=Unit.BYTES),
                Evidence(label="growth per step", value=growth.bytes_per_step, unit=Unit.BYTES),
                Evidence(label="highest level", value=growth.level_bytes, unit=Unit.BYTES),
                Evidence(label="95% lower bound of growth per step", value=growth.low, unit=Unit.BYTES),
                Evidence(label="95% upper bound of growth per step", value=growth.high, unit=Unit.BYTES),
                count("epochs", growth.num_epochs),
            ),
        )

    def _creep(
        self,
        growth: Growth,
        use: MemoryUse,
        step_ns: float | None,
        growing: Sequence[GrowingAttribute],
    ) -> Finding:
        name, per = _NAMES[growth.kind], growth.bytes_per_step * _PER
        full_ns = _full_in_ns(growth, use.record, step_ns)
        summary = (
            f"{name[0].upper()}{name[1:]} grows by {size(per)} per {_PER:,} steps"
            f" (95% confidence interval {size(growth.low * _PER)} to {size(growth.high * _PER)})"
        )
        if full_ns is not None:
            summary += f" and will be full in about {full_ns / _HOUR_NS:.2g} hours"
        evidence = list(_evidence(growth))
        if full_ns is not None:
            evidence.insert(1, duration("time until memory is full", full_ns))
        seen_ns = (step_ns or 0.0) * (growth.last_step - growth.first_step)
        # An allocator of the process's memory levels off late; a device's is torch's own and counts exactly.
        is_sure = growth.kind == "allocated" or seen_ns >= self.sure_s * 1e9
        if not is_sure:
            summary += f". After only {seen_ns / 1e9:.2g} s it may still be warm-up"
        is_critical = is_sure and full_ns is not None and full_ns <= self.critical_hours * _HOUR_NS
        return self.found(
            f"{summary}.",
            _ACTION,
            Severity.CRITICAL if is_critical else Severity.WARNING if is_sure or growing else Severity.INFO,
            evidence=evidence,
        )


_CONSIDERABLE: Final = 0.25
"""Of the growth, what the elements of an attribute must be able to take."""


def _able_to(bytes_per_step: float, growing: Sequence[GrowingAttribute]) -> list[GrowingAttribute]:
    """The attributes whose elements may take a considerable part of the growth."""
    return [
        one
        for one in growing
        if one.element_bytes is None
        or one.element_bytes * (one.last_size - one.first_size)
        >= _CONSIDERABLE * bytes_per_step * (one.last_step - one.first_step)
    ]


def _with_growing(
    finding: Finding, growing: Sequence[GrowingAttribute], seen: Sequence[GrowingAttribute]
) -> Finding:
    """The same finding, with the attributes that grow and the lines that add to them, if any is known.

    Args:
        growing: attributes that may be the cause.
        seen: all that grow.
    """
    if not growing and seen:
        small = ", ".join(f"{one.owner}.{one.name}" for one in seen[:3])
        told = f"The cause isn't known: {small} also grew, but takes too little."
        return replace(finding, summary=f"{finding.summary} {told}")
    if not growing:
        return finding
    first = growing[0]
    names = ", ".join(f"{one.owner}.{one.name}" for one in growing[:3])
    lines = [line for one in growing for line in one.lines]
    return replace(
        finding,
        summary=f"{finding.summary} {first.owner}.{first.name} grew from {first.first_size:,} to"
        f" {first.last_size:,} elements in {first.last_step - first.first_step:,} steps.",
        action=f"Replace {names} with a running sum, or detach and clear it.",
        locations=tuple(one.exact() for one in lines) or finding.locations,
    )


def _evidence(growth: Growth) -> tuple[Evidence, ...]:
    name = _NAMES[growth.kind]
    return (
        Evidence(
            label=f"{name} growth per {_PER:,} steps", value=growth.bytes_per_step * _PER, unit=Unit.BYTES
        ),
        Evidence(label=f"{name} level", value=growth.level_bytes, unit=Unit.BYTES),
        Evidence(label="95% lower bound of growth", value=growth.low * _PER, unit=Unit.BYTES),
        Evidence(label="95% upper bound of growth", value=growth.high * _PER, unit=Unit.BYTES),
        count("first step", growth.first_step),
        count("last step", growth.last_step),
    )


def _full_in_ns(growth: Growth, record: MemoryRecord, step_ns: float | None) -> float | None:
    """When there is no memory left, at the pace of the steady steps; ``None`` if that is not known."""
    total = record.total_bytes if growth.kind == "allocated" else record.host_total_bytes
    if total is None or not step_ns or growth.bytes_per_step <= 0:
        return None
    return max(0.0, total - growth.level_bytes) / growth.bytes_per_step * step_ns


class MemoryFragmentation(Rule, frozen=True, kw_only=True):
    """The most that was reserved less the most that was allocated, and whether the cache was given back.

    Attributes:
        unused_share: of the most that was reserved.
        unused_bytes: what must be unused too.

    Source: the thresholds are choices; TraceML warns where twice as much is reserved as allocated.

    Caveats: the two peaks may be of different moments, and then more was unused at some of them than is said.
    """

    kind: ClassVar[str] = "memory_fragmentation"
    title: ClassVar[str] = "Reserved GPU memory is unused"
    healthy: ClassVar[str] = "Reserved memory is used"
    help: ClassVar[RuleHelp] = RuleHelp(
        "peak reserved minus peak allocated memory (a lower bound, since the peaks may differ in time), or"
        " the allocator had to free its cache, which waits for the GPU",
        levels="30% and 1 GiB",
    )
    points_at: ClassVar[PointsAt] = PointsAt.NO_TIME

    unused_share: float = 0.30
    unused_bytes: float = 2**30

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        use = analysis.memory
        if isinstance(use, Absent):
            return self.not_evaluated(use.reason)
        record, unused, share = use.record, use.unused_bytes, use.unused_share
        if unused is None or share is None:
            return self.not_evaluated("PyTorch doesn't report reserved memory on this device")
        retries = record.num_retries or 0
        evidence = [
            ratio("unused share of reserved memory", share),
            Evidence(label="peak reserved memory", value=record.peak_reserved_bytes, unit=Unit.BYTES),
            Evidence(label="peak allocated memory", value=record.peak_allocated_bytes, unit=Unit.BYTES),
            count("cache flushes", record.num_retries),
        ]
        is_unused = share >= self.unused_share and unused >= self.unused_bytes
        if not is_unused and not retries:
            return self.clean(f"{percent(share)} of reserved memory was never used.", evidence)
        reasons = []
        if is_unused:
            reasons.append(f"{size(unused)} ({percent(share)}) of reserved memory was never used")
        if retries:
            times = "once" if retries == 1 else f"{retries:,} times"
            reasons.append(f"the allocator freed its cache {times} and waited for the GPU")
        summary = ", and ".join(reasons)
        return (
            self.found(
                f"{summary[0].upper()}{summary[1:]}.",
                "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or pad batches to few shapes.",
                Severity.WARNING,
                evidence=evidence,
            ),
        )


class MemoryNearCapacity(Rule, frozen=True, kw_only=True):
    """The most memory that torch's allocator held, over that of the device.

    Attributes:
        warning, critical: shares.

    Source: 92% and 97% are the bands of TraceML.
    """

    kind: ClassVar[str] = "memory_near_capacity"
    title: ClassVar[str] = "GPU memory is nearly full"
    healthy: ClassVar[str] = "Training fits in memory"
    help: ClassVar[RuleHelp] = RuleHelp("peak memory reserved by torch, as a share of GPU memory")
    points_at: ClassVar[PointsAt] = PointsAt.NO_TIME

    warning: float = 0.92
    critical: float = 0.97

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        found = _reserved_of(analysis)
        if isinstance(found, Absent):
            return self.not_evaluated(found.reason)
        reserved, total = found
        share = reserved / total
        evidence = [
            ratio("reserved share of GPU memory", share),
            Evidence(label="peak reserved memory", value=reserved, unit=Unit.BYTES),
            Evidence(label="GPU memory", value=total, unit=Unit.BYTES),
        ]
        if share < self.warning:
            return self.clean(f"At most {percent(share)} of GPU memory was reserved.", evidence)
        return (
            self.found(
                f"{percent(share)} of GPU memory was reserved, so a longer batch may not fit.",
                "Use a smaller batch with accumulate_grad_batches, or activation checkpointing.",
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


_MOST_NAMED: Final = 5


_REST: Final = "activations and other"
"""Memory in no known category."""


_LABELS: Final = {phase.key: phase.label for phase in PHASES}


_TOO_LARGE: Final = "a smaller tensor there, since it alone exceeds all memory"


_BATCH: Final = "a smaller batch with accumulate_grad_batches"


_CHECKPOINTS: Final = "activation checkpointing"


_PRECISION: Final = 'precision="bf16-mixed" (may change results)'


_OPTIMIZER: Final = "an optimizer with less state (8-bit Adam, Adafactor), or sharded state (FSDP, ZeRO)"


_SHARDED: Final = "sharded parameters (FSDP), or a smaller model"


_SEGMENTS: Final = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


class RanOutOfMemory(Rule, frozen=True, kw_only=True):
    """An exception that says so ended the loop.

    Attributes:
        unused_share: of the reserved memory; from here on to reserve in another way is worth a try.
    """

    kind: ClassVar[str] = "out_of_memory"
    title: ClassVar[str] = "Out of memory"
    healthy: ClassVar[str] = "No out-of-memory errors"
    help: ClassVar[RuleHelp] = RuleHelp(
        "an out-of-memory error ended the loop. Suggestions are in order of the memory they should free",
        levels="critical",
    )
    points_at: ClassVar[PointsAt] = PointsAt.NO_TIME

    unused_share: float = 0.10

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        use = analysis.memory
        if isinstance(use, Absent):
            return self.not_evaluated(use.reason)
        event = use.record.out_of_memory
        if event is None:
            return self.clean("Memory didn't run out.")
        half = not analysis.info.precision.startswith(("16", "bf16", "transformer-engine"))
        attempts = sorted(self._attempts(event, may_halve=half), key=lambda one: -one[0])
        total = use.record.host_total_bytes if event.device == "cpu" else event.total_bytes
        names = [name for _, name in attempts]
        if event.requested_bytes is not None and total is not None and event.requested_bytes > total:
            names.insert(0, _TOO_LARGE)
        modules = dict.fromkeys(one.name for one in event.holders if one.name)
        return (
            self.found(
                _summary(event),
                f"Try {', or '.join(names)}.",
                Severity.CRITICAL,
                places=_places(event),
                evidence=[
                    *_evidence_of_error(event),
                    *([text("largest modules", ", ".join(list(modules)[:_MOST_NAMED]))] if modules else []),
                ],
            ),
        )

    def _attempts(self, event: OutOfMemory, *, may_halve: bool) -> Iterator[tuple[float, str]]:
        """What to try, with the bytes that it should give; rough, only to put them in an order."""
        rest, held = rest_bytes(event), event.by_category
        if rest is None:
            # The size of activations is unknown; the request itself came on top of the rest.
            rest = max(event.requested_bytes or 0, sum(held.values()), 1)
        yield rest / 2, _BATCH
        if event.phase in {"", "forward", "backward"}:
            yield rest / 2, _CHECKPOINTS
        if may_halve and event.device != "cpu":
            yield rest / 2, _PRECISION
        state = held.get("optimizer state", 0)
        if state:
            yield 0.75 * state, _OPTIMIZER
        weights = held.get("parameters", 0) + held.get("gradients", 0)
        if weights > rest:
            yield weights / 2, _SHARDED
        allocated, reserved = event.allocated_bytes, event.reserved_bytes
        if allocated is not None and reserved and reserved - allocated >= self.unused_share * reserved:
            yield float(reserved - allocated), _SEGMENTS


def _places(event: OutOfMemory) -> list[Place]:
    if event.file is None:
        return []
    return [event.exact()]


def rest_bytes(event: OutOfMemory) -> int | None:
    """What was allocated and is in no known category; ``None`` if it is not known what was allocated."""
    if event.allocated_bytes is None:
        return None
    return max(0, event.allocated_bytes - sum(event.by_category.values()))


def _summary(event: OutOfMemory) -> str:
    where = f" in {_LABELS[event.phase]}" if event.phase in _LABELS else ""
    asked = "" if event.requested_bytes is None else f" when allocating {size(event.requested_bytes)}"
    device = "CPU" if event.device == "cpu" else "GPU"
    summary = f"{device} memory ran out at step {event.step}{where}{asked}."
    held = dict(sorted(event.by_category.items(), key=lambda item: -item[1]))
    rest = rest_bytes(event)
    if rest is not None:
        held = dict(sorted((held | {_REST: rest}).items(), key=lambda item: -item[1]))
    parts = [f"{category} {size(num_bytes)}" for category, num_bytes in held.items() if num_bytes]
    return f"{summary} In use: {', '.join(parts)}." if parts else summary


def _evidence_of_error(event: OutOfMemory) -> Iterator[Evidence]:
    for label, num_bytes in (
        ("requested memory", event.requested_bytes),
        ("allocated memory", event.allocated_bytes),
        ("reserved memory", event.reserved_bytes),
        ("total memory", event.total_bytes),
        *event.by_category.items(),
        (_REST, rest_bytes(event)),
        *((f"{one.category} of {one.name or 'the model itself'}", one.num_bytes) for one in event.holders),
    ):
        if num_bytes is not None:
            yield Evidence(label=label, value=num_bytes, unit=Unit.BYTES)
    yield count("step", event.step)
    yield text("message", event.message)
