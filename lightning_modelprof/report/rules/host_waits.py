"""Does the CPU wait for GPU values, and the GPU then for the CPU?"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Final

from lightning_modelprof.analysis.facts import Facts
from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.analysis.trace.host_waits import HostWait, HostWaits, WaitPlace
from lightning_modelprof.analysis.trace.job_facts import NO_WINDOW, JobFacts
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.advice.owners import owner_of_loader, written_call
from lightning_modelprof.report.model import SavingIs, Severity, Slices
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.rule import HOST_WAIT, Found, Limits, Passed, count, duration, rule
from lightning_modelprof.run.sites import (
    BATCH_START,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    PRINT,
    SYNCHRONISATION,
    SourceSite,
    StepSites,
)
from lightning_modelprof.units import milliseconds

_COULD_SAVE: Final = "could save per step"
_TRANSFER: Final = "transfer"
_MOST_FINDINGS: Final = 5
_MOST_LOCATIONS: Final = 10

_VALUE: Final = frozenset(("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"))
_INDEXING: Final = ("aten::nonzero", "aten::argwhere", "aten::index", "aten::index_put_")
_SELECTING: Final = ("aten::masked_select", "aten::repeat_interleave", "aten::bincount")
_UNIQUE: Final = ("aten::_unique2", "aten::unique_consecutive", "aten::unique_dim")
_SIZE: Final = frozenset((*_INDEXING, *_SELECTING, *_UNIQUE))
_COPY: Final = frozenset(("aten::to", "aten::_to_copy", "aten::copy_"))

_FOR_LIGHTNING: Final = (
    "Log less often (Trainer(log_every_n_steps=...)), and use self.log(..., prog_bar=False). Lightning itself"
    " reads these values."
)
_FOR_VALUES: Final = (
    "Keep values as GPU tensors and read them every N steps. Use torch.where for conditions and"
    " torch._assert_async for checks."
)
_FOR_SIZES: Final = "Use torch.where or fixed-shape masks instead of nonzero, masked_select or unique."
_FOR_COPIES: Final = "Copy to the CPU every N steps, or non-blocking into pinned memory."
_FOR_PRINTS: Final = "Print tensors only every N steps."
_FOR_CALLS: Final = "Remove torch.cuda.synchronize and event.synchronize, or call them every N steps."


@rule(
    "host_device_sync",
    title="CPU waits for GPU values",
    healthy="No costly GPU syncs",
    where="the waiting lines",
    bound="sync_bound",
    slices=(Slices(kind="idle: host"),),
    is_of_device=True,
    on_traces=True,
)
def host_device_sync(facts: JobFacts, limits: Limits) -> Iterator[Found | Passed]:
    """CPU waits for GPU values or a synchronization, by the GPU idle time they cause (After waits in
    CPU waits for the GPU); a hint without a profiler window.
    """
    yield from _of_waits(
        facts,
        limits,
        _Asked(
            kinds=(SYNCHRONISATION, DEVICE_TO_HOST),
            verb="wait for the GPU",
            verb_one="waits for the GPU",
            advice=_without_reads,
        ),
    )


def _without_reads(waits: Sequence[HostWait], sites: Sequence[SourceSite]) -> str:
    if sites and all(site.file is None and "lightning" in site.caller for site in sites):
        return _FOR_LIGHTNING
    operators = {name for wait in waits for name in wait.place.operators}
    operators |= {site.operator for site in sites}
    chosen = [
        text
        for text, applies in (
            (_FOR_SIZES, operators & _SIZE),
            (_FOR_VALUES, operators & _VALUE),
            (_FOR_COPIES, operators & _COPY and not operators & _VALUE),
            (_FOR_PRINTS, PRINT in operators),
            (_FOR_CALLS, any(not wait.place.operators for wait in waits)),
        )
        if applies
    ]
    return " ".join(chosen) or _FOR_VALUES


_FOR_OTHERS: Final = (
    "Create the tensor with device=self.device, or once with register_buffer. Copy other tensors from pinned"
    " memory with non_blocking=True."
)
_FOR_EITHER: Final = (
    "{call} and use .to(device, non_blocking=True) for batches. Create other tensors on the GPU, or once."
)


@rule(
    "host_to_device_copy",
    title="Copies to the GPU block the CPU",
    healthy="Blocking copies are cheap",
    where="the copying lines, or the DataLoader",
    bound="sync_bound",
    slices=(Slices(kind="idle: host"),),
    is_of_device=True,
    on_traces=True,
)
def host_to_device_copy(facts: JobFacts, limits: Limits) -> Iterator[Found | Passed]:
    """Blocking copies to the GPU, by the GPU idle time they cause at least. Copies from pageable memory block
    the CPU; Lightning doesn't wait for copies from pinned memory.
    """

    def advice(waits: Sequence[HostWait], sites: Sequence[SourceSite]) -> str:
        of_batch = [wait.place.phase == _TRANSFER for wait in waits]
        if not isinstance(facts, Facts) and not any(of_batch):
            return _FOR_EITHER.format(call=_pinning(facts))
        of_batch += [site.phase == BATCH_START for site in sites if not waits]
        chosen = [f"{_pinning(facts)}."] if any(of_batch) else []
        if not all(of_batch):
            chosen.append(_FOR_OTHERS)
        return " ".join(chosen) or _FOR_OTHERS

    yield from _of_waits(
        facts,
        limits,
        _Asked(
            kinds=(HOST_TO_DEVICE,),
            verb="copy to the GPU and block the CPU",
            verb_one="copies to the GPU and blocks the CPU",
            advice=advice,
            saving_is="at least",  # copies from pinned memory are also faster, and overlap with work
        ),
    )


def _pinning(facts: JobFacts) -> str:
    setup = facts.get(JobFacts.setup)
    owner = owner_of_loader(setup, setup.loaders[0]) if setup is not None and setup.loaders else None
    return written_call("DataLoader", {"pin_memory": True}, owner)


class _Asked(Record, frozen=True, kw_only=True):
    """The waits that a rule is about.

    Attributes:
        kinds: kinds of source lines that cause such waits.
        verb: predicate for multiple calls.
        verb_one: predicate for one call.
        advice: what to change; either argument may be empty.
    """

    kinds: tuple[str, ...]
    verb: str
    verb_one: str
    advice: Callable[[Sequence[HostWait], Sequence[SourceSite]], str]
    saving_is: SavingIs = ""

    def is_about(self, wait: HostWait) -> bool:
        return (wait.place.kind == HOST_TO_DEVICE) is (HOST_TO_DEVICE in self.kinds)


def _of_waits(facts: JobFacts, limits: Limits, asked: _Asked) -> Iterator[Found | Passed]:
    """Report each costly place; without a window, the lines of the inspected step."""
    waits, sites = facts.get(JobFacts.waits), facts.get(JobFacts.sites)
    if waits is None:
        yield _of_lines(facts, sites, asked)
        return
    if not waits.steps_ns:
        raise NotMeasured("the recorded steps took no time")

    def is_found(saves_ns: int) -> bool:
        return limits.is_found(saves_ns / waits.steps_ns, facts.per_step(saves_ns))

    some = [wait for wait in waits.waits if asked.is_about(wait)]
    saves_ns = sum(wait.saves_ns for wait in some)
    if not is_found(saves_ns):
        yield _cheap(facts, waits, some)
        return
    rest: list[_Spot] = []
    for number, spot in enumerate(_spots_of(some, sites, asked.kinds)):
        if number < _MOST_FINDINGS - 1 and is_found(spot.saves_ns):
            yield _found(facts, waits, [spot], asked, limits.severity(spot.saves_ns / waits.steps_ns))
        elif spot.saves_ns:
            rest.append(spot)
    if rest:
        rest_ns = sum(spot.saves_ns for spot in rest)
        severity = limits.severity(rest_ns / waits.steps_ns) if is_found(rest_ns) else Severity.INFO
        yield _found(facts, waits, rest, asked, severity)


def _of_lines(facts: JobFacts, sites: StepSites | None, asked: _Asked) -> Found | Passed:
    if sites is None:
        reason = facts.why_not(JobFacts.waits)
        raise NotMeasured(reason if facts.traces else f"{NO_WINDOW}, and no step was inspected")
    waiting = [
        site for site in sites.sites if site.kind in asked.kinds and site.is_blocking and site.device != "cpu"
    ]
    if not waiting:
        return Passed(what="The inspected step has no such line.")
    calls = sum(site.calls for site in waiting)
    places = tuple(dict.fromkeys(map(_place_of_site, waiting)))
    return Found(
        what=f"In the inspected step, {calls:,} call{'s' * (calls != 1)} in {len(places)}"
        f" place{'s' * (len(places) != 1)} {asked.verb if calls != 1 else asked.verb_one}. Set active=10"
        " to record a profiler window and see the cost.",
        do=asked.advice((), waiting),
        severity=Severity.INFO,
        at=places[:_MOST_LOCATIONS],
        evidence=[count("calls per step", calls)],
    )


def _cheap(facts: JobFacts, waits: HostWaits, some: Sequence[HostWait]) -> Passed:
    calls, saves_ns = sum(wait.calls for wait in some), facts.per_step(sum(wait.saves_ns for wait in some))
    what = "There are no such waits in the recorded steps."
    if calls:
        host_ns = facts.per_step(sum(wait.wait_ns for wait in some))
        what = (
            f"The CPU waits {_times(calls / waits.num_steps)} per step, {milliseconds(host_ns)} in total."
            f" Without these waits, the GPU would finish {milliseconds(saves_ns)} earlier."
        )
    return Passed(what=what, evidence=[duration(_COULD_SAVE, saves_ns)])


def _found(
    facts: JobFacts, waits: HostWaits, spots: Sequence[_Spot], asked: _Asked, severity: Severity
) -> Found:
    saves_ns = facts.per_step(sum(spot.saves_ns for spot in spots))
    host_ns = facts.per_step(sum(spot.wait_ns for spot in spots))
    calls = sum(spot.calls for spot in spots) / waits.num_steps
    some = [wait for spot in spots for wait in spot.waits]
    what = spots[0].what if len(spots) == 1 else f"{len(spots)} places ({spots[0].what}, ...)"
    sites = tuple(dict.fromkeys(site for spot in spots for site in spot.sites))
    places = dict.fromkeys(place for spot in spots for place in spot.places)
    return Found(
        what=f"The CPU waits {_times(calls)} per step in {what}, {milliseconds(host_ns)} in total. The GPU"
        " then idles until the CPU launches more. Without these waits, it would finish"
        f" {f'{asked.saving_is} {COST}'.lstrip()} earlier.",
        do=asked.advice(some, sites),
        severity=severity,
        # How much earlier the device would finish without these waits: never more than the CPU waited.
        saves_ns=saves_ns,
        saving_is=asked.saving_is,
        at=tuple(places)[:_MOST_LOCATIONS],
        evidence=[
            duration(_COULD_SAVE, saves_ns),
            duration(HOST_WAIT, host_ns),
            count("waits per step", calls),
        ],
        slices=[Slices(name=name, kind="operator") for name in some[0].place.operators[:1]],
        phases=(_TRANSFER,) if {wait.place.phase for wait in some} == {_TRANSFER} else None,
    )


def _times(calls: float) -> str:
    return "once" if calls == 1 else f"{calls:.3g} times"


_FUNCTION: Final = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)")
_PHASES_OF_SITES: Final[Mapping[str, tuple[str, ...]]] = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
    "optimizer": ("optimizer",),
}
"""Trace phase → site phases; sites split the phases around the model differently, so all match there."""
_MADE_ON_HOST: Final = "aten::lift_fresh"
"""Operator of ``torch.tensor(..., device=...)``, which traces show as a copy."""


class _Spot(Record, frozen=True, kw_only=True):
    """One place to change: waits from the same source lines, if known.

    Attributes:
        waits: waits in all recorded steps, largest saving first.
        sites: source lines, most calls first; empty if unknown.
    """

    waits: tuple[HostWait, ...]
    sites: tuple[SourceSite, ...]

    @property
    def saves_ns(self) -> int:
        return sum(wait.saves_ns for wait in self.waits)

    @property
    def wait_ns(self) -> int:
        return sum(wait.wait_ns for wait in self.waits)

    @property
    def calls(self) -> int:
        return sum(wait.calls for wait in self.waits)

    @property
    def what(self) -> str:
        place = self.waits[0].place
        name = place.operators[-1] if place.operators else place.call
        where = place.annotation or place.phase
        return f"{name} in {where}" if where else name

    @property
    def places(self) -> tuple[Place, ...]:
        if self.sites:
            return tuple(map(_place_of_site, self.sites))
        place = self.waits[0].place
        match = _FUNCTION.fullmatch(place.function)
        if match is not None:
            return (Place(file=match["file"], line=int(match["line"]), function=match["name"]),)
        return (Place(function=place.annotation or place.phase or self.what),)


def _spots_of(waits: Iterable[HostWait], sites: StepSites | None, kinds: Collection[str]) -> Sequence[_Spot]:
    usable = [] if sites is None else [one for one in sites.sites if one.kind in kinds and one.is_blocking]
    found: dict[object, tuple[list[HostWait], tuple[SourceSite, ...]]] = {}
    for wait in waits:
        place, lines = wait.place, _sites_of(wait.place, usable)
        where = place.annotation or place.phase
        key = lines or place.function or (where, place.operators[-1:] or place.call)
        found.setdefault(key, ([], lines))[0].append(wait)
    spots = [_Spot(waits=tuple(same), sites=lines) for same, lines in found.values()]
    return sorted(spots, key=lambda spot: (-spot.saves_ns, -spot.wait_ns))


def _place_of_site(site: SourceSite) -> Place:
    """Return the line, or the library function if no user line calls the code."""
    if site.file is None:
        return Place(function=site.caller or site.operator, module=site.module)
    return site.exact(module=site.module)


def _sites_of(place: WaitPlace, sites: Sequence[SourceSite]) -> tuple[SourceSite, ...]:
    """Return the sites that may cause a wait: same phase, operators and, if known, function."""
    phases = _PHASES_OF_SITES.get(place.phase)
    in_phase = [site for site in sites if phases is None or site.phase in phases]
    fitting = [site for site in in_phase if site.operator in place.operators]
    if not fitting and place.operators:
        others = (PRINT, _MADE_ON_HOST) if place.kind == HOST_TO_DEVICE else (PRINT,)
        fitting = [site for site in in_phase if site.operator in others]
    match = _FUNCTION.fullmatch(place.function)
    if match is not None:
        # The inspected step and the recorded window may have run different code.
        fitting = [
            site
            for site in fitting
            if site.function_line == int(match["line"])
            and site.file is not None
            and PurePath(site.file).name == PurePath(match["file"]).name
        ]
    return tuple(sorted(fitting, key=lambda site: -site.calls))
