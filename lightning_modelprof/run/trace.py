"""Trace: one profiler window of one rank as read-only columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Category(IntEnum):
    """What kind of event a row is; names of every torch version since 1.9 are mapped to these."""

    OTHER = 0
    CPU_OP = 1
    USER_ANNOTATION = 2
    RUNTIME = 3
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6
    DEVICE_ANNOTATION = 7
    PYTHON_FUNCTION = 8


DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
"""Categories of events that occupy a device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Duration events of one rank, sorted by (begin_ns, -end_ns); arrays are not writeable.

    Attributes:
        source: the file's name, for messages.
        base_ns: what was subtracted from every time stamp, so that the first event begins at 0.
        begin_ns, end_ns: int64, shape (n,): half-open interval of the event, exact nanoseconds.
        category: uint8, shape (n,): :class:`Category`.
        name: int32, shape (n,): index into ``names``.
        track: int32, shape (n,): index into ``tracks`` (host thread or device stream).
        correlation: int64, shape (n,): joins a host launch to its device events, -1 without one.
        names: the distinct event names.
        tracks: the distinct (pid, tid) pairs as written in the file, as text.
        metadata: the file's top-level entries other than its events.
        num_dropped: events that could not be used (no duration, negative duration, not a number).
    """

    source: str
    base_ns: int
    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    category: NDArray[np.uint8]
    name: NDArray[np.int32]
    track: NDArray[np.int32]
    correlation: NDArray[np.int64]
    names: tuple[str, ...]
    tracks: tuple[tuple[str, str], ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.begin_ns)

    def name_ids(self, prefix: str) -> NDArray[np.int32]:
        """Ids of the names that start with ``prefix``."""
        return np.array([index for index, name in enumerate(self.names) if name.startswith(prefix)], np.int32)
