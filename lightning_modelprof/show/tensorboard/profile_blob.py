"""A profile as the blobs of a TensorBoard summary, and back.

The first blob is a zlib-compressed JSON document: the reports, and what the other blobs contain. Those are
packed columns (``packing.py``), which browsers get unchanged. The head, a few words, is in the summary's
metadata, so that a list of profiles reads no blob.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_modelprof.errors import ArchiveError, describe_error, without_surrogates
from lightning_modelprof.record import Record
from lightning_modelprof.report.dashboard_entry import DashboardEntry, ProfileKind, StepColumns
from lightning_modelprof.report.model import Chart, Report, Series, Unit
from lightning_modelprof.report.summary import Summary
from lightning_modelprof.show.html.chart import chart_view
from lightning_modelprof.show.tensorboard.packing import inflate, pack_columns, unpack_columns
from lightning_modelprof.show.tensorboard.timeline_columns import pack_timeline
from lightning_modelprof.upgrade import upgrade

T = TypeVar("T")


PROFILE_SCHEMA_VERSION: Final = 3
"""Increased by incompatible changes."""


_LEVEL: Final = 6


STEPS: Final = "steps"


TIMELINE: Final = "timeline"


class EntryHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a list of profiles shows of one; attributes as in ``DashboardEntry``.

    Attributes:
        ranks: ranks that a reader can select; empty if there's only one.
        recorded: (first, last) of each series of consecutive steps in a window; empty in older files.
        model: class of a run's model; ``""`` for windows, if unknown, and in older files.
        created: when a run started, in ISO 8601; ``""`` as above.
    """

    schema_version: int
    kind: ProfileKind
    loop: str
    window: int | None
    label: str
    ranks: tuple[int, ...] = ()
    recorded: tuple[tuple[int, int], ...] = ()
    model: str = ""
    created: str = ""


class ColumnsBlob(Record, frozen=True, kw_only=True):
    """Contents of a blob of packed columns.

    Attributes:
        kind: ``steps`` or ``timeline``.
        rank: rank of a timeline.
    """

    kind: str
    rank: int | None = None


class StoredEntry(Record, frozen=True, kw_only=True):
    """The first blob of a profile.

    Attributes:
        head: as in the summary's metadata.
        report: report on all ranks together.
        rank_reports: rank → its report, if there's more than one rank.
        columns: contents of blobs 1, 2, ...
    """

    head: EntryHead
    report: Report
    rank_reports: dict[int, Report]
    columns: tuple[ColumnsBlob, ...]


def _head(profile: DashboardEntry) -> EntryHead:
    run = profile.report.summary.run
    return EntryHead(
        schema_version=PROFILE_SCHEMA_VERSION,
        kind=profile.kind,
        loop=profile.loop,
        window=profile.window,
        label=profile.label,
        ranks=tuple(sorted(profile.rank_reports)),
        recorded=_neighbours(profile.step_numbers),
        model="" if run is None else run.model,
        created="" if run is None else run.created,
    )


