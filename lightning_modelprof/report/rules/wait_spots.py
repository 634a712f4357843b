"""Joins the waits of a trace with the source lines that were seen to wait."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from lightning_modelprof.analysis.trace.host_waits import HostWait, WaitPlace
from lightning_modelprof.report.model import Location
from lightning_modelprof.run.sites import HOST_TO_DEVICE, PRINT, SourceSite, StepSites

_FUNCTION: Final = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)")
_PHASES_OF_SITES: Final[Mapping[str, tuple[str, ...]]] = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
    "optimizer": ("optimizer",),
}
"""Phase of a trace → phases of sites; those around the model are told apart otherwise there, so all fit."""
_MADE_ON_HOST: Final = "aten::lift_fresh"
"""Of ``torch.tensor(..., device=...)``, which a trace shows as a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpot:
    """One place to change: waits that come from the same source lines, as far as they are known.

    Attributes:
        waits: of the trace; most at stake first.
        sites: the source lines, most calls first; empty if none is known.
    """

    waits: tuple[HostWait, ...]
    sites: tuple[SourceSite, ...]

    @property
    def stake_ns(self) -> int:
        """In all recorded steps."""
        return sum(wait.stake_ns for wait in self.waits)

    @property
    def wait_ns(self) -> int:
        """Host time in all recorded steps."""
        return sum(wait.wait_ns for wait in self.waits)

    @property
    def calls(self) -> int:
        """In all recorded steps."""
        return sum(wait.calls for wait in self.waits)

    @property
    def operators(self) -> tuple[str, ...]:
        """Of the most expensive wait, innermost first."""
        return self.waits[0].place.operators

    @property
    def what(self) -> str:
        """What waits, as a reader would call it."""
        place = self.waits[0].place
        name = place.operators[-1] if place.operators else place.call
        where = place.annotation or place.phase
        return f"{name} in {where}" if where else name

    @property
    def locations(self) -> tuple[Location, ...]:
        """Exact lines; without any the function, the range or the phase."""
        if self.sites:
            return tuple(dict.fromkeys(map(location_of_site, self.sites)))
        place = self.waits[0].place
        match = _FUNCTION.fullmatch(place.function)
        if match is not None:
            return (Location(file=match["file"], line=int(match["line"]), function=match["name"]),)
        where = place.annotation or place.phase or self.what
        return (Location(function=where),)


def spots_of(
    waits: Iterable[HostWait], sites: StepSites | None, kinds: Collection[str]
) -> tuple[WaitSpot, ...]:
    """The places to change, most at stake first.

    Args:
        waits: of a trace, most at stake first.
        sites: source lines of one step.
        kinds: of sites, that these waits can come from.
    """
    usable = [] if sites is None else [one for one in sites.sites if one.kind in kinds and one.is_blocking]
    found: dict[object, tuple[list[HostWait], tuple[SourceSite, ...]]] = {}
    for wait in waits:
        lines = _sites_of(wait.place, usable)
        place = wait.place
        where = place.annotation or place.phase
        key = lines or place.function or (where, place.operators[-1:] or place.call)
        found.setdefault(key, ([], lines))[0].append(wait)
    spots = [WaitSpot(waits=tuple(same), sites=lines) for same, lines in found.values()]
    return tuple(sorted(spots, key=lambda spot: (-spot.stake_ns, -spot.wait_ns)))


def location_of_site(site: SourceSite) -> Location:
    """The line itself; of code that no line of the user's calls, the library's function."""
    if site.file is None:
        return Location(function=site.caller or site.operator, module=site.module or None)
    return Location(
        file=site.file,
        line=site.line,
        function=site.function or None,
        module=site.module or None,
        is_exact=True,
    )


def is_lightnings_own(sites: Sequence[SourceSite]) -> bool:
    """Whether no line of the user's waits, but Lightning does."""
    return bool(sites) and all(site.file is None and "lightning" in site.caller for site in sites)


def _sites_of(place: WaitPlace, sites: Sequence[SourceSite]) -> tuple[SourceSite, ...]:
    """The sites a wait may come from: of its phase, its operators and, if that is known, its function."""
    phases = _PHASES_OF_SITES.get(place.phase)
    in_phase = [site for site in sites if phases is None or site.phase in phases]
    fitting = [site for site in in_phase if site.operator in place.operators]
    if not fitting and place.operators:
        others = (PRINT, _MADE_ON_HOST) if place.kind == HOST_TO_DEVICE else (PRINT,)
        fitting = [site for site in in_phase if site.operator in others]
    match = _FUNCTION.fullmatch(place.function)
    if match is not None:
        # What the step of the sites ran and what the window recorded need not be the same.
        fitting = [
            site
            for site in fitting
            if site.function_line == int(match["line"])
            and site.file is not None
            and PurePath(site.file).name == PurePath(match["file"]).name
        ]
    return tuple(sorted(fitting, key=lambda site: -site.calls))
