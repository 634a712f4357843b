"""One run of a comparison, with all that is derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_modelprof.analysis.analyze import Analysis
from lightning_modelprof.analysis.run_settings import batch_size, run_settings
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.records import StepTimings


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run of a side.

    Attributes:
        source: what the reader calls it: the path that was given.
        steps: of the first rank.
        analysis: of the run.
        report: of the analysis.
    """

    source: str
    steps: StepTimings
    analysis: Analysis
    report: Report

    @cached_property
    def settings(self) -> dict[str, str]:
        """What the run was set to."""
        return run_settings(self.analysis, self.steps)

    @property
    def global_batch_size(self) -> float | None:
        """Samples of a usual step of all ranks, taken as equal; ``None`` if not counted."""
        samples = batch_size(self.steps)
        return None if samples is None else samples * self.analysis.info.world_size
