"""Is the same sample made again in each epoch, though that is waited for?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from lightning_modelprof.analysis.absent import Absent
from lightning_modelprof.analysis.facts import Analysis
from lightning_modelprof.analysis.steps.step_costs import StepCosts
from lightning_modelprof.report.advice.loader import is_row_by_row, places_of_batches
from lightning_modelprof.report.advice.owners import owner_of_loader
from lightning_modelprof.report.model import Evidence, Finding, Severity, Unit
from lightning_modelprof.report.rules.base import (
    NO_SETUP,
    NOT_A_FIT,
    ShareRule,
    Whole,
    count,
    duration,
    milliseconds,
    percent,
    usual_step,
)
from lightning_modelprof.run.loops import loop_of

_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RepeatedWork(ShareRule):
    """A few samples of the data set, hashed in batches of several epochs, where the loop waits for batches.

    It is found where all of them had the same bytes each time their index came. One that differs, as of
    augmented data, ends it. The wait is what making batches costs; how much of it keeping samples would save
    is not known, and ``input_bound`` speaks of the same time.

    Caveats:
        Of large tensors some values are hashed, spread evenly. A change that is made to few samples of a
        hundred may not come by.

    Attributes:
        least_compared: samples that have to be the same.
    """

    kind: ClassVar[str] = "repeated_work"
    title: ClassVar[str] = "The same samples are made again in each epoch"
    takes_time_there: ClassVar[bool] = False

    warning: float = 0.05
    critical: float = 0.20
    least_compared: int = 12

    def whole(self, analysis: Analysis, costs: StepCosts) -> Whole:  # noqa: ARG002
        """Of a usual clean step."""
        return usual_step(costs, costs.typical)

    def evaluate(self, analysis: Analysis) -> tuple[Finding, ...]:
        """Found, clean, or not evaluated where too few samples could be compared."""
        costs, setup, seen = analysis.step_costs, analysis.setup, analysis.repeated
        if not loop_of(analysis.info.loop).is_fit:
            return self.not_evaluated(NOT_A_FIT)
        if isinstance(costs, Absent):
            return self.not_evaluated(costs.reason)
        if setup is None or not setup.loaders:
            return self.not_evaluated(NO_SETUP if setup is None else "the dataloader was not seen")
        wait_ns, (wall_ns, whole) = costs.usual_wait_ns(), self.whole(analysis, costs)
        if wait_ns is None or not wall_ns:
            return self.not_evaluated("the fetches of batches were not seen")
        share = wait_ns / wall_ns
        if not self.is_found(share, wait_ns, costs.least_of(wait_ns, costs.typical, "dataloader")):
            return self.clean(f"Batches are waited for {milliseconds(wait_ns)} a step.")
        if is_row_by_row(setup.loaders[0], wait_ns):
            return self.clean("Samples are rows in memory: there is no work to keep.")
        if seen is None:
            return self.not_evaluated("samples were not compared (the run is of an older version)")
        compared = [count("samples compared", seen.num_compared), count("the same", seen.num_equal)]
        if seen.num_equal < seen.num_compared:
            return self.clean("A sample of the same index was another one in another epoch.", compared)
        if seen.note or seen.num_compared < self.least_compared:
            return self.not_evaluated(
                seen.note or f"only {seen.num_compared} samples came again while samples were watched"
            )
        evidence = [duration("wait per step", wait_ns), *compared]
        memory = f"A sample takes {seen.sample_bytes:,} bytes in its batch"
        if seen.num_samples:
            total = seen.sample_bytes * seen.num_samples
            memory += f", all {seen.num_samples:,} of them {_mebibytes(total)}"
            evidence.append(Evidence(label="memory of all samples", value=total, unit=Unit.BYTES))
        owner = owner_of_loader(setup, setup.loaders[0])
        each = " in each worker that keeps them" if setup.loaders[0].num_workers else ""
        return (
            self.found(
                f"All {seen.num_compared} samples that were compared are the same each time their index"
                f" comes ({seen.num_indices} indices); {whole} waits {milliseconds(wait_ns)}"
                f" ({percent(share)} of it) for its batch.",
                "Make each sample once and keep it: in a list in memory, in files, or ahead of the training."
                f" {memory}{each}. What is random has to stay behind what is kept."
                f"{'' if owner is None else owner.cheaper_batches}",
                Severity.INFO,
                places=places_of_batches(setup.loaders),
                evidence=evidence,
            ),
        )


def _mebibytes(size: int) -> str:
    return f"{size / _MIB:,.{0 if size >= 10 * _MIB else 2}f} MiB"
