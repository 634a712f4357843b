"""What a rule is: a function of facts that yields what it found; and the words that all of them use.

    @rule("slow_layers", title="Slow layers", healthy="Layers are fast", warning=0.05, critical=0.2)
    def slow_layers(facts: Facts, limits: Limits) -> Iterator[Found | Passed]:
        \"\"\"Forward time of layers that could be faster.\"\"\"
        saves_ns = facts.modules.root.forward_ns / 2
        yield Found(saves_ns=saves_ns, what=f"Layers take {COST}.", do="Use faster ones.")
        yield Passed(what="Layers take little time.")

``engine.py`` does the rest: it applies the thresholds, decides how severe a finding is, and places it. A fact
that wasn't measured raises, and the rule is then not evaluated. The docstring is the help text.
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
"""Less than this in a step is not worth a finding: about what Lightning's own loop takes."""

WARNING: Final = 0.03
CRITICAL: Final = 0.15
"""Source: the bands of TensorFlow's profiler for whatever is neither input nor compute
(``input_pipeline_analysis`` in tensorflow/profiler: kernel launch and all other time)."""

NO_CUDA: Final = "the run didn't use a CUDA device"
NOT_A_FIT: Final = "only checked for training loops"
ON_THE_CPU: Final = "only checked on a GPU"
HOST_WAIT: Final = "sync wait per step"
"""Label of how long the CPU waits for the GPU."""
HOST_LATE: Final = "GPU idle per step while the CPU is late"
"""Label of the idle time in which the CPU is late, whatever it does."""
LATE_WORK: Final = "CPU work while the GPU is idle"
"""Label of what an idle device waits for, where it is no launches."""
LATE_SHARE: Final = "share of the step"
"""Label of what that covers of the idle time."""
PYTHON_CODE: Final = "Python code"
LATE_RANK: Final = "late rank"
LATE_PHASE: Final = "slower phase"
INFLATED: Final = "All timings in this report are inflated, including the model's."
"""Sentence of the rule about busy CPUs."""
VOLTA: Final = (7, 0)
"""Compute capability from which on there are tensor cores."""
AMPERE: Final = (8, 0)
"""Compute capability from which on tensor cores take TF32 and bfloat16."""
FAILED: Final = "the rule failed because of a bug"
NOTHING_SAMPLED: Final = "no samples were taken"


class Limits:
    """The thresholds of a rule, by name: ``limits.warning``."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> float:
        try:
            return self.__dict__["_values"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(name) from None

    def is_found(self, share: float | None, ns: float, least_ns: float | None = None) -> bool:
        """Whether so much is worth a finding.

        Args:
            share: of the step or the loop; ``None`` if it isn't known.
            ns: per step, of which it is the share.
            least_ns: the lower end of its interval, which must be worth it, too; ``None`` if there is none.
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
        what: one or two sentences on what is so, with ``COST`` where its cost goes.
        do: what to change.
        saves_ns: per step, all phases taken together, a mean; ``None`` if it isn't known.
        saving_is: whether that's a bound.
        title: a few words; ``""`` for the rule's.
        at: places, most expensive first; ``None`` in it is left out.
        judged_ns: what is compared with the thresholds; ``None`` for the saving.
        least_ns: its lower end, which must be worth it, too; ``None`` without an interval.
        whole_ns: what it is a share of; ``None`` for the rule's denominator.
        severity: ``None`` leaves it to the thresholds; otherwise it is found, whatever they say.
        verdict_ns: what of it speaks for the verdict, where that isn't the saving.
        slices: where it's seen in a timeline, before the rule's own.
        wants: what the action sets: argument → value.
        phases: that the saving is in; ``None`` for the rule's.
        passed: what's said where it is too little to be found.
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
    """What a rule says where it finds nothing; ``title`` is ``""`` for the rule's healthy name."""

    what: str
    evidence: Iterable[Evidence] = ()
    title: str = ""


Ask = Callable[[Any, Limits], Iterator[Found | Passed]]
_Asks = Ask | Callable[[Any], Iterator[Found | Passed]]


class Rule(Record, frozen=True, kw_only=True):
    """One question about a run or about traces; what :func:`rule` makes of a function.

    Attributes:
        kind: stable code of its findings.
        title: the problem, as a noun phrase or short sentence.
        healthy: the state without that problem, in at most five words.
        help: its criterion, in Markdown.
        of: what its shares are of: the clean steps, or the whole loop.
        limits: its thresholds by name.
        levels: from where on a finding is a warning and critical, in words.
        where: what its findings point at, in words.
        bound: the verdict that the time of its findings speaks for, such as ``sync_bound``.
        sampled_phases: phases whose time is that of its findings, so that any line of the user's in them may
            be the place.
        phases: phases that the time of its findings is in, also where it is not all of theirs; by default the
            sampled ones. Empty where it may be in any phase.
        slices: where the time is seen in a timeline, besides the ranges of its phases.
        is_between_steps: whether the time lies between or around the steps: then it is a share of the loop.
        is_of_device: whether it is about the device's side, which sees the same time as the host's.
        on_traces: whether it also judges traces alone.
        samples: of others that the training thread waits for, as a function of facts: the lines of a finding
            are looked for in them, if there are any, and not in its own samples. Such a rule has a limit
            ``least_samples``: at a line that comes before the others.
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
"""All rules of the files that are imported, as they stand there."""


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
    """Make a rule of a function of facts, and of limits if it needs them; its docstring is its criterion.

    Args:
        of_words: what the shares are of, where it isn't "of the loop" or nothing.
        levels: from where on it is a warning and critical, where the limits don't say it.
        has_thresholds: whether it is judged by its share of the time; otherwise it says itself how severe
            what it found is.
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
    """A docstring as part of a sentence or a table: one line, without its full stop."""
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
    """What a rule says that found nothing."""
    return Finding(
        kind=rule.kind,
        status=status,
        title=title or rule.healthy,
        summary=summary,
        evidence=tuple(evidence),
    )


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


def few_samples(samples: int, took_ns: float) -> str:
    """Why nobody can say whether calls take too long, as a clause."""
    return f"about {milliseconds(took_ns)} per step, but {samples} stack samples are too few to tell"
