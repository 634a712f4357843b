"""What single values in the arguments of an event mean."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.run.trace_numbers import integers
from lightning_modelprof.trace.json import Args
from lightning_modelprof.trace.model import NOT_RECORDED, Collective

_STREAM_TEXT: Final = re.compile(r"(?:stream )?([0-9]{1,18})")
_MAX_SIZE: Final = 2**48
"""More bytes, elements or ranks than anybody has; what is above is garbage, and sums of it would overflow."""


def sizes(values: list[Any], missing: int = NOT_RECORDED) -> NDArray[np.int64]:
    """Numbers of bytes as a column; what is none becomes ``missing``."""
    column = integers(values, missing)
    return np.where((column < _MAX_SIZE) & (column > -_MAX_SIZE), column, missing)


def stream_number(value: Any) -> Any:
    """The number in ``stream 7``, as torch 1.9 wrote it."""
    if isinstance(value, str):
        found = _STREAM_TEXT.fullmatch(value)
        return None if found is None else int(found.group(1))
    return value


def collective_of(args: Args) -> Collective:
    """What the arguments of a communication event say, as far as they have the expected types."""

    def text(value: Any) -> str | None:
        return value if isinstance(value, str) and value else None

    def number(value: Any) -> int | None:
        return value if type(value) is int and 0 <= value < _MAX_SIZE else None

    return Collective(
        name=text(args.collective),
        group=text(args.group_description) or text(args.group_name),
        group_size=number(args.group_size),
        dtype=text(args.dtype),
        in_elements=number(args.in_elements),
        out_elements=number(args.out_elements),
    )
