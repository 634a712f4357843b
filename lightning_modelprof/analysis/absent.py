"""Transitional: how facts looked before they raised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.record import Record

_NONE = ("setup", "cost", "repeated", "benchmark", "all_ranks", "sites")


class Absent(Record, frozen=True):
    reason: str

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class Analysis:
    """Facts as they were: ``Absent`` or ``None`` in the place of what raises."""

    def __init__(self, facts: Any) -> None:
        self.new = facts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            value = getattr(self.new, name)
        except NotMeasured as why:
            return None if name in _NONE else Absent(why.reason)
        if name == "windows":
            return tuple(replace(one, facts=None if one.facts is None else one.facts.old) for one in value)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Analysis) and self.new is other.new

    def __hash__(self) -> int:
        return id(self.new)
