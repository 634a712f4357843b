"""Rules: functions of facts that yield what they found, and words that all rules share.

    @rule("slow_layers", title="Slow layers", healthy="Layers are fast", warning=0.05, critical=0.2)
    def slow_layers(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
        \"\"\"Forward time of layers that could be faster.\"\"\"
        saves_ns = facts.modules.root.forward_ns / 2
        yield Found(saves_ns=saves_ns, what=f"Layers take {COST}.", do="Use faster ones.")
        yield Passed(what="Layers take little time.")

``engine.py`` applies the thresholds, decides the severity and locates the finding. If a fact wasn't measured,
it raises, and the rule is not evaluated. The docstring is the help text.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from lightning_modelprof.analysis.source.hot_lines import HotLines
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.advice.lines import PointsAt
from lightning_modelprof.report.model import Evidence, Finding, SavingIs, Severity, Slices, Status, Unit
from lightning_modelprof.run.setup import TrainingSetup
from lightning_modelprof.units import milliseconds

FLOOR_NS: Final = 300_000.0
"""Minimum time per step worth a finding: about what Lightning's own loop takes."""

WARNING: Final = 0.03
CRITICAL: Final = 0.15
"""Source: the bands of TensorFlow's profiler for everything that is neither input nor compute
(``input_pipeline_analysis`` in tensorflow/profiler: kernel launch and all other time).
"""

NO_CUDA: Final = "the run didn't use a CUDA device"
NOT_A_FIT: Final = "only checked for training loops"
ON_THE_CPU: Final = "only checked on a GPU"
HOST_WAIT: Final = "sync wait per step"
"""Label of the time the CPU waits for the GPU."""
HOST_LATE: Final = "GPU idle per step while the CPU is late"
"""Label of the GPU idle time while the CPU is late, for any reason."""
LATE_WORK: Final = "CPU work while the GPU is idle"
"""Label of what an idle GPU waits for, other than launches."""
LATE_SHARE: Final = "share of the step"
"""Label of that work's share of the step."""
PYTHON_CODE: Final = "Python code"
LATE_RANK: Final = "late rank"
LATE_PHASE: Final = "slower phase"
INFLATED: Final = "All timings in this report are inflated, including the model's."
"""Sentence of the rule about CPU contention."""
VOLTA: Final = (7, 0)
"""Minimum compute capability of GPUs with tensor cores."""
AMPERE: Final = (8, 0)
"""Minimum compute capability of tensor cores with TF32 and bfloat16."""
FAILED: Final = "the rule failed because of a bug"
NOTHING_SAMPLED: Final = "no samples were taken"


