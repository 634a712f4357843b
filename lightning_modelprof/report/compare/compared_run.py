"""One run of a comparison, with its plain facts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from lightning_modelprof.analysis.compare import batch_size
from lightning_modelprof.errors import ArchiveError
from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Report
from lightning_modelprof.run.steps import StepTimings


class ComparedRun(Record, frozen=True, kw_only=True):
    """One run of a side.

    Attributes:
        source: the given path.
        loop: Trainer method.
        created: start time, in ISO 8601.
        status: ``finished``, or how else it ended.
        batch_cost_ns: mean clean step time; ``None`` without clean steps.
        settings: name → value of everything that may make it differ from another run.
        steps: steps of the first rank.
    """

    source: str
    loop: str
    world_size: int
    sample_unit: str
    created: str
    status: str
    num_clean_steps: int
    batch_cost_ns: float | None
    settings: Mapping[str, str]
    steps: StepTimings
    report: Report

    @property
    def global_batch_size(self) -> float | None:
        """Samples of a median step over all ranks, assumed equal; ``None`` if not counted."""
        samples = batch_size(self.steps)
        return None if samples is None else samples * self.world_size

    @property
    def started(self) -> datetime | None:
        """``created`` as a time; ``None`` if it is invalid or lacks a time zone."""
        try:
            time = datetime.fromisoformat(self.created)
        except ValueError:
            return None
        return None if time.tzinfo is None else time


def compared_run(source: str, report: Report, steps: StepTimings) -> ComparedRun:
    """Make a run to compare, from a saved run or a logger's event file.

    Args:
        report: report of the run, built or read.
        steps: steps of its first rank.

    Raises:
        ArchiveError: If the report isn't a run's.
    """
    info, figures = report.summary.run, report.summary.benchmark
    if info is None:
        raise ArchiveError(
            f"{source}: expected a run's report, got one that doesn't say what ran. It was written by another"
            " version or isn't a run's report."
        )
    return ComparedRun(
        source=source,
        loop=info.loop,
        world_size=info.world_size,
        sample_unit=info.sample_unit,
        created=info.created,
        status=info.status,
        num_clean_steps=0 if figures is None else figures.num_steps,
        batch_cost_ns=None if figures is None else figures.batch_cost_ns.avg,
        settings=report.summary.settings,
        steps=steps,
        report=report,
    )
