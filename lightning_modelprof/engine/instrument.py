"""What measures something of a loop beside its timing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Instrument:
    """Measures something of one loop; all that it needn't do stays as it is here.

    It's made before the loop's dataloaders, and what it changed is undone by the loop's ``ExitStack``.
    """

    def begin(self) -> None:
        """The loop begins."""

    def poll(self) -> None:
        """Between two steps of the training thread."""

    def trace_metadata(self, begin_ns: int, end_ns: int) -> Mapping[str, Any]:  # noqa: ARG002
        """What a window's trace is to say of a stretch of time, by key; called in a thread of its own."""
        return {}

    def fields(self) -> Mapping[str, Any]:
        """What was measured so far: fields of the ``RankRecord``."""
        return {}


def trace_metadata(instruments: Iterable[Instrument], begin_ns: int, end_ns: int) -> dict[str, Any]:
    """What all of them know of a stretch of time."""
    return {key: value for one in instruments for key, value in one.trace_metadata(begin_ns, end_ns).items()}


def record_fields(instruments: Iterable[Instrument]) -> dict[str, Any]:
    """What all of them measured."""
    return {key: value for one in instruments for key, value in one.fields().items()}
