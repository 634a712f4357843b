"""Which parts of a step a picture of it tells apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_modelprof.report.model import StepPart

_SMALL: Final = 0.04
"""Share of the step below which a part cannot be told apart by eye."""

REST: Final = "rest"


def merge_small(parts: Sequence[StepPart], small: float = _SMALL) -> tuple[StepPart, ...]:
    """The parts to draw, in their order: small ones and Lightning's own loop are one at the end.

    Args:
        parts: of a lane.
        small: share of the lane below which a part is small.
    """
    whole_ns = sum(part.ns for part in parts)
    kept = [part for part in parts if part.key != "other" and part.ns >= small * whole_ns]
    rest_ns = whole_ns - sum(part.ns for part in kept)
    if rest_ns <= 0:
        return tuple(kept)
    return (*kept, StepPart(key=REST, label="other", ns=rest_ns))