def _neighbours(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (first, last) of each series of consecutive numbers; ``numbers`` is ascending."""
    rows: list[tuple[int, int]] = []
    for number in numbers:
        is_next = bool(rows) and number == rows[-1][1] + 1
        rows[-1 if is_next else len(rows) :] = [(rows[-1][0] if is_next else number, number)]
    return tuple(rows)


def pack_head(profile: DashboardEntry) -> bytes:
    return _encode(_head(profile))


def unpack_head(packed: bytes) -> EntryHead:
    """Read the head of a stored profile.

    Raises:
        ArchiveError: if it's invalid or of a newer version.
    """
    _check_version(packed, "head")
    return _decode(packed, EntryHead)


def pack_profile(profile: DashboardEntry) -> list[bytes]:
    """Return the blobs of a profile, the document first."""
    columns = [(ColumnsBlob(kind=STEPS), pack_steps(profile.steps))] if profile.steps is not None else []
    for rank, timeline in profile.timelines.items():
        with suppress(ValueError):  # spans years, as with two clocks in one trace; the report matters more
            columns.append((ColumnsBlob(kind=TIMELINE, rank=rank), pack_timeline(timeline)))
    stored = StoredEntry(
        head=_head(profile),
        report=profile.report,
        rank_reports=dict(profile.rank_reports),
        columns=tuple(blob for blob, _ in columns),
    )
    return [zlib.compress(_encode(stored), _LEVEL), *(packed for _, packed in columns)]


def unpack_profile(packed: bytes) -> StoredEntry:
    """Read the first blob.

    Raises:
        ArchiveError: if it's damaged, not a profile, or of a newer version.
    """
    try:
        raw = inflate(packed)
    except ValueError as error:
        raise ArchiveError(f"expected a lightning-modelprof profile, got {error}.") from error
    if _check_version(raw, "profile") < PROFILE_SCHEMA_VERSION:
        raw = _upgraded(raw)
    stored = _decode(raw, StoredEntry)
    try:
        for report in (stored.report, *stored.rank_reports.values()):
            _check_charts(report)
    except ValueError as error:
        raise _refusal(error) from error
    return stored


def _upgraded(raw: bytes) -> bytes:
    """Upgrade a profile of an older version, without figures that this version can't read."""
    try:
        profile = upgrade(_decode(raw, dict[str, Any]))
        reports = [profile.get("report"), *(profile.get("rank_reports") or {}).values()]
        for report in reports:
            if isinstance(report, dict) and isinstance(report.get("summary"), dict):
                report["summary"] = _readable(report["summary"])
        return msgspec.json.encode(profile)
    except (RecursionError, AttributeError) as error:
        raise _refusal(error) from error


def _readable(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that match their records; earlier versions had fewer fields."""
    kept = {}
    for name, figures in summary.items():
        with suppress(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode({name: figures}), type=Summary)
            kept[name] = figures
    return kept


def _check_charts(report: Report) -> None:
    """Refuse charts that no axis can show.

    Raises:
        ValueError: with the chart's id.
    """
    for chart in report.charts:
        if any(not before < after for before, after in pairwise(chart.x)):
            raise ValueError(f"points of chart {chart.id!r} are out of order")


class _Versioned(msgspec.Struct):
    schema_version: int


class _WithHead(msgspec.Struct):
    head: _Versioned


def _check_version(raw: bytes, what: str) -> int:
    """Check the version first, because only that version knows the rest."""
    version = (_decode(raw, _Versioned) if what == "head" else _decode(raw, _WithHead).head).schema_version
    if version > PROFILE_SCHEMA_VERSION:
        raise ArchiveError(
            f"expected a profile of version {PROFILE_SCHEMA_VERSION} or lower, got {version}. A newer"
            " lightning-modelprof wrote it; update the one TensorBoard uses."
        )
    return version


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> ArchiveError:
    return ArchiveError(f"expected a lightning-modelprof profile, got: {describe_error(error)}.")


def _encode(value: Any) -> bytes:
    """Encode as JSON; non-finite numbers become ``null``."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # an unpaired surrogate, as in some file names, has no UTF-8 form
        return msgspec.json.encode(without_surrogates(msgspec.to_builtins(value)))


MAX_STEPS: Final = 1_000_000
"""A browser draws this many without a pause; each takes about 30 bytes."""


MAX_LAYERS: Final = 7
"""Phases with a layer and color of their own, as in the charts of report.html."""


TAG_WORDS: Final = {
    1: "first in an epoch or dataloader",
    2: "skip_first",
    4: "profiler warm-up",
    8: "recorded by torch.profiler",
    16: "closing a window or saving the run",
    32: "with validation",
    64: "without an optimizer step",
    128: "prefetched while the profiler worked",
    256: "counting FLOPs or timing modules",
    512: "the whole epoch",
    1024: "CPU ahead of the GPU",
}
"""Bit of ``run.records.StepTag`` → its text."""


_FIRST_OF: Final = ("first in an epoch", "first in a dataloader")
"""The benchmark's names for the first tag, in a fit and in evaluation loops."""


_NOT_MEASURED: Final = -1


_DELTAS: Final = frozenset({"step"})


class _StepMeta(msgspec.Struct):
    """The part of the description that Python reads."""

    phases: tuple[tuple[str, str], ...]
    exclusions: tuple[str, ...]


def pack_steps(columns: StepColumns) -> bytes:
    """Pack the newest ``MAX_STEPS`` steps.

    The description has ``phases`` ([key, label] each), ``exclusions``, ``tags`` (``TAG_WORDS``), ``layers``
    ({label, color, phases}: each layer of the stacked chart with the indices of its phases and its color
    class, as in report.html), ``unmeasured`` (indices of phases that some step has no time for) and ``notes``
    on steps that are missing.
    """
    left_out = max(len(columns.step) - MAX_STEPS, 0)
    newest = slice(left_out, None)
    meta: dict[str, Any] = {
        "phases": [list(phase) for phase in columns.phases],
        "exclusions": list(columns.exclusions),
        "tags": {str(bit): word for bit, word in _tag_words(columns).items()},
        "layers": _layers(columns),
        "unmeasured": [place for place in range(len(columns.phases)) if not _is_measured(columns, place)],
        "notes": _notes(columns.step[newest], left_out),
    }
    packed = {
        "step": columns.step[newest],
        "duration": columns.duration_ns[newest],
        "samples": columns.samples[newest],
        "tags": columns.tags[newest],
        "exclusion": columns.exclusion[newest],
    }
    for place in range(len(columns.phases)):
        packed[f"phase_{place}"] = columns.phases_ns[newest, place]
    return pack_columns(meta, packed, _DELTAS)


def unpack_steps(packed: bytes) -> StepColumns:
    """Unpack the steps that :func:`pack_steps` packed.

    Raises:
        ValueError: if it didn't make these bytes.
    """
    plain, columns = unpack_columns(packed)
    try:
        meta = msgspec.convert(plain, _StepMeta)
        phases = meta.phases
        times = [columns[f"phase_{place}"] for place in range(len(phases))]
        steps = StepColumns(
            step=columns["step"],
            duration_ns=columns["duration"],
            samples=columns["samples"],
            tags=columns["tags"],
            exclusion=columns["exclusion"],
            exclusions=meta.exclusions,
            phases=phases,
            phases_ns=np.stack(times, axis=1) if times else np.zeros((len(columns["step"]), 0), np.int64),
        )
        _check_ranges(steps)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ValueError(f"these columns hold no steps: {error}") from error
    return steps


def _check_ranges(steps: StepColumns) -> None:
    """Refuse numbers that no measurement has.

    Raises:
        ValueError: with what's wrong.
    """
    columns = (steps.duration_ns, steps.samples, steps.tags, steps.exclusion, steps.phases_ns)
    if any(len(column) != len(steps.step) for column in columns):
        raise ValueError("the columns differ in length")
    least = dict.fromkeys(("step", "duration_ns", "tags", "exclusion"), 0)
    least |= dict.fromkeys(("samples", "phases_ns"), _NOT_MEASURED)
    for name, lowest in least.items():
        if (getattr(steps, name) < lowest).any():
            raise ValueError(f"{name} is below {lowest}")
    if (np.diff(steps.step) <= 0).any():
        raise ValueError("the steps are out of order")
    if (steps.exclusion >= len(steps.exclusions)).any():
        raise ValueError("unknown exclusion reason")
    if (steps.phases_ns > steps.duration_ns[:, None]).any():
        raise ValueError("a phase is longer than its step")


def _notes(step: NDArray[np.int64], left_out: int) -> list[str]:
    notes = []
    if left_out:
        notes.append(f"Newest {MAX_STEPS:,} steps; {left_out:,} older ones are left out.")
    span = int(step[-1] - step[0]) + 1 if len(step) else 0
    if span > len(step):
        notes.append(
            f"{len(step):,} of {span:,} steps were saved, evenly spaced. Totals and means in Overview cover"
            " all of them."
        )
    return notes


def _tag_words(columns: StepColumns) -> dict[int, str]:
    """Use the benchmark's word if it has one, so that a reason has only one name."""
    used = next((word for word in _FIRST_OF if word in columns.exclusions), TAG_WORDS[1])
    return TAG_WORDS | {1: used}


def _is_measured(columns: StepColumns, place: int) -> bool:
    return bool((columns.phases_ns[:, place] >= 0).all())


def _layers(columns: StepColumns) -> list[dict[str, Any]]:
    """Return the layers of the chart of all phases, the same and in the same colors as in report.html."""
    totals = columns.phases_ns.sum(axis=0).tolist()
    measured = [place for place in range(len(totals)) if _is_measured(columns, place) and totals[place]]
    largest = sorted(measured, key=lambda place: -totals[place])[:MAX_LAYERS]
    shown = [[place] for place in measured if place in largest]
    rest = [place for place in measured if place not in largest]
    series = [_series(*columns.phases[place], totals[place]) for (place,) in shown]
    if rest:
        shown.append(rest)
        series.append(_series("rest", "Other phases", sum(totals[place] for place in rest)))
    chart = Chart(
        id="phases",
        title="",
        kind="stacked",
        x_label="",
        x=(0.0,),
        unit=Unit.DURATION_NS,
        series=tuple(series),
    )
    view = chart_view(chart)
    drawn = () if view is None else view.layers
    return [
        {"label": one.label, "color": layer.color, "phases": places}
        for one, layer, places in zip(series, drawn, shown, strict=True)
    ]


def _series(key: str, label: str, total: float) -> Series:
    return Series(key=key, label=label, values=(float(total),))
