"""Does memory grow, is it nearly full or reserved but unused, and what if it ran out?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.steps.memory import LEAST_POINTS, EpochGrowth, Growth
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Severity, Unit
from lightning_modelprof.report.rules.rule import (
    NO_CUDA,
    Found,
    Limits,
    Passed,
    count,
    duration,
    ratio,
    rule,
    text,
)
from lightning_modelprof.run.memory import GrowingAttribute, MemoryRecord, OutOfMemory
from lightning_modelprof.run.phases import PHASES
from lightning_modelprof.units import percent, size

_PER: Final = 1_000
"""Number of steps that growth is given for."""

_HOUR_NS: Final = 3_600e9

_NAMES: Final = {
    "anonymous": "private process memory",
    "rss": "resident process memory",
    "allocated": "allocated GPU memory",
}


@rule(
    "memory_creep",
    title="Memory usage keeps growing",
    healthy="Memory usage is stable",
    levels="16 MiB (also per epoch) and 1% of the level; critical if full within 24 h",
    points_at=PointsAt.NO_TIME,
    has_thresholds=False,
    growth_bytes=16 * 2**20,
    growth_share=0.01,
    seen_bytes=4 * 2**20,
    steadiness=0.5,
    critical_hours=24.0,
    sure_s=30.0,
    epoch_bytes=16 * 2**20,
)
def memory_creep(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Slope (Theil-Sen) of the second half of the memory curve per 1,000 steps, with a 95% confidence
    interval above 0, at least 4 MiB of growth, no levelling off and no single jump; for private process
    memory, critical only after 30 s. Or growth within epochs of which at least half is freed at their end
    (doesn't show if the process keeps memory that CPU tensors free). Attributes of the model and callbacks
    that grew in at least 4 checks in a row by at least one element per step are named if they may hold a
    quarter of the growth.
    """
    # The floors are our choice: a small model that keeps each step's graph grows by some ten KiB per step,
    # which is some ten MiB in 1,000 steps.
    use, costs = facts.memory, facts.get(Facts.step_costs)
    if not use.growth:
        raise NotMeasured(
            f"memory was measured fewer than {2 * LEAST_POINTS} times (every 100 ms, unless"
            ' inspect={"sampling": False})'
        )
    yield Passed(
        what="Memory doesn't keep growing.",
        evidence=[evidence for one in use.growth for evidence in _growth_evidence(one)],
    )
    for one in use.growth:
        seen, in_epochs = use.record.growing, one.in_epochs
        if _is_creep(one, limits):
            able = _possible_causes(one.bytes_per_step, seen)
            step_ns = 0.0 if costs is None else costs.steady.wall_ns
            yield _with_growing(_creep(one, use.record, step_ns, limits, bool(able)), able, seen)
        elif in_epochs is not None and _is_collected(in_epochs, limits):
            able = _possible_causes(in_epochs.bytes_per_step, seen)
            yield _with_growing(_collected(_NAMES[one.kind], in_epochs), able, seen)


def _is_creep(growth: Growth, limits: Limits) -> bool:
    """Return whether growth continues: it doesn't level off, and remains without its largest jump."""
    per = growth.bytes_per_step * _PER
    return (
        growth.low > 0
        and per >= max(limits.growth_bytes, limits.growth_share * growth.level_bytes)
        and growth.seen_bytes >= limits.seen_bytes
        and growth.fourth >= limits.steadiness * growth.third
        and growth.low_without_jump > 0
    )


def _is_collected(growth: EpochGrowth, limits: Limits) -> bool:
    return (
        growth.falls
        and growth.grown_bytes >= max(limits.epoch_bytes, limits.growth_share * growth.level_bytes)
        and growth.second >= limits.steadiness * growth.first
    )


