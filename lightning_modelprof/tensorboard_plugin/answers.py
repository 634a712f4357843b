"""Responses of the plugin's routes: lists, views, comparisons and columns of the stored profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_modelprof.errors import ArchiveError, describe_error, printable
from lightning_modelprof.record import Record
from lightning_modelprof.report.build_dashboard_entry import timings_of
from lightning_modelprof.report.compare.build_compare import build_comparison
from lightning_modelprof.report.compare.compared_run import ComparedRun, compared_run
from lightning_modelprof.report.compare.differences import find_differences
from lightning_modelprof.report.compare.row_changes import changed_rows
from lightning_modelprof.report.compare.windows import compare_windows
from lightning_modelprof.report.model import Report
from lightning_modelprof.report.summary import Difference
from lightning_modelprof.run.loops import loop_of
from lightning_modelprof.run.steps import StepTimings
from lightning_modelprof.show.tensorboard.profile_blob import (
    STEPS,
    TIMELINE,
    ColumnsBlob,
    StoredEntry,
    unpack_steps,
)
from lightning_modelprof.show.tensorboard.timeline_columns import check_timeline
from lightning_modelprof.tensorboard_plugin.selection import Selection
from lightning_modelprof.tensorboard_plugin.stored_profiles import (
    Entry,
    StoredProfiles,
    find_trace,
    named_trace,
)
from lightning_modelprof.tensorboard_plugin.views import VIEWS, render, render_comparison

_MOST_DIGITS = 9
"""Maximum digits of a rank; Python refuses to read thousands of digits."""


_BEFORE = "before_"
"""Prefix of the arguments of a comparison's first selection."""


