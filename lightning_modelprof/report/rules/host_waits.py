"""Does the host wait for values of the device, and the device then for the host?"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.trace.host_waits import HostWait, HostWaits, WaitPlace
from lightning_modelprof.analysis.trace.trace_facts import TraceFacts
from lightning_modelprof.place import Place
from lightning_modelprof.record import Record
from lightning_modelprof.report.advice.owners import owner_of_loader, written_call
from lightning_modelprof.report.model import Evidence, Finding, SavingIs, Severity, Slices
from lightning_modelprof.report.one_step import COST
from lightning_modelprof.report.rules.base import RuleHelp, count, duration
from lightning_modelprof.report.rules.device import NO_WINDOW, Circumstances, DeviceRule, pooled_waits
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

COULD_SAVE: Final = "could save per step"


HOST_WAIT: Final = "sync wait per step"


_TRANSFER: Final = "transfer"


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


class WaitRule(DeviceRule, frozen=True, kw_only=True):
    """Waits of some kinds; what to do about them is the subclass's.

    The saving is how much earlier the device would be done if no call waited (``HostWaits.saves_ns``):
    the idle time after waits, but never more than the host waited.
    """

    bound: ClassVar[str | None] = "sync_bound"
    slices: ClassVar[tuple[Slices, ...]] = (Slices(kind="idle: host"),)
    site_kinds: ClassVar[tuple[str, ...]]
    """Of source lines that such waits come from."""
    verb: ClassVar[str]
    """The calls' predicate, in the plural."""
    verb_one: ClassVar[str]
    """The same of one call."""
    saving_is: ClassVar[SavingIs] = ""

    def judge(self, traces: Sequence[TraceFacts], circumstances: Circumstances) -> tuple[Finding, ...]:
        """One finding for each place that costs enough."""
        facts = pooled_waits(traces)
        if isinstance(facts, Absent):
            has_lines = circumstances.sites is not None
            return self.without_window(circumstances) if has_lines else self.not_evaluated(facts.reason)
        if not facts.steps_ns:
            return self.not_evaluated("the recorded steps took no time")
        waits = [wait for wait in facts.waits if self.is_asked(wait)]
        saving = sum(wait.saves_ns for wait in waits)
        share = saving / facts.steps_ns
        cost_ns = circumstances.per_step(saving, facts.steps_ns, facts.num_steps)
        if not self.is_found(share, cost_ns):
            return self.clean(
                self._clean_summary(waits, facts, circumstances, cost_ns),
                (duration(COULD_SAVE, cost_ns),),
            )
        spots = spots_of(waits, circumstances.sites, self.site_kinds)
        return tuple(
            self._finding(some, facts, circumstances) for some in self._grouped(spots, facts, circumstances)
        )

    @abstractmethod
    def is_asked(self, wait: HostWait) -> bool: ...

    @abstractmethod
    def advice(
        self, waits: Sequence[HostWait], sites: Sequence[SourceSite], circumstances: Circumstances
    ) -> str:
        """What to change; either of the two may be empty."""

    def without_window(self, circumstances: Circumstances) -> tuple[Finding, ...]:
        """The lines of one step, without times."""
        sites = circumstances.sites
        if sites is None:
            return self.not_evaluated(f"{NO_WINDOW}, and no step was inspected")
        waiting = [
            site
            for site in sites.sites
            if site.kind in self.site_kinds and site.is_blocking and site.device != "cpu"
        ]
        if not waiting:
            return self.clean("The inspected step has no such line.")
        calls = sum(site.calls for site in waiting)
        places = tuple(dict.fromkeys(map(location_of_site, waiting)))
        return (
            self.found(
                f"In the inspected step, {calls:,} call{'s' * (calls != 1)} in {len(places)}"
                f" place{'s' * (len(places) != 1)} {self.verb if calls != 1 else self.verb_one}. Record a"
                " profiler window (active) to see the cost.",
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
            return "There are no such waits in the recorded steps."
        host_ns = circumstances.per_step(sum(wait.wait_ns for wait in waits), facts.steps_ns, facts.num_steps)
        return (
            f"The CPU waits {_times(calls)} per step, {milliseconds(host_ns)} in total. Without these waits,"
            f" the GPU would finish {milliseconds(cost_ns)} earlier."
        )

    def _grouped(
        self, spots: Sequence[WaitSpot], facts: HostWaits, circumstances: Circumstances
    ) -> list[list[WaitSpot]]:
        """The spots that cost enough by themselves, one each; the others together."""
        alone: list[list[WaitSpot]] = []
        rest: list[WaitSpot] = []
        for spot in spots:
            cost_ns = circumstances.per_step(spot.saves_ns, facts.steps_ns, facts.num_steps)
            if len(alone) < _MOST_FINDINGS - 1 and self.is_found(spot.saves_ns / facts.steps_ns, cost_ns):
                alone.append([spot])
            elif spot.saves_ns:
                rest.append(spot)
        return [*alone, rest] if rest else alone

    def _finding(self, spots: Sequence[WaitSpot], facts: HostWaits, circumstances: Circumstances) -> Finding:
        saving = sum(spot.saves_ns for spot in spots)
        share = saving / facts.steps_ns
        cost_ns = circumstances.per_step(saving, facts.steps_ns, facts.num_steps)
        calls = sum(spot.calls for spot in spots) / facts.num_steps
        host_ns = circumstances.per_step(sum(spot.wait_ns for spot in spots), facts.steps_ns, facts.num_steps)
        what = spots[0].what if len(spots) == 1 else f"{len(spots)} places ({spots[0].what}, ...)"
        sites = tuple(dict.fromkeys(site for spot in spots for site in spot.sites))
        places: dict[Place, None] = dict.fromkeys(place for spot in spots for place in spot.locations)
        found = self.found(
            f"The CPU waits {_times(calls)} per step in {what}, {milliseconds(host_ns)} in total. The GPU"
            " then idles until the CPU launches more. Without these waits, it would finish"
            f" {f'{self.saving_is} {COST}'.lstrip()} earlier.",
            self.advice([wait for spot in spots for wait in spot.waits], sites, circumstances),
            self._severity(share, cost_ns),
            saving_ns=cost_ns,
            saving_is=self.saving_is,
            places=tuple(places)[:_MOST_LOCATIONS],
            evidence=_evidence(cost_ns, calls, host_ns),
            slices=[
                Slices(name=name, kind="operator")
                for wait in spots[0].waits[:1]
                for name in wait.place.operators[:1]
            ],
        )
        phases = {wait.place.phase for spot in spots for wait in spot.waits}
        return replace(found, phases=(_TRANSFER,)) if phases == {_TRANSFER} else found

    def _severity(self, share: float, cost_ns: float) -> Severity:
        return self.severity(share) if self.is_found(share, cost_ns) else Severity.INFO


class HostDeviceSync(WaitRule, frozen=True, kw_only=True):
    """The host reads values of the device, or synchronizes."""

    kind: ClassVar[str] = "host_device_sync"
    title: ClassVar[str] = "CPU waits for GPU values"
    healthy: ClassVar[str] = "No costly GPU syncs"
    help: ClassVar[RuleHelp] = RuleHelp(
        (
            "CPU waits for GPU values or a synchronization, by the GPU idle time they cause (Host Wait"
            " Summary); a hint without a profiler window"
        ),
        where="the waiting lines",
    )
    site_kinds: ClassVar[tuple[str, ...]] = (SYNCHRONISATION, DEVICE_TO_HOST)
    verb: ClassVar[str] = "wait for the GPU"
    verb_one: ClassVar[str] = "waits for the GPU"

    def is_asked(self, wait: HostWait) -> bool:
        return wait.place.kind != "host_to_device"

    def advice(
        self,
        waits: Sequence[HostWait],
        sites: Sequence[SourceSite],
        circumstances: Circumstances,  # noqa: ARG002  # of the other rule
    ) -> str:
        operators = {name for wait in waits for name in wait.place.operators}
        operators |= {site.operator for site in sites}
        if is_lightnings_own(sites):
            return _FOR_LIGHTNING
        has_bare_calls = any(not wait.place.operators for wait in waits)
        chosen = [
            text
            for text, applies in (
                (_FOR_SIZES, operators & _SIZE),
                (_FOR_VALUES, operators & _VALUE),
                (_FOR_COPIES, operators & _COPY and not operators & _VALUE),
                (_FOR_PRINTS, PRINT in operators),
                (_FOR_CALLS, has_bare_calls),
            )
            if applies
        ]
        return " ".join(chosen) or _FOR_VALUES


_FOR_BATCHES: Final = "{call}."


_FOR_OTHERS: Final = (
    "Create the tensor with device=self.device, or once with register_buffer. Copy other tensors from pinned"
    " memory with non_blocking=True."
)


_FOR_EITHER: Final = (
    "{call} and use .to(device, non_blocking=True) for batches. Create other tensors on the GPU, or once."
)


class HostToDeviceCopy(WaitRule, frozen=True, kw_only=True):
    """Blocking copies to the device: of the batch, and of what the step makes on the host.

    From pageable memory the host copies into memory of the driver itself, after the work that was queued
    before is done; then the queue is empty. The saving is a lower bound: from pinned memory a copy is
    faster, and overlaps with work. What ``slow_transfer`` says of the same waits is not counted again.
    """

    kind: ClassVar[str] = "host_to_device_copy"
    title: ClassVar[str] = "Copies to the GPU block the CPU"
    healthy: ClassVar[str] = "Blocking copies are cheap"
    help: ClassVar[RuleHelp] = RuleHelp(
        "blocking copies to the GPU, by the GPU idle time they cause at least. Copies from pageable memory"
        " block the CPU; Lightning doesn't wait for copies from pinned memory",
        where="the copying lines, or the DataLoader",
    )
    site_kinds: ClassVar[tuple[str, ...]] = (HOST_TO_DEVICE,)
    verb: ClassVar[str] = "copy to the GPU and block the CPU"
    verb_one: ClassVar[str] = "copies to the GPU and blocks the CPU"
    saving_is: ClassVar[SavingIs] = "at least"

    def is_asked(self, wait: HostWait) -> bool:
        return wait.place.kind == "host_to_device"

    def advice(
        self, waits: Sequence[HostWait], sites: Sequence[SourceSite], circumstances: Circumstances
    ) -> str:
        if not circumstances.is_run and not any(wait.place.phase == _TRANSFER for wait in waits):
            return _FOR_EITHER.format(call=_call(circumstances))
        of_batch = [wait.place.phase == _TRANSFER for wait in waits]
        of_batch += [site.phase == BATCH_START for site in sites if not waits]
        chosen = [_FOR_BATCHES.format(call=_call(circumstances))] if any(of_batch) else []
        if not all(of_batch):
            chosen.append(_FOR_OTHERS)
        return " ".join(chosen) or _FOR_OTHERS


def _call(circumstances: Circumstances) -> str:
    """What pins the memory of batches."""
    setup = circumstances.setup
    owner = owner_of_loader(setup, setup.loaders[0]) if setup is not None and setup.loaders else None
    return written_call("DataLoader", {"pin_memory": True}, owner)


_MOST_FINDINGS: Final = 5


_MOST_LOCATIONS: Final = 10


def _evidence(cost_ns: float, calls: float, host_ns: float) -> list[Evidence]:
    return [
        duration(COULD_SAVE, cost_ns),
        duration(HOST_WAIT, host_ns),
        count("waits per step", calls),
    ]


def _times(calls: float) -> str:
    return "once" if calls == 1 else f"{calls:.3g} times"


_FUNCTION: Final = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<name>.+)")


_PHASES_OF_SITES: Final[Mapping[str, tuple[str, ...]]] = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
    "optimizer": ("optimizer",),
}
"""Phase of a trace → phases of sites; those around the model are told apart otherwise there, so all fit."""