def _collected(name: str, growth: EpochGrowth) -> Found:
    return Found(
        what=f"{_capital(name)} grows by {size(growth.grown_bytes)} within each epoch"
        f" ({size(growth.bytes_per_step)} per step) and falls by {size(growth.fallen_bytes)} at its end"
        f" (median of {growth.num_epochs} epochs).",
        do="Append loss.detach() to self.outputs, or keep running sums instead.",
        severity=Severity.WARNING,
        evidence=[
            _bytes(f"{name} growth per epoch", growth.grown_bytes),
            _bytes("freed at the end of an epoch", growth.fallen_bytes),
            _bytes("growth per step", growth.bytes_per_step),
            _bytes("highest level", growth.level_bytes),
            _bytes("95% lower bound of growth per step", growth.low),
            _bytes("95% upper bound of growth per step", growth.high),
            count("epochs", growth.num_epochs),
        ],
    )


def _creep(growth: Growth, record: MemoryRecord, step_ns: float, limits: Limits, has_cause: bool) -> Found:
    full_ns, evidence = _ns_until_full(growth, record, step_ns), _growth_evidence(growth)
    what = (
        f"{_capital(_NAMES[growth.kind])} grows by {size(growth.bytes_per_step * _PER)} per {_PER:,} steps"
        f" (95% confidence interval {size(growth.low * _PER)} to {size(growth.high * _PER)})"
    )
    if full_ns is not None:
        what += f" and will be full in about {full_ns / _HOUR_NS:.2g} hours"
        evidence.insert(1, duration("time until memory is full", full_ns))
    seen_ns = step_ns * (growth.last_step - growth.first_step)
    # The process's allocator levels off late; a device's is torch's own and counts exactly.
    is_sure = growth.kind == "allocated" or seen_ns >= limits.sure_s * 1e9
    if not is_sure:
        what += f". After only {seen_ns / 1e9:.2g} s it may still be warm-up"
    is_critical = is_sure and full_ns is not None and full_ns <= limits.critical_hours * _HOUR_NS
    return Found(
        what=f"{what}.",
        do="Detach stored losses and outputs (losses.append(loss.detach())), and limit caches and stored"
        " values.",
        severity=Severity.CRITICAL
        if is_critical
        else Severity.WARNING
        if is_sure or has_cause
        else Severity.INFO,
        evidence=evidence,
    )


_CONSIDERABLE: Final = 0.25
"""Minimum share of the growth that an attribute's elements must be able to explain."""


def _possible_causes(bytes_per_step: float, growing: Sequence[GrowingAttribute]) -> list[GrowingAttribute]:
    return [
        one
        for one in growing
        if one.element_bytes is None
        or one.element_bytes * (one.last_size - one.first_size)
        >= _CONSIDERABLE * bytes_per_step * (one.last_step - one.first_step)
    ]


def _with_growing(
    found: Found, growing: Sequence[GrowingAttribute], seen: Sequence[GrowingAttribute]
) -> Found:
    """Add the attributes in ``growing``, the possible causes, of all that grow (``seen``)."""
    names = ", ".join(f"{one.owner}.{one.name}" for one in (growing or seen)[:3])
    if not growing:
        told = f" The cause isn't known: {names} also grew, but takes too little." if seen else ""
        return replace(found, what=f"{found.what}{told}")
    first = growing[0]
    return replace(
        found,
        what=f"{found.what} {first.owner}.{first.name} grew from {first.first_size:,} to"
        f" {first.last_size:,} elements in {first.last_step - first.first_step:,} steps.",
        do=f"Replace {names} with a running sum, or detach and clear it.",
        at=[line.exact() for one in growing for line in one.lines],
    )


def _growth_evidence(growth: Growth) -> list[Evidence]:
    name = _NAMES[growth.kind]
    return [
        _bytes(f"{name} growth per {_PER:,} steps", growth.bytes_per_step * _PER),
        _bytes(f"{name} level", growth.level_bytes),
        _bytes("95% lower bound of growth", growth.low * _PER),
        _bytes("95% upper bound of growth", growth.high * _PER),
        count("first step", growth.first_step),
        count("last step", growth.last_step),
    ]


