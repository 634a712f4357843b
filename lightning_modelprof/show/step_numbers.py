"""The step time and its parts in numbers that add up as they are printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from typing import Final

from lightning_modelprof.report.model import StepCard, StepPart
from lightning_modelprof.units import digits

CORE: Final = ("dataloader", "forward", "backward", "optimizer")
"""Phases that are never put with others."""

REST: Final = "rest"
"""Key of what small phases are together."""

MOST_REST: Final = 0.1
"""Share of the step that small phases take together at most."""

_SMALL: Final = 0.03
"""Share of the step below which a part can't be told apart by eye."""


def merge_small(parts: Sequence[StepPart], small: float = _SMALL) -> tuple[StepPart, ...]:
    """The parts to draw, in their order, with small ones together at the end: a tenth of the step at most.

    Args:
        parts: of the host's lane.
        small: share of the lane below which a part is small.
    """
    total_ns, rest_ns = sum(part.ns for part in parts), 0.0
    merged: set[str] = set()
    for part in sorted(parts, key=lambda one: one.ns):
        is_small = part.key not in CORE and part.ns < small * total_ns
        if is_small and rest_ns + part.ns <= MOST_REST * total_ns:
            merged.add(part.key)
            rest_ns += part.ns
    kept = tuple(part for part in parts if part.key not in merged)
    return (*kept, StepPart(key=REST, label="other", ns=rest_ns)) if rest_ns > 0 else kept


class StepNumbers:
    """Milliseconds of one step, all with as many decimals as give the step time three digits."""

    def __init__(self, card: StepCard) -> None:
        self._card = card
        self._places = max(0, 2 - math.floor(math.log10(card.wall_ns / 1e6)))

    @property
    def step(self) -> str:
        return self._text(self._rounded(self._card.wall_ns))

    @property
    def best(self) -> str:
        """What is left of the step without what the findings could save, each counted once."""
        return self._text(self._best())

    def parts(self, parts: Sequence[StepPart], *, is_best: bool = False) -> list[str]:
        """Each part of the step, or of the best case; a part that rounds to 0 has a digit of its own.

        They sum to what :attr:`step` and :attr:`best` say: the largest remainders are rounded up. A phase
        reads the same wherever it stands, whatever small phases are together there.
        """
        phases: Sequence[StepPart] = self._card.better if is_best else self._card.host
        alone = {part.key: part.ns for part in parts if part.key != REST}
        if not alone.items() <= {(part.key, part.ns) for part in phases}:  # the device's
            phases = parts
        total = self._best() if is_best else self._rounded(self._card.wall_ns)
        shown = self._adding_up([part.ns for part in phases], total)
        at = {part.key: number for part, number in zip(phases, shown, strict=True)}
        rest = sum((number for key, number in at.items() if key not in alone), Decimal(0))
        numbers = [rest if part.key == REST else at[part.key] for part in parts]
        if phases is parts:  # the device may idle for one cause at several places
            numbers = shown
        return [
            self._text(number) if number else digits(part.ns / 1e6, 1)
            for part, number in zip(parts, numbers, strict=True)
        ]

    def _adding_up(self, parts_ns: Sequence[float], total: Decimal) -> list[Decimal]:
        unit = Decimal(1).scaleb(-self._places)
        exact = [Decimal(ns) / 10**6 for ns in parts_ns]
        floors = [one.quantize(unit, ROUND_FLOOR) for one in exact]
        left = int((total - sum(floors)) / unit)
        order = sorted(range(len(exact)), key=lambda number: floors[number] - exact[number])
        for number in order[: max(0, left)]:
            floors[number] += unit
        return floors

    def _best(self) -> Decimal:
        return self._rounded(self._card.wall_ns) - self._rounded(self._card.saved_ns)

    def _rounded(self, ns: float) -> Decimal:
        return (Decimal(ns) / 10**6).quantize(Decimal(1).scaleb(-self._places), ROUND_HALF_EVEN)

    def _text(self, number: Decimal) -> str:
        return f"{number:,}"
