"""One run of a comparison: the plain facts of it, from what was measured or from its report."""

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
        source: what the reader calls it: the path that was given.
        loop: the Trainer's method.
        created: when it began, in ISO 8601.
        status: how it ended, ``finished`` if it did.
        batch_cost_ns: mean time of the clean steps; ``None`` when there are none.
        settings: name → value of all that may make it differ from another run.
        steps: of the first rank.
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
        """Samples of a usual step of all ranks, taken as equal; ``None`` if not counted."""
        samples = batch_size(self.steps)
        return None if samples is None else samples * self.world_size

    @property
    def started(self) -> datetime | None:
        """``created`` as a time; ``None`` if it can't be read or has no time zone."""
        try:
            time = datetime.fromisoformat(self.created)
        except ValueError:
            return None
        return None if time.tzinfo is None else time


def compared_run(source: str, report: Report, steps: StepTimings) -> ComparedRun:
    """A run to compare: a saved one, or one of which a logger's event file has the report and the steps.

    Args:
        report: of the run; as it was built, or read back.
        steps: of its first rank.

    Raises:
        ArchiveError: when the report isn't a run's.
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
