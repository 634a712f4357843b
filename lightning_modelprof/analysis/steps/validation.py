"""Time of a fit's validation loops by part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lightning_modelprof.analysis.lazy import NotMeasured
from lightning_modelprof.record import Record
from lightning_modelprof.run.phases import PARTS, PHASE_INDEX, ValidationTimes
from lightning_modelprof.run.records import CallbackTime
from lightning_modelprof.run.step_totals import StepTotals

NO_VALIDATION: Final = "no validation ran in this fit"

_VALIDATION: Final = PHASE_INDEX["validation"]


class PartShare(Record, frozen=True, kw_only=True):
    """One part over all validations of the fit; the parts sum to the phase ``validation`` exactly.

    Attributes:
        calls: number of starts; ``None`` for a part that nothing starts.
        total_ns: self time.
        per_batch_ns: per validation batch; ``None`` without any batch.
        per_run_ns: per validation; ``None`` as above.
        ratio: share of all parts; ``None`` if these took no time.
        device_ns: elapsed time on the device's stream; ``None`` if unknown.
    """

    key: str
    label: str
    calls: int | None
    total_ns: int
    per_batch_ns: float | None
    per_run_ns: float | None
    ratio: float | None
    device_ns: int | None


class ValidationSplit(Record, frozen=True, kw_only=True):
    """All validations of a fit.

    Attributes:
        num_runs: validations started.
        num_batches: calls of ``validation_step``.
        parts: those that took any time, in the order of ``PARTS``.
        first_wait_ns: how much longer the dataloaders' first fetches waited than as many others, mostly for
            starting workers; ``None`` if there are no others.
        callbacks_ns: hooks of other callbacks in validations, which are in no part.
    """

    num_runs: int
    num_batches: int
    total_ns: int
    parts: tuple[PartShare, ...]
    first_wait_ns: float | None
    callbacks_ns: int

    def part(self, key: str) -> PartShare | None:
        return next((part for part in self.parts if part.key == key), None)

    @property
    def labels(self) -> dict[str, str]:
        return {part.key: part.label for part in PARTS}

    def costs(self, *, has_workers: bool) -> dict[str, float]:
        """Cost of each part: its device time if known, else its host time.

        The host runs ahead of a device and waits for it wherever a value is needed next, so host time means
        little there. A fetch counts for the shorter of the two, since the device keeps working during it.

        Args:
            has_workers: whether dataloaders have workers. The extra wait for their first batches then counts
                as starting them.
        """
        costs = {part.key: float(part.total_ns) for part in self.parts}
        if any(part.device_ns is not None for part in self.parts):
            costs = {part.key: float(part.device_ns or 0) for part in self.parts}
            fetch = self.part("dataloader")
            if fetch is not None:
                costs["dataloader"] = min(costs["dataloader"], float(fetch.total_ns))
        first_ns = min(self.first_wait_ns or 0.0, costs.get("dataloader", 0.0))
        if has_workers and first_ns:
            costs["dataloader"] -= first_ns
            costs["dataloader_init"] = costs.get("dataloader_init", 0.0) + first_ns
        return costs


def validation_split(
    times: ValidationTimes | None,
    totals: StepTotals,
    outside_ns: dict[str, int],
    callbacks: Iterable[CallbackTime],
) -> ValidationSplit:
    """Split the validations of one rank's fit.

    Args:
        outside_ns: time of the fit outside finished steps, by phase key.
    """
    if times is None:
        if not totals.measured_phases()[_VALIDATION]:
            raise NotMeasured("validation wasn't measured, because the phases were read from hooks")
        if int(totals.total("phases_ns")[_VALIDATION]) + outside_ns.get("validation", 0):
            raise NotMeasured("an older version, which didn't split validation, saved this run")
        raise NotMeasured(NO_VALIDATION)
    labels = {part.key: part.label for part in PARTS}
    num_runs, num_batches, total_ns = times.num_runs, times.num_batches, times.total_ns
    return ValidationSplit(
        num_runs=num_runs,
        num_batches=num_batches,
        total_ns=total_ns,
        parts=tuple(
            PartShare(
                key=part.key,
                label=labels[part.key],
                calls=part.calls,
                total_ns=part.total_ns,
                per_batch_ns=part.total_ns / num_batches if num_batches else None,
                per_run_ns=part.total_ns / num_runs if num_runs else None,
                ratio=part.total_ns / total_ns if total_ns else None,
                device_ns=part.device_ns,
            )
            for part in times.parts
            if part.total_ns and part.key in labels
        ),
        first_wait_ns=_first_wait_ns(times),
        callbacks_ns=sum(one.total_ns for one in callbacks if one.hook.startswith("on_validation_")),
    )


def _first_wait_ns(times: ValidationTimes) -> float | None:
    fetches = next((part for part in times.parts if part.key == "dataloader"), None)
    if fetches is None or not times.num_first_fetches:
        return None
    num_others = (fetches.calls or 0) - times.num_first_fetches
    if num_others <= 0:
        return None
    usual_ns = (fetches.total_ns - times.first_fetch_ns) / num_others
    return max(0.0, times.first_fetch_ns - usual_ns * times.num_first_fetches)
