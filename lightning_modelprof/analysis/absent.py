"""Absent: a fact that could not be derived, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands in the place of a fact; ``reason`` continues a sentence that begins with the table's title."""

    reason: str


NO_DEVICE = Absent("the trace has no device events")
