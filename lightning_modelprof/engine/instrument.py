"""Base class of what measures a loop in addition to its timing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Instrument:
    """Measures something about a loop; subclasses override the methods they need.

    It's made before the loop's dataloaders, and the loop's ``ExitStack`` undoes its changes.
    """

    def begin(self) -> None:
        """Start with the loop."""

    def poll(self) -> None:
        """Work between two steps, on the training thread."""

    def trace_metadata(self, begin_ns: int, end_ns: int) -> Mapping[str, Any]:  # noqa: ARG002
        """Return metadata about a time range for a window's trace; called in another thread."""
        return {}

    def fields(self) -> Mapping[str, Any]:
        """Return results so far, as fields of the ``RankRecord``."""
        return {}


def trace_metadata(instruments: Iterable[Instrument], begin_ns: int, end_ns: int) -> dict[str, Any]:
    return {key: value for one in instruments for key, value in one.trace_metadata(begin_ns, end_ns).items()}


def record_fields(instruments: Iterable[Instrument]) -> dict[str, Any]:
    return {key: value for one in instruments for key, value in one.fields().items()}
