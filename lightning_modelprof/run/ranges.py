"""The ranges of measured numbers: a file with a number outside of them is refused.

They leave room to add up many of them in 64 bits.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

LARGEST: Final = 2**62
MAX_RANKS: Final = 2**20

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
"""How many there are, or the number of one of them."""

Whole = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
"""Bytes, nanoseconds, FLOPs, settings; a clock that is put back makes negative ones."""

Real = Annotated[float, Meta(ge=-1e30, le=1e30)]

Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
"""Processes of one training."""
