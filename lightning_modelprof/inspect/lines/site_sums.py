"""Adds up what a step runs, by source line: in bounded memory, and without a line looked up meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from lightning_modelprof.flops.host_waits import Sighting
from lightning_modelprof.inspect.lines.frames import Spot, UserLines
from lightning_modelprof.run.sites import LineCount, SourceSite

MOST_LINES: Final = 200
"""Lines in the record."""
_MOST_PLACES: Final = 20_000
_MOST_SITES: Final = 1_000


Place: TypeAlias = tuple["Spot | None", str, str]
"""Spot, phase and module: what operators are counted under; plain, as one is made for every operator."""


class _Site(NamedTuple):
    """What calls of sites are added up under; fields as in ``SourceSite``."""

    sighting: Sighting  # without its bytes
    place: Place
    callers: tuple[str, ...]
    operator: str


class _Line(NamedTuple):
    """A source line; fields as in ``SourceSite``."""

    file: str | None
    line: int | None
    function: str
    function_line: int | None


class _Tally:
    """Sums of one place."""

    __slots__ = ("calls", "elements", "logging", "num_bytes", "operators", "unsized", "views")

    def __init__(self) -> None:
        self.calls = self.views = self.logging = self.elements = self.num_bytes = self.unsized = 0
        self.operators: set[str] = set()

    def add(self, other: _Tally) -> None:
        self.calls += other.calls
        self.views += other.views
        self.logging += other.logging
        self.elements += other.elements
        self.num_bytes += other.num_bytes
        self.unsized += other.unsized
        self.operators |= other.operators


class SiteSums:
    """The sums of one step.

    Attributes:
        dropped: calls at places beyond the number that is told apart.
    """

    def __init__(self) -> None:
        self._tallies: dict[Place, _Tally] = {}
        self._sites: dict[_Site, list[int]] = {}  # calls, bytes, calls without known bytes
        self.dropped = 0

    def count(
        self,
        place: Place,
        operator: str,
        operands: Any,
        result: Any,
        *,
        is_view: bool,
        is_logging: bool = False,
    ) -> None:
        """An operator ran at a place, perhaps for a metric."""
        tally = self._tallies.get(place)
        if tally is None:
            if len(self._tallies) >= _MOST_PLACES:
                self.dropped += 1
                return
            tally = self._tallies[place] = _Tally()
        tally.calls += 1
        tally.operators.add(operator)
        if is_view:
            tally.views += 1
            return
        tally.logging += is_logging
        results = result if isinstance(result, (list, tuple)) else (result,)
        try:
            tally.num_bytes += _num_bytes(operands) + _num_bytes(results)
            tally.elements += _elements(results)
        except Exception:  # a tensor that has no such size
            tally.unsized += 1

    def note(self, sighting: Sighting, place: Place, callers: tuple[str, ...], operator: str) -> None:
        """An operator waits or copies."""
        num_bytes = sighting.num_bytes
        site = _Site(sighting._replace(num_bytes=None), place, callers, operator)
        sums = self._sites.get(site)
        if sums is None:
            if len(self._sites) >= _MOST_SITES:
                self.dropped += 1
                return
            sums = self._sites[site] = [0, 0, 0]
        sums[0] += 1
        sums[1] += num_bytes or 0
        sums[2] += num_bytes is None

    def line_counts(self, lines: UserLines) -> list[LineCount]:
        """The places by line, most operators first: several instructions of one line are one."""
        merged: dict[tuple[_Line, str, str], _Tally] = {}
        for (spot, phase, module), tally in self._tallies.items():
            merged.setdefault((_located(spot, lines), phase, module), _Tally()).add(tally)
        counts = [
            LineCount(
                **line._asdict(),
                module=module,
                phase=phase,
                calls=tally.calls,
                views=tally.views,
                operators=len(tally.operators),
                elements=tally.elements,
                num_bytes=tally.num_bytes,
                unsized=tally.unsized,
                logging=tally.logging,
            )
            for (line, phase, module), tally in merged.items()
        ]
        return sorted(counts, key=_rank)

    def source_sites(self, lines: UserLines) -> tuple[SourceSite, ...]:
        """The sites by line, most calls first."""
        merged: dict[tuple[_Line, _Site], list[int]] = {}
        for site, sums in self._sites.items():
            spot, phase, module = site.place
            nowhere = site._replace(place=(None, phase, module))
            whole = merged.setdefault((_located(spot, lines), nowhere), [0, 0, 0])
            for index, one in enumerate(sums):
                whole[index] += one
        sites = (_source_site(line, site, sums) for (line, site), sums in merged.items())
        return tuple(sorted(sites, key=_rank))


def _source_site(line: _Line, site: _Site, sums: list[int]) -> SourceSite:
    sighting, (_, phase, module) = site.sighting, site.place
    return SourceSite(
        kind=sighting.kind,
        **line._asdict(),
        callers=site.callers,
        module=module,
        phase=phase,
        operator=site.operator,
        device=sighting.device,
        calls=sums[0],
        num_bytes=None if sums[2] else sums[1],
        is_blocking=sighting.is_blocking,
        is_pinned=sighting.is_pinned,
        is_non_blocking=sighting.is_non_blocking,
    )


def _located(spot: Spot | None, lines: UserLines) -> _Line:
    if spot is None:
        return _Line(file=None, line=None, function="", function_line=None)
    location, line = lines.locate(spot)
    return _Line(location.file, line, location.function, location.line)


def _rank(one: LineCount | SourceSite) -> tuple[Any, ...]:
    """Most calls first; among equals by where they are, so that the order is always the same."""
    return -one.calls, one.file or "", one.line or 0, one.phase, one.module


_TENSOR, _SEQUENCE, _OTHER = range(3)
_KINDS: dict[type, int] = {}  # torch's own isinstance takes long for what is no tensor


def _kind_of(value: Any) -> int:
    kind = _KINDS.get(type(value))
    if kind is None:
        is_tensor, is_sequence = isinstance(value, torch.Tensor), isinstance(value, (list, tuple))
        kind = _KINDS[type(value)] = _TENSOR if is_tensor else _SEQUENCE if is_sequence else _OTHER
    return kind


def _num_bytes(values: Iterable[Any]) -> int:
    """Bytes of tensors, in lists too; raises for tensors that are not strided."""
    total = 0
    for value in values:
        kind = _KINDS.get(type(value))
        if kind is None:
            kind = _kind_of(value)
        if kind == _TENSOR:
            total += value.nbytes
        elif kind == _SEQUENCE:
            total += _num_bytes(value)
    return total


def _elements(values: Iterable[Any]) -> int:
    total = 0
    for value in values:
        kind = _kind_of(value)
        if kind == _TENSOR:
            total += value.numel()
        elif kind == _SEQUENCE:
            total += _elements(value)
    return total
