"""What a formula is and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class WithRecompute(NamedTuple):
    """FLOPs of a backward kernel that computes a part of the forward again.

    Attributes:
        gradients: what the gradients need.
        recompute: what the forward has done already.
    """

    gradients: int
    recompute: int


Formula: TypeAlias = Callable[..., "int | WithRecompute"]
"""``formula(*args, **kwargs, out_val=result)`` → FLOPs."""