class Limits:
    """A rule's thresholds by name: ``limits.warning``."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> float:
        try:
            return self.__dict__["_values"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def is_found(self, share: float | None, ns: float, least_ns: float | None = None) -> bool:
        """Return whether a time is worth a finding.

        Args:
            share: share of the step or the loop; ``None`` if unknown.
            ns: the same time per step.
            least_ns: its lower bound, which must also be worth a finding; ``None`` without an interval.
        """
        if share is None:
            return False
        sure = 1.0 if least_ns is None or ns <= 0 else least_ns / ns
        return sure * share >= self.warning and sure * ns >= self.floor_ns

    def severity(self, share: float) -> Severity:
        return Severity.CRITICAL if share >= self.critical else Severity.WARNING


class Found(Record, frozen=True, kw_only=True):
    """One thing that costs time.

    Attributes:
        what: one or two sentences on the problem, with ``COST`` in place of its cost.
        do: what to change.
        saves_ns: mean saving per step, summed over all phases; ``None`` if unknown.
        saving_is: whether that's a bound.
        title: a few words; ``""`` for the rule's.
        at: places, most expensive first; ``None`` entries are left out.
        judged_ns: time to compare with the thresholds; ``None`` for the saving.
        least_ns: its lower bound, which must also be worth a finding; ``None`` without an interval.
        whole_ns: what it is a share of; ``None`` for the rule's denominator.
        severity: ``None`` lets the thresholds decide; otherwise it is found regardless of them.
        verdict_ns: the part that counts for the verdict, if not the saving.
        slices: where to see it in a timeline, before the rule's own.
        wants: what the action sets: argument → value.
        phases: phases that the saving is in; ``None`` for the rule's.
        passed: text if it's too small for a finding.
    """

    what: str
    do: str
    saves_ns: float | None = None
    saving_is: SavingIs = ""
    title: str = ""
    at: Iterable[Place | None] = ()
    evidence: Iterable[Evidence] = ()
    judged_ns: float | None = None
    least_ns: float | None = None
    whole_ns: float | None = None
    severity: Severity | None = None
    verdict_ns: float | None = None
    slices: Iterable[Slices] = ()
    wants: Mapping[str, Any] | None = None
    phases: tuple[str, ...] | None = None
    passed: str = ""


class Passed(Record, frozen=True, kw_only=True):
    """A rule's result when it finds nothing; ``title`` is ``""`` for the rule's healthy name."""

    what: str
    evidence: Iterable[Evidence] = ()
    title: str = ""


Ask = Callable[[Any, Limits], Iterator[Found | Passed]]
_Asks = Ask | Callable[[Any], Iterator[Found | Passed]]


class Rule(Record, frozen=True, kw_only=True):
    """One check of a run or of traces, made by :func:`rule` from a function.

    Attributes:
        kind: stable code of its findings.
        title: the problem, as a noun phrase or short sentence.
        healthy: the state without that problem, in at most five words.
        help: its criterion, in Markdown.
        of: what its shares are of: the clean steps, or the whole loop.
        limits: thresholds by name.
        levels: warning and critical levels, in words.
        where: what its findings point at, in words.
        bound: verdict that its findings' time supports, such as ``sync_bound``.
        sampled_phases: phases entirely made up of its findings' time, so any user line in them may be the
            place.
        phases: phases that its findings' time is in, even if only partly; by default the sampled ones. Empty
            if it may be in any phase.
        slices: where to see the time in a timeline, in addition to its phases' ranges.
        is_between_steps: whether the time is between or around the steps; it is then a share of the loop.
        is_of_device: whether it is about the device, which sees the same time as the CPU.
        on_traces: whether it also judges traces alone.
        samples: for rules about workers that the training thread waits for: function of facts that returns
            the workers' samples, which locate findings if there are any. Needs a limit ``least_samples``:
            minimum samples of a line that goes first.
    """

    kind: str
    title: str
    healthy: str
    help: str
    ask: Ask
    of: Literal["step", "loop"] = "step"
    limits: Mapping[str, float]
    levels: str = ""
    where: str = ""
    bound: str | None = None
    points_at: PointsAt = PointsAt.TIME
    sampled_phases: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    slices: tuple[Slices, ...] = ()
    is_between_steps: bool = False
    is_of_device: bool = False
    on_traces: bool = False
    samples: Callable[[Any], HotLines | None] | None = None


MADE: Final[list[Rule]] = []
"""All rules of the imported files, in order of definition."""


def rule(
    kind: str,
    *,
    title: str,
    healthy: str,
    of: Literal["step", "loop"] = "step",
    of_words: str = "",
    levels: str | None = None,
    where: str = "",
    bound: str | None = None,
    points_at: PointsAt = PointsAt.TIME,
    sampled_phases: tuple[str, ...] = (),
    phases: tuple[str, ...] = (),
    slices: tuple[Slices, ...] = (),
    is_between_steps: bool = False,
    is_of_device: bool = False,
    on_traces: bool = False,
    samples: Callable[[Any], HotLines | None] | None = None,
    has_thresholds: bool = True,
    **limits: float,
) -> Callable[[_Asks], Rule]:
    """Make a rule from a function of facts, and optionally limits; its docstring is the criterion.

    Args:
        of_words: what the shares are of, if not "of the loop" or nothing.
        levels: warning and critical levels, if the limits don't show them.
        has_thresholds: whether its share of the time decides the severity; otherwise the rule sets it.
        limits: thresholds by name; ``warning``, ``critical`` and ``floor_ns`` have defaults.
    """
    if has_thresholds:
        limits = {"warning": WARNING, "critical": CRITICAL, "floor_ns": FLOOR_NS} | limits

    def make(function: _Asks) -> Rule:
        ask: Any = function
        if len(inspect.signature(ask).parameters) == 1:
            ask = functools.wraps(ask)(lambda facts, _, only=ask: only(facts))
        made = Rule(
            kind=kind,
            title=title,
            healthy=healthy,
            help=_criterion(inspect.getdoc(ask) or ""),
            ask=ask,
            of=of,
            limits=limits,
            levels=_levels(limits, of_words or ("of the loop" if of == "loop" else ""))
            if levels is None
            else levels,
            where=where,
            bound=bound,
            points_at=points_at,
            sampled_phases=sampled_phases,
            phases=phases or sampled_phases,
            slices=slices,
            is_between_steps=is_between_steps,
            is_of_device=is_of_device,
            on_traces=on_traces,
            samples=samples,
        )
        MADE.append(made)
        return made

    return make


def _criterion(text: str) -> str:
    """Turn a docstring into part of a sentence or table: one line, without its full stop."""
    line = " ".join(text.split()).removesuffix(".")
    is_name = line[1:2].isupper() or not line[:1].isalpha()
    return line if is_name else line[:1].lower() + line[1:]


def _levels(limits: Mapping[str, float], of: str) -> str:
    if "warning" not in limits or "critical" not in limits:
        return ""
    return f"{100 * limits['warning']:g}%, {100 * limits['critical']:g}% {of}".strip()


def unfound(
    rule: Rule, status: Status, summary: str, evidence: Iterable[Evidence] = (), title: str = ""
) -> Finding:
    """Make the finding of a rule that found nothing."""
    return Finding(
        kind=rule.kind,
        status=status,
        title=title or rule.healthy,
        summary=summary,
        evidence=tuple(evidence),
    )


def location_of(place: Place) -> Place:
    """Return a place for reports; code of torch, Lightning and the like has no line."""
    if place.is_library and not place.package:
        return Place(function=place.function)
    return replace(place, is_library=False) if place.is_library else place


def lines_that_call(setup: TrainingSetup | None, *names: str) -> list[Place]:
    """Return the user's lines that call one of these names, as places to change."""
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


def few_samples(samples: int, took_ns: float) -> str:
    """Explain, in a clause, that too few samples show whether calls are slow."""
    return f"about {milliseconds(took_ns)} per step, but {samples} stack samples are too few to tell"