def _ns_until_full(growth: Growth, record: MemoryRecord, step_ns: float) -> float | None:
    total = record.total_bytes if growth.kind == "allocated" else record.host_total_bytes
    if total is None or not step_ns or growth.bytes_per_step <= 0:
        return None
    return max(0.0, total - growth.level_bytes) / growth.bytes_per_step * step_ns


def _bytes(label: str, num_bytes: float | None) -> Evidence:
    return Evidence(label=label, value=num_bytes, unit=Unit.BYTES)


def _capital(sentence: str) -> str:
    return f"{sentence[0].upper()}{sentence[1:]}"


@rule(
    "memory_fragmentation",
    title="Reserved GPU memory is unused",
    healthy="Reserved memory is used",
    levels="30% and 1 GiB",
    points_at=PointsAt.NO_TIME,
    has_thresholds=False,
    unused_share=0.30,
    unused_bytes=2**30,
)
def memory_fragmentation(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Peak reserved minus peak allocated memory (a lower bound, since the peaks may differ in time), or the
    allocator had to free its cache, which waits for the GPU.
    """
    # The thresholds are our choice; TraceML warns if twice as much is reserved as allocated.
    record, unused, share = facts.memory.record, facts.memory.unused_bytes, facts.memory.unused_share
    if unused is None or share is None:
        raise NotMeasured("PyTorch doesn't report reserved memory on this device")
    retries = record.num_retries or 0
    evidence = [
        ratio("unused share of reserved memory", share),
        _bytes("peak reserved memory", record.peak_reserved_bytes),
        _bytes("peak allocated memory", record.peak_allocated_bytes),
        count("cache flushes", record.num_retries),
    ]
    reasons = []
    if share >= limits.unused_share and unused >= limits.unused_bytes:
        reasons.append(f"{size(unused)} ({percent(share)}) of reserved memory was never used")
    if retries:
        times = "once" if retries == 1 else f"{retries:,} times"
        reasons.append(f"the allocator freed its cache {times} and waited for the GPU")
    if not reasons:
        yield Passed(what=f"{percent(share)} of reserved memory was never used.", evidence=evidence)
        return
    yield Found(
        what=f"{_capital(', and '.join(reasons))}.",
        do="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or pad batches to few shapes.",
        severity=Severity.WARNING,
        evidence=evidence,
    )


@rule(
    "memory_near_capacity",
    title="GPU memory is nearly full",
    healthy="Training fits in memory",
    points_at=PointsAt.NO_TIME,
    has_thresholds=False,
    warning=0.92,
    critical=0.97,
)
def memory_near_capacity(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """Peak memory reserved by torch, as a share of GPU memory."""
    # 92% and 97% are TraceML's bands.
    reserved, total = _reserved_and_total(facts)
    share = reserved / total
    evidence = [
        ratio("reserved share of GPU memory", share),
        _bytes("peak reserved memory", reserved),
        _bytes("GPU memory", total),
    ]
    if share < limits.warning:
        yield Passed(what=f"At most {percent(share)} of GPU memory was reserved.", evidence=evidence)
        return
    yield Found(
        what=f"{percent(share)} of GPU memory was reserved, so a longer batch may not fit.",
        do="Use a smaller batch with accumulate_grad_batches, or activation checkpointing.",
        severity=limits.severity(share),
        evidence=evidence,
    )


def _reserved_and_total(facts: Facts) -> tuple[int, int]:
    use = facts.get(Facts.memory)
    if use is not None and use.record.peak_reserved_bytes is not None and use.record.total_bytes:
        return use.record.peak_reserved_bytes, use.record.total_bytes
    if facts.setup.cuda is None:
        raise NotMeasured(NO_CUDA)
    return facts.setup.cuda.reserved_bytes, facts.setup.cuda.total_bytes


_MOST_NAMED: Final = 5
_REST: Final = "activations and other"
"""Memory outside the known categories."""
_LABELS: Final = {phase.key: phase.label for phase in PHASES}


@rule(
    "out_of_memory",
    title="Out of memory",
    healthy="No out-of-memory errors",
    levels="critical",
    points_at=PointsAt.NO_TIME,
    has_thresholds=False,
    unused_share=0.10,
)
def out_of_memory(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
    """An out-of-memory error ended the loop. Suggestions are in order of the memory they should free."""
    record = facts.memory.record
    event = record.out_of_memory
    if event is None:
        yield Passed(what="Memory didn't run out.")
        return
    may_halve = not facts.info.precision.startswith(("16", "bf16", "transformer-engine"))
    attempts = sorted(_attempts(event, limits, may_halve=may_halve), key=lambda one: -one[0])
    names = [name for _, name in attempts]
    total = record.host_total_bytes if event.device == "cpu" else event.total_bytes
    if event.requested_bytes is not None and total is not None and event.requested_bytes > total:
        names.insert(0, "a smaller tensor there, since it alone exceeds all memory")
    modules = list(dict.fromkeys(one.name for one in event.holders if one.name))
    yield Found(
        what=_summary(event),
        do=f"Try {', or '.join(names)}.",
        severity=Severity.CRITICAL,
        at=[] if event.file is None else [event.exact()],
        evidence=[
            *_evidence_of_error(event),
            *([text("largest modules", ", ".join(modules[:_MOST_NAMED]))] if modules else []),
        ],
    )


def _attempts(event: OutOfMemory, limits: Limits, *, may_halve: bool) -> Iterator[tuple[float, str]]:
    """Yield what to try, with rough bytes it should free, only used to sort."""
    rest, held = _uncategorized_bytes(event), event.by_category
    if rest is None:
        # Activation size is unknown; the request itself came on top of the rest.
        rest = max(event.requested_bytes or 0, sum(held.values()), 1)
    yield rest / 2, "a smaller batch with accumulate_grad_batches"
    if event.phase in {"", "forward", "backward"}:
        yield rest / 2, "activation checkpointing"
    if may_halve and event.device != "cpu":
        yield rest / 2, 'precision="bf16-mixed" (may change results)'
    state = held.get("optimizer state", 0)
    if state:
        yield (
            0.75 * state,
            "an optimizer with less state (8-bit Adam, Adafactor), or sharded state (FSDP, ZeRO)",
        )
    weights = held.get("parameters", 0) + held.get("gradients", 0)
    if weights > rest:
        yield weights / 2, "sharded parameters (FSDP), or a smaller model"
    allocated, reserved = event.allocated_bytes, event.reserved_bytes
    if allocated is not None and reserved and reserved - allocated >= limits.unused_share * reserved:
        yield float(reserved - allocated), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def _uncategorized_bytes(event: OutOfMemory) -> int | None:
    if event.allocated_bytes is None:
        return None
    return max(0, event.allocated_bytes - sum(event.by_category.values()))


def _summary(event: OutOfMemory) -> str:
    where = f" in {_LABELS[event.phase]}" if event.phase in _LABELS else ""
    asked = "" if event.requested_bytes is None else f" when allocating {size(event.requested_bytes)}"
    device = "CPU" if event.device == "cpu" else "GPU"
    summary = f"{device} memory ran out at step {event.step}{where}{asked}."
    held = [*event.by_category.items(), (_REST, _uncategorized_bytes(event) or 0)]
    held.sort(key=lambda item: -item[1])
    parts = [f"{category} {size(num_bytes)}" for category, num_bytes in held if num_bytes]
    return f"{summary} In use: {', '.join(parts)}." if parts else summary


def _evidence_of_error(event: OutOfMemory) -> Iterator[Evidence]:
    for label, num_bytes in (
        ("requested memory", event.requested_bytes),
        ("allocated memory", event.allocated_bytes),
        ("reserved memory", event.reserved_bytes),
        ("total memory", event.total_bytes),
        *event.by_category.items(),
        (_REST, _uncategorized_bytes(event)),
        *((f"{one.category} of {one.name or 'the model itself'}", one.num_bytes) for one in event.holders),
    ):
        if num_bytes is not None:
            yield _bytes(label, num_bytes)
    yield count("step", event.step)
    yield text("message", event.message)
