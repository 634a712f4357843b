"""The dashboard's selection, and where each part of a view comes from."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_modelprof.record import Record
from lightning_modelprof.report.model import Chart, FlameGraph, Report, Slices, Table
from lightning_modelprof.report.timeline.idle_slices import IDLE_PREFIX
from lightning_modelprof.run.phases import RANGE_PREFIX
from lightning_modelprof.show.tensorboard.profile_blob import TIMELINE, ColumnsBlob, StoredEntry


class Selection(Record, frozen=True, kw_only=True):
    """A run, one of its windows, and optionally a rank.

    Attributes:
        run: profile of a whole loop; ``None`` if there are only traces.
        run_tag: its tag.
        window: profile of one profiler window, if any.
        window_tag: its tag.
        rank: rank to show alone; ``None`` for all together.
    """

    run: StoredEntry | None = None
    run_tag: str = ""
    window: StoredEntry | None = None
    window_tag: str = ""
    rank: int | None = None

    @property
    def run_report(self) -> Report | None:
        """The report on the run, or on its selected rank."""
        return _of_rank(self.run, self.rank)

    @property
    def window_report(self) -> Report | None:
        """The report on the window, or on its selected rank."""
        return _of_rank(self.window, self.rank)

    @property
    def main_report(self) -> Report:
        """The report whose verdict, facts and notes are shown: the run's if there is one.

        Raises:
            ValueError: if nothing is selected.
        """
        report = self.run_report or self.window_report
        if report is None:
            raise ValueError("a selection of nothing")
        return report

    def tables(self, ids: Iterable[str]) -> list[Table]:
        """Return the tables with these ids that exist, the window's rather than the run's."""
        return [table for one in ids if (table := self.table(one)) is not None]

    def table(self, id: str) -> Table | None:  # noqa: A002  # its name in a report
        """Return the table with this id, preferably one with rows."""
        found = [table for report in self._reports() for table in report.tables if table.id == id]
        return next((table for table in found if table.rows), found[0] if found else None)

    def chart(self, id: str) -> Chart | None:  # noqa: A002
        charts = (chart for report in self._reports() for chart in report.charts)
        return next((chart for chart in charts if chart.id == id), None)

    def flame(self, id: str) -> FlameGraph | None:  # noqa: A002
        flames = (flame for report in self._reports() for flame in report.flames)
        return next((flame for flame in flames if flame.id == id), None)

    @property
    def has_timeline(self) -> bool:
        return bool(self.columns(TIMELINE))

    def has_slices(self, slices: Slices) -> bool:
        """Return whether the timeline probably has them: idle time, and phases if they were recorded."""
        if not self.has_timeline:
            return False
        if slices.kind.startswith(IDLE_PREFIX):
            idle = self.table("idle")
            return idle is not None and bool(idle.rows)
        return self.run is not None or not slices.name.startswith(RANGE_PREFIX)

    def columns(self, kind: str) -> list[tuple[str, ColumnsBlob]]:
        """Return tag and description of packed columns, only of the selected rank if it has some."""
        places = ((self.run_tag, self.run), (self.window_tag, self.window))
        found = [
            (tag, blob)
            for tag, profile in places
            if profile is not None
            for blob in profile.columns
            if blob.kind == kind
        ]
        of_rank = [(tag, blob) for tag, blob in found if blob.rank == self.rank]
        return of_rank or found

    def _reports(self) -> list[Report]:
        """Return the reports to search, the window's first, because it covers more of the window."""
        return [report for report in (self.window_report, self.run_report) if report is not None]


def _of_rank(profile: StoredEntry | None, rank: int | None) -> Report | None:
    if profile is None:
        return None
    return profile.report if rank is None else profile.rank_reports.get(rank, profile.report)
