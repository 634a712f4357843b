"""Did memory run out, and who held it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.report.byte_sizes import size
from lightning_modelprof.report.model import Evidence, Finding, Location, Severity, Unit
from lightning_modelprof.report.rules.base import Rule, count, text
from lightning_modelprof.run.memory import OutOfMemory
from lightning_modelprof.run.phases import PHASES

_MOST_NAMED: Final = 5
_LABELS: Final = {phase.key: phase.label for phase in PHASES}

_TOO_LARGE: Final = "look at the shape of what is made there: it alone is larger than all of the memory"
_BATCH: Final = "a smaller batch, with accumulate_grad_batches to keep its sum"
_CHECKPOINTS: Final = "activation checkpointing of the largest blocks"
_PRECISION: Final = 'precision="bf16-mixed"'
_OPTIMIZER: Final = "an optimizer with less state (8-bit Adam, Adafactor), or its state sharded (FSDP, ZeRO)"
_SHARDED: Final = "parameters and gradients sharded (FSDP), or a smaller model"
_SEGMENTS: Final = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, as much is reserved that nothing uses"


@dataclass(frozen=True, kw_only=True)
class RanOutOfMemory(Rule):
    """An exception that says so ended the loop.

    Attributes:
        unused_share: of the reserved memory; from here on to reserve in another way is worth a try.
    """

    kind: ClassVar[str] = "out_of_memory"
    title: ClassVar[str] = "Memory ran out"
    rests_on_time: ClassVar[bool] = False
    takes_time_there: ClassVar[bool] = False

    unused_share: float = 0.10

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated in runs of versions that did not look."""
        use = analysis.memory
        if isinstance(use, Absent):
            return self.not_evaluated(use.reason)
        event = use.record.out_of_memory
        if event is None:
            return self.clean("Memory did not run out.")
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
                f"To try, what should give most first: {'; '.join(names)}.",
                Severity.CRITICAL,
                places=_places(event),
                evidence=[
                    *_evidence(event),
                    *([text("held most by", ", ".join(list(modules)[:_MOST_NAMED]))] if modules else []),
                ],
            ),
        )

    def _attempts(self, event: OutOfMemory, *, may_halve: bool) -> Iterator[tuple[float, str]]:
        """What to try, with the bytes that it should give; rough, only to put them in an order."""
        rest, held = rest_bytes(event), event.by_category
        if rest is None:
            # Nobody knows how much activations take: the request itself came on top of the rest.
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


def _places(event: OutOfMemory) -> list[Location]:
    """Where memory was asked for."""
    if event.file is None:
        return []
    return [Location(file=event.file, line=event.line, function=event.function, is_exact=True)]


def rest_bytes(event: OutOfMemory) -> int | None:
    """What was allocated and is in no known category; ``None`` if it is not known what was allocated."""
    if event.allocated_bytes is None:
        return None
    return max(0, event.allocated_bytes - sum(event.by_category.values()))


def _summary(event: OutOfMemory) -> str:
    where = f" in {_LABELS[event.phase]}" if event.phase in _LABELS else ""
    asked = "" if event.requested_bytes is None else f" when {size(event.requested_bytes)} were asked for"
    device = "the host" if event.device == "cpu" else "the device"
    summary = f"The memory of {device} ran out at step {event.step}{where}{asked}."
    held = dict(sorted(event.by_category.items(), key=lambda item: -item[1]))
    rest = rest_bytes(event)
    if rest is not None:
        held = dict(sorted((held | {"activations and others": rest}).items(), key=lambda item: -item[1]))
    parts = [f"{category} {size(num_bytes)}" for category, num_bytes in held.items() if num_bytes]
    return f"{summary} Held were: {', '.join(parts)}." if parts else summary


def _evidence(event: OutOfMemory) -> Iterator[Evidence]:
    yield text("message", event.message)
    yield count("step", event.step)
    for label, num_bytes in (
        ("asked for", event.requested_bytes),
        ("memory of the device", event.total_bytes),
        ("allocated", event.allocated_bytes),
        ("reserved", event.reserved_bytes),
        *event.by_category.items(),
        ("activations and others", rest_bytes(event)),
        *((f"{one.category} of {one.name or 'the model itself'}", one.num_bytes) for one in event.holders),
    ):
        if num_bytes is not None:
            yield Evidence(label=label, value=num_bytes, unit=Unit.BYTES)
