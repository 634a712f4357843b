"""What rules about waits of the host have in common: one finding for each place that costs enough."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.host_waits import HostWait, HostWaits
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.report.model import Evidence, Finding, Location, Severity
from lightning_modelprof.report.rules.base import count, duration, milliseconds, percent, ratio
from lightning_modelprof.report.rules.device import NO_WINDOW, Circumstances, DeviceRule, pooled_waits
from lightning_modelprof.report.rules.wait_spots import WaitSpot, location_of_site, spots_of
from lightning_modelprof.run.sites import SourceSite

_MOST_FINDINGS: Final = 5
_MOST_LOCATIONS: Final = 10


@dataclass(frozen=True, kw_only=True)
class WaitRule(DeviceRule):
    """Waits of some kinds; what to do about them is the subclass's.

    The time at stake is how much earlier the device would be done if no call waited (``HostWaits.stake_ns``):
    the idle time after waits, but never more than the host waited.
    """

    bound: ClassVar[str | None] = "sync_bound"
    site_kinds: ClassVar[tuple[str, ...]]
    """Of source lines that such waits come from."""
    verb: ClassVar[str]
    """What the calls do, in the plural."""

    def judge(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:
        """Found for each place that costs enough, clean, or not evaluated without steps on a device."""
        facts = pooled_waits(traces)
        if isinstance(facts, Absent):
            has_lines = circumstances.sites is not None
            return self.without_window(circumstances) if has_lines else self.not_evaluated(facts.reason)
        if not facts.steps_ns:
            return self.not_evaluated("the recorded steps took no time")
        waits = [wait for wait in facts.waits if self.is_asked(wait)]
        stake = sum(wait.stake_ns for wait in waits)
        share = stake / facts.steps_ns
        cost_ns = circumstances.per_step(stake, facts.steps_ns, facts.num_steps)
        if not self.is_found(share, cost_ns):
            return self.clean(
                self._clean_summary(waits, facts, circumstances, cost_ns),
                (duration("at stake per step", cost_ns), ratio("share of the step", share)),
            )
        spots = spots_of(waits, circumstances.sites, self.site_kinds)
        return tuple(
            self._finding(some, facts, circumstances) for some in self._grouped(spots, facts, circumstances)
        )

    @abstractmethod
    def is_asked(self, wait: HostWait) -> bool:
        """Whether the wait is of the kinds that the rule is about."""

    @abstractmethod
    def advice(
        self, waits: Sequence[HostWait], sites: Sequence[SourceSite], circumstances: Circumstances
    ) -> str:
        """What to change; either of the two may be empty."""

    def without_window(self, circumstances: Circumstances) -> tuple[Finding, ...]:
        """The lines of one step, without times."""
        sites = circumstances.sites
        if sites is None:
            return self.not_evaluated(f"{NO_WINDOW}, and no step's source lines were watched")
        waiting = [
            site
            for site in sites.sites
            if site.kind in self.site_kinds and site.is_blocking and site.device != "cpu"
        ]
        if not waiting:
            return self.clean("No line of the watched step does so.")
        calls = sum(site.calls for site in waiting)
        places = tuple(dict.fromkeys(map(location_of_site, waiting)))
        return (
            self.found(
                f"In the watched step {calls:,} calls in {len(places)} places {self.verb}. What that costs is"
                " not known: record a profiler window (active) for the time.",
                self.advice((), waiting, circumstances),
                Severity.INFO,
                places=places[:_MOST_LOCATIONS],
                evidence=[count("calls per step", calls)],
            ),
        )

    def _clean_summary(
        self, waits: Sequence[HostWait], facts: HostWaits, circumstances: Circumstances, cost_ns: float
    ) -> str:
        calls = sum(wait.calls for wait in waits) / facts.num_steps
        if not calls:
            return "In the recorded steps the host does not wait for that."
        host_ns = circumstances.per_step(sum(wait.wait_ns for wait in waits), facts.steps_ns, facts.num_steps)
        return (
            f"{_times(calls)} a step the host waits, {milliseconds(host_ns)} in all; without that the device"
            f" would be done {milliseconds(cost_ns)} earlier."
        )

    def _grouped(
        self, spots: Sequence[WaitSpot], facts: HostWaits, circumstances: Circumstances
    ) -> list[list[WaitSpot]]:
        """The spots that cost enough by themselves, one each; the others together."""
        alone: list[list[WaitSpot]] = []
        rest: list[WaitSpot] = []
        for spot in spots:
            cost_ns = circumstances.per_step(spot.stake_ns, facts.steps_ns, facts.num_steps)
            if len(alone) < _MOST_FINDINGS - 1 and self.is_found(spot.stake_ns / facts.steps_ns, cost_ns):
                alone.append([spot])
            elif spot.stake_ns:
                rest.append(spot)
        return [*alone, rest] if rest else alone

    def _finding(self, spots: Sequence[WaitSpot], facts: HostWaits, circumstances: Circumstances) -> Finding:
        stake = sum(spot.stake_ns for spot in spots)
        share = stake / facts.steps_ns
        cost_ns = circumstances.per_step(stake, facts.steps_ns, facts.num_steps)
        calls = sum(spot.calls for spot in spots) / facts.num_steps
        host_ns = circumstances.per_step(sum(spot.wait_ns for spot in spots), facts.steps_ns, facts.num_steps)
        what = spots[0].what if len(spots) == 1 else f"{len(spots)} places ({spots[0].what}, ...)"
        sites = tuple(dict.fromkeys(site for spot in spots for site in spot.sites))
        places: dict[Location, None] = dict.fromkeys(place for spot in spots for place in spot.locations)
        return self.found(
            f"{_times(calls)} a step the host waits in {what}, {milliseconds(host_ns)} in all. After that the"
            f" device waits for the host: without, it would be done {milliseconds(cost_ns)} earlier"
            f" ({percent(share)} of a step).",
            self.advice([wait for spot in spots for wait in spot.waits], sites, circumstances),
            self._severity(share, cost_ns),
            saving_ns=cost_ns,
            places=tuple(places)[:_MOST_LOCATIONS],
            evidence=_evidence(cost_ns, share, calls, host_ns),
        )

    def _severity(self, share: float, cost_ns: float) -> Severity:
        return self.severity(share) if self.is_found(share, cost_ns) else Severity.INFO


def _evidence(cost_ns: float, share: float, calls: float, host_ns: float) -> list[Evidence]:
    return [
        duration("at stake per step", cost_ns),
        ratio("share of the step", share),
        count("waits per step", calls),
        duration("host's wait per step", host_ns),
    ]


def _times(calls: float) -> str:
    return f"{calls:.3g} times"