class Answers:
    """Answers each route with plain JSON values or bytes, one method per route.

    Methods take TensorBoard's request context, the experiment's ID and the request's arguments: ``run``,
    ``profile`` and ``window`` (tags), ``rank``.

    Args:
        provider: TensorBoard's ``DataProvider``.
        logdir: TensorBoard's log directory; ``""`` if unknown, and then no trace is served.

    Raises:
        ArchiveError: if something requested is missing or can't be read.
    """

    def __init__(self, provider: Any, logdir: str = "") -> None:
        self._profiles = StoredProfiles(provider)
        self._logdir = logdir

    def profiles(self, context: Any, experiment: str, arguments: Mapping[str, str]) -> dict[str, Any]:  # noqa: ARG002
        """List all profiles by run, and the views."""
        runs = self._profiles.list(context, experiment)
        return {
            "runs": [
                {"name": run, "profiles": [_entry(entry) for entry in entries]}
                for run, entries in runs.items()
            ],
            "views": [{"key": view.key, "title": view.title} for view in VIEWS],
        }

    def view(self, context: Any, experiment: str, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Return one view of a selection: what to draw, and its columns."""
        wanted = arguments.get("view", VIEWS[0].key)
        view = next((view for view in VIEWS if view.key == wanted), None)
        if view is None:
            known = ", ".join(view.key for view in VIEWS)
            raise ArchiveError(f"expected one of the views {known}, got {wanted!r}.")
        selection = self._select(context, experiment, arguments)
        columns = selection.columns(view.columns) if view.columns else []
        return {
            "title": view.title,
            "documents": _shown(lambda: render(view, selection)),
            "empty": view.empty,
            "columns": [
                {"tag": tag, "kind": blob.kind, "rank": blob.rank}
                | self._trace_of(arguments.get("run", ""), tag, selection.window, blob)
                for tag, blob in columns
            ],
            "words": _words(selection),
        }

    def compare(self, context: Any, experiment: str, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Compare two selections; the arguments of the first have the prefix ``before_``."""
        before = {
            name.removeprefix(_BEFORE): value for name, value in arguments.items() if name.startswith(_BEFORE)
        }
        sides = [self._side(context, experiment, chosen) for chosen in (before, arguments)]
        return {
            "title": "Compare",
            "documents": _shown(lambda: list(map(render_comparison, compare_sides(*sides)))),
            "empty": _why_nothing(*sides),
        }

    def columns(self, context: Any, experiment: str, arguments: Mapping[str, str]) -> bytes:
        """Return packed columns of one profile, as stored.

        Checks every number, but only the lengths of columns for very large timelines.
        """
        wanted = ColumnsBlob(kind=arguments.get("kind", ""), rank=_rank(arguments))
        run, tag = arguments.get("run", ""), arguments.get("tag", "")
        packed = self._profiles.read_columns(context, experiment, run, tag, wanted)
        try:
            if wanted.kind == STEPS:
                unpack_steps(packed)
            else:
                check_timeline(packed)
        except ValueError as error:
            raise ArchiveError(f"{run}, {tag}: can't read its {wanted.kind}: {error}.") from error
        return packed

    def trace(self, context: Any, experiment: str, arguments: Mapping[str, str]) -> bytes:
        """Return a window's trace as its run saved it; ``file`` is the bare file name."""
        run, tag, name = (arguments.get(key, "") for key in ("run", "tag", "file"))
        self._profiles.read(context, experiment, run, tag)  # only runs that TensorBoard shows
        file = find_trace(self._logdir, run, tag, name)
        if file is None:
            raise ArchiveError(f"expected the trace {name!r} in the directory of {run!r}, got none.")
        try:
            return file.read_bytes()
        except OSError as error:
            raise ArchiveError(f"can't read the trace {name!r}: {describe_error(error)}.") from error

    def _trace_of(self, run: str, tag: str, window: StoredEntry | None, blob: ColumnsBlob) -> dict[str, str]:
        if blob.kind != TIMELINE or window is None:
            return {}
        report = window.rank_reports.get(blob.rank or 0, window.report)
        return named_trace(self._logdir, run, tag, report)

    def _side(self, context: Any, experiment: str, arguments: Mapping[str, str]) -> ComparedSide:
        selection = self._select(context, experiment, arguments)
        run = arguments.get("run", "")

        def read_steps() -> StepTimings:
            wanted = ColumnsBlob(kind=STEPS)
            packed = self._profiles.read_columns(context, experiment, run, selection.run_tag, wanted)
            try:
                return timings_of(unpack_steps(packed))
            except ValueError as error:
                raise ArchiveError(f"{run}: can't read its steps: {error}.") from error

        return ComparedSide(run_name=run, selection=selection, read_steps=read_steps)

    def _select(self, context: Any, experiment: str, arguments: Mapping[str, str]) -> Selection:
        tags = [arguments.get(name, "") for name in ("profile", "window")]
        run, window = (self._read(context, experiment, arguments.get("run", ""), tag) for tag in tags)
        if run is None and window is None:
            raise ArchiveError("expected a profile of a run or a window, got none. Select one.")
        return Selection(run=run, run_tag=tags[0], window=window, window_tag=tags[1], rank=_rank(arguments))

    def _read(self, context: Any, experiment: str, run: str, tag: str) -> StoredEntry | None:
        return self._profiles.read(context, experiment, run, tag) if tag else None


def _shown(make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Make something from profiles, whose numbers may be anything even if their types are right.

    Raises:
        ArchiveError: if that fails.
    """
    try:
        return make()
    except ArchiveError:
        raise
    except Exception as error:
        raise ArchiveError(
            f"can't show this ({describe_error(error)})."
            " The profile is damaged or lightning-modelprof has a bug."
        ) from error


def _rank(arguments: Mapping[str, str]) -> int | None:
    text = arguments.get("rank", "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ArchiveError(f"expected a rank number, got {text[:20]!r}.")
    return int(text)


def _words(selection: Selection) -> dict[str, str]:
    info = None if selection.run is None else selection.run.report.summary.run
    loop = loop_of("" if info is None else info.loop)
    samples = "samples" if info is None else printable(info.sample_unit)
    return {"step": loop.step, "steps": loop.steps, "samples": samples}


def _entry(entry: Entry) -> dict[str, Any]:
    head = entry.head
    described = {"tag": entry.tag, "wall_time": entry.wall_time, "problem": entry.problem}
    if head is None:
        return described
    return described | {
        "kind": head.kind,
        "loop": head.loop,
        "window": head.window,
        "label": printable(head.label),
        "ranks": list(head.ranks),
        "recorded": head.recorded,
        "model": printable(head.model),
        "created": printable(head.created),
    }


class ComparedSide(Record, frozen=True, kw_only=True):
    """One side of a comparison.

    Attributes:
        run_name: TensorBoard's name of the run.
        read_steps: reads the steps of the selected loop.
    """

    run_name: str
    selection: Selection
    read_steps: Callable[[], StepTimings]


def compare_sides(before: ComparedSide, after: ComparedSide) -> list[Report]:
    """Compare the loops and the windows, each if both sides have one and they differ.

    Raises:
        ArchiveError: if the runs are of different loops, or too old to compare.
    """
    reports = []
    differences: tuple[Difference, ...] = ()
    old, new = before.selection, after.selection
    is_other_run = before.run_name != after.run_name
    if old.run is not None and new.run is not None and (is_other_run or old.run_tag != new.run_tag):
        runs = [_compared_run(side) for side in (before, after)]
        differences = find_differences(runs[:1], runs[1:])
        reports.append(_compare_loops(*runs))
    is_other_window = is_other_run or (old.window_tag, old.rank) != (new.window_tag, new.rank)
    if old.window_report is not None and new.window_report is not None and is_other_window:
        names = (_window_name(before), _window_name(after))
        reports.append(compare_windows(old.window_report, new.window_report, names, differences))
    return reports


def _why_nothing(before: ComparedSide, after: ComparedSide) -> str:
    chosen = [
        (one.run_name, one.selection.run_tag, one.selection.window_tag, one.selection.rank)
        for one in (before, after)
    ]
    if chosen[0] == chosen[1]:
        return "Both sides are the same. Select another run or window for Before."
    reasons = [
        f"{side.run_name} is only a trace"
        if side.selection.run is None
        else f"{side.run_name} has no torch.profiler window"
        for side in (before, after)
        if side.selection.run is None or side.selection.window is None
    ]
    why = f": {', and '.join(reasons)}" if len(reasons) == len(chosen) else ""
    return f"These can't be compared{why}. Select another run or window for Before."


def _compared_run(side: ComparedSide) -> ComparedRun:
    stored = side.selection.run
    assert stored is not None
    return compared_run(side.run_name, stored.report, side.read_steps())


def _compare_loops(before: ComparedRun, after: ComparedRun) -> Report:
    """Return what the command ``compare`` shows, and every table of the runs row by row."""
    report, _ = build_comparison([before], [after])
    return replace(report, tables=(*report.tables, *changed_rows(before.report, after.report)))


def _window_name(side: ComparedSide) -> str:
    window = side.selection.window
    assert window is not None
    rank = "" if side.selection.rank is None else f", rank {side.selection.rank}"
    return f"{side.run_name}, window {window.head.window} ({window.head.label}{rank})"
