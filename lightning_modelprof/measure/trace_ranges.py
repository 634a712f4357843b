"""Named ranges that the phases of a step have in a trace."""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from lightning_modelprof.run.phases import PHASES, RANGE_PREFIX


class TraceRanges:
    """Named ranges on the training thread: one per phase that is open, innermost last."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def push(self, phase: int) -> None:
        """Open the range of a phase."""
        self.open(RANGE_PREFIX + PHASES[phase].key)

    def open(self, name: str) -> None:
        """Open a range of any name."""
        entered: Any = record_function(name)
        entered.__enter__()
        self._open.append(entered)

    def pop(self) -> None:
        """Close the innermost range; does nothing when none is open."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def close_all(self) -> None:
        """Close every open range, innermost first."""
        while self._open:
            self.pop()
