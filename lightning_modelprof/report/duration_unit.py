"""The unit that a sentence says durations in."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))


def duration_unit(largest_ns: float) -> tuple[float, str]:
    """How many nanoseconds a unit has, and its name: the largest that is not above ``largest_ns``."""
    return next((ns, unit) for ns, unit in _UNITS if largest_ns >= ns or unit == "ns")
