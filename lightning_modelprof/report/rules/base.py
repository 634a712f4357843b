"""What every rule has: a stable code, thresholds that are its fields, and three ways to answer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.source.hot_lines import FoundCalls, HotLines
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.advice.lines import PointsAt, at_exact_lines, location_at
from lightning_modelprof.report.model import (
    Evidence,
    Finding,
    SavingIs,
    Severity,
    Slices,
    Status,
    Unit,
)
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.run.phases import RANGE_PREFIX
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.units import milliseconds, time_per_step

FLOOR_NS: Final = 300_000.0
"""Less than this in a step is not worth a finding: about what Lightning's own loop takes."""


NO_SETUP: Final = "the run was saved by an older version, without the training setup"


NO_CUDA: Final = "the run didn't use a CUDA device"


NOT_A_FIT: Final = "only checked for training loops"


class RuleHelp(NamedTuple):
    """The definition of a rule, in Markdown.

    Attributes:
        found: its criterion.
        of: what the shares are of, where they need a word.
        levels: from where on a finding is a warning and critical, where fields do not say it.
        where: what its findings point at.
    """

    found: str
    of: str = ""
    levels: str | None = None
    where: str = ""


class Rule(Record, frozen=True, kw_only=True):
    """One question about a run. Its fields are its thresholds, so the class is its own configuration."""

    kind: ClassVar[str]
    """Stable code of its findings."""
    title: ClassVar[str]
    """The problem, as a noun phrase or short sentence."""
    healthy: ClassVar[str]
    """The state without that problem, in at most five words; the title of findings that aren't found."""
    help: ClassVar[RuleHelp]

    bound: ClassVar[str | None] = None
    """The verdict that the time of its findings speaks for, such as ``sync_bound``."""
    points_at: ClassVar[PointsAt] = PointsAt.TIME

    sampled_phases: ClassVar[tuple[str, ...]] = ()
    """Phases whose time is that of its findings, so that any line of the user's in them may be the place."""

    phases: ClassVar[tuple[str, ...]] = ()
    """Phases that the time of its findings is in, also where it is not all of theirs; by default the sampled
    ones. Empty where it may be in any phase."""

    slices: ClassVar[tuple[Slices, ...]] = ()
    """Where the time of its findings is seen in a timeline, besides the ranges of its phases."""

    is_of_loop: ClassVar[bool] = False
    """Whether the time of its findings lies between or around the steps: then it is a share of the loop."""

    @property
    def levels(self) -> str:
        """From where on it is a warning, and critical: by its fields, unless its definition says it."""
        warning, critical = getattr(self, "warning", None), getattr(self, "critical", None)
        if self.help.levels is not None or warning is None or critical is None:
            return self.help.levels or ""
        return f"{100 * warning:g}%, {100 * critical:g}% {self.help.of}".strip()

    def saves_ns(self, finding: Finding) -> float:
        """What of a finding's time speaks for the verdict; less where another rule speaks of it, too."""
        return finding.saving_ns_per_step or 0.0

    def at_lines(self, finding: Finding, analysis: Analysis, hot: HotLines | Absent | None = None) -> Finding:
        """A finding of its own with the lines that take the time as its places.

        Args:
            finding: whose places are functions.
            hot: the samples in which the lines are looked for; ``None`` means the training thread's.
        """
        libraries = () if analysis.setup is None else [one.package for one in analysis.setup.libraries]
        return at_exact_lines(
            finding,
            analysis.hot_lines if hot is None else hot,
            points_at=self.points_at,
            phases=self.sampled_phases,
            libraries=libraries,
        )

    @abstractmethod
    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """What the rule says of a run: at least one finding, be it clean or not evaluated."""

    def clean(self, summary: str, evidence: Iterable[Evidence] = ()) -> tuple[Finding, ...]:
        return (
            Finding(
                kind=self.kind,
                status=Status.CLEAN,
                title=self.healthy,
                summary=summary,
                evidence=tuple(evidence),
            ),
        )

    def not_evaluated(self, reason: str) -> tuple[Finding, ...]:
        """Not applicable; the reason is a clause without a full stop."""
        return (Finding(kind=self.kind, status=Status.NOT_EVALUATED, title=self.healthy, summary=reason),)

    def found(
        self,
        summary: str,
        action: str,
        severity: Severity,
        *,
        title: str = "",
        saving_ns: float | None = None,
        saving_is: SavingIs = "",
        places: Iterable[Place | None] = (),
        evidence: Iterable[Evidence] = (),
        slices: Iterable[Slices] = (),
        wants: Mapping[str, Any] | None = None,
    ) -> Finding:
        """One thing that costs time; ``slices`` are its own, before those of the rule."""
        phases = self.phases or self.sampled_phases
        return Finding(
            kind=self.kind,
            status=Status.FOUND,
            severity=severity,
            title=title or self.title,
            summary=summary,
            action=action,
            saving_ns_per_step=saving_ns,
            saving_is="" if saving_ns is None else saving_is,
            phases=phases,
            locations=tuple(location_of(place) for place in places if place),
            evidence=tuple(evidence),
            slices=(*slices, *self.slices, *(Slices(name=RANGE_PREFIX + phase) for phase in phases)),
            wants=tuple((wants or {}).items()),
        )


