"""Bytes in sentences."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(num_bytes: float) -> str:
    """For sentences: three digits that count, in powers of 1024."""
    power = 0
    while abs(num_bytes) >= 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    return f"{float(f'{num_bytes / 1024**power:.3g}'):g} {_UNITS[power]}"