_MADE_ON_HOST: Final = "aten::lift_fresh"
"""Of ``torch.tensor(..., device=...)``, which a trace shows as a copy."""


class WaitSpot(Record, frozen=True, kw_only=True):
    """One place to change: waits that come from the same source lines, as far as they are known.

    Attributes:
        waits: of the trace; largest saving first.
        sites: the source lines, most calls first; empty if none is known.
    """

    waits: tuple[HostWait, ...]
    sites: tuple[SourceSite, ...]

    @property
    def saves_ns(self) -> int:
        """In all recorded steps."""
        return sum(wait.saves_ns for wait in self.waits)

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
    def locations(self) -> tuple[Place, ...]:
        """Exact lines; without any the function, the range or the phase."""
        if self.sites:
            return tuple(dict.fromkeys(map(location_of_site, self.sites)))
        place = self.waits[0].place
        match = _FUNCTION.fullmatch(place.function)
        if match is not None:
            return (Place(file=match["file"], line=int(match["line"]), function=match["name"]),)
        where = place.annotation or place.phase or self.what
        return (Place(function=where),)


def spots_of(
    waits: Iterable[HostWait], sites: StepSites | None, kinds: Collection[str]
) -> tuple[WaitSpot, ...]:
    """The places to change, largest saving first.

    Args:
        waits: of a trace, largest saving first.
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
    return tuple(sorted(spots, key=lambda spot: (-spot.saves_ns, -spot.wait_ns)))


def location_of_site(site: SourceSite) -> Place:
    """The line itself; of code that no line of the user's calls, the library's function."""
    if site.file is None:
        return Place(function=site.caller or site.operator, module=site.module)
    return site.exact(module=site.module)


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