class ShareRule(Rule, frozen=True, kw_only=True):
    """A rule about a share of the time of a step.

    Attributes:
        warning: share from which on it is found.
        critical: share from which on it is critical.
        floor_ns: time per step below which nothing is found, whatever its share.

    Source: 3% and 15% are the bands of TensorFlow's profiler for whatever is neither input nor compute
    (``input_pipeline_analysis`` in tensorflow/profiler: kernel launch and all other time).
    """

    warning: float = 0.03
    critical: float = 0.15
    floor_ns: float = FLOOR_NS

    def is_found(self, share: float | None, ns: float, least_ns: float | None = None) -> bool:
        """Whether so much is worth a finding.

        Args:
            share: of the step.
            ns: per step, of which it is the share.
            least_ns: the lower end of its interval, which must be worth it, too; ``None`` if there is none.
        """
        if share is None:
            return False
        sure = 1.0 if least_ns is None or ns <= 0 else least_ns / ns
        return sure * share >= self.warning and sure * ns >= self.floor_ns

    def severity(self, share: float) -> Severity:
        return Severity.CRITICAL if share >= self.critical else Severity.WARNING


def location_of(place: Place) -> Place:
    """The same place in the words of a report; of torch, Lightning and the like without a line."""
    if place.is_library and not place.package:
        return Place(function=place.function)
    return replace(place, is_library=False) if place.is_library else place


def lines_that_call(setup: TrainingSetup | None, *names: str) -> list[Place]:
    """The user's lines that call one of these names, where something has to be changed."""
    calls = {} if setup is None else setup.calls
    return [replace(location_of(place), is_exact=True) for name in names for place in calls.get(name, ())]


def duration(label: str, ns: float | None) -> Evidence:
    return Evidence(label=label, value=ns, unit=Unit.DURATION_NS)


def ratio(label: str, share: float | None) -> Evidence:
    return Evidence(label=label, value=share, unit=Unit.RATIO)


def count(label: str, number: float | None) -> Evidence:
    return Evidence(label=label, value=number, unit=Unit.COUNT)


def text(label: str, value: str) -> Evidence:
    return Evidence(label=label, value=value, unit=Unit.TEXT)


NOTHING_SAMPLED: Final = "no samples were taken"


def few_samples(samples: int, took_ns: float) -> str:
    """Why nobody can say whether calls take too long, as a clause."""
    return f"about {milliseconds(took_ns)} per step, but {samples} stack samples are too few to tell"


class SampledCallsRule(ShareRule, frozen=True, kw_only=True):
    """The share of samples in some calls; less two standard errors it must be worth a finding.

    Attributes:
        least_samples: in the calls.

    Source: half of what TraceML takes for what is in a step and in none of its parts, 10% and 20%.
    """

    what: ClassVar[str]
    """The calls as the subject of a sentence, with its verb."""
    bound: ClassVar[str | None] = "host_bound"
    points_at: ClassVar[PointsAt] = PointsAt.CHANGE
    is_lower_bound: ClassVar[bool] = False
    """Whether more goes with the calls than their samples say."""

    warning: float = 0.05
    critical: float = 0.20
    least_samples: int = 10

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        costs, hot = analysis.step_costs, analysis.hot_lines
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if isinstance(hot, Absent):
            return self.not_evaluated(NOTHING_SAMPLED)
        calls = self.calls(analysis, hot)
        if isinstance(calls, Absent):
            return self.not_evaluated(calls.reason)
        took_ns = calls.share * costs.loop.wall_ns
        least = calls.share - 2 * math.sqrt(calls.share * (1 - calls.share) / max(hot.num_samples, 1))
        if calls.samples < self.least_samples or not self.is_found(least, least * costs.loop.wall_ns):
            return self.too_few(analysis, calls, took_ns)
        saved = f" Saves at least {milliseconds(took_ns)} per step." if self.is_lower_bound else ""
        return (
            self.found(
                self.summary(analysis, calls, COST),
                f"{self.action(analysis, calls)}{saved}",
                self.severity(calls.share),
                saving_ns=took_ns,
                saving_is="at least" if self.is_lower_bound else "",
                places=[location_at(line) for line in calls.lines],
                evidence=[
                    duration("minimum time per step" if self.is_lower_bound else "time per step", took_ns),
                    ratio("share of stack samples", calls.share),
                    count("stack samples", calls.samples),
                ],
            ),
        )

    @abstractmethod
    def calls(self, analysis: Analysis, hot: HotLines) -> FoundCalls | Absent: ...

    @abstractmethod
    def summary(self, analysis: Analysis, calls: FoundCalls, took: str) -> str:
        """What is so, as sentences; ``took`` is how long they take."""

    @abstractmethod
    def action(self, analysis: Analysis, calls: FoundCalls) -> str: ...

    def too_few(
        self,
        analysis: Analysis,  # noqa: ARG002
        calls: FoundCalls,
        took_ns: float,
    ) -> tuple[Finding, ...]:
        """What is said where the calls take next to nothing, or where too few samples tell how much."""
        if self.is_found(calls.share, took_ns):
            return self.not_evaluated(few_samples(calls.samples, took_ns))
        return self.clean(f"{self.what} {time_per_step(took_ns)}.")
