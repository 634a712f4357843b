"""Columns in parts: one for each piece of a file, put together in the end."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]

_ColumnT = TypeVar("_ColumnT", bound=np.generic)

EMPTY_EVENTS: Final[Columns] = {
    "begin_ns": np.empty(0, np.int64),
    "duration_ns": np.empty(0, np.int64),
    "category": np.empty(0, np.uint8),
    "name": np.empty(0, np.int32),
    "track": np.empty(0, np.int32),
    "correlation": np.empty(0, np.int64),
    "external_id": np.empty(0, np.int64),
    "shape": np.empty(0, np.int32),
    "stack": np.empty(0, np.int32),
    "collective": np.empty(0, np.int32),
}
EMPTY_DEVICE: Final[Columns] = {
    "event": np.empty(0, np.int64),
    "device": np.empty(0, np.int64),
    "stream": np.empty(0, np.int64),
    "size_bytes": np.empty(0, np.int64),
    "blocks_per_sm": np.empty(0, np.float64),
    "occupancy": np.empty(0, np.float64),
}
EMPTY_ALLOCATIONS: Final[Columns] = {
    "time_ns": np.empty(0, np.int64),
    "track": np.empty(0, np.int32),
    "size_bytes": np.empty(0, np.int64),
    "device_type": np.empty(0, np.int64),
    "device": np.empty(0, np.int64),
    "allocated_bytes": np.empty(0, np.int64),
    "reserved_bytes": np.empty(0, np.int64),
}


def concatenate(parts: list[Columns], empty: Columns) -> Columns:
    """All parts in one, freeing them; ``empty`` gives the columns and their types."""
    columns = {
        key: np.concatenate([column, *(part.pop(key) for part in parts)]) for key, column in empty.items()
    }
    parts.clear()
    return columns


def read_only(column: NDArray[_ColumnT]) -> NDArray[_ColumnT]:
    """The same column, which cannot be written to any more."""
    column.flags.writeable = False
    return column
